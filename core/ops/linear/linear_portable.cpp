#include <kvlab/dtype.hpp>

#include <algorithm>

#include "ops/linear/linear_kernels.hpp"

namespace kvlab::ops::gemm {
namespace {

float weight(const std::uint16_t* row, int j) {
  bf16 b;
  b.bits = row[bf16_place(j)];
  return float(b);
}
float weight(const float* row, int j) { return row[j]; }

template <class W>
void tile(const Tile& t) {
  const W* panel = static_cast<const W*>(t.panels);
  for (std::int64_t c = 0; c < t.columns; c += panel_width, panel += t.panel_stride) {
    const int width = static_cast<int>(std::min<std::int64_t>(panel_width, t.columns - c));
    for (int r = 0; r < t.rows; ++r) {
      float sum[panel_width] = {};
      float* y = t.y + r * t.y_stride + c;
      if (t.accumulate) std::copy_n(y, width, sum);
      for (std::int64_t i = 0; i < t.depth; ++i) {
        const float x = t.a[r * t.a_row + i * t.a_depth];
        for (int j = 0; j < panel_width; ++j) sum[j] += x * weight(panel + i * panel_width, j);
      }
      std::copy_n(sum, width, y);
    }
  }
}

}  // namespace

const Kernels& portable_kernels() {
  static constexpr Kernels k{"portable", tile<std::uint16_t>, tile<float>};
  return k;
}

void portable_pair_product(const PairTile& t) {
  for (int r = 0; r < t.rows; ++r)
    for (int c = 0; c < t.columns; ++c) {
      const bf16* b = t.panels + c / panel_width * t.panel_stride + c % panel_width * 2;
      float* y = t.y + r * t.y_stride + c;
      float sum = t.accumulate ? *y : 0.f;
      for (int d = 0; d < t.depth; ++d)
        sum += float(t.a[r * t.a_stride + d]) * float(b[std::int64_t{d / 2} * 2 * panel_width + d % 2]);
      *y = sum;
    }
}

}  // namespace kvlab::ops::gemm
