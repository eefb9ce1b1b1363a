// Numbers that are not finite: NaN and infinities, and what becomes one when it is rounded.
#pragma once
#include <kvlab/dtype.hpp>
#include <kvlab/error.hpp>

#include <cmath>
#include <cstdint>
#include <limits>

namespace kvlab {

// What is smaller than this, whatever its sign, stays finite when it is rounded to the type.
constexpr float finite_limit(DType dtype) {
  return dtype == DType::bf16 ? 0x1.ffp127f : dtype == DType::f16 ? 65520.f : std::numeric_limits<float>::infinity();
}

// How many of n numbers are not below the limit: all that are NaN, and infinities.
inline std::int64_t count_nonfinite(const float* x, std::int64_t n, float limit = finite_limit(DType::f32)) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += !(std::abs(x[i]) < limit);
  return count;
}

// A result that would be made of such numbers. A cell that throws it has failed, and its row counts them.
class NonFinite : public Error {
 public:
  // count: of the numbers found, at least one.
  NonFinite(std::int64_t count, const Error& what) : Error(what), count_(count) {}
  std::int64_t count() const noexcept { return count_; }

 private:
  std::int64_t count_;
};

}  // namespace kvlab
