#pragma once
#include <cstdlib>

namespace kvlab::cases {

// KVLAB_QUICK: sweeps take a few of their cases, for tests on the emulated GPU and under sanitizers.
inline bool quick() { return std::getenv("KVLAB_QUICK") != nullptr; }

}  // namespace kvlab::cases
