#include "ops/select/placement.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

int pages_of(int tokens, int page_size) { return (tokens + page_size - 1) / page_size; }

void check_room(const IndexList& list, int wanted, const char* op) {
  if (list.index.extent[2] < wanted)
    fail(Errc::internal, op,
         "got a list with room for " + std::to_string(list.index.extent[2]) + ", wanted " + std::to_string(wanted));
}

bool present(const PagedKv& kv, int row, int head, int page) { return kv.entry(row, head, page).frame != null_frame; }

// Marks the pages that attention reads, and returns their number.
int mark_attended(const PlacementArgs& a, int row, int head, std::vector<char>& stays) {
  const int n = a.device.tokens(row, head), pages = a.device.pages(row, head), p = a.device.page_size;
  stays.assign(static_cast<std::size_t>(pages), a.attended ? 0 : 1);
  if (!a.attended) return pages;
  for (int i = 0; i < a.attended->count(row, head); ++i) {
    const int page = a.attended->index(row, head, i);
    if (page < 0 || page >= pages)
      fail(Errc::plugin, "place_pages",
           "got page " + std::to_string(page) + " to attend to, wanted 0 to " + std::to_string(pages - 1));
    stays[static_cast<std::size_t>(page)] = 1;
  }
  for (int page = 0; page < pages && page * p < a.pins.first; ++page) stays[static_cast<std::size_t>(page)] = 1;
  for (int page = pages - 1; page >= 0 && a.pins.last > 0 && (page + 1) * p > n - a.pins.last; --page)
    stays[static_cast<std::size_t>(page)] = 1;
  return static_cast<int>(std::count(stays.begin(), stays.end(), 1));
}

void place_head(const PlacementArgs& a, int row, int head, std::vector<char>& stays) {
  const int pages = a.device.pages(row, head);
  int count = mark_attended(a, row, head, stays), recalled = 0, offloaded = 0, dropped = 0;
  for (int page = 0; page < pages; ++page)
    if (stays[static_cast<std::size_t>(page)] && !present(a.device, row, head, page))
      a.recall.index(row, head, recalled++) = page;
  const auto stay = [&](int page) {
    char& s = stays[static_cast<std::size_t>(page)];
    count += !s;
    s = 1;
  };
  if (pages > 0) stay(pages - 1);
  const int room = std::max(count, a.resident_tokens / a.device.page_size);
  for (int page = pages - 1; page >= 0 && count < room; --page)
    if (present(a.device, row, head, page)) stay(page);
  for (int page = 0; page < pages; ++page) {
    if (stays[static_cast<std::size_t>(page)] || !present(a.device, row, head, page)) continue;
    a.drop.index(row, head, dropped++) = page;
    if (!present(a.host, row, head, page)) a.offload.index(row, head, offloaded++) = page;
  }
  a.recall.count(row, head) = recalled;
  a.offload.count(row, head) = offloaded;
  a.drop.count(row, head) = dropped;
}

}  // namespace

void lengths(const PagedKv& kv, View<std::int32_t, 2> out, Stream s) {
  check_kv(kv, "lengths", s);
  if (out.extent[0] < kv.rows || out.extent[1] < kv.kv_heads)
    fail(Errc::internal, "lengths", "got too small an output, wanted [row, kv_head]");
  if (s.device() == Device::cuda) return on_cuda<lengths>(kv, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) out(r, h) = kv.tokens(r, h);
}

void older_pages(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest, PageList out,
                 Stream s) {
  const char* op = "older_pages";
  const auto heads = tokens.extent[1];
  if (page_size < 1 || newest < 0)
    fail(Errc::internal, op, "got no page size or a negative number of pages, wanted at least 1 and 0");
  if (out.count.extent[0] < tokens.extent[0] || out.count.extent[1] < heads || out.index.extent[0] < tokens.extent[0] ||
      out.index.extent[1] < heads)
    fail(Errc::internal, op, "got too small a list, wanted [row, kv_head]");
  if (s.device() == Device::cuda) return on_cuda<older_pages>(tokens, rows, page_size, newest, out, s);
  for (std::int64_t r = 0; r < tokens.extent[0]; ++r)
    for (std::int64_t h = 0; h < heads; ++h) {
      const int n = rows && !rows[r] ? 0 : std::max(0, pages_of(tokens(r, h), page_size) - newest);
      check_room(out, n, op);
      for (int page = 0; page < n; ++page) out.index(r, h, page) = page;
      out.count(r, h) = n;
    }
}

void place_pages(const PlacementArgs& a, Stream s) {
  const char* op = "place_pages";
  check_kv(a.device, op, s);
  check_kv(a.host, op, s);
  if (a.host.rows != a.device.rows || a.host.kv_heads != a.device.kv_heads || a.host.page_size != a.device.page_size)
    fail(Errc::internal, op, "got tiers of different shapes, wanted two views of one cache");
  for (const PageList* list : {&a.recall, &a.offload, &a.drop}) check_list(a.device, *list, op);
  if (a.attended) check_list(a.device, *a.attended, op);
  if (s.device() == Device::cuda) return on_cuda<place_pages>(a, s);
  for (const PageList* list : {&a.recall, &a.offload, &a.drop})
    check_room(*list, pages_of(longest(a.device), a.device.page_size), op);
  thread_local std::vector<char> stays;
  for (int r = 0; r < a.device.rows; ++r)
    for (int h = 0; h < a.device.kv_heads; ++h) place_head(a, r, h, stays);
}

}  // namespace kvlab::ops
