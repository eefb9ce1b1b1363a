#include <kvlab/ops.hpp>

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/final_list.hpp"

namespace kvlab::ops {
namespace {

int pages_of(int tokens, int page_size) { return (tokens + page_size - 1) / page_size; }

void check_room(const IndexList& list, int wanted, const char* op) {
  if (list.index.extent[2] < wanted)
    fail(Errc::internal, op,
         "got a list with room for " + std::to_string(list.index.extent[2]) + ", wanted " + std::to_string(wanted));
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
  if (out.final) out.final->clear();
  if (s.device() == Device::cuda) return on_cuda<older_pages>(tokens, rows, page_size, newest, out, s);
  for (std::int64_t r = 0; r < tokens.extent[0]; ++r)
    for (std::int64_t h = 0; h < heads; ++h) {
      const int n = rows && !rows[r] ? 0 : std::max(0, pages_of(tokens(r, h), page_size) - newest);
      check_room(out, n, op);
      for (int page = 0; page < n; ++page) out.index(r, h, page) = page;
      out.count(r, h) = n;
    }
}

void aged_pages(const PagedKv& kv, View<const std::int32_t, 2> tokens, int residual, PageList out, Stream s) {
  const char* op = "aged_pages";
  if (residual < 0) fail(Errc::internal, op, "got a negative residual, wanted 0 or more tokens");
  if (tokens && (tokens.extent[0] < kv.rows || tokens.extent[1] < kv.kv_heads))
    fail(Errc::internal, op, "got too few numbers of tokens, wanted [row, kv_head]");
  if (out.count.extent[0] < kv.rows || out.count.extent[1] < kv.kv_heads || out.index.extent[0] < kv.rows ||
      out.index.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got too small a list, wanted [row, kv_head]");
  if (out.final) out.final->clear();
  if (s.device() == Device::cuda) return on_cuda<aged_pages>(kv, tokens, residual, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = tokens ? tokens(r, h) : kv.tokens(r, h),
                first = kv.lower_pages ? kv.lower_pages(kv.slots[r], h) : 0,
                aged = std::max(n - residual, 0) / kv.page_size - first,
                count = std::clamp(aged, 0, static_cast<int>(out.index.extent[2]));
      for (int i = 0; i < count; ++i) out.index(r, h, i) = first + i;
      out.count(r, h) = count;
    }
}

}  // namespace kvlab::ops
