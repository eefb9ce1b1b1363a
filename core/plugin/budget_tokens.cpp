#include "plugin/budget_tokens.hpp"

#include <algorithm>
#include <limits>

#include "ops/page/paged.hpp"

namespace kvlab {
namespace {

constexpr int unlimited = std::numeric_limits<int>::max();

}  // namespace

std::int64_t page_bytes(const Shape& shape, const CodecSpec& codec, const Needs& needs) {
  return ops::make_layout(shape.dtype, codec, shape.page_size, shape.head_dim,
                          static_cast<int>(needs.token_state().size()))
             .bytes +
         summary_bytes(needs.page_summary(), needs.summary_bits(), shape.dtype, shape.head_dim);
}

BudgetAmount amount_for_pages(BudgetAmount amount, std::size_t state_bytes) {
  if (amount.kind == BudgetAmount::bytes) amount.value = std::max(0., amount.value - static_cast<double>(state_bytes));
  return amount;
}

std::int64_t bytes_of_layers(int layers, std::int64_t tokens, const Shape& s, std::int64_t page_bytes) {
  return std::int64_t{layers} * s.kv_heads * ((tokens + s.page_size - 1) / s.page_size) * page_bytes;
}

int byte_budget_tokens(double bytes, int seen, const Shape& s, std::int64_t page_bytes, int dense_layers) {
  const std::int64_t dense = bytes_of_layers(dense_layers, seen, s, page_bytes);
  const std::int64_t heads = std::int64_t{s.layers - dense_layers} * s.kv_heads;
  if (heads <= 0) return unlimited;
  const double pages = (bytes - static_cast<double>(dense)) / static_cast<double>(heads * page_bytes);
  return static_cast<int>(std::min(1e8 / s.page_size, std::max(0., pages))) * s.page_size;
}

int budget_tokens(const BudgetAmount& amount, int seen, const Shape& s, std::int64_t page_bytes, int dense_layers) {
  switch (amount.kind) {
    case BudgetAmount::unlimited: return unlimited;
    case BudgetAmount::tokens: return static_cast<int>(amount.value);
    case BudgetAmount::ratio:
      if (amount.value >= 1) return unlimited;
      return std::max(1, static_cast<int>(seen * amount.value));
    case BudgetAmount::bytes:
      return std::max(s.page_size, byte_budget_tokens(amount.value, seen, s, page_bytes, dense_layers));
  }
  return unlimited;
}

}  // namespace kvlab
