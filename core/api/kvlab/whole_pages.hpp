// Pages that stay or leave as a whole, for methods that rate pages and evict them (RaaS). ops.hpp says what holds for
// every op. A page keeps its tokens where a head only ever loses whole pages, and only while all its pages are full.
#pragma once
#include <cstdint>

#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// out[row, kv_head, token] = pages[row, kv_head, page] of the token's page. Bytes: out.
void spread_pages(const PagedKv& kv, View<const float, 3> pages, Scores out, Stream s);

// out[row, kv_head, token] = the greatest of `in` over the tokens of the token's page. NaN counts as -inf. `out` is not
// `in`. Bytes: in, and out.
void page_greatest(const PagedKv& kv, View<const float, 3> in, Scores out, Stream s);

// keep[row, kv_head] = the tokens that a head keeps so that a page fits beside them: most(row) in whole pages, less
// one page. A head of fewer tokens keeps them all. So does one of at most most(row) tokens in whole pages whose newest
// page is not full yet. most: [row] memory of the stream's device, at least two pages. Bytes: lengths and keep.
void room_for_page(const PagedKv& kv, const std::int32_t* most, View<std::int32_t, 2> keep, Stream s);

}  // namespace kvlab::ops
