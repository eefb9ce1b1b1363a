#include <algorithm>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::ops {
namespace {

bool present(const PagedKv& kv, int row, int head, int page) { return kv.entry(row, head, page).frame != null_frame; }

template <class Listed>
void write(const PageList& list, int row, int head, int pages, const Listed& listed) {
  list.count(row, head) = 0;
  for (int page = 0; page < pages; ++page)
    if (listed(page)) list.index(row, head, list.count(row, head)++) = page;
}

// Returns whether a token of this page is pinned by its place.
bool pinned(const PlacementArgs& a, int page, int tokens) {
  for (int t = page * a.device.page_size; t < std::min(tokens, (page + 1) * a.device.page_size); ++t)
    if (t < a.pins.first || t >= tokens - a.pins.last) return true;
  return false;
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

void place_pages_reference(const PlacementArgs& a) {
  for (int r = 0; r < a.device.rows; ++r)
    for (int h = 0; h < a.device.kv_heads; ++h) {
      const int pages = a.device.pages(r, h), tokens = a.device.tokens(r, h);
      std::vector<bool> read, stays;
      for (int page = 0; page < pages; ++page) {
        bool listed = !a.attended;
        for (int i = 0; a.attended && i < a.attended->count(r, h); ++i) listed |= a.attended->index(r, h, i) == page;
        read.push_back(listed || pinned(a, page, tokens));
      }
      write(a.recall, r, h, pages, [&](int page) { return read[page] && !present(a.device, r, h, page); });
      stays = read;
      if (pages > 0) stays[pages - 1] = true;
      for (int page = pages - 1; page >= 0; --page)
        if (std::count(stays.begin(), stays.end(), true) < a.resident_tokens / a.device.page_size &&
            present(a.device, r, h, page))
          stays[page] = true;
      const auto leaves = [&](int page) { return !stays[page] && present(a.device, r, h, page); };
      write(a.drop, r, h, pages, leaves);
      write(a.offload, r, h, pages, [&](int page) { return leaves(page) && !present(a.host, r, h, page); });
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

}  // namespace kvlab::ops
