#include <cmath>
#include <vector>

#include "ops/attend/left_out.hpp"
#include "ops/page/reference.hpp"

namespace kvlab::ops {

void add_mean_value_reference(const PagedKv& kv, int newest, View<float, 3> mean) {
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h), first = n > newest ? n - newest : 0;
      std::vector<float> values(static_cast<std::size_t>(n) * dim);
      gather_rows_reference(kv, r, h, KvSide::value, n, values.data());
      for (std::size_t d = 0; first < n && d < dim; ++d) {
        float& to = mean(kv.slots[r], h, static_cast<std::int64_t>(d));
        double sum = first > 0 ? double{to} * first : 0;
        for (int t = first; t < n; ++t) sum += double{values[static_cast<std::size_t>(t) * dim + d]};
        to = static_cast<float>(sum / n);
      }
    }
}

void listed_share_reference(const PagedKv& kv, View<const float, 3> scores, const TokenList& list,
                            View<float, 2> share) {
  const std::int64_t group = scores.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (std::int64_t q = 0; q < scores.extent[1]; ++q) {
      const auto h = static_cast<int>(q / group);
      double most = -INFINITY, all = 0, listed = 0;
      const auto score = [&](std::int64_t t) { return std::isnan(scores(r, q, t)) ? -INFINITY : scores(r, q, t); };
      for (int t = 0; t < kv.tokens(r, h); ++t) most = std::fmax(most, double{score(t)});
      for (int t = 0; t < kv.tokens(r, h) && most > -INFINITY; ++t) all += std::exp(double{score(t)} - most);
      for (int i = 0; i < list.count(list.at(r), h) && most > -INFINITY; ++i)
        listed += std::exp(double{score(list.index(list.at(r), h, i))} - most);
      share(r, q) = all > 0 ? static_cast<float>(listed / all) : 1.f;
    }
}

void blend_left_out_reference(const PagedKv& kv, const LeftOut& what, View<float, 3> out) {
  const std::int64_t group = out.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (std::int64_t q = 0; q < out.extent[1]; ++q)
      for (int d = 0; d < kv.head_dim; ++d) {
        const double share = what.share(r, q);
        out(r, q, d) =
            static_cast<float>(share * out(r, q, d) + (1 - share) * double{what.mean(kv.slots[r], q / group, d)});
      }
}

}  // namespace kvlab::ops
