// What a profiler found out about a model. `kvlab profile` writes it to a file, and a policy reads it.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kvlab {

// An array with two or more extents begins with [layer, KV head] or [layer, query head].
struct ProfileArray {
  std::vector<std::int64_t> extent;
  std::vector<float> values;
  std::string unit;
};
using Profile = std::map<std::string, ProfileArray>;

}  // namespace kvlab
