// Work of KV heads that is spread over steps. ops.hpp says what holds for every op.
#pragma once
#include <cstdint>

#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// When a head that waits has its turn: in steps where (counts + lead + place) % steps == 0, by each sequence's own
// count. So it waits at most steps - 1 steps, and heads whose places follow each other act in steps that do.
struct SpreadRule {
  int steps = 1;  // at least 1; with 1 no head waits
  int lead = 0;
  const std::int32_t* places = nullptr;  // [kv_head] HeadOfHead; not negative
  const std::int32_t* counts = nullptr;  // [slot] LayerKv::steps
};

// A head with marked[slot, kv_head] != 0 begins to wait, or waits on. due[slot, kv_head] = 1 for a head that waits and
// has its turn in this step, which ends its waiting; else 0. waits: [slot, kv_head] KeptFlags, which the op keeps up to
// date. Heads of other slots stay as they are. Bytes: the flags.
void spread_heads(const PagedKv& kv, HeadFlags marked, const SpreadRule& rule, HeadFlags waits, HeadFlags due,
                  Stream s);

// No head of the rows waits: for new lists at a prompt's end.
void forget_waiting(const PagedKv& kv, HeadFlags waits, Stream s);

}  // namespace kvlab::ops
