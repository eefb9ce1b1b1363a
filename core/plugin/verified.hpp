// Reports callbacks' numbers that no contract allows, after the executor's call. Numbers on a GPU are ready then, and
// the model's own non-finite numbers have been reported.
#pragma once

#include <kvlab/kv.hpp>
#include <kvlab/policy.hpp>
#include <kvlab/stream.hpp>

namespace kvlab {

namespace ops {
struct Finding;
}

class Verified {
 public:
  virtual ~Verified() = default;
  // Throws Errc::plugin if a callback gave such numbers since the last call. Waits for their stream.
  virtual void verify() = 0;
  // Drops the findings of an executor's call that did not fit into memory.
  virtual void forget() = 0;
  // Memory of the stream's device in which core notes NaN among ranks that no callback of a decode step wrote; null =
  // nobody reads it.
  virtual ops::Finding* finding(Stream) { return nullptr; }
};

// The Verified of a policy or of one of its roles; null = its numbers need no check.
template <class Interface>
Verified* verified(Interface* object) {
  return dynamic_cast<Verified*>(object);
}

}  // namespace kvlab
