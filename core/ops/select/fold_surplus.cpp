#include <kvlab/ops.hpp>

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/made_up.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/token_rows.hpp"
#include "ops/select/surplus.hpp"

namespace kvlab::ops {
namespace {

// mean = the mean of `weight` rows that it stands for and of the marked tokens. `pages` hold all of these.
void join(const PagedKv& kv, int row, int head, KvSide side, const std::vector<std::int32_t>& pages,
          const std::vector<char>& leaves, int count, double weight, float* mean) {
  thread_local TokenRows rows;
  thread_local std::vector<double> sums;
  const int dim = kv.head_dim;
  sums.assign(static_cast<std::size_t>(dim), 0);
  constexpr std::size_t at_once = 64;  // pages that are decoded together
  for (std::size_t at = 0; at < pages.size(); at += at_once) {
    rows.gather(kv, row, head, side, pages.data() + at, 0, static_cast<int>(std::min(at_once, pages.size() - at)));
    const float* x = rows.decode(dim);
    for (int t = 0; t < rows.count(); ++t, x += dim)
      for (int d = 0; leaves[static_cast<std::size_t>(rows.place(t))] && d < dim; ++d)
        sums[static_cast<std::size_t>(d)] += x[d];
  }
  for (int d = 0; d < dim; ++d)
    mean[d] = static_cast<float>((weight * mean[d] + sums[static_cast<std::size_t>(d)]) / (weight + count));
}

void fold_head(const PagedKv& kv, const Surplus& x, int row, int head, int i, const MadeUpTokens& to) {
  thread_local std::vector<std::int32_t> position, pages;
  thread_local std::vector<char> leaves;
  const int n = kv.tokens(row, head), slot = kv.slots[row], count = find_surplus(kv, x, row, head, position, leaves);
  if (count == 0) return;
  pages.clear();
  for (int t = 0; t < n; ++t)
    if (leaves[static_cast<std::size_t>(t)] && (pages.empty() || pages.back() != t / kv.page_size))
      pages.push_back(t / kv.page_size);
  float& weight = to.weights(slot, head, i);
  join(kv, row, head, KvSide::key, pages, leaves, count, weight, &to.keys(slot, head, i, 0));
  join(kv, row, head, KvSide::value, pages, leaves, count, weight, &to.values(slot, head, i, 0));
  weight += static_cast<float>(count);
}

}  // namespace

void fold_surplus(const PagedKv& kv, const Surplus& surplus, int i, const MadeUpTokens& to, Stream s) {
  const char* op = "fold_surplus";
  resident_cache(&kv, op, s);
  if (kv.rope != RopeRegime::original)
    fail(Errc::unsupported, op,
         "got keys that RoPE turns by rank, wanted RopeRegime::original: their mean has no rank");
  check_surplus(kv, surplus, op, s);
  check_made_up(kv, to, op, s);
  if (i < 0 || i >= to.weights.extent[2])
    fail(Errc::internal, op,
         "got made-up token " + std::to_string(i) + ", wanted one of " + std::to_string(to.weights.extent[2]));
  if (s.device() == Device::cuda) return on_cuda<fold_surplus>(kv, surplus, i, to, s);
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * kv.kv_heads * longest(kv)))
  for (int row = 0; row < kv.rows; ++row)
    for (int head = 0; head < kv.kv_heads; ++head) fold_head(kv, surplus, row, head, i, to);
}

}  // namespace kvlab::ops
