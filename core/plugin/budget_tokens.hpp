// Converts a budget to tokens of a sequence.
#pragma once
#include <kvlab/policy.hpp>

#include <cstddef>
#include <cstdint>

namespace kvlab {

// Device bytes of a page of one KV head, its summary included.
std::int64_t page_bytes(const Shape& shape, const CodecSpec& codec, const Needs& needs);

// The part of an amount that is left for pages. state_bytes: the policy's state for each sequence.
BudgetAmount amount_for_pages(BudgetAmount amount, std::size_t state_bytes);

// Tokens per KV head that an amount allows a sequence after `seen` tokens; the largest int if unlimited. page_bytes: of
// one page with its summary. dense_layers: these first layers hold everything.
int budget_tokens(const BudgetAmount& amount, int seen, const Shape& shape, std::int64_t page_bytes, int dense_layers);

// The same of a budget in bytes, which may buy no page at all.
int byte_budget_tokens(double bytes, int seen, const Shape& shape, std::int64_t page_bytes, int dense_layers);

// Bytes of so many layers whose KV heads hold so many tokens each, in whole pages.
std::int64_t bytes_of_layers(int layers, std::int64_t tokens, const Shape& shape, std::int64_t page_bytes);

}  // namespace kvlab
