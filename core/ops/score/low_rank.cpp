// Rows of low rank: the nearest ones, jointly over the KV heads.
#include "ops/score/low_rank.hpp"

#include <kvlab/eigen.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/score/channels.hpp"

namespace kvlab::ops {
namespace {

using Numbers = std::vector<double>;

// X of one row of the batch.
struct Joint {
  const PagedKv& kv;
  View<float, 4> rows;
  int row, tokens = 0, width;

  Joint(const PagedKv& of, const View<float, 4>& from, int r)
      : kv(of), rows(from), row(r), width(of.kv_heads * of.head_dim) {
    for (int h = 0; h < kv.kv_heads; ++h) tokens = std::max(tokens, kv.tokens(row, h));
  }
  void read(int t, double* out) const {
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int d = 0; d < kv.head_dim; ++d) *out++ = t < kv.tokens(row, h) ? double{rows(row, h, t, d)} : 0;
  }
  template <class F>
  void write(int t, const F& f) const {
    for (int h = 0, i = 0; h < kv.kv_heads; ++h)
      for (int d = 0; d < kv.head_dim; ++d, ++i)
        if (t < kv.tokens(row, h)) rows(row, h, t, d) = static_cast<float>(f(rows(row, h, t, d), i));
  }
};

Numbers gram_of(const Joint& x) {
  const auto w = static_cast<std::size_t>(x.width);
  constexpr int at_once = 64;
  Numbers g(w * w), block(w * at_once);
  for (int first = 0; first < x.tokens; first += at_once) {
    const int count = std::min(at_once, x.tokens - first);
    for (int t = 0; t < count; ++t) x.read(first + t, &block[static_cast<std::size_t>(t) * w]);
#pragma omp parallel for schedule(dynamic, 8) if (worth_threads(x.width * std::int64_t{x.width}))
    for (int i = 0; i < x.width; ++i)
      for (int t = 0; t < count; ++t) {
        const double* of = &block[static_cast<std::size_t>(t) * w];
        const double y = of[i];
        double* to = &g[static_cast<std::size_t>(i) * w];
        for (int j = 0; j <= i; ++j) to[j] += y * of[j];
      }
  }
  for (std::size_t i = 0; i < w; ++i)
    for (std::size_t j = 0; j < i; ++j) g[j * w + i] = g[i * w + j];
  return g;
}

// Eigenvectors [vector][element] of a symmetric matrix, and their values. Elements change independently of each other,
// so they lie side by side.
Numbers eigenvectors(Numbers& a, int n, Numbers& values) {
  const auto w = static_cast<std::size_t>(n);
  Numbers z(w * w), v(w), p(w), beside(w), cosine(w), sine(w);
  values.assign(w, 0);
  for (std::size_t i = 0; i < w; ++i) z[i * w + i] = 1;
  const auto row = [&](Numbers& x, int i) { return &x[static_cast<std::size_t>(i) * w]; };
  for (int k = 0; k < n; ++k) {
    values[static_cast<std::size_t>(k)] = row(a, k)[k];
    if (k + 1 == n) break;
    double tail = 0;
    for (int j = k + 2; j < n; ++j) tail += row(a, k)[j] * row(a, k)[j];
    const Reflection r = Reflection::of(row(a, k)[k + 1], tail);
    beside[static_cast<std::size_t>(k)] = r.first;
    if (r.beta == 0) continue;
    std::copy(row(a, k) + k + 1, row(a, k) + n, &v[static_cast<std::size_t>(k) + 1]);
    v[static_cast<std::size_t>(k) + 1] = r.v0;
    const double* of = v.data();
    std::fill(p.begin(), p.end(), 0);
    for (int j = k + 1; j < n; ++j) {
      const double* from = row(a, j);
      for (int i = k + 1; i < n; ++i) p[static_cast<std::size_t>(i)] += from[i] * of[j];
    }
    double product = 0;
    for (int i = k + 1; i < n; ++i) product += (p[static_cast<std::size_t>(i)] *= r.beta) * of[i];
    for (int i = k + 1; i < n; ++i) p[static_cast<std::size_t>(i)] -= r.beta / 2 * product * of[i];
    const double* by = p.data();
#pragma omp parallel for schedule(static) if (worth_threads(std::int64_t{n - k} * (n - k)))
    for (int j = k + 1; j < n; ++j) {
      double* to = row(a, j);
      for (int i = k + 1; i < n; ++i) to[i] -= of[j] * by[i] + by[j] * of[i];
    }
    std::fill(cosine.begin(), cosine.end(), 0);
    for (int j = k + 1; j < n; ++j) {
      const double* from = row(z, j);
      const double y = r.beta * of[j];
      for (int i = 0; i < n; ++i) cosine[static_cast<std::size_t>(i)] += y * from[i];
    }
#pragma omp parallel for schedule(static) if (worth_threads(std::int64_t{n} * (n - k)))
    for (int j = k + 1; j < n; ++j) {
      double* to = row(z, j);
      for (int i = 0; i < n; ++i) to[i] -= of[j] * cosine[static_cast<std::size_t>(i)];
    }
  }
  QlSteps steps{values.data(), beside.data(), cosine.data(), sine.data(), n};
  while (steps.next()) {
    constexpr int at_once = 512;
#pragma omp parallel for schedule(static) if (worth_threads(std::int64_t{n} * (steps.last - steps.first)))
    for (int begin = 0; begin < n; begin += at_once) {
      const int end = std::min(n, begin + at_once);
      for (int k = steps.last; k >= steps.first; --k) {
        const double c = steps.cosine[k], s = steps.sine[k];
        double *x = row(z, k), *y = row(z, k + 1);
        for (int i = begin; i < end; ++i) {
          const double f = y[i];
          y[i] = s * x[i] + c * f;
          x[i] = c * x[i] - s * f;
        }
      }
    }
  }
  return z;
}

std::vector<int> falling(const Numbers& values) {
  std::vector<int> order(values.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::sort(order.begin(), order.end(), [&](int i, int j) {
    return is_greater(values[static_cast<std::size_t>(i)], i, values[static_cast<std::size_t>(j)], j);
  });
  return order;
}

void project(const Joint& x, int rank) {
  const auto w = static_cast<std::size_t>(x.width);
  Numbers gram = gram_of(x), values;
  double energy = 0;
  for (std::size_t i = 0; i < w; ++i) energy += gram[i * w + i];
  if (energy == 0) return;
  if (!std::isfinite(energy)) {
    for (int t = 0; t < x.tokens; ++t) x.write(t, [](float, int) { return NAN; });
    return;
  }
  for (double& g : gram) g /= energy;
  const Numbers z = eigenvectors(gram, x.width, values);
  const std::vector<int> order = falling(values);
  const RankSide side = RankSide::of(rank, x.width);
  const auto count = static_cast<std::size_t>(side.count);
  Numbers vectors(count * w), turned(count * w);  // [vector][element], [element][vector]
  for (std::size_t q = 0; q < count; ++q)
    for (std::size_t i = 0; i < w; ++i)
      turned[i * count + q] = vectors[q * w + i] =
          z[static_cast<std::size_t>(order[static_cast<std::size_t>(side.first) + q]) * w + i];
#pragma omp parallel if (worth_threads(std::int64_t{x.tokens} * x.width))
  {
    Numbers of(w), along(count), sum(w);
#pragma omp for schedule(static)
    for (int t = 0; t < x.tokens; ++t) {
      x.read(t, of.data());
      std::fill(along.begin(), along.end(), 0);
      std::fill(sum.begin(), sum.end(), 0);
      for (std::size_t i = 0; i < w; ++i)
        for (std::size_t q = 0; q < count; ++q) along[q] += of[i] * turned[i * count + q];
      for (std::size_t q = 0; q < count; ++q)
        for (std::size_t i = 0; i < w; ++i) sum[i] += along[q] * vectors[q * w + i];
      x.write(t, [&](float own, int i) {
        const double y = sum[static_cast<std::size_t>(i)];
        return side.takes_away ? double{own} - y : y;
      });
    }
  }
}

}  // namespace

void low_rank(const PagedKv& kv, int rank, View<float, 4> rows, Stream s) {
  const char* op = "low_rank";
  check_kv(kv, op, s);
  check_rows(kv, rows, op, s);
  const int width = kv.kv_heads * kv.head_dim;
  if (rank < 1 || rank > width)
    fail(Errc::internal, op,
         "got rank " + std::to_string(rank) + ", wanted 1 to " + std::to_string(width) + ", KV heads times head_dim");
  if (rank == width) return;
  if (s.device() == Device::cuda) return on_cuda<low_rank>(kv, rank, rows, s);
  for (int r = 0; r < kv.rows; ++r) project(Joint(kv, rows, r), rank);
}

}  // namespace kvlab::ops

namespace kvlab {

Eigen eigen_of_symmetric(std::vector<double> matrix, int n) {
  const auto w = static_cast<std::size_t>(std::max(n, 0));
  if (n < 1 || matrix.size() != w * w)
    ops::fail(Errc::internal, "eigen_of_symmetric",
              "got " + std::to_string(matrix.size()) + " numbers, wanted those of a matrix of " + std::to_string(n) +
                  " x " + std::to_string(n));
  std::vector<double> values;
  const std::vector<double> z = ops::eigenvectors(matrix, n, values);
  Eigen out;
  for (const int i : ops::falling(values)) {
    out.values.push_back(values[static_cast<std::size_t>(i)]);
    const auto first = z.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i) * w);
    out.vectors.insert(out.vectors.end(), first, first + n);
  }
  return out;
}

}  // namespace kvlab
