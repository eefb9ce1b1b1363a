// Makes a policy from an experiment's entry: creates its plugins with their parameters and composes them.
#pragma once
#include <kvlab/policy.hpp>

#include <memory>
#include <optional>

#include "compose/injection.hpp"
#include "experiment/policy_spec.hpp"

namespace kvlab {

// Throws as the plugins' constructors, compose() and load_profile do. Errc::config if the entry names a profile that no
// plugin of it needs, or none although one does; an ablation may need none. profile: null = not loaded. injection:
// replaces what the selector or the policy chooses.
std::shared_ptr<Policy> build_policy(const PolicySpec& spec, const PluginCatalog& catalog,
                                     const Profile* profile = nullptr, std::optional<Injection> injection = {});

// Whether the policy keeps or reads as much as a budget says: neither the full cache nor one that decides by itself.
bool takes_budget(const PolicySpec& spec, const PluginCatalog& catalog);

}  // namespace kvlab
