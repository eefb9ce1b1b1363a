// Asks a policy of core's own whether it offloads pages without Needs::host_pages. The store then takes the host tier
// at the start.
#pragma once
#include <kvlab/policy.hpp>

namespace kvlab {

class Offloads {
 public:
  virtual ~Offloads() = default;
  virtual bool offloads() const = 0;
};

inline bool offloads(const Policy& policy) {
  const auto* asked = dynamic_cast<const Offloads*>(&policy);
  return asked && asked->offloads();
}

}  // namespace kvlab
