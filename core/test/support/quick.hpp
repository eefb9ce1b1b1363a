#pragma once
#include <cstdlib>

namespace kvlab::test {

// KVLAB_QUICK: sweeps take their first cases only, for the tests that run on the emulated GPU.
inline bool quick() { return std::getenv("KVLAB_QUICK") != nullptr; }

}  // namespace kvlab::test
