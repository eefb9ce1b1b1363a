#include "run/averages.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvlab {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

double mean(const std::vector<double>& values) {
  double sum = 0;
  int count = 0;
  for (double v : values)
    if (!std::isnan(v)) {
      sum += v;
      ++count;
    }
  return count ? sum / count : nan;
}

double percentile(std::vector<double> values, double share) {
  std::erase_if(values, [](double v) { return std::isnan(v); });
  if (values.empty()) return nan;
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  return values[static_cast<std::size_t>(std::clamp(rank - 1, 0., static_cast<double>(values.size() - 1)))];
}

}  // namespace kvlab
