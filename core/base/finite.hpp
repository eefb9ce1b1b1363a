// Numbers that are not finite: NaN, infinities, and numbers that rounding turns into infinities.
#pragma once
#include <kvlab/dtype.hpp>
#include <kvlab/error.hpp>

#include <cmath>
#include <cstdint>
#include <limits>

namespace kvlab {

// A number whose magnitude is below this stays finite when it is rounded to the dtype.
constexpr float finite_limit(DType dtype) {
  return dtype == DType::bf16 ? 0x1.ffp127f : dtype == DType::f16 ? 65520.f : std::numeric_limits<float>::infinity();
}

// Counts the numbers of x[0, n) whose magnitude is not below the limit. NaN and infinities always count.
inline std::int64_t count_nonfinite(const float* x, std::int64_t n, float limit = finite_limit(DType::f32)) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += !(std::abs(x[i]) < limit);
  return count;
}

// Thrown where a result would be made of such numbers. The cell has failed then, and its row counts them.
class NonFinite : public Error {
 public:
  // count: how many numbers were found, at least one.
  NonFinite(std::int64_t count, const Error& what) : Error(what), count_(count) {}
  std::int64_t count() const noexcept { return count_; }

 private:
  std::int64_t count_;
};

}  // namespace kvlab
