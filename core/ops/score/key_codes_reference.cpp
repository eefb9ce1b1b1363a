#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/score/key_codes.hpp"

namespace kvlab::ops {

void code_keys_reference(const PagedKv& kv, int newest, const KeyCodes& codes) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h), slot = kv.slots[r];
      std::vector<float> keys(static_cast<std::size_t>(n) * static_cast<std::size_t>(kv.head_dim));
      gather_rows_reference(kv, r, h, KvSide::key, n, keys.data());
      for (int t = std::max(0, n - newest); t < n; ++t) {
        const float* x = keys.data() + std::int64_t{t} * kv.head_dim;
        const auto [least, greatest] = std::minmax_element(x, x + kv.head_dim);
        const float scale = (*greatest - *least) / 15.f;
        codes.range(slot, h, t, 0) = *least, codes.range(slot, h, t, 1) = scale;
        for (int d = 0; d < kv.head_dim; ++d) {
          const int code = scale > 0 ? static_cast<int>(std::nearbyint((x[d] - *least) / scale)) : 0;
          auto& two = codes.code(slot, h, t, d / 2);
          two = static_cast<std::uint8_t>(d % 2 ? (two & 15) | code << 4 : (two & 240) | code);
        }
      }
    }
}

void coded_entry_dot_reference(const PagedKv& kv, View<const float, 3> vectors, const IndexList& list, int unit,
                               const KeyCodes& codes, Scores out) {
  const int group = static_cast<int>(vectors.extent[1]) / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int q = 0; q < vectors.extent[1]; ++q) {
      const int h = q / group, slot = kv.slots[r];
      for (int i = 0; i < list.count(list.at(r), h) * unit; ++i) {
        const int t = list.index(list.at(r), h, i / unit) * unit + i % unit;
        out(r, q, i) = -INFINITY;
        if (t >= kv.tokens(r, h)) continue;
        double sum = 0;
        for (int d = 0; d < kv.head_dim; ++d) {
          const int code = codes.code(slot, h, t, d / 2) >> d % 2 * 4 & 15;
          sum += double{vectors(r, q, d)} *
                 (double{codes.range(slot, h, t, 0)} + double{codes.range(slot, h, t, 1)} * code);
        }
        out(r, q, i) = static_cast<float>(sum);
      }
    }
}

}  // namespace kvlab::ops
