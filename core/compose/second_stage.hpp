// What a first method and a second stage (kvlab/stages.hpp) need together.
#pragma once
#include <kvlab/abi.hpp>
#include <kvlab/policy.hpp>

#include <string>

namespace kvlab {

// `role`: of the second stage, for messages. Errc::plugin for a need that such a stage cannot have. Errc::config for
// two that both ask for the output projection, and for two that have no device or element type in common.
Needs with_second_stage(Needs first, const Needs& second, Role role, const std::string& entry);

}  // namespace kvlab
