// A policy as an experiment names it becomes an object: its plugins created with their parameters and composed.
#pragma once
#include <kvlab/policy.hpp>

#include <memory>
#include <optional>

#include "compose/injection.hpp"
#include "experiment/policy_spec.hpp"

namespace kvlab {

// Throws as the plugins' constructors and compose() do. injection: of a selector's lists.
std::shared_ptr<Policy> build_policy(const PolicySpec& spec, const PluginCatalog& catalog,
                                     std::optional<Injection> injection = {});

}  // namespace kvlab
