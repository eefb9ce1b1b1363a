// The ops of kvlab/low_rank.hpp and kvlab/key_factors.hpp in plain loops.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/half.hpp"
#include "ops/page/reference.hpp"
#include "ops/score/key_factors.hpp"
#include "ops/score/low_rank.hpp"

namespace kvlab::ops {

// Cyclic Jacobi: each rotation makes one element beside the diagonal 0.
void eigen_reference(std::vector<double> a, int n, std::vector<double>& values, std::vector<double>& vectors) {
  const auto at = [n](int i, int j) {
    return static_cast<std::size_t>(i) * static_cast<std::size_t>(n) + static_cast<std::size_t>(j);
  };
  std::vector<double> v(a.size());
  for (int i = 0; i < n; ++i) v[at(i, i)] = 1;
  double all = 0;
  for (const double x : a) all += x * x;
  for (int sweep = 0; sweep < 50; ++sweep) {
    double off = 0;
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < i; ++j) off += a[at(i, j)] * a[at(i, j)];
    if (off <= 1e-30 * all) break;
    for (int i = 0; i < n; ++i)
      for (int j = i + 1; j < n; ++j) {
        if (a[at(i, j)] == 0) continue;
        const double half = (a[at(j, j)] - a[at(i, i)]) / (2 * a[at(i, j)]);
        const double t = (half < 0 ? -1 : 1) / (std::abs(half) + std::hypot(half, 1.)), c = 1 / std::hypot(t, 1.),
                     s = t * c;
        for (int k = 0; k < n; ++k) {
          const double x = a[at(k, i)], y = a[at(k, j)];
          a[at(k, i)] = c * x - s * y, a[at(k, j)] = s * x + c * y;
        }
        for (int k = 0; k < n; ++k) {
          const double x = a[at(i, k)], y = a[at(j, k)];
          a[at(i, k)] = c * x - s * y, a[at(j, k)] = s * x + c * y;
          const double p = v[at(i, k)], q = v[at(j, k)];
          v[at(i, k)] = c * p - s * q, v[at(j, k)] = s * p + c * q;
        }
      }
  }
  std::vector<int> order;
  for (int i = 0; i < n; ++i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return a[at(i, i)] > a[at(j, j)]; });
  values.clear(), vectors.clear();
  for (const int i : order) {
    values.push_back(a[at(i, i)]);
    for (int k = 0; k < n; ++k) vectors.push_back(v[at(i, k)]);
  }
}

void low_rank_reference(const PagedKv& kv, int rank, View<float, 4> rows) {
  const int n = kv.kv_heads * kv.head_dim;
  for (int r = 0; r < kv.rows; ++r) {
    int tokens = 0;
    for (int h = 0; h < kv.kv_heads; ++h) tokens = std::max(tokens, kv.tokens(r, h));
    const auto x = [&](int t, int i) {
      const int h = i / kv.head_dim;
      return t < kv.tokens(r, h) ? double{rows(r, h, t, i % kv.head_dim)} : 0.;
    };
    std::vector<double> gram, values, vectors;
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) {
        double sum = 0;
        for (int t = 0; t < tokens; ++t) sum += x(t, i) * x(t, j);
        gram.push_back(sum);
      }
    eigen_reference(gram, n, values, vectors);
    for (int t = 0; t < tokens; ++t) {
      std::vector<double> sum(static_cast<std::size_t>(n));
      for (int q = 0; q < rank; ++q) {
        const double* v = &vectors[static_cast<std::size_t>(q * n)];
        double along = 0;
        for (int i = 0; i < n; ++i) along += x(t, i) * v[i];
        for (int i = 0; i < n; ++i) sum[static_cast<std::size_t>(i)] += along * v[i];
      }
      for (int i = 0; i < n; ++i)
        if (t < kv.tokens(r, i / kv.head_dim))
          rows(r, i / kv.head_dim, t, i % kv.head_dim) = static_cast<float>(sum[static_cast<std::size_t>(i)]);
    }
  }
}

void rebuild_rows_reference(const PagedKv& kv, const KeyFactors& f, View<float, 4> rows) {
  const auto number = [&](const std::byte* of, std::int64_t i) -> double {
    if (f.dtype == DType::f32) return double{reinterpret_cast<const float*>(of)[i]};
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(of)[i];
    bf16 x;
    x.bits = bits;
    return double{f.dtype == DType::f16 ? half_to_float(bits) : static_cast<float>(x)};
  };
  const std::int64_t dim = kv.head_dim, half = dim / 2, width = kv.kv_heads * dim;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int64_t slot = kv.slots[r], of_slot = slot * f.slot_bytes;
      const int n = std::min(kv.tokens(r, h), f.count_of(kv.slots[r]));
      std::vector<std::int32_t> position(static_cast<std::size_t>(kv.tokens(r, h)));
      token_positions_reference(kv, r, h, kv.tokens(r, h), position.data());
      for (int t = 0; t < n; ++t) {
        std::vector<double> x(static_cast<std::size_t>(dim));
        for (std::int64_t d = 0; d < dim; ++d)
          for (std::int64_t q = 0; q < f.rank; ++q)
            x[static_cast<std::size_t>(d)] +=
                number(f.tokens + of_slot, t * f.row + q) * number(f.basis + of_slot, q * width + h * dim + d);
        for (std::int64_t i = 0; i < half; ++i) {
          const double angle = double{kv.rope_table.inv_freq[i]} * position[static_cast<std::size_t>(t)],
                       a = x[static_cast<std::size_t>(i)], b = x[static_cast<std::size_t>(half + i)],
                       c = std::cos(angle) * double{kv.rope_table.attention_scale},
                       s = std::sin(angle) * double{kv.rope_table.attention_scale};
          rows(r, h, t, i) = static_cast<float>(a * c - b * s);
          rows(r, h, t, half + i) = static_cast<float>(b * c + a * s);
        }
      }
    }
}

}  // namespace kvlab::ops
