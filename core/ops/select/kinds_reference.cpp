// The op of kvlab/kinds.hpp in plain loops.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::ops {

void keep_by_class_reference(const PagedKv& kv, const TextTokens& text, View<const float, 3> scores,
                             const ClassNumbers& classes, View<const KeepRule, 2> rules, Scores kept,
                             View<std::int32_t, 2> counts) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r], n = kv.tokens(r, h);
      std::int64_t of = 0;
      for (; classes.of && of < classes.of.extent[2]; ++of)
        if (classes.of(slot, h, of) >= classes.wanted) break;
      const KeepRule& rule = rules(r, of);
      std::vector<std::int32_t> position(static_cast<std::size_t>(n));
      token_positions_reference(kv, r, h, n, position.data());
      const auto sure = [&](int t) {
        const int p = position[static_cast<std::size_t>(t)];
        const int id = p < text.ids.extent[1] ? text.ids(slot, p) : -1;
        const int kind = id >= 0 && id < text.kinds.extent[0] ? text.kinds(id) : 0;
        return p < rule.first || (rule.kinds >> kind) % 2 == 1;
      };
      counts(r, h) = 0;
      for (int t = 0; t < n; ++t) {
        const float own = scores(r, h, t);
        int better = 0;  // others that come before this one
        for (int u = 0; u < n; ++u) {
          const float x = scores(r, h, u);
          if (u == t || sure(u) || std::isnan(x)) {
            better += u < t && !sure(u) && std::isnan(x) && std::isnan(own);
            continue;
          }
          better += std::isnan(own) || x > own || (x == own && u < t);
        }
        const bool keeps = sure(t) || position[static_cast<std::size_t>(t)] >= rule.from || better < rule.best;
        kept(r, h, t) = keeps ? 1.f : 0.f;
        counts(r, h) += keeps;
      }
    }
}

}  // namespace kvlab::ops
