// What the CPU's selections of tokens by a share of weights have in common.
#pragma once
#include <kvlab/key_copies.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvlab::ops {

// Marks those of n weights that a head takes.
inline void take_top_p(const float* weight, int n, double p, char* taken) {
  thread_local std::vector<std::int32_t> order;
  order.clear();
  double all = 0, sum = 0;
  for (int t = 0; t < n; ++t)
    if (weight[t] > 0) order.push_back(t);
  const auto before = [&](int a, int b) { return weight[a] > weight[b] || (weight[a] == weight[b] && a < b); };
  if (p < 1) std::sort(order.begin(), order.end(), before);
  for (auto t = order.rbegin(); t != order.rend(); ++t) all += double{weight[*t]};
  for (const int t : order) {
    if (p < 1 && sum >= p * all) break;
    taken[t] = 1;
    sum += double{weight[t]};
  }
}

// top_p_candidates of listed entries, each of which stands for `unit` neighbouring places: a page, or a token.
void top_p_entries(const PagedKv& kv, View<const float, 3> logits, const IndexList& entries, int unit,
                   float temperature, float p, int newest, TokenList list, Stream s);
void top_p_entries_reference(const PagedKv& kv, View<const float, 3> logits, const IndexList& entries, int unit,
                             float temperature, double p, int newest, TokenList list);

}  // namespace kvlab::ops
