#include "ops/select/spread.hpp"

namespace kvlab::ops {

void spread_heads_reference(const PagedKv& kv, HeadFlags marked, const SpreadRule& rule, HeadFlags waits,
                            HeadFlags due) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int32_t slot = kv.slots[r];
      const bool turn = (rule.counts[slot] + rule.lead + rule.places[h]) % rule.steps == 0;
      if (marked(slot, h) != 0) waits(slot, h) = 1;
      due(slot, h) = turn ? waits(slot, h) : 0;
      if (turn) waits(slot, h) = 0;
    }
}

}  // namespace kvlab::ops
