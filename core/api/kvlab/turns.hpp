// Periodic work of sequences that begin together, spread over the steps of a period. Without it all rows of a batch do
// it in the same step.
#pragma once
#include <cstdint>

#include "kvlab/ops.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

namespace ops {

// turns[slot] = steps[slot] + lead[slot], for the slots of kv's rows; 0 where steps[slot] is 0 and `begins`. All have
// one number per slot, in memory of the stream's device. A lead is a whole number.
void take_turns(const PagedKv& kv, const std::int32_t* steps, const float* lead, bool begins, std::int32_t* turns,
                Stream s);

}  // namespace ops

// Counts steps from a place in the period that the sequence's number decides: number % period. So it is the same in any
// batch and in any slot, and sequences with consecutive numbers take turns. Core saves it with the sequence.
class Turns {
 public:
  Turns() = default;
  // Takes memory in attach.
  Turns(const char* tag, const Shape& s, int period, Workspace& w)
      : period_(period),
        lead_(static_cast<float*>(w.state(tag, sizeof(float), s.max_slots))),
        turns_(static_cast<std::int32_t*>(w.room(tag, sizeof(std::int32_t) * static_cast<std::size_t>(s.max_slots)))) {}

  // In one layer of each prompt, at its end.
  void begin(const LayerPrefill& kv, Stream s) const {
    const float lead = static_cast<float>(kv.sequence[0] % static_cast<std::uint32_t>(period_));
    ops::copy(View<float, 3>::dense(lead_ + kv.slots[0], {1, 1, 1}),
              View<const float, 3>::dense(kv.upload("lead", &lead), {1, 1, 1}), s);
  }

  // In select() of a step's first layer: what steps() gives in all callbacks of the step. begins: the first step counts
  // as 0 for every sequence. Needs::steps is needed.
  void take(const LayerStep& step, bool begins, Stream s) const {
    ops::take_turns(step.pages, step.steps, lead_, begins, turns_, s);
  }

  // [slot] for Heads::every, in place of LayerKv::steps.
  const std::int32_t* steps() const { return turns_; }

 private:
  int period_ = 1;
  float* lead_ = nullptr;
  std::int32_t* turns_ = nullptr;
};

}  // namespace kvlab
