// How far an op's output is from the reference's.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

namespace kvlab::cases {

// The norm of the difference over the norm of the reference.
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

// The largest difference of two values, in units of the difference that the value may have. Infinities and NaN must be
// equal, and so must values that may have no difference: else 1e30.
inline double share_of_bound(const std::vector<float>& got, const std::vector<float>& wanted,
                             const std::vector<double>& most) {
  double worst = got.size() == wanted.size() && most.size() == wanted.size() ? 0 : 1e30;
  for (std::size_t i = 0; worst < 1e30 && i < wanted.size(); ++i) {
    if (got[i] == wanted[i] || (std::isnan(got[i]) && std::isnan(wanted[i]))) continue;
    const double share = std::abs(double{got[i]} - wanted[i]) / most[i];
    worst = std::isfinite(share) ? std::max(worst, share) : 1e30;
  }
  return worst;
}

}  // namespace kvlab::cases
