// How far an op's output is from the reference's: the norm of the difference over the norm of the reference.
#pragma once
#include <cmath>
#include <vector>

namespace kvlab::test {

// 1e30 if a value is not finite and differs from the reference's.
inline double relative(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (!std::isfinite(a[i]) && a[i] != b[i]) return 1e30;
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace kvlab::test
