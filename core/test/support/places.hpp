// Where tests find what they read: the checkout and its build, or the folder of a bundle with --tests
// (KVLAB_TEST_ROOT), which may lie on another machine.
#pragma once
#include <cstdlib>
#include <filesystem>

namespace kvlab::test {

inline std::filesystem::path source_root() {
  const char* moved = std::getenv("KVLAB_TEST_ROOT");
  return moved ? moved : KVLAB_SOURCE_DIR;
}
inline std::filesystem::path plugin_folder() {
  const char* moved = std::getenv("KVLAB_TEST_ROOT");
  return std::filesystem::path(moved ? moved : KVLAB_BINARY_DIR) / "lib" / "plugins";
}

}  // namespace kvlab::test
