// What a policy says of pruners (kvlab/stages.hpp). A class states it as a base beside Policy.
#pragma once

namespace kvlab {

// The policy evicts or moves tokens, or attention computes more than its lists say. Core then refuses a pruner beside
// it before the run. Of a policy that does not say so core refuses the edits, when they come.
class TakesNoPruner {
 public:
  virtual ~TakesNoPruner() = default;
  // Why, as it stands behind "a method that": "evicts tokens". null = with these parameters it takes one.
  virtual const char* takes_no_pruner() const = 0;
};

}  // namespace kvlab
