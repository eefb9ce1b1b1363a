#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#include <cstdlib>

#include "test/support/places.hpp"

namespace kvlab::test {

static std::filesystem::path moved_or(const char* root) {
  const char* moved = std::getenv("KVLAB_TEST_ROOT");
  return moved ? moved : root;
}

std::filesystem::path source_root() { return moved_or(KVLAB_SOURCE_DIR); }
std::filesystem::path build_root() { return moved_or(KVLAB_BINARY_DIR); }
std::filesystem::path plugin_folder() { return build_root() / "lib" / "plugins"; }

}  // namespace kvlab::test

// A test executable defines this if it needs something that may be missing. It returns 0 to run, else the exit code.
extern "C" int kvlab_test_skip() __attribute__((weak));

int main(int argc, char** argv) {
  setenv("KVLAB_POISON", "1", 0);  // unused frames read as NaN, see store/arena.hpp
  if (kvlab_test_skip)
    if (const int code = kvlab_test_skip()) return code;
  return Catch::Session().run(argc, argv);
}
