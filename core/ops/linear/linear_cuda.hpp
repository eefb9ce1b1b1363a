// The executor's linear layers on CUDA. Everything is in device memory; calls return at once and may be captured in a
// graph after one call outside of it (scratch is allocated then). Errors: Errc::unsupported for shapes, strides and
// types that are not listed here, Errc::device.
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>

#include "base/library_state.hpp"

namespace kvlab::ops {

// A norm without a launch of its own, between two products of up to linear_stream_rows rows. The one that completes x
// leaves x * weight, rounded, and the sum of squares of every norm_piece elements of x; the one that takes the norm
// multiplies its sums by 1 / sqrt(mean(x^2) + eps). bf16 only: x * weight may leave the range of f16.
inline constexpr std::int64_t norm_piece = 16;
struct NormLeft {
  const float* weight = nullptr;  // [n], n a multiple of 4 norm_piece; null: no norm. Not written by anything that may
                                  // still be running
  void* out = nullptr;            // [m, out_stride] of the weights' type
  std::int64_t out_stride = 0;
  float* squares = nullptr;  // [m, n / norm_piece], 16-byte aligned; neither is anything that this product reads
};
struct NormTaken {
  const float* squares = nullptr;  // [m, k / norm_piece] of x, as they were left; null: x is taken as it is
  float eps = 0;
};

// y[m, n] = x[m, k] W[n, k]^T (+ bias), products of 16-bit numbers added in f32.
// Up to linear_stream_rows rows weights stream through tensor cores at the memory's speed; the order of additions
// depends on n and k only, so that a row's result is the same, bit for bit, whatever the number of rows and their
// values. Above, cuBLASLt.
struct LinearArgs {
  const void* weight = nullptr;  // [n, k] dense, 16-byte aligned; k a multiple of 8
  DType dtype = DType::bf16;     // of the weight: bf16 or f16
  std::int64_t n = 0, k = 0;
  const void* x = nullptr;  // [m, x_stride] f32 or dtype, 16-byte aligned; f32 is rounded to dtype first
  DType x_dtype = DType::f32;
  std::int64_t m = 0, x_stride = 0;  // elements, a multiple of 8
  const float* bias = nullptr;       // [n] or null; not with gated
  float* y = nullptr;                // [m, y_stride]; not with gated
  std::int64_t y_stride = 0;
  bool add = false;  // y += instead of y =

  // Rows [0, n/2) of W are a gate, [n/2, n) what it gates: gated [m, n/2] of dtype = silu(gate) * up.
  void* gated = nullptr;
  std::int64_t gated_stride = 0;

  NormLeft left;  // of y; not with gated
  NormTaken taken;

  // The weights are not written by anything that may still be running in the stream: they are read before the work in
  // front has ended.
  bool constant_weights = true;
};
inline constexpr std::int64_t linear_stream_rows = 16;
inline constexpr std::int64_t linear_stream_most = 64;  // that its kernel can take

void linear_cuda(const LinearArgs& a, void* stream);

// The two ways of linear_cuda; x of dtype.
void linear_stream_cuda(const LinearArgs& a, void* stream);  // m <= linear_stream_most
void linear_blas_cuda(const LinearArgs& a, void* stream);    // any m

// cuBLASLt: the library that KVLAB_CUBLASLT names, else that of the CUDA version of the build, wherever the loader or
// /usr/local/cuda has it; KVLAB_CUBLASLT=off turns it off. Errc::device from linear_blas_cuda where it is not there.
const LibraryState& cublaslt_state();

// out[row, :] = x[row, :] / sqrt(mean(x^2) + eps) * weight, or x rounded when weight is null. n a multiple of 8. A
// row's result is the same, bit for bit, whatever the number of rows.
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
void rms_norm_cuda(const NormArgs& a, void* stream);

// gated[row, i] = silu(x[row, i]) * x[row, n + i], both of dtype (bf16, f16); n a multiple of 8, strides too.
void silu_mul_cuda(const void* x, std::int64_t x_stride, DType dtype, std::int64_t rows, std::int64_t n, void* gated,
                   std::int64_t gated_stride, void* stream);
// y[row, i] += bias[i]
void add_bias_cuda(const float* bias, std::int64_t rows, std::int64_t n, float* y, std::int64_t y_stride, void* stream);

// out[row, :] f32 = table[token[row], :] of dtype; k a multiple of 8. A token outside [0, vocabulary) gives NaN.
struct EmbedArgs {
  const void* table = nullptr;  // [vocabulary, k]
  DType dtype = DType::bf16;
  std::int64_t vocabulary = 0, k = 0;
  const std::int32_t* token = nullptr;  // [rows], device memory
  std::int64_t rows = 0;
  float* out = nullptr;  // [rows, k]
};
void embed_cuda(const EmbedArgs& a, void* stream);

// index[row] = place of the largest of x[row, 0..n), the lowest of equal ones; -1 where one is NaN or infinite.
struct ArgmaxArgs {
  const float* x = nullptr;  // [rows, x_stride]
  std::int64_t rows = 0, n = 0, x_stride = 0;
  std::int32_t* index = nullptr;  // [rows]
  // Optional [rows]: -1 too for a row of which this is not 0; 0 afterwards.
  std::int32_t* nonfinite = nullptr;
};
void argmax_cuda(const ArgmaxArgs& a, void* stream);

}  // namespace kvlab::ops
