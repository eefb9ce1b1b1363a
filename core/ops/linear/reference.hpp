// The references of this folder (see ops/page/reference.hpp).
#pragma once
#include <cstdint>

namespace kvlab::ops {

// w [n, k]: the weights as stored (Linear::row).
void linear_reference(const float* x, std::int64_t x_stride, const float* w, float* y, std::int64_t y_stride,
                      std::int64_t m, std::int64_t n, std::int64_t k);
void rms_norm_reference(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n, float* out);
void silu_mul_reference(const float* gate, const float* up, std::int64_t count, float* out);

}  // namespace kvlab::ops
