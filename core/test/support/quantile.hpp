// Quantiles as numpy.quantile has them, the plain way.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

namespace kvlab::test {

// With linear interpolation. At least one number, 0 <= q <= 1.
template <class T>
double plain_quantile(std::vector<T> x, double q) {
  std::sort(x.begin(), x.end());
  const double at = q * static_cast<double>(x.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const double below = x[low], above = x[std::min(low + 1, x.size() - 1)];
  return below + (at - static_cast<double>(low)) * (above - below);
}

}  // namespace kvlab::test
