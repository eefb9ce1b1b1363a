#include <cmath>

#include "ops/select/whole_pages.hpp"

namespace kvlab::ops {

void spread_pages_reference(const PagedKv& kv, View<const float, 3> pages, Scores out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int t = 0; t < kv.tokens(r, h); ++t) out(r, h, t) = pages(r, h, t / kv.page_size);
}

void page_greatest_reference(const PagedKv& kv, View<const float, 3> in, Scores out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int t = 0; t < kv.tokens(r, h); ++t) {
        out(r, h, t) = -INFINITY;
        for (int u = 0; u < kv.tokens(r, h); ++u)
          if (u / kv.page_size == t / kv.page_size) out(r, h, t) = std::fmax(out(r, h, t), in(r, h, u));
      }
}

void room_for_page_reference(const PagedKv& kv, const std::int32_t* most, View<std::int32_t, 2> keep) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      int pages = 0;  // of the most tokens
      while ((pages + 1) * kv.page_size <= most[r]) ++pages;
      const int n = kv.tokens(r, h), rest = n % kv.page_size;
      if (n > pages * kv.page_size || (n == pages * kv.page_size && rest == 0))
        keep(r, h) = (pages - 1) * kv.page_size;
      else
        keep(r, h) = n;
    }
}

}  // namespace kvlab::ops
