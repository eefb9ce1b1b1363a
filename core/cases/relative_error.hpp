// How far an op's output is from the reference's: the norm of the difference over the norm of the reference.
#pragma once
#include <cmath>
#include <vector>

namespace kvlab::cases {

// 1e30 if a value is not finite and differs from the reference's. NaN equals NaN.
inline double relative(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const bool same = a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]));
    if (!same && !std::isfinite(a[i])) return 1e30;
    const double x = same ? 0 : double{a[i]} - b[i], y = std::isfinite(b[i]) ? b[i] : 0;
    difference += x * x;
    norm += y * y;
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace kvlab::cases
