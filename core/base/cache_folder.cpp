#include "base/cache_folder.hpp"

#include <cstdlib>

namespace kvlab {

std::filesystem::path cache_folder() {
  const auto set = [](const char* value) { return value != nullptr && *value != '\0'; };
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); set(cache)) return std::filesystem::path(cache) / "kvlab";
  const char* home = std::getenv("HOME");
  return std::filesystem::path(set(home) ? home : ".") / ".cache" / "kvlab";
}

}  // namespace kvlab
