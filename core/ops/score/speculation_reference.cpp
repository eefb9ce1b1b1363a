#include <algorithm>
#include <cmath>

#include "ops/score/speculation.hpp"

namespace kvlab::ops {

void add_magnitudes_reference(const PagedKv& kv, View<const float, 4> queries, View<float, 3> sums) {
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (std::int64_t d = 0; d < kv.head_dim; ++d)
      for (std::int64_t h = 0; h < kv.kv_heads; ++h) {
        double sum = double{sums(kv.slots[r], h, d)};
        for (std::int64_t g = 0; g < group; ++g)
          for (std::int64_t i = 0; i < queries.extent[2]; ++i) {
            const double q = double{queries(r, h * group + g, i, d)};
            sum += q < 0 ? -q : q;
          }
        sums(kv.slots[r], h, d) = static_cast<float>(sum);
      }
}

void near_greatest_reference(const PagedKv& kv, View<const float, 3> scores, const NearGreatest& rule,
                             View<std::int32_t, 2> out) {
  for (int r = 0; r < kv.rows; ++r) {
    double counts = 0, shortest = INFINITY;
    for (int h = 0; h < kv.kv_heads; ++h) {
      shortest = std::min(shortest, static_cast<double>(kv.tokens(r, h)));
      float greatest = -INFINITY;
      for (int t = 0; t + rule.newest < kv.tokens(r, h); ++t)
        if (scores(r, h, t) > greatest) greatest = scores(r, h, t);
      for (int t = 0; t + rule.newest < kv.tokens(r, h); ++t) counts += scores(r, h, t) > greatest - rule.within;
    }
    const double newest = std::min<double>(rule.newest, shortest), others = shortest - newest;
    double mean = std::floor(counts / kv.kv_heads);
    mean = std::min(
        {mean, static_cast<double>(rule.most), std::floor(double{rule.most_share * static_cast<float>(others)})});
    for (int h = 0; h < kv.kv_heads; ++h)
      out(r, h) = static_cast<std::int32_t>(newest + (others > 0 ? std::max(mean, 1.) : 0));
  }
}

}  // namespace kvlab::ops
