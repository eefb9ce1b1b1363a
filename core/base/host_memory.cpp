#include "base/host_memory.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace kvlab {
namespace {

constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();

std::optional<std::int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::int64_t n = 0;
  return file >> n ? std::optional(n) : std::nullopt;  // "max" is no number
}

// The number behind `name` in a file of lines "name number".
std::optional<std::int64_t> number_of(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name)) return std::stoll(line.substr(name.size()));
  return {};
}

std::int64_t left_of_container(const std::string& limit, const std::string& used, const std::string& folder,
                               const std::string& cache) {
  const auto most = number_in(folder + limit), now = number_in(folder + used);
  if (!most || !now) return no_limit;
  return std::max<std::int64_t>(0, *most - *now + number_of(folder + "memory.stat", cache).value_or(0));
}

}  // namespace

std::int64_t free_host_bytes() {
  const auto system = number_of("/proc/meminfo", "MemAvailable:");
  return std::min(
      {system ? *system * 1024 : no_limit,
       left_of_container("memory.max", "memory.current", "/sys/fs/cgroup/", "file "),
       left_of_container("memory.limit_in_bytes", "memory.usage_in_bytes", "/sys/fs/cgroup/memory/", "total_cache ")});
}

}  // namespace kvlab
