#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/score/reference.hpp"

namespace kvlab::ops {
namespace {

using Rows = std::vector<std::vector<double>>;  // [token][head_dim]

Rows rows_of(const KvRows& rows, int row, int head) {
  const PagedKv& kv = *rows.kv;
  std::vector<float> x(std::size_t(kv.tokens(row, head)) * kv.head_dim);
  gather_rows_reference(kv, row, head, rows.side, kv.tokens(row, head), x.data());
  Rows out;
  for (int t = 0; t < kv.tokens(row, head); ++t)
    out.emplace_back(x.begin() + std::int64_t{t} * kv.head_dim, x.begin() + std::int64_t{t + 1} * kv.head_dim);
  return out;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

// Calls body(row, head, rows of its KV head) for each of `heads` heads.
template <class Body>
void for_head_rows(const KvRows& rows, std::int64_t heads, Body body) {
  for (int r = 0; r < rows.kv->rows; ++r)
    for (int h = 0; h < heads; ++h) body(r, h, rows_of(rows, r, h / static_cast<int>(heads / rows.kv->kv_heads)));
}

}  // namespace

void read_rows_reference(const KvRows& rows, View<float, 4> out) {
  for_head_rows(rows, rows.kv->kv_heads, [&](int r, int h, const Rows& x) {
    for (std::size_t t = 0; t < x.size(); ++t)
      for (std::size_t d = 0; d < x[t].size(); ++d) out(r, h, t, d) = static_cast<float>(x[t][d]);
  });
}

void read_range_reference(const KvRows& rows, const TokenRange& range, View<float, 4> out) {
  for_head_rows(rows, rows.kv->kv_heads, [&](int r, int h, const Rows& x) {
    for (int i = 0; i < range.count(r, h); ++i)
      for (int d = 0; d < rows.kv->head_dim; ++d)
        out(r, h, i, d) =
            static_cast<float>(x[static_cast<std::size_t>(range.first(r, h) + i)][static_cast<std::size_t>(d)]);
  });
}

void row_dot_reference(const KvRows& rows, View<const float, 3> vectors, bool cosine, Scores out) {
  for_head_rows(rows, vectors.extent[1], [&](int r, int h, const Rows& x) {
    std::vector<double> v(rows.kv->head_dim);
    for (std::size_t d = 0; d < v.size(); ++d) v[d] = vectors(r, h, d);
    for (std::size_t t = 0; t < x.size(); ++t) {
      const double by = cosine ? std::sqrt(dot(v, v) * dot(x[t], x[t])) : 1;
      out(r, h, t) = by > 0 ? static_cast<float>(dot(v, x[t]) / by) : 0;
    }
  });
}

void listed_row_dot_reference(const KvRows& rows, View<const float, 3> vectors, const PageList& pages, int bits,
                              Scores out) {
  const PagedKv& kv = *rows.kv;
  for_head_rows(rows, vectors.extent[1], [&](int r, int q, const Rows& x) {
    const int h = q / (static_cast<int>(vectors.extent[1]) / kv.kv_heads);
    for (std::size_t t = 0; t < x.size(); ++t) out(r, q, t) = -INFINITY;
    for (int i = 0; i < pages.count(pages.at(r), h); ++i) {
      const int first = pages.index(pages.at(r), h, i) * kv.page_size;
      for (int t = first; t < std::min(first + kv.page_size, static_cast<int>(x.size())); ++t) {
        // Codes are of f32 numbers, since exact ones would decide other ties.
        const auto [least, greatest] = std::minmax_element(x[t].begin(), x[t].end());
        const auto low = static_cast<float>(*least);
        const float scale = bits > 0 ? (static_cast<float>(*greatest) - low) / static_cast<float>((1 << bits) - 1) : 0;
        double sum = 0;
        for (std::size_t d = 0; d < x[t].size(); ++d) {
          const float code = scale > 0 ? std::nearbyint((static_cast<float>(x[t][d]) - low) / scale) : 0;
          sum += vectors(r, q, d) * (scale > 0 ? low + double{scale} * code : x[t][d]);
        }
        out(r, q, t) = static_cast<float>(sum);
      }
    }
  });
}

void row_quadratic_reference(const KvRows& rows, View<const float, 4> matrix, Scores out) {
  for_head_rows(rows, matrix.extent[1], [&](int r, int h, const Rows& x) {
    for (std::size_t t = 0; t < x.size(); ++t) {
      double sum = 0;
      for (std::size_t d = 0; d < x[t].size(); ++d)
        for (std::size_t e = 0; e < x[t].size(); ++e) sum += x[t][d] * matrix(r, h, d, e) * x[t][e];
      out(r, h, t) = static_cast<float>(sum);
    }
  });
}

void normalised_mean_reference(const KvRows& rows, View<float, 3> out) {
  for_head_rows(rows, rows.kv->kv_heads, [&](int r, int h, const Rows& x) {
    for (int d = 0; d < rows.kv->head_dim; ++d) {
      double sum = 0;
      for (const auto& y : x)
        if (const double length = std::sqrt(dot(y, y)); length > 0) sum += y[d] / length;
      out(r, h, d) = x.empty() ? 0 : static_cast<float>(sum / static_cast<double>(x.size()));
    }
  });
}

}  // namespace kvlab::ops
