// The output of `kvlab list`, `kvlab describe` and `kvlab inspect`, from the plugins' own declarations.
#pragma once
#include <filesystem>
#include <string>

#include "plugin/registry.hpp"

namespace kvlab {

// A table of name, role, version, library and help, then the libraries that could not be used and why. kind: "" = all,
// or policies (Policy, Scorer and Selector plugins), scorers, selectors, budgets, codecs, profilers, tasks; another
// word is Errc::config.
std::string list_text(Registry& registry, const std::string& kind);

// The usable plugins of the kind as a JSON list, a line for each parameter. plugins/plugins.json is the one of kvlab's
// own.
std::string list_json(Registry& registry, const std::string& kind);

// What a library says of itself in its note: ABI, build, roles, parameters. Nothing of it is run. Errc::plugin for a
// file that is no plugin.
std::string inspect_text(const std::filesystem::path& file);
std::string inspect_json(const std::filesystem::path& file);  // "roles" is null where the note does not hold them

// Parameters with type, default, range and help, components, the keys that every policy takes, an example to copy.
// Errc::plugin when nothing has that name. `full` is described, too.
std::string describe_text(Registry& registry, const std::string& name);

}  // namespace kvlab
