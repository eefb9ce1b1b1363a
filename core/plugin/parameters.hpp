// Resolves an experiment's values to the parameters that a plugin is created with.
#pragma once
#include <kvlab/params.hpp>

#include <map>
#include <optional>
#include <string>

#include "plugin/loader.hpp"

namespace kvlab {

// Why `value` cannot be `spec`'s value ("got 0, wanted an integer of at least 1"), or nothing. A choice is a string; an
// integer serves as a real.
std::optional<std::string> check(const ParamSpec& spec, const ParamValue& value);

// The declaration of parameter `name`, or null.
const ParamSpec* find_param(const PluginInfo& plugin, std::string_view name);

// "got parameter 'windw', wanted one of snapkv's: kernel, window (did you mean 'window'?)"
std::string unknown_parameter(const PluginInfo& plugin, const std::string& name);

// Defaults, replaced by what is given. Errc::config, where = "NAME.PARAMETER", for an unknown name or a refused value.
Params resolve(const PluginInfo& plugin, const std::map<std::string, ParamValue>& given);

// "integer", "real", "boolean", "text" or "choice".
const char* name_of(ParamKind kind);

// A value as YAML spells it.
std::string to_text(const ParamValue& value);

// "at least 1", "0 to 1", "mean | max | sum", or nothing when every value of the kind will do.
std::string range_text(const ParamSpec& spec);

}  // namespace kvlab
