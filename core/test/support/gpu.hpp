// Tests that need a GPU.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/backend.hpp"

namespace kvlab::test {

// The program's exit code in place of running, 0 = it runs. Without a GPU it is 77, which ctest calls skipped, or 1 if
// KVLAB_REQUIRE_GPU is set.
inline int skip_without_gpu() {
  if (cuda_backend()) return 0;
  const char* required = std::getenv("KVLAB_REQUIRE_GPU");
  const bool must = required && *required && std::strcmp(required, "0") != 0;
  std::printf("%s: %s\n", must ? "KVLAB_REQUIRE_GPU is set and there is no usable GPU" : "skipped",
              cuda_state().c_str());
  return must ? 1 : 77;
}

}  // namespace kvlab::test
