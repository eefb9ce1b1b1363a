// The ops of two layers' rows in plain loops.
#include <cmath>
#include <set>
#include <vector>

#include "ops/score/reference.hpp"

namespace kvlab::ops {
namespace {

using Row = std::vector<double>;

Row row_of(const View<const float, 4>& x, int r, int h, int t) {
  Row out;
  for (std::int64_t d = 0; d < x.extent[3]; ++d) out.push_back(x(r, h, t, d));
  return out;
}

double dot(const Row& a, const Row& b) {
  double sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

// Divides a row by its length and returns that.
double normalise(Row& x) {
  const double length = std::sqrt(dot(x, x));
  for (double& y : x) y = length > 0 ? y / length : 0;
  return length;
}

// The angle of two unit rows, exact near both ends of its range; pi if one is 0.
double angle_of(const Row& a, const Row& b) {
  Row sum, difference;
  for (std::size_t d = 0; d < a.size(); ++d) sum.push_back(a[d] + b[d]), difference.push_back(a[d] - b[d]);
  if (dot(a, a) == 0 || dot(b, b) == 0) return std::acos(-1.0);
  return 2 * std::atan2(std::sqrt(dot(difference, difference)), std::sqrt(dot(sum, sum)));
}

}  // namespace

void row_distance_reference(const PagedKv& kv, const View<const float, 4>& a, const View<const float, 4>& b,
                            Scores out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int t = 0; t < kv.tokens(r, h); ++t) {
        Row x = row_of(a, r, h, t), y = row_of(b, r, h, t);
        normalise(x), normalise(y);
        out(r, h, t) = static_cast<float>(angle_of(x, y) / std::acos(-1.0));
      }
}

void merge_rows_reference(const PagedKv& kv, float t, const TokenList& exact, View<float, 4> a, View<float, 4> b) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::set<int> stay;
      for (int i = 0; i < exact.count(exact.at(r), h); ++i) stay.insert(exact.index(exact.at(r), h, i));
      for (int i = 0; i < kv.tokens(r, h); ++i) {
        Row x = row_of(a, r, h, i), y = row_of(b, r, h, i), between;
        const double of_a = normalise(x), of_b = normalise(y), angle = angle_of(x, y);
        if (stay.count(i) || std::sin(angle) < 1e-6) {
          // Rows that point alike already have the direction between.
          if (stay.count(i) || angle > 1) continue;
          between = x;
        } else {
          for (std::size_t d = 0; d < x.size(); ++d)
            between.push_back((std::sin((1 - double{t}) * angle) * x[d] + std::sin(double{t} * angle) * y[d]) /
                              std::sin(angle));
        }
        normalise(between);
        for (std::size_t d = 0; d < x.size(); ++d) {
          a(r, h, i, static_cast<std::int64_t>(d)) = static_cast<float>(of_a * between[d]);
          b(r, h, i, static_cast<std::int64_t>(d)) = static_cast<float>(of_b * between[d]);
        }
      }
    }
}

}  // namespace kvlab::ops
