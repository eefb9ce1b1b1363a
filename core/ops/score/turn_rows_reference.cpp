// The op turn_rows in plain loops.
#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/score/reference.hpp"

namespace kvlab::ops {

void turn_rows_reference(const PagedKv& kv, RopeTurn way, View<float, 4> rows, const RowRange& range) {
  const std::int64_t half = kv.head_dim / 2;
  const double scale = kv.rope_table.attention_scale;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::vector<std::int32_t> position(static_cast<std::size_t>(kv.tokens(r, h)));
      token_positions_reference(kv, r, h, kv.tokens(r, h), position.data());
      for (int t = range.first(r, h); t < kv.tokens(r, h); ++t)
        for (std::int64_t i = 0; i < half; ++i) {
          const double angle = double{kv.rope_table.inv_freq[i]} * position[static_cast<std::size_t>(t)],
                       a = rows(r, h, t, i), b = rows(r, h, t, half + i), c = std::cos(angle), s = std::sin(angle);
          const bool on = way == RopeTurn::on;
          rows(r, h, t, i) = static_cast<float>(on ? (a * c - b * s) * scale : (a * c + b * s) / scale);
          rows(r, h, t, half + i) = static_cast<float>(on ? (b * c + a * s) * scale : (b * c - a * s) / scale);
        }
    }
}

}  // namespace kvlab::ops
