#include <algorithm>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::ops {
namespace {

template <class Listed>
void write(const PageList& list, int row, int head, int pages, const Listed& listed) {
  list.count(row, head) = 0;
  for (int page = 0; page < pages; ++page)
    if (listed(page)) list.index(row, head, list.count(row, head)++) = page;
}

}  // namespace

void lengths_reference(const PagedKv& kv, View<std::int32_t, 2> out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) out(r, h) = kv.tokens(r, h);
}

void older_pages_reference(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest,
                           PageList out) {
  for (int r = 0; r < tokens.extent[0]; ++r)
    for (int h = 0; h < tokens.extent[1]; ++h) {
      const int pages = (tokens(r, h) + page_size - 1) / page_size;
      write(out, r, h, pages, [&](int page) { return (!rows || rows[r]) && pages - page > newest; });
    }
}

void aged_pages_reference(const PagedKv& kv, View<const std::int32_t, 2> tokens, int residual, PageList out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int lower = kv.lower_pages ? kv.lower_pages(kv.slots[r], h) : 0,
                n = tokens ? tokens(r, h) : kv.tokens(r, h);
      write(out, r, h, kv.pages(r, h), [&](int page) {
        const bool old = (page + 1) * kv.page_size + residual <= n;
        return old && page >= lower && page - lower < out.index.extent[2];
      });
    }
}

void round_allotment_reference(View<const std::int32_t, 2> length, const std::uint8_t* keep_all, int page_size,
                               View<std::int32_t, 2> keep) {
  for (int r = 0; r < keep.extent[0]; ++r)
    for (int h = 0; h < keep.extent[1]; ++h) {
      if (keep_all[r]) keep(r, h) = length(r, h);
      while (keep(r, h) < length(r, h) && keep(r, h) % page_size) --keep(r, h);
    }
}

void share_of_keep_reference(View<const std::int32_t, 2> keep, int pinned, double share, View<std::int32_t, 2> out) {
  for (int r = 0; r < out.extent[0]; ++r)
    for (int h = 0; h < out.extent[1]; ++h) {
      int n = 0;
      while (n + 1 <= share * (keep(r, h) - pinned)) ++n;
      out(r, h) = n;
    }
}

}  // namespace kvlab::ops
