// Timing on the GPU: device buffers, and a timer that replays a graph with a cold L2 cache.
#pragma once
#include <kvlab/dtype.hpp>
#include <kvlab/error.hpp>
#include <kvlab/stream.hpp>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/backend.hpp"
#include "bench/cases.hpp"

namespace kvlab::bench {

// Runs `work` once, which allocates its scratch, then captures it and replays it with a cold L2. Seconds of one run.
template <class F>
Times time_graph(Stream s, F&& work, int runs = 30) {
  const CudaRuntime& r = cuda_backend()->runtime;
  work();
  r.synchronize(s.handle());
  void* graph = r.capture(
      s.handle(), [](void* f) { (*static_cast<std::remove_reference_t<F>*>(f))(); },
      const_cast<void*>(static_cast<const void*>(&work)));
  std::vector<float> ms(static_cast<std::size_t>(runs));
  r.time_graph(graph, s.handle(), runs, ms.data());
  r.delete_graph(graph);
  std::sort(ms.begin(), ms.end());
  return {ms[ms.size() / 2] * 1e-3, ms.front() * 1e-3};
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes)
      : memory_(cuda_backend()->runtime.allocate(std::max<std::size_t>(bytes, 16))) {
    if (!memory_) throw Error(Errc::device, "got no device memory for a bench", "kvlab bench");
  }
  ~DeviceBuffer() { cuda_backend()->runtime.free(memory_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_;
};

// Owns a stream.
class CudaTimer {
 public:
  CudaTimer() : stream_(require_cuda("kvlab bench").runtime.new_stream(false)) {}
  ~CudaTimer() { cuda_backend()->runtime.delete_stream(stream_); }
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;

  void* handle() const { return stream_; }
  Stream stream() const { return Stream::cuda(stream_); }

  template <class T>
  std::unique_ptr<DeviceBuffer> put(const std::vector<T>& from) const {
    auto b = std::make_unique<DeviceBuffer>(from.size() * sizeof(T));
    cuda_backend()->runtime.copy(b->template as<void>(), from.data(), from.size() * sizeof(T), stream_);
    cuda_backend()->runtime.synchronize(stream_);
    return b;
  }

  template <class F>
  Times time(F&& work, int runs = 30) const {
    return time_graph(stream(), work, runs);
  }

 private:
  void* stream_;
};

}  // namespace kvlab::bench
