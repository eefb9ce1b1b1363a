// Calls of spread_heads on CUDA that wait for those of other layers, and what the CPU and the GPU share of it.
#pragma once
#include <kvlab/spread.hpp>

#include <vector>

namespace kvlab::ops {

struct SpreadHeads {
  PagedKv kv;
  HeadFlags marked;
  SpreadRule rule;
  HeadFlags waits, due;
  Stream stream = Stream::cpu();

  const void* output() const { return due.data; }
  static void run(const std::vector<SpreadHeads>& calls);
};
// CUDA only. Calls of as many rows and heads in one stream share launches.
void spread_in_layers(const std::vector<SpreadHeads>& calls);

constexpr void spread_head(const SpreadRule& rule, bool marked, int count, int place, std::uint8_t& waits,
                           std::uint8_t& due) {
  const bool waiting = waits != 0 || marked, acts = waiting && (count + rule.lead + place) % rule.steps == 0;
  waits = waiting && !acts, due = acts;
}

// In plain loops.
void spread_heads_reference(const PagedKv& kv, HeadFlags marked, const SpreadRule& rule, HeadFlags waits,
                            HeadFlags due);

}  // namespace kvlab::ops
