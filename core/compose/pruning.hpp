// A policy whose steps read a part of what another one lets them read.
#pragma once
#include <kvlab/policy.hpp>
#include <kvlab/stages.hpp>

#include <memory>
#include <string>

#include "plugin/loader.hpp"

namespace kvlab {

struct Pruning {
  bool whole = false;    // a step without a list has all tokens as candidates: the first method is the full cache
  bool encodes = false;  // edits that encode pages keep tokens at their places: core's own do
  std::string name;      // for messages
};

// Why no pruner goes with a policy, as it stands behind "a method that"; null = one goes, as far as the policy says.
// encodes: as in Pruning.
const char* takes_no_pruner(const Policy& policy, bool encodes = false);

// Errc::plugin for needs that no pruner has. Errc::config for a first method that says that it takes no pruner, and for
// edits that no pruner goes with, when they come.
std::unique_ptr<Policy> pruned(std::shared_ptr<Policy> first, Instance<Pruner> pruner, Pruning how);

}  // namespace kvlab
