// A profiler watches runs with the full cache and gives named arrays. Core writes them to a profile file keyed by the
// model's hash.
#pragma once
#include "kvlab/policy.hpp"
#include "kvlab/profile.hpp"

namespace kvlab {

// All views of a profiler are host memory, unlike a policy's, and its stream is the CPU's. On a GPU they are copies, in
// f32 if the cache is f16. chunk_queries stay empty: no profiler needs them, and the copies would be large.
class Profiler {
 public:
  virtual ~Profiler() = default;
  virtual Needs needs() const = 0;
  // Whether the arrays depend on how tokens lie in pages, with any parameters. If so, core refuses them beside another
  // page size.
  virtual bool by_pages() const { return true; }
  virtual void attach(const Shape&, Workspace&) {}
  virtual void prefill(const LayerPrefill&, Stream) {}
  virtual void observe(const LayerStep&, Stream) {}
  virtual void release(int /*slot*/) {}
  virtual void finish(Profile& out) = 0;
};

}  // namespace kvlab
