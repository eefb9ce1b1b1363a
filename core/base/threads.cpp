#include "base/threads.hpp"

#include <unistd.h>

#include <cstdlib>

namespace kvlab {

void prefer_short_spins(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
  setenv("GOMP_SPINCOUNT", "10000", 1);
  execv("/proc/self/exe", argv);  // returns only when it failed: then the default stays
}

}  // namespace kvlab
