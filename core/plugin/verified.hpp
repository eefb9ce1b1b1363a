// Numbers that no contract allows are told after the call of the executor in which a callback gave them. A GPU then has
// them, and what of the model is not finite was told before.
#pragma once

namespace kvlab {

class Verified {
 public:
  virtual ~Verified() = default;
  // Errc::plugin when a callback gave such numbers since the last call. Waits for their stream.
  virtual void verify() = 0;
  // Drops what was found: the call came to nothing.
  virtual void forget() = 0;
};

// Of a policy or of a role that a policy is made of; null = its numbers need no look.
template <class Interface>
Verified* verified(Interface* object) {
  return dynamic_cast<Verified*>(object);
}

}  // namespace kvlab
