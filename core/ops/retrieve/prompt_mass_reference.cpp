#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/retrieve/prompt_mass.hpp"

namespace kvlab::ops {

void add_prompt_mass_reference(const LayerPrefill& kv, int newest, const KeyBlocks& blocks) {
  const View<const float, 4> q = kv.chunk_queries.f32();
  const std::int64_t count = q.extent[2], dim = q.extent[3], group = q.extent[1] / kv.kv_heads();
  const int tokens = kv.pages.tokens(0, 0);
  std::vector<float> keys(static_cast<std::size_t>(tokens * dim));
  for (std::int64_t head = 0; head < q.extent[1]; ++head) {
    gather_rows_reference(kv.pages, 0, static_cast<int>(head / group), KvSide::key, tokens, keys.data());
    std::vector<double> sum(static_cast<std::size_t>(tokens));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto sees = static_cast<std::size_t>(tokens - count + i + 1);
      std::vector<double> share(sees);
      double all = 0;
      for (std::size_t t = 0; t < sees; ++t) {
        double x = 0;
        for (std::int64_t d = 0; d < dim; ++d)
          x += double{q(0, head, i, d)} * double{keys[t * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)]};
        share[t] = x / std::sqrt(static_cast<double>(dim));
      }
      double most = share[0];
      for (const double x : share) most = std::max(most, x);
      for (double& x : share) all += x = std::exp(x - most);
      for (std::size_t t = sees > static_cast<std::size_t>(newest) ? sees - static_cast<std::size_t>(newest) : 0;
           t < sees; ++t)
        sum[t] += share[t] / all;
    }
    for (int t = 0; t < tokens; ++t)
      blocks.mass(kv.slots[0], head, t) += static_cast<float>(sum[static_cast<std::size_t>(t)]);
  }
}

}  // namespace kvlab::ops
