#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/score/reference.hpp"

namespace kvlab::ops {
namespace {

// One head's moments: products of deviations, mean, count.
struct Head {
  const View<float, 3>& m;
  int slot, head, dim;
  float& product(int d, int e) const { return m(slot, head, d * dim + e); }
  float& mean(int d) const { return m(slot, head, dim * dim + d); }
  float& count() const { return m(slot, head, dim * dim + dim); }
};

}  // namespace

// Welford: each query moves the mean, and adds the product of its distances from the old mean and the new mean.
void add_moments_reference(const View<const float, 4>& queries, const std::int32_t* seen, const PagedKv& kv, int first,
                           const View<float, 3>& moments) {
  const int dim = kv.head_dim, n = static_cast<int>(queries.extent[2]);
  const double unscale = 1. / kv.rope_table.attention_scale / kv.rope_table.attention_scale;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < queries.extent[1]; ++h) {
      const Head to{moments, kv.slots[r], h, dim};
      std::vector<double> mean(dim), product(dim * dim), before(dim);
      double count = to.count();
      for (int d = 0; d < dim; ++d) mean[d] = to.mean(d);
      for (int d = 0; d < dim * dim; ++d) product[d] = to.product(0, d);
      for (int i = std::max(0, first - seen[r] + n); i < n; ++i, ++count) {
        std::vector<float> x(dim);
        for (int d = 0; d < dim; ++d) x[d] = queries(r, h, i, d);
        rotate_reference(x.data(), kv.rope_table, -(seen[r] - n + i));
        for (int d = 0; d < dim; ++d) {
          before[d] = x[d] * unscale - mean[d];
          mean[d] += before[d] / (count + 1);
        }
        for (int d = 0; d < dim; ++d)
          for (int e = 0; e < dim; ++e) product[d * dim + e] += before[d] * (x[e] * unscale - mean[e]);
      }
      for (int d = 0; d < dim; ++d) to.mean(d) = static_cast<float>(mean[d]);
      for (int d = 0; d < dim * dim; ++d) to.product(0, d) = static_cast<float>(product[d]);
      to.count() = static_cast<float>(count);
    }
}

void expected_query_reference(const View<float, 3>& moments, const std::int32_t* seen, const PagedKv& kv, int horizon,
                              View<float, 3> mean, View<float, 4> covariance) {
  const int dim = kv.head_dim, half = dim / 2;
  for (int r = 0; r < kv.rows; ++r) {
    // The mean of the rotation matrices over the next `horizon` positions.
    std::vector<std::vector<double>> turn(dim, std::vector<double>(dim));
    for (int i = 0; i < half; ++i)
      for (int p = seen[r]; p < seen[r] + horizon; ++p) {
        const double angle = double{kv.rope_table.inv_freq[i]} * p, scale = kv.rope_table.attention_scale;
        turn[i][i] += std::cos(angle) * scale / horizon;
        turn[i][i + half] -= std::sin(angle) * scale / horizon;
        turn[i + half][i] += std::sin(angle) * scale / horizon;
        turn[i + half][i + half] += std::cos(angle) * scale / horizon;
      }
    for (int h = 0; h < mean.extent[1]; ++h) {
      const Head from{moments, kv.slots[r], h, dim};
      const double divisor = from.count() > 0 ? from.count() : 1;
      std::vector<std::vector<double>> half_way(dim, std::vector<double>(dim));
      for (int d = 0; d < dim; ++d)
        for (int i = 0; i < dim; ++i)
          for (int e = 0; e < dim; ++e) half_way[d][e] += turn[d][i] * from.product(i, e) / divisor;
      for (int d = 0; d < dim; ++d) {
        double sum = 0;
        for (int i = 0; i < dim; ++i) sum += turn[d][i] * from.mean(i);
        mean(r, h, d) = static_cast<float>(sum);
        for (int e = 0; e < dim; ++e) {
          sum = 0;
          for (int i = 0; i < dim; ++i) sum += half_way[d][i] * turn[e][i];
          covariance(r, h, d, e) = static_cast<float>(sum);
        }
      }
    }
  }
}

}  // namespace kvlab::ops
