// y[m, n] = x[m, k] * W[n, k]^T (+ bias): the executor's linear layers. Weights are packed once at load; the plain copy
// is freed by the caller. f32 and, where the CPU has AVX-512 with bf16 (or AMX), bf16 go through oneDNN; below, bf16
// weights are expanded to f32 in our own kernel (oneDNN 2.6 has no bf16 there). Activations are f32.
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

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

}  // namespace kvlab::ops
