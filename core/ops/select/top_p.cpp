// The fewest tokens whose weights make up a share, of all query heads of a group together.
#include <kvlab/ops.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/select/select.hpp"
#include "ops/select/top_p.hpp"

namespace kvlab::ops {

void top_p_tokens(const PagedKv& kv, View<const float, 3> weights, float p, Pins pins, TokenList list, Stream s) {
  const char* op = "top_p_tokens";
  check_kv(kv, op, s);
  check_scores(kv, weights, "weights", op, s);
  check_list(kv, list, op);
  if (!(p > 0 && p <= 1))
    fail(Errc::internal, op, "got a share of " + std::to_string(p) + ", wanted more than 0 and at most 1");
  if (s.device() == Device::cuda) return on_cuda<top_p_tokens>(kv, weights, p, pins, list, s);
  const int group = static_cast<int>(weights.extent[1]) / kv.kv_heads;
  int wanted = 0;  // entries of the longest list that has no room; a thread must not throw
#pragma omp parallel for collapse(2) schedule(dynamic) \
    reduction(max                                      \
              : wanted) if (worth_threads(std::int64_t{longest(kv)} * kv.rows * weights.extent[1]))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      thread_local std::vector<char> taken;
      const int n = kv.tokens(r, h);
      taken.assign(static_cast<std::size_t>(n), 0);
      mark_pins(kv, r, h, pins, taken.data());
      for (int q = h * group; n > 0 && q < (h + 1) * group; ++q)
        take_top_p(&weights(r, q, 0), n, double{p}, taken.data());
      const auto count = static_cast<int>(std::count(taken.begin(), taken.end(), 1));
      if (count > list.index.extent[2]) {
        wanted = std::max(wanted, count);
        continue;
      }
      list.count(list.at(r), h) = count;
      for (int t = 0, i = 0; t < n; ++t)
        if (taken[static_cast<std::size_t>(t)]) list.index(list.at(r), h, i++) = t;
    }
  if (wanted > 0)
    fail(Errc::internal, op,
         "got a list with room for " + std::to_string(list.index.extent[2]) + ", wanted " + std::to_string(wanted));
}

}  // namespace kvlab::ops
