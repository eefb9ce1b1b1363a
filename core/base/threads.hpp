#pragma once

namespace kvlab {

// Waiting OpenMP threads spin briefly and then sleep. The runtime's own default spins for milliseconds, which a busy
// machine pays for many times over in short parallel regions. libgomp reads its settings when it is loaded, so the
// program starts itself again with them; does nothing when the user has chosen (OMP_WAIT_POLICY, GOMP_SPINCOUNT). Call
// it first in main.
void prefer_short_spins(char** argv);

}  // namespace kvlab
