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

// Errc::plugin for needs that no pruner has. Errc::config for a first method whose needs say that it changes or moves
// keys, and for edits that do so, when they come.
std::unique_ptr<Policy> pruned(std::shared_ptr<Policy> first, Instance<Pruner> pruner, Pruning how);

}  // namespace kvlab
