// The ops of channels in plain loops.
#include <cmath>

#include "ops/score/reference.hpp"

namespace kvlab::ops {

void channel_energy_reference(const View<const float, 4>& queries, const PagedKv& kv, const View<const float, 4>& rows,
                              View<float, 3> out) {
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int d = 0; d < kv.head_dim; ++d) {
        double of_queries = 0, of_rows = 0;
        for (std::int64_t g = 0; g < group; ++g)
          for (std::int64_t i = 0; i < queries.extent[2]; ++i)
            of_queries +=
                std::pow(double{queries(r, h * group + g, i, d)}, 2) / static_cast<double>(group * queries.extent[2]);
        for (int t = 0; t < kv.tokens(r, h); ++t) of_rows += std::pow(double{rows(r, h, t, d)}, 2) / kv.tokens(r, h);
        out(r, h, d) = static_cast<float>(of_queries * of_rows);
      }
}

// A channel becomes zeros if fewer than `count` others go before it. NaN goes first, and of equal ones the last.
void zero_channels_reference(const PagedKv& kv, const View<const float, 3>& energy, int count, int newest,
                             View<float, 4> rows) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int d = 0; d < kv.head_dim; ++d) {
        int before = 0;
        for (int e = 0; e < kv.head_dim; ++e) {
          const float own = energy(r, h, d), other = energy(r, h, e);
          const bool alike = own == other || (std::isnan(own) && std::isnan(other));
          if (alike ? e > d : std::isnan(other) || (!std::isnan(own) && other < own)) ++before;
        }
        for (int t = 0; before < count && t < kv.tokens(r, h) - newest; ++t) rows(r, h, t, d) = 0;
      }
}

}  // namespace kvlab::ops
