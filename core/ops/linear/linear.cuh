// Launchers of this folder that other launchers call.
#pragma once
#include "ops/linear/linear.hpp"
#include "ops/linear/norm.hpp"

namespace kvlab::ops {

decltype(linear_stream) linear_stream_cuda;
decltype(linear_blas) linear_blas_cuda;
decltype(rms_norm) rms_norm_cuda;

// gated[row, i] = silu(x[row, i]) * x[row, n + i], both of dtype (bf16, f16); n a multiple of 8, strides too.
void silu_mul_cuda(const void* x, std::int64_t x_stride, DType dtype, std::int64_t rows, std::int64_t n, void* gated,
                   std::int64_t gated_stride, Stream s);
// y[row, i] += bias[i]
void add_bias_cuda(const float* bias, std::int64_t rows, std::int64_t n, float* y, std::int64_t y_stride, Stream s);

}  // namespace kvlab::ops
