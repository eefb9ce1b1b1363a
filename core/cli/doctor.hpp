// What this machine can do: `kvlab doctor` and `kvlab list models`.
#pragma once
#include <string>

#include "plugin/registry.hpp"

namespace kvlab {

std::string doctor_text(Registry& registry);
// "580.159.03" of the kernel's NVIDIA driver, whether its CUDA part is there or not; empty without one.
std::string driver_version(const std::string& file = "/proc/driver/nvidia/version");
std::string models_text();  // bundled models and whether they are there

}  // namespace kvlab
