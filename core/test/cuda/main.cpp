// Without a GPU these tests are skipped; with KVLAB_REQUIRE_GPU set that is a failure.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/backend.hpp"

extern "C" int kvlab_test_skip() {
  if (kvlab::cuda_backend()) return 0;
  const char* required = std::getenv("KVLAB_REQUIRE_GPU");
  const bool must = required && *required && std::strcmp(required, "0") != 0;
  std::printf("%s: %s\n", must ? "KVLAB_REQUIRE_GPU is set and there is no usable GPU" : "skipped",
              kvlab::cuda_state().c_str());
  return must ? 1 : 77;
}
