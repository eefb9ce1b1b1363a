// y[m, n] = x[m, k] * W[n, k]^T (+ bias): the executor's linear layers. The CPU uses class Linear, CUDA linear().
//
// Linear packs weights once at load; the caller frees the plain copy. oneDNN multiplies f32 on CPUs with AVX-512, and
// bf16 where the CPU has bf16 instructions or AMX. Elsewhere our own kernels multiply; they expand bf16 weights to f32.
// Activations are f32.
#pragma once
#include <kvlab/dtype.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/library_state.hpp"

namespace kvlab::ops {

class Linear {
 public:
  // fill(row_begin, row_count, out) writes rows of W as f32. pack calls it for consecutive blocks of rows, so that the
  // whole f32 matrix never exists.
  using Fill = std::function<void(std::int64_t, std::int64_t, float*)>;
  static Linear pack(std::int64_t n, std::int64_t k, DType dtype, const Fill& fill);

  Linear();
  Linear(Linear&&) noexcept;
  Linear& operator=(Linear&&) noexcept;
  ~Linear();

  // x [m, x_stride], y [m, y_stride] f32. Results for a row do not depend on the other rows' values.
  void apply(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const;

  // Row n of W as f32 (the embedding of a tied model).
  void row(std::int64_t n, float* out) const;

  std::int64_t n() const;
  std::int64_t k() const;
  std::int64_t bytes() const;  // bytes that one pass must read
  std::string kernel() const;  // e.g. "onednn bf16", "avx2 bf16->f32"

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Name of the kernel that multiplies bf16 weights on this machine.
std::string bf16_kernel();

// CUDA from here on. All pointers are device memory. Calls return at once. A graph may capture a call after one call
// outside of it, which allocates scratch. Errc::unsupported for a CPU stream and for shapes, strides and types that are
// not listed here; Errc::device.

// A norm without a launch of its own, between two products of up to linear_stream_rows rows. The first product, whose y
// is the next x, writes x * weight, rounded, and the sum of squares of every norm_piece elements of x. The second
// multiplies its sums by 1 / sqrt(mean(x^2) + eps). bf16 only: x * weight may leave the range of f16.
inline constexpr std::int64_t norm_piece = 16;
struct NormLeft {
  const float* weight = nullptr;  // [n], n a multiple of 4 norm_piece; null: no norm. No running kernel may write it
  void* out = nullptr;            // [m, out_stride] of the weights' type
  std::int64_t out_stride = 0;
  float* squares = nullptr;  // [m, n / norm_piece], 16-byte aligned; this product may read neither out nor squares
};
struct NormTaken {
  const float* squares = nullptr;  // [m, k / norm_piece] that NormLeft wrote for x; null: no norm
  float eps = 0;
};

// y[m, n] = x[m, k] W[n, k]^T (+ bias), products of 16-bit numbers added in f32.
// Up to linear_stream_rows rows, weights stream through tensor cores at the memory's speed. The order of additions
// depends on n and k only: the number and values of other rows change no bit of a row's result. cuBLASLt multiplies
// more rows.
struct LinearArgs {
  const void* weight = nullptr;    // [n, k], 16-byte aligned; k a multiple of 8
  std::int64_t weight_stride = 0;  // elements from row to row, a multiple of 8; 0 = k. Else cuBLASLt multiplies any m
  DType dtype = DType::bf16;       // of the weight: bf16 or f16
  std::int64_t n = 0, k = 0;
  const void* x = nullptr;  // [m, x_stride] f32 or dtype, 16-byte aligned; linear rounds f32 to dtype first
  DType x_dtype = DType::f32;
  std::int64_t m = 0, x_stride = 0;  // elements, a multiple of 8
  const float* bias = nullptr;       // [n] or null; not with gated
  float* y = nullptr;                // [m, y_stride]; not with gated
  std::int64_t y_stride = 0;
  bool add = false;  // y += instead of y =

  // Rows [0, n/2) of W are a gate, rows [n/2, n) are `up`: gated [m, n/2] of dtype = silu(gate) * up.
  void* gated = nullptr;
  std::int64_t gated_stride = 0;

  NormLeft left;  // norm of y; not with gated
  NormTaken taken;

  // True: the kernel reads the weights before the preceding kernel in the stream ends. False: such a kernel may still
  // write them.
  bool constant_weights = true;
};
inline constexpr std::int64_t linear_stream_rows = 16;
inline constexpr std::int64_t linear_stream_most = 64;  // most rows that linear_stream takes

void linear(const LinearArgs& a, Stream s);

// The two implementations of linear; both want x of dtype.
void linear_stream(const LinearArgs& a, Stream s);  // m <= linear_stream_most
void linear_blas(const LinearArgs& a, Stream s);    // any m

// cuBLASLt: the library that KVLAB_CUBLASLT names, else the one of the build's CUDA version, from the loader's paths or
// /usr/local/cuda. KVLAB_CUBLASLT=off turns it off. Without it linear_blas throws Errc::device.
const LibraryState& cublaslt_state();
// Throws Errc::device without a usable GPU or without cuBLASLt; models need both.
void require_cuda_for_models(const char* who);

}  // namespace kvlab::ops
