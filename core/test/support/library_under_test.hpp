// The conformance suite tests the plugins of KVLAB_CONTRACT_LIBRARY, or all of the build's own folder without it.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "plugin/registry.hpp"
#include "test/support/places.hpp"

namespace kvlab::test {

// The paths that a Registry loads for it.
inline std::vector<std::filesystem::path> library_under_test() {
  const char* library = std::getenv("KVLAB_CONTRACT_LIBRARY");
  if (library) return {library};
  return {plugin_folder()};
}

// Are all plugins of this tree under test?
inline bool of_the_tree() { return !std::getenv("KVLAB_CONTRACT_LIBRARY"); }

inline bool under_test(const PluginInfo& p) {
  const char* library = std::getenv("KVLAB_CONTRACT_LIBRARY");
  std::error_code ec;
  return !library || std::filesystem::equivalent(p.library, library, ec);
}

}  // namespace kvlab::test
