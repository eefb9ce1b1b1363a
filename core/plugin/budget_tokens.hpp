// What a budget means for a sequence, in tokens.
#pragma once
#include <kvlab/policy.hpp>

#include <cstddef>
#include <cstdint>

namespace kvlab {

// Device bytes of a page of one KV head, its summary included.
std::int64_t page_bytes(const Shape& shape, const CodecSpec& codec, const Needs& needs);

// What an amount leaves for pages when a policy has taken so much state for each sequence.
BudgetAmount amount_for_pages(BudgetAmount amount, std::size_t state_bytes);

// Tokens per KV head that an amount means for a sequence that has seen `seen` tokens; the largest int when unlimited.
// page_bytes: of one page with its summaries; dense_layers hold everything.
int budget_tokens(const BudgetAmount& amount, int seen, const Shape& shape, std::int64_t page_bytes, int dense_layers);

// The same of a budget in bytes, which may buy no page at all.
int byte_budget_tokens(double bytes, int seen, const Shape& shape, std::int64_t page_bytes, int dense_layers);

}  // namespace kvlab
