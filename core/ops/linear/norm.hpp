// Small row operations of the executor.
#pragma once
#include <kvlab/dtype.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// out[row, :] = x[row, :] / sqrt(mean(x^2) + eps) * weight, or x rounded when weight is null. The number of rows
// changes no bit of a row's result. The CPU takes f32 and a weight only, with any n, strides and addresses. CUDA wants
// n a multiple of 8.
struct NormArgs {
  const float* x = nullptr;  // [rows, x_stride], 16-byte aligned, x_stride a multiple of 4
  std::int64_t rows = 0, n = 0, x_stride = 0;
  const float* weight = nullptr;  // [n], 16-byte aligned; no running kernel may write it
  float eps = 0;
  void* out = nullptr;        // [rows, out_stride], 16-byte aligned, out_stride a multiple of 8; not x
  DType dtype = DType::bf16;  // f32, bf16 or f16
  std::int64_t out_stride = 0;
};
void rms_norm(const NormArgs& a, Stream s);

// CPU only.
void silu_mul(const float* gate, const float* up, std::int64_t count, float* out);  // out = silu(gate) * up
void add(const float* x, std::int64_t count, float* inout);
void round_to(float* x, std::int64_t count, int dtype_bytes);  // 2: to bf16 and back; 4: unchanged

}  // namespace kvlab::ops
