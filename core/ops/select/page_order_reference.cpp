#include <cmath>

#include "ops/select/page_order.hpp"

namespace kvlab::ops {

void keep_page_scores_reference(const PagedKv& kv, View<const float, 3> scores, const Pins& left_out,
                                const Heads& heads, View<float, 3> order) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int page = 0; page < order.extent[2] && heads.on(kv.slots[r], h); ++page) {
        const int n = kv.tokens(r, h);
        bool candidate = page * kv.page_size < n;
        for (int t = page * kv.page_size; t < (page + 1) * kv.page_size && t < n; ++t)
          candidate = candidate && t >= left_out.first && t < n - left_out.last;
        order(kv.slots[r], h, page) =
            candidate ? scores(r, h, page) : static_cast<float>(std::ldexp(1 + std::ldexp(page, -23), 127));
      }
}

}  // namespace kvlab::ops
