#include <cmath>

#include "ops/linear/reference.hpp"

namespace kvlab::ops {

namespace {

// Sums of `Rows` rows go on together, as an addition waits for the one before it.
template <std::int64_t Rows>
void linear_rows(const float* x, std::int64_t x_stride, const float* w, float* y, std::int64_t y_stride, std::int64_t n,
                 std::int64_t k) {
  for (std::int64_t j = 0; j < n; ++j) {
    double sums[Rows] = {};
    for (std::int64_t c = 0; c < k; ++c)
      for (std::int64_t r = 0; r < Rows; ++r) sums[r] += double{x[r * x_stride + c]} * w[j * k + c];
    for (std::int64_t r = 0; r < Rows; ++r) y[r * y_stride + j] = static_cast<float>(sums[r]);
  }
}

}  // namespace

void linear_reference(const float* x, std::int64_t x_stride, const float* w, float* y, std::int64_t y_stride,
                      std::int64_t m, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t together = 8;
  std::int64_t i = 0;
  for (; i + together <= m; i += together)
    linear_rows<together>(x + i * x_stride, x_stride, w, y + i * y_stride, y_stride, n, k);
  for (; i < m; ++i) linear_rows<1>(x + i * x_stride, x_stride, w, y + i * y_stride, y_stride, n, k);
}

void rms_norm_reference(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n, float* out) {
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += double{x[r * n + i]} * x[r * n + i];
    const double norm = std::sqrt(sum / static_cast<double>(n) + eps);
    for (std::int64_t i = 0; i < n; ++i) out[r * n + i] = static_cast<float>(x[r * n + i] / norm * weight[i]);
  }
}

void silu_mul_reference(const float* gate, const float* up, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i)
    out[i] = static_cast<float>(gate[i] / (1 + std::exp(-double{gate[i]})) * up[i]);
}

}  // namespace kvlab::ops
