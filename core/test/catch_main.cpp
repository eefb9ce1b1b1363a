#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

// A test executable that needs something which may be missing defines this: the exit code in place of running, or 0.
extern "C" int kvlab_test_skip() __attribute__((weak));

int main(int argc, char** argv) {
  if (kvlab_test_skip)
    if (const int code = kvlab_test_skip()) return code;
  return Catch::Session().run(argc, argv);
}
