// What a policy, maybe behind its guard, says by kvlab/takes_no_pruner.hpp; null = nothing.
#pragma once
#include <kvlab/policy.hpp>
#include <kvlab/takes_no_pruner.hpp>

namespace kvlab {

inline const char* says_no_pruner(const Policy& policy) {
  const auto* one = dynamic_cast<const TakesNoPruner*>(&policy);
  return one ? one->takes_no_pruner() : nullptr;
}

}  // namespace kvlab
