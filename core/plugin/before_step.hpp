// Tells a policy, or a role of it, of a decode step before it begins. A graph that replays the step runs no callback,
// so numbers that follow the text's length must lie on the device by then.
#pragma once
#include <kvlab/step_numbers.hpp>

namespace kvlab {

class BeforeStep {
 public:
  virtual ~BeforeStep() = default;
  // Returns the step's variant. Steps of one variant and as many rows give the stream the same work. So a graph holds
  // one of them.
  virtual int before_step(const StepCounters& c) = 0;
};

// The same of an object that may be none.
template <class Interface>
int tell_before_step(Interface* object, const StepCounters& c) {
  auto* told = dynamic_cast<BeforeStep*>(object);
  return told ? told->before_step(c) : 0;
}

}  // namespace kvlab
