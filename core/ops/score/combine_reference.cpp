#include <cmath>
#include <limits>

#include "ops/score/reference.hpp"

namespace kvlab::ops {

void combine_reference(Scores out, View<const float, 3> in, Combine rule, float factor) {
  const std::int64_t group = out.extent[1] / in.extent[1];
  for (std::int64_t r = 0; r < out.extent[0]; ++r)
    for (std::int64_t h = 0; h < out.extent[1]; ++h)
      for (std::int64_t t = 0; t < out.extent[2]; ++t) {
        const double x = out(r, h, t), y = in(r, h / group, t);
        out(r, h, t) = static_cast<float>(rule == Combine::copy       ? y
                                          : rule == Combine::add      ? x + double{factor} * y
                                          : rule == Combine::multiply ? x * y
                                          : y == 0                    ? 0
                                                                      : x / y);
      }
}

void softmax_reference(const PagedKv& kv, Scores scores, float temperature) {
  const int heads = static_cast<int>(scores.extent[1]);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const int n = kv.tokens(r, h / (heads / kv.kv_heads));
      double most = -std::numeric_limits<double>::infinity(), sum = 0;
      const auto power = [&](int t) {
        return most > -std::numeric_limits<double>::infinity() ? std::exp((scores(r, h, t) - most) / temperature) : 0;
      };
      for (int t = 0; t < n; ++t) most = std::max(most, double{scores(r, h, t)});
      for (int t = 0; t < n; ++t) sum += power(t);
      for (int t = 0; t < n; ++t) scores(r, h, t) = sum > 0 ? static_cast<float>(power(t) / sum) : 0;
    }
}

}  // namespace kvlab::ops
