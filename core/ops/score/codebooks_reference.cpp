// The ops of codebooks in plain loops.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/score/reference.hpp"

namespace kvlab::ops {
namespace {

float code(double x, double lower, double upper, const Coding& how) {
  if (!std::isfinite(x)) return static_cast<float>(x);
  if (how.exact_outliers && (x < lower || x > upper)) return static_cast<float>(x);
  const double zero = (upper + lower) / 2, range = (upper - lower) / 2;
  if (range == 0) return static_cast<float>(zero);
  std::vector<double> distance;
  for (std::int64_t i = 0; i < how.book.centres.extent[0]; ++i)
    distance.push_back(std::abs((x - zero) / range - double{how.book.centres(i)}));
  const auto nearest = std::min_element(distance.begin(), distance.end()) - distance.begin();
  return static_cast<float>(zero + range * double{how.book.levels(nearest)});
}

double quantile(std::vector<double> x, double q) {
  std::sort(x.begin(), x.end());
  const double at = q * static_cast<double>(x.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  return low + 1 < x.size() ? x[low] + (at - static_cast<double>(low)) * (x[low + 1] - x[low]) : x[low];
}

}  // namespace

void code_channels_reference(const PagedKv& kv, const View<const float, 2>& lower, const View<const float, 2>& upper,
                             const Coding& how, View<float, 4> rows) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int t = how.range.first(r, h); t < kv.tokens(r, h); ++t)
        for (int d = 0; d < kv.head_dim; ++d) rows(r, h, t, d) = code(rows(r, h, t, d), lower(h, d), upper(h, d), how);
}

void code_tokens_reference(const PagedKv& kv, double outliers, const Coding& how, View<float, 4> rows) {
  for (int r = 0; r < kv.rows; ++r)
    for (int t = 0; t < rows.extent[2]; ++t) {
      std::vector<float*> numbers;
      std::vector<double> values;
      for (int h = 0; h < kv.kv_heads; ++h)
        for (int d = 0; t >= how.range.first(r, h) && t < kv.tokens(r, h) && d < kv.head_dim; ++d)
          numbers.push_back(&rows(r, h, t, d)), values.push_back(*numbers.back());
      if (values.empty()) continue;
      const double lower = quantile(values, outliers / 2), upper = quantile(values, 1 - outliers / 2);
      for (float* x : numbers) *x = code(*x, lower, upper, how);
    }
}

}  // namespace kvlab::ops
