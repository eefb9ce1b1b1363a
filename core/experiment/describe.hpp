// The output of `kvlab list` and `kvlab describe`, from the plugins' own declarations.
#pragma once
#include <string>

#include "plugin/registry.hpp"

namespace kvlab {

// A table of name, role, version, library and help, then the libraries that could not be used and why. kind: "" = all,
// or policies (Policy, Scorer and Selector plugins), scorers, selectors, budgets, codecs, profilers, tasks; another
// word is Errc::config.
std::string list_text(Registry& registry, const std::string& kind);

// Parameters with type, default, range and help, components, the keys that every policy takes, an example to copy.
// Errc::plugin when nothing has that name. `full` is described, too.
std::string describe_text(Registry& registry, const std::string& name);

}  // namespace kvlab
