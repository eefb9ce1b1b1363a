// Numbers that no contract allows, told after the call of the executor in which a callback gave them: on a GPU nothing
// waits for them, and where the model's own numbers are not finite, the model is told first.
#pragma once

namespace kvlab {

class Verified {
 public:
  virtual ~Verified() = default;
  // Errc::plugin when one of the callbacks since the last call gave such numbers. Waits for their stream.
  virtual void verify() = 0;
};

// Of a policy or of a role that a policy is made of.
template <class Interface>
void verify(Interface& object) {
  if (auto* known = dynamic_cast<Verified*>(&object)) known->verify();
}

}  // namespace kvlab
