// Packed weight matrices behind ops::Linear, one class per way to hold and multiply them.
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>
#include <memory>
#include <string>

#include "ops/linear/linear_kernels.hpp"

namespace kvlab::ops::gemm {

class Weights {
 public:
  virtual ~Weights() = default;
  virtual void put_rows(std::int64_t begin, std::int64_t count, const float* rows) = 0;  // [count, k]
  virtual void get_row(std::int64_t n, float* out) const = 0;
  virtual void apply(const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, std::int64_t m) const = 0;
  virtual std::int64_t bytes() const = 0;
  virtual std::string kernel() const = 0;
};

// dtype: f32 or bf16.
std::unique_ptr<Weights> panel_weights(std::int64_t n, std::int64_t k, DType dtype, const Kernels& kernels);

}  // namespace kvlab::ops::gemm
