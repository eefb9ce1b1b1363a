// Budgets that divide in decode steps without the host. A GPU replays steps that evict by them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvlab/ops.hpp"
#include "kvlab/roles.hpp"

namespace kvlab {

// allot() keeps the promise of Needs::capturable: it uploads nothing and reads no number of the host. Ops take
// Allotment::total and Allotment::pins, which are memory of the device. Scores of rows whose heads have length 0 are
// uninitialised: nothing leaves them.
class SteadyBudget : public Budget {};

// The numbers follow counters of the host alone, and all KV heads of a layer get the same. Core asks for them before a
// decode step, so a graph may hold the step.
class CountedBudget : public Budget {
 public:
  struct Counters {
    int layer = 0, layers = 0;  // as in Allotment
    int position = 0;           // text tokens seen so far
    int total = 0;              // mean tokens per KV head and layer, pins included
    int pinned = 0;             // of each head
  };
  // Returns the tokens that each KV head of the layer keeps, pins included. A head that holds fewer keeps them all.
  virtual int tokens(const Counters&) const = 0;

  bool uniform_heads() const override { return true; }
  void allot(const Allotment& a, Stream s) override {
    std::vector<std::int32_t> of_rows;
    for (std::int64_t row = 0; row < a.length.extent[0]; ++row)
      of_rows.push_back(tokens({.layer = a.layer,
                                .layers = a.layers,
                                .position = a.kv->position[row],
                                .total = a.host_total[row],
                                .pinned = a.host_pins[row].first + a.host_pins[row].last}));
    ops::allot_tokens(a, a.kv->upload("layer tokens", of_rows.data()), s);
  }
};

}  // namespace kvlab
