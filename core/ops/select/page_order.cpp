#include "ops/select/page_order.hpp"

#include <bit>

#include "base/device_op.hpp"
#include "base/put_off.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"
#include "ops/select/candidates.hpp"

namespace kvlab::ops {

void keep_page_scores(const PagedKv& kv, View<const float, 3> scores, const Pins& left_out, const Heads& heads,
                      View<float, 3> order, Stream s) {
  const char* op = "keep_page_scores";
  check_kv(kv, op, s);
  if (scores.extent[0] < kv.rows || scores.extent[1] != kv.kv_heads)
    fail(Errc::internal, op,
         "got scores " + extents(scores) + ", wanted [row, " + std::to_string(kv.kv_heads) + " KV heads, page]");
  if (order.extent[1] != kv.kv_heads || order.extent[2] < kv.table.extent[2])
    fail(Errc::internal, op,
         "got an order " + extents(order) + ", wanted [slot, " + std::to_string(kv.kv_heads) + " KV heads, " +
             std::to_string(kv.table.extent[2]) + " pages]");
  run_put_off();  // it may write the scores
  if (s.device() == Device::cuda) return on_cuda<keep_page_scores>(kv, scores, left_out, heads, order, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r];
      if (!heads.on(slot, h)) continue;
      const Candidates pages = candidates(kv.tokens(r, h), kv.page_size, left_out);
      if (pages.count() > 0 && pages.last > scores.extent[2])
        fail(Errc::internal, op,
             "got scores " + extents(scores) + ", wanted those of " + std::to_string(pages.last) + " pages");
      for (int page = 0; page < order.extent[2]; ++page)
        order(slot, h, page) =
            page >= pages.first && page < pages.last ? scores(r, h, page) : std::bit_cast<float>(0x7f000000 + page);
    }
}

}  // namespace kvlab::ops
