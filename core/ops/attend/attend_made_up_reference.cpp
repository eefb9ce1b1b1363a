#include <cmath>
#include <vector>

#include "ops/attend/attend_made_up.hpp"

namespace kvlab::ops {

// The first attention counts as one token of the weight e^lse, whose value is its output.
void attend_made_up_reference(const AttendArgs& a, const MadeUpTokens& tokens) {
  const std::int64_t group = a.queries.extent[1] / a.kv.kv_heads;
  const double scale = a.softmax_scale > 0 ? a.softmax_scale : 1 / std::sqrt(static_cast<double>(a.kv.head_dim));
  for (int row = 0; row < a.kv.rows; ++row)
    for (std::int64_t q = 0; q < a.queries.extent[1]; ++q) {
      const std::int64_t slot = a.kv.slots[row], head = q / group;
      double highest = a.lse(row, q);
      std::vector<double> logits;
      for (std::int64_t i = 0; i < tokens.weights.extent[2]; ++i) {
        double logit = 0;
        for (int d = 0; d < a.kv.head_dim; ++d)
          logit += scale * a.queries(row, q, d) * double{tokens.keys(slot, head, i, d)};
        const double weight = tokens.weights(slot, head, i);
        logits.push_back(weight > 0 ? logit + std::log(weight) : -INFINITY);
        highest = std::fmax(highest, logits.back());
      }
      if (highest == -INFINITY) continue;
      double total = std::exp(a.lse(row, q) - highest);
      std::vector<double> out(static_cast<std::size_t>(a.kv.head_dim));
      for (std::size_t d = 0; d < out.size(); ++d) out[d] = total * a.out(row, q, d);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        const double share = std::exp(logits[i] - highest);
        total += share;
        for (std::size_t d = 0; d < out.size() && share > 0; ++d) out[d] += share * tokens.values(slot, head, i, d);
      }
      for (std::size_t d = 0; d < out.size(); ++d) a.out(row, q, d) = static_cast<float>(out[d] / total);
      a.lse(row, q) = static_cast<float>(highest + std::log(total));
    }
}

}  // namespace kvlab::ops
