#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/centres.hpp"

namespace kvlab::ops {

void tokens_beyond_reference(const PagedKv& kv, View<const float, 3> scores, double share, TokenList list) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      double least = INFINITY, greatest = -INFINITY;
      for (int t = 0; t < kv.tokens(r, h); ++t) {
        least = std::fmin(least, double{scores(r, h, t)});
        greatest = std::fmax(greatest, double{scores(r, h, t)});
      }
      list.count(list.at(r), h) = 0;
      for (int t = 0; t < kv.tokens(r, h); ++t)
        if (scores(r, h, t) > least + (greatest - least) * (1 - share))
          list.index(list.at(r), h, list.count(list.at(r), h)++) = t;
    }
}

void farthest_first_reference(const KvRows& rows, int count, Scores nearest, Scores out) {
  const PagedKv& kv = *rows.kv;
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h);
      std::vector<float> all(static_cast<std::size_t>(n) * dim);
      gather_rows_reference(kv, r, h, rows.side, n, all.data());
      std::vector<int> others;
      for (int t = 0; t < n; ++t) {
        out(r, h, t) = 0;
        if (nearest(r, h, t) != -INFINITY) others.push_back(t);
      }
      for (int i = 0; i < count && !others.empty(); ++i) {
        auto farthest = others.begin();
        for (auto t = others.begin(); t != others.end(); ++t)
          if (nearest(r, h, *t) > nearest(r, h, *farthest)) farthest = t;
        const int centre = *farthest;
        others.erase(farthest);
        out(r, h, centre) = static_cast<float>(count - i);
        nearest(r, h, centre) = -INFINITY;
        for (const int t : others) {
          double sum = 0;
          for (std::size_t d = 0; d < dim; ++d)
            sum += std::pow(double{all[static_cast<std::size_t>(t) * dim + d]} -
                                double{all[static_cast<std::size_t>(centre) * dim + d]},
                            2);
          nearest(r, h, t) = i == 0 ? static_cast<float>(sum) : std::fmin(nearest(r, h, t), static_cast<float>(sum));
        }
      }
    }
}

}  // namespace kvlab::ops
