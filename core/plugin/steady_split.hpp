// What a split promises of decode steps (kvlab/steady_budget.hpp), behind its guard.
#pragma once
#include <kvlab/steady_budget.hpp>

namespace kvlab {

class SteadySplit {
 public:
  virtual ~SteadySplit() = default;
  virtual bool steady() const = 0;                               // a SteadyBudget
  virtual bool counted() const = 0;                              // a CountedBudget
  virtual int tokens(const CountedBudget::Counters&) const = 0;  // of a counted one
};

}  // namespace kvlab
