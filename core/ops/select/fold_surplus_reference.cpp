#include <kvlab/ops.hpp>

#include <algorithm>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/reference.hpp"
#include "ops/select/surplus.hpp"

namespace kvlab::ops {

// The tokens that are not in the list of top_tokens.
std::vector<int> surplus_reference(const PagedKv& kv, const Surplus& x, int row, int head) {
  const int n = kv.tokens(row, head);
  std::vector<std::int32_t> position(static_cast<std::size_t>(n)), kept;
  token_positions_reference(kv, row, head, n, position.data());
  std::vector<float> rank(static_cast<std::size_t>(std::max(n, 1)));
  std::int32_t keep = std::max(0, x.keep(row, head)), left = 0;
  PagedKv alone = kv;
  alone.slots += row, alone.rows = alone.kv_heads = 1;
  alone.table.data += head * kv.table.stride[1], alone.length.data += head * kv.length.stride[1];
  for (int t = 0; t < n; ++t) {
    const PageEntry& e = kv.entry(row, head, t / kv.page_size);
    rank[static_cast<std::size_t>(t)] =
        x.scores ? x.scores(row, head, t)
        : x.column >= 0
            ? reinterpret_cast<const float*>(
                  kv.frame(e) + kv.layout(e).state)[std::int64_t{x.column} * kv.page_size + t % kv.page_size]
            : static_cast<float>(position[static_cast<std::size_t>(t)]);
  }
  std::vector<std::int32_t> index(static_cast<std::size_t>(std::max(n, 1)));
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, std::max(n, 1)});
  list.count = View<std::int32_t, 2>::dense(&left, {1, 1});
  top_tokens_reference(alone, View<const float, 3>::dense(rank.data(), {1, 1, std::max(n, 1)}),
                       View<const std::int32_t, 2>::dense(&keep, {1, 1}), x.pins ? x.pins + row : nullptr, list);
  kept.assign(index.begin(), index.begin() + left);
  std::vector<int> leaving;
  for (int t = 0; t < n; ++t)
    if (std::find(kept.begin(), kept.end(), t) == kept.end()) leaving.push_back(t);
  return leaving;
}

// They join one after the other.
void fold_surplus_reference(const PagedKv& kv, const Surplus& x, int i, const MadeUpTokens& to) {
  for (int row = 0; row < kv.rows; ++row)
    for (int head = 0; head < kv.kv_heads; ++head) {
      const int slot = kv.slots[row];
      double count = to.weights(slot, head, i);
      std::vector<double> sums[2];
      for (const bool value : {false, true})
        for (int d = 0; d < kv.head_dim; ++d)
          sums[value].push_back(count * double{(value ? to.values : to.keys)(slot, head, i, d)});
      std::vector<float> at(static_cast<std::size_t>(kv.head_dim));
      for (const int t : surplus_reference(kv, x, row, head)) {
        const PageEntry& e = kv.entry(row, head, t / kv.page_size);
        for (const bool value : {false, true}) {
          read_row_reference(kv.frame(e), kv.layout(e), value ? KvSide::value : KvSide::key, t % kv.page_size,
                             at.data());
          for (std::size_t d = 0; d < at.size(); ++d) sums[value][d] += at[d];
        }
        ++count;
      }
      if (count == to.weights(slot, head, i)) continue;
      for (int d = 0; d < kv.head_dim; ++d) {
        to.keys(slot, head, i, d) = static_cast<float>(sums[0][static_cast<std::size_t>(d)] / count);
        to.values(slot, head, i, d) = static_cast<float>(sums[1][static_cast<std::size_t>(d)] / count);
      }
      to.weights(slot, head, i) = static_cast<float>(count);
    }
}

}  // namespace kvlab::ops
