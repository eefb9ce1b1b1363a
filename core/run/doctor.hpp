// What this machine can do: `kvlab doctor` and `kvlab list models`.
#pragma once
#include <string>

#include "host/registry.hpp"

namespace kvlab {

std::string doctor_text(Registry& registry);
std::string models_text();  // bundled models and whether they are there

}  // namespace kvlab
