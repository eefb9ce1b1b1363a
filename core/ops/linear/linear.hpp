// y[m, n] = x[m, k] * W[n, k]^T (+ bias): the executor's linear layers. On the CPU they are class Linear, on CUDA
// linear().
//
// Linear packs weights once at load; the caller frees the plain copy. f32 and, where the CPU has AVX-512 with bf16 (or
// AMX), bf16 go through oneDNN; below, bf16 weights are expanded to f32 in our own kernel (oneDNN 2.6 has no bf16
// there). Activations are f32.
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
  // fill(row_begin, row_count, out) writes rows of W as f32; it is called for consecutive blocks of rows, so that the
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
  std::int64_t bytes() const;  // what one pass must read
  std::string kernel() const;  // e.g. "onednn bf16", "avx2 bf16->f32"

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Which kernel `bf16` takes on this machine, and the matching ceilings for `kvlab bench`.
std::string bf16_kernel();

// CUDA from here on. Everything is in device memory; calls return at once and may be captured in a graph after one call
// outside of it (scratch is allocated then). Errors: Errc::unsupported for shapes, strides and types that are not
// listed here and for a CPU stream, Errc::device.

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

void linear(const LinearArgs& a, Stream s);

// The two ways of linear; x of dtype.
void linear_stream(const LinearArgs& a, Stream s);  // m <= linear_stream_most
void linear_blas(const LinearArgs& a, Stream s);    // any m

// cuBLASLt: the library that KVLAB_CUBLASLT names, else that of the CUDA version of the build, wherever the loader or
// /usr/local/cuda has it; KVLAB_CUBLASLT=off turns it off. Errc::device from linear_blas where it is not there.
const LibraryState& cublaslt_state();
// Errc::device without a usable GPU or without cuBLASLt, without which no model runs there.
void require_cuda_for_models(const char* who);

}  // namespace kvlab::ops
