#include "ops/select/surplus.hpp"

#include <algorithm>

#include "ops/page/paged.hpp"
#include "ops/page/token_rows.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

// The numbers that rank a head's tokens, or null = by age.
const float* ranks_of(const PagedKv& kv, const Surplus& x, int row, int head, int n, std::vector<float>& state) {
  if (x.scores) return &x.scores(row, head, 0);
  if (x.column < 0) return nullptr;
  state.clear();
  for (int t = 0; t < n; ++t) {
    const PageEntry& e = kv.entry(row, head, t / kv.page_size);
    state.push_back(reinterpret_cast<const float*>(
        kv.frame(e) + kv.layout(e).state)[std::int64_t{x.column} * kv.page_size + t % kv.page_size]);
  }
  return state.data();
}

}  // namespace

void check_surplus(const PagedKv& kv, const Surplus& x, const char* op, Stream s) {
  if (!x.keep.data || x.keep.extent[0] < kv.rows || x.keep.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got numbers to keep of fewer rows or heads than the cache has, wanted [row, kv_head]");
  if (x.scores)
    check_kv_scores(kv, x.scores, "scores", op, s);
  else if (x.column >= 0)
    checked_column({&kv, x.column}, op, s);
}

int find_surplus(const PagedKv& kv, const Surplus& x, int row, int head, std::vector<std::int32_t>& position,
                 std::vector<char>& leaves) {
  thread_local std::vector<float> state;
  const int n = kv.tokens(row, head), keep = x.keep(row, head);
  if (keep >= n) return 0;
  position.resize(static_cast<std::size_t>(n));
  token_positions(kv, row, head, n, position.data());
  return mark_surplus(ranks_of(kv, x, row, head, n, state), position.data(), n, std::max(0, keep),
                      x.pins ? x.pins[row] : Pins{}, leaves);
}

}  // namespace kvlab::ops
