// Quantiles and one-dimensional k-means.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace kvquant {

// The quantile of ascending numbers, with linear interpolation.
inline double quantile(const std::vector<float>& ascending, double q) {
  const double at = q * static_cast<double>(ascending.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const double a = ascending[low];
  return low + 1 < ascending.size() ? a + (at - static_cast<double>(low)) * (double{ascending[low + 1]} - a) : a;
}

// Numbers in ascending order, and their codebooks.
class Fit {
 public:
  // weights: of each number, or none = 1.
  explicit Fit(std::vector<float> numbers, const std::vector<float>& weights = {}) : x_(std::move(numbers)) {
    std::vector<std::size_t> order(weights.empty() ? 0 : x_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return x_[a] < x_[b]; });
    std::sort(x_.begin(), x_.end());
    for (std::size_t i = 0; i < x_.size(); ++i) {
      const double w = weights.empty() ? 1 : double{weights[order[i]]};
      weight_.push_back(weight_.back() + w), sum_.push_back(sum_.back() + w * double{x_[i]});
    }
  }

  // k-means from k quantiles, the middles of equal shares. A centre is the weighted mean of its numbers. A number that
  // is as near to two centres goes to the lower. A centre without weight stays. At most so many rounds. Without
  // numbers: uniform centres from -1 to 1.
  std::vector<double> centres(std::size_t k, int rounds) const {
    std::vector<double> c;
    for (std::size_t i = 0; i < k; ++i)
      c.push_back(x_.empty() ? 2. * static_cast<double>(i) / static_cast<double>(k - 1) - 1
                             : quantile(x_, (static_cast<double>(i) + .5) / static_cast<double>(k)));
    std::vector<std::size_t> last;
    for (int round = 0; round < rounds; ++round) {
      const std::vector<std::size_t> at = bounds(c);
      if (at == last) break;
      for (std::size_t i = 0; i < k; ++i)
        if (const double w = weight_[at[i + 1]] - weight_[at[i]]; w > 0) c[i] = (sum_[at[i + 1]] - sum_[at[i]]) / w;
      last = at;
    }
    return c;
  }

  // Q-Norm: levels in place of the centres, so that rounded numbers have the mean and the spread of the numbers, each
  // of which counts once.
  std::vector<double> normed(const std::vector<double>& c) const {
    const std::vector<std::size_t> at = bounds(c);
    const auto n = static_cast<double>(std::max<std::size_t>(x_.size(), 1));
    double mean = std::accumulate(x_.begin(), x_.end(), 0.) / n, rounded = 0, spread = 0, of_rounded = 0;
    for (std::size_t i = 0; i < c.size(); ++i) rounded += c[i] * static_cast<double>(at[i + 1] - at[i]) / n;
    for (std::size_t i = 0; i < c.size(); ++i)
      of_rounded += std::pow(c[i] - rounded, 2) * static_cast<double>(at[i + 1] - at[i]) / n;
    for (const float x : x_) spread += std::pow(double{x} - mean, 2) / n;
    const double scale = of_rounded > 0 ? std::sqrt(spread / of_rounded) : 1;
    std::vector<double> out;
    for (const double x : c) out.push_back((x - rounded) * scale + mean);
    return out;
  }

 private:
  // Centre i has the numbers at [bounds[i], bounds[i + 1]).
  std::vector<std::size_t> bounds(const std::vector<double>& c) const {
    std::vector<std::size_t> at{0};
    for (std::size_t i = 0; i + 1 < c.size(); ++i)
      at.push_back(
          static_cast<std::size_t>(std::upper_bound(x_.begin(), x_.end(), (c[i] + c[i + 1]) / 2) - x_.begin()));
    at.push_back(x_.size());
    return at;
  }

  std::vector<float> x_;
  std::vector<double> sum_{0.}, weight_{0.};  // of the first numbers; sums are weighted
};

}  // namespace kvquant
