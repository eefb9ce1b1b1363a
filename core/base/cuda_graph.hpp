// Work of a GPU's stream, captured once and launched many times.
#pragma once
#include <kvlab/stream.hpp>

#include <utility>

#include "base/backend.hpp"

namespace kvlab {

class CudaGraph {
 public:
  CudaGraph() = default;
  // Captures the calls that work() makes on the stream; none of them runs. work() may neither wait nor allocate.
  template <class Work>
  CudaGraph(Stream s, Work work)
      : graph_(require_cuda("a CUDA graph")
                   .runtime.capture(
                       s.handle(), [](void* f) { (*static_cast<Work*>(f))(); }, &work)) {}
  ~CudaGraph() {
    if (graph_) require_cuda("a CUDA graph").runtime.delete_graph(graph_);
  }
  CudaGraph(CudaGraph&& o) noexcept : graph_(std::exchange(o.graph_, nullptr)) {}
  CudaGraph& operator=(CudaGraph&& o) noexcept {
    std::swap(graph_, o.graph_);
    return *this;
  }

  explicit operator bool() const { return graph_ != nullptr; }
  void launch(Stream s) const { require_cuda("a CUDA graph").runtime.launch(graph_, s.handle()); }

 private:
  void* graph_ = nullptr;
};

}  // namespace kvlab
