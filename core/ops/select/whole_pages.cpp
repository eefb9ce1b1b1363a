#include "ops/select/whole_pages.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

template <class F>
void for_heads(const PagedKv& kv, const F& f) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) f(r, h, kv.tokens(r, h));
}

}  // namespace

void spread_pages(const PagedKv& kv, View<const float, 3> pages, Scores out, Stream s) {
  const char* op = "spread_pages";
  check_kv(kv, op, s);
  check_kv_scores(kv, out, "out", op, s);
  if (pages.extent[0] < kv.rows || pages.extent[1] != kv.kv_heads || pages.stride[2] != 1)
    fail(Errc::internal, op, "got pages of another shape, wanted [row, kv_head, page]");
  if (s.device() == Device::cuda) return on_cuda<spread_pages>(kv, pages, out, s);
  if (pages.extent[2] * kv.page_size < longest(kv))
    fail(Errc::internal, op, "got " + std::to_string(pages.extent[2]) + " pages, wanted those of every head");
  for_heads(kv, [&](int r, int h, int n) {
    for (int t = 0; t < n; ++t) out(r, h, t) = pages(r, h, t / kv.page_size);
  });
}

void page_greatest(const PagedKv& kv, View<const float, 3> in, Scores out, Stream s) {
  const char* op = "page_greatest";
  check_kv(kv, op, s);
  check_kv_scores(kv, in, "in", op, s);
  check_kv_scores(kv, out, "out", op, s);
  if (s.device() == Device::cuda) return on_cuda<page_greatest>(kv, in, out, s);
  for_heads(kv, [&](int r, int h, int n) {
    for (int first = 0; first < n; first += kv.page_size) {
      const int end = std::min(n, first + kv.page_size);
      float most = -std::numeric_limits<float>::infinity();
      for (int t = first; t < end; ++t) most = in(r, h, t) > most ? in(r, h, t) : most;
      std::fill(&out(r, h, first), &out(r, h, first) + (end - first), most);
    }
  });
}

void room_for_page(const PagedKv& kv, const std::int32_t* most, View<std::int32_t, 2> keep, Stream s) {
  const char* op = "room_for_page";
  check_kv(kv, op, s);
  if (!most || keep.extent[0] < kv.rows || keep.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got no numbers or too small an output, wanted [row] and [row, kv_head]");
  if (s.device() == Device::cuda) return on_cuda<room_for_page>(kv, most, keep, s);
  for_heads(kv, [&](int r, int h, int n) {
    if (most[r] < 2 * kv.page_size)
      fail(Errc::internal, op, "got " + std::to_string(most[r]) + " tokens, wanted at least two pages");
    keep(r, h) = kept_beside_page(n, most[r], kv.page_size);
  });
}

}  // namespace kvlab::ops
