// Ops that finish the work of the allot_* ops.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stages.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

// Runs after an allot_*. keep(row, head) becomes length where keep_all[row] is not 0. Elsewhere a keep below length is
// rounded down to a multiple of page_size. length, keep [row, kv_head], keep_all [row].
void round_allotment(View<const std::int32_t, 2> length, const std::uint8_t* keep_all, int page_size,
                     View<std::int32_t, 2> keep, Stream s);

// out(row, head) = of_slots(slots[row], head), as many rows and heads as `out` has.
void numbers_of_rows(View<const std::int32_t, 2> of_slots, const std::int32_t* slots, View<std::int32_t, 2> out,
                     Stream s);

// out(slot, head) = the tokens of the cache's head, or 0 where leave_out[row] is not 0, for the slots of kv's rows. As
// PagedKv::length it makes ops skip the other rows: a mask for every op that a callback calls.
void lengths_of_rows(const PagedKv& kv, const std::uint8_t* leave_out, View<std::int32_t, 2> out, Stream s);

void share_of_keep_reference(View<const std::int32_t, 2> keep, int pinned, double share, View<std::int32_t, 2> out);

}  // namespace kvlab::ops
