// Decode steps come in variants where whole steps have work that others have not, as an eviction every n steps. An
// executor that replays steps has graphs of each variant.
#pragma once

namespace kvlab {

class StepVariants {
 public:
  virtual ~StepVariants() = default;
  // Before a decode step: the number of its variant (BeforeStep::before_step).
  virtual void variant_of_step(int number) = 0;
};

}  // namespace kvlab
