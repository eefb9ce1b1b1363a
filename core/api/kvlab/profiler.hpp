// Calibration: watches runs of the full cache and leaves named arrays behind, which core writes to a profile file keyed
// by the model's hash and a policy may read (Policy::load_profile in a later version).
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kvlab/policy.hpp"

namespace kvlab {

struct ProfileArray {
  std::vector<std::int64_t> extent;
  std::vector<float> values;
  std::string unit;
};
using Profile = std::map<std::string, ProfileArray>;

// Unlike a policy's, all views of a profiler are host memory, on a GPU copies of what is there (of f32 for a cache of
// f16), and the stream is the CPU's. chunk_queries stay empty: no profiler has needed them yet, and copies would be
// many.
class Profiler {
 public:
  virtual ~Profiler() = default;
  virtual Needs needs() const = 0;
  virtual void attach(const Shape&, Workspace&) {}
  virtual void prefill(const LayerPrefill&, Stream) {}
  virtual void observe(const LayerStep&, Stream) {}
  virtual void release(int /*slot*/) {}
  virtual void finish(Profile& out) = 0;
};

}  // namespace kvlab
