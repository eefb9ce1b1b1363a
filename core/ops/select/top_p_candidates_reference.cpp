#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "ops/select/top_p.hpp"

namespace kvlab::ops {

void top_p_entries_reference(const PagedKv& kv, View<const float, 3> logits, const IndexList& entries, int unit,
                             float temperature, double p, int newest, TokenList list) {
  const int group = static_cast<int>(logits.extent[1]) / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::set<int> tokens;
      for (int t = std::max(0, kv.tokens(r, h) - newest); t < kv.tokens(r, h); ++t) tokens.insert(t);
      const int candidates = entries.count(entries.at(r), h) * unit;
      for (int q = h * group; q < (h + 1) * group; ++q) {
        double most = -INFINITY, all = 0, sum = 0;
        std::vector<int> order;
        for (int i = 0; i < candidates; ++i)
          if (logits(r, q, i) > -INFINITY) order.push_back(i), most = std::max(most, double{logits(r, q, i)});
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits(r, q, a) > logits(r, q, b); });
        const auto weight = [&](int i) { return std::exp((logits(r, q, i) - most) / temperature); };
        for (const int i : order) all += weight(i);
        for (const int i : order) {
          if (p < 1 && sum >= p * all) break;
          sum += weight(i);
          tokens.insert(entries.index(entries.at(r), h, i / unit) * unit + i % unit);
        }
      }
      list.count(list.at(r), h) = static_cast<int>(tokens.size());
      int at = 0;
      for (const int t : tokens) list.index(list.at(r), h, at++) = t;
    }
}

}  // namespace kvlab::ops
