// GPU time between two points of a stream's work.
#pragma once
#include <kvlab/stream.hpp>

#include "base/backend.hpp"

namespace kvlab {

class CudaStopwatch {
 public:
  CudaStopwatch() : begin_(runtime().new_event()), end_(runtime().new_event()) {}
  ~CudaStopwatch() {
    runtime().delete_event(begin_);
    runtime().delete_event(end_);
  }
  CudaStopwatch(const CudaStopwatch&) = delete;
  CudaStopwatch& operator=(const CudaStopwatch&) = delete;

  void begin(Stream s) { runtime().record(begin_, s.handle()); }
  void end(Stream s) { runtime().record(end_, s.handle()); }
  double ms() const { return static_cast<double>(runtime().elapsed(begin_, end_)); }  // waits for the end

 private:
  static const CudaRuntime& runtime() { return require_cuda("a measurement on the GPU").runtime; }
  void *begin_, *end_;
};

}  // namespace kvlab
