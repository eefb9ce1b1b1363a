// Small row operations of the executor.
#pragma once
#include <kvlab/dtype.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// out[row, :] = x[row, :] / sqrt(mean(x^2) + eps) * weight, or x rounded when weight is null. A row's result is the
// same, bit for bit, whatever the number of rows. The CPU takes a weight and f32 alone, and any n, strides and
// addresses. CUDA takes n that are multiples of 8.
struct NormArgs {
  const float* x = nullptr;  // [rows, x_stride], 16-byte aligned, x_stride a multiple of 4
  std::int64_t rows = 0, n = 0, x_stride = 0;
  const float* weight = nullptr;  // [n], 16-byte aligned; not written by anything that may still be running: it is read
                                  // before the work in front has ended
  float eps = 0;
  void* out = nullptr;        // [rows, out_stride], 16-byte aligned, out_stride a multiple of 8; not x
  DType dtype = DType::bf16;  // f32, bf16 or f16
  std::int64_t out_stride = 0;
};
void rms_norm(const NormArgs& a, Stream s);

// The others are the CPU's.
void silu_mul(const float* gate, const float* up, std::int64_t count, float* out);  // out = silu(gate) * up
void add(const float* x, std::int64_t count, float* inout);
void round_to(float* x, std::int64_t count, int dtype_bytes);  // 2: through bf16; 4: as it is

}  // namespace kvlab::ops
