// Says that attention mass in token state (Needs::mass_into) may come at a decode step's end.
#pragma once

namespace kvlab {

class TakesMassLate {
 public:
  virtual ~TakesMassLate() = default;
  // True: in decode steps core's evictions at the step's end are what looks at that state. It is about speed alone: an
  // op or an edit that comes to the state earlier finds the mass there (base/late_state.hpp). Ask after attach.
  virtual bool takes_mass_late() const = 0;
};

// The same of a policy that may not say so.
template <class Interface>
bool takes_mass_late(const Interface& object) {
  const auto* says = dynamic_cast<const TakesMassLate*>(&object);
  return says && says->takes_mass_late();
}

}  // namespace kvlab
