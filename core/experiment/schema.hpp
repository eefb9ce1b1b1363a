// The JSON schema (draft 2020-12) of experiment files, for editors.
#pragma once
#include <string>

#include "plugin/registry.hpp"

namespace kvlab {

// Every key with its help, and the parameters of every plugin in the registry with type, range, choices and default.
std::string schema_text(Registry& registry);

}  // namespace kvlab
