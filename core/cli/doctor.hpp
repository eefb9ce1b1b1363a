// `kvlab doctor` and `kvlab list models` describe this machine.
#pragma once
#include <string>

#include "plugin/registry.hpp"

namespace kvlab {

std::string doctor_text(Registry& registry);
// The version of the kernel's NVIDIA driver, e.g. "580.159.03", with or without its CUDA part; empty without a driver.
std::string driver_version(const std::string& file = "/proc/driver/nvidia/version");
std::string models_text();  // models without a path of their own: shapes, and whether bundled ones are there

}  // namespace kvlab
