// Counts of pages that the stores and their kernels share.
#pragma once
#include <cstdint>

namespace kvlab {

// Pages of a layer of a slot, as a place edit told at the prompt's end: those that may leave the device, and those that
// the host must take before.
struct Spare {
  std::int32_t leave = 0, write = 0;
};

}  // namespace kvlab
