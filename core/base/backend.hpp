// The CUDA backend: libkvlab_cuda.so, which gives its runtime and a list of its ops. It lies beside libkvlab.so, and
// kvlab loads it if there is a driver. Nothing else in core links to CUDA, so one build serves machines with and
// without a GPU. KVLAB_CUDA_LIBRARY=PATH names another library and needs no driver (core/test/emulator is one).
// base/device_op.hpp says how an op finds its CUDA version.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvlab {

struct CudaOpEntry;

// Memory, streams and graphs of the current device. Errors are Errc::device.
struct CudaRuntime {
  void* (*allocate)(std::size_t bytes) = nullptr;  // device memory, 256-byte aligned; null when it does not fit
  void (*free)(void*) = nullptr;
  void* (*allocate_pinned)(std::size_t bytes) = nullptr;  // host memory that kernels reach
  void (*free_pinned)(void*) = nullptr;
  std::size_t (*free_bytes)() = nullptr;  // device memory that is not in use
  void (*copy)(void* to, const void* from, std::size_t bytes, void* stream) = nullptr;  // either direction
  void (*fill)(void* to, int byte, std::size_t bytes, void* stream) = nullptr;
  // background: its kernels get multiprocessors that other streams' kernels leave free.
  void* (*new_stream)(bool background) = nullptr;
  // Waits for the stream and frees the memory that kernels keep for it. Graphs captured from it must not run again.
  void (*delete_stream)(void* stream) = nullptr;
  void (*synchronize)(void* stream) = nullptr;  // throws the errors of the stream's kernels
  // Captures all that `work` gives to the stream as one graph, which can be launched again. Copies from pageable memory
  // read it now.
  void* (*capture)(void* stream, void (*work)(void*), void* context) = nullptr;
  void (*launch)(void* graph, void* stream) = nullptr;
  void (*delete_graph)(void* graph) = nullptr;
  // Counts the moves of memory that kernels keep between calls, without those of deleted streams. A graph captured
  // before the latest move must not run again.
  std::int64_t (*scratch_moves)() = nullptr;
  // Milliseconds of each of `runs` launches by events. Before each launch, reads of other memory flush the L2 cache.
  void (*time_graph)(void* graph, void* stream, int runs, float* milliseconds) = nullptr;
  // Milliseconds, by events, that the device takes for the work given to the stream by `work`. Waits for it.
  float (*time)(void* stream, void (*work)(void*), void* context) = nullptr;
  // Events. elapsed: milliseconds between two recorded ones; waits for `end`.
  void* (*new_event)() = nullptr;
  void (*delete_event)(void* event) = nullptr;
  void (*record)(void* event, void* stream) = nullptr;
  // While a graph is captured from the stream: each launch of the graph records the event there, for elapsed.
  void (*record_at_launch)(void* event, void* stream) = nullptr;
  // The stream's later work runs after the work that `event` was recorded behind. A stream that waits so for one that
  // is captured is captured with it, and must be waited for before the capture ends.
  void (*wait)(void* event, void* stream) = nullptr;
  float (*elapsed)(void* begin, void* end) = nullptr;
  bool (*passed)(void* event) = nullptr;  // whether the work that it was recorded behind is done
  // Bytes per second at which all multiprocessors read `bytes` of fresh device memory; the best of several grids.
  double (*read_rate)(std::size_t bytes, void* stream) = nullptr;
};

struct CudaBackend {
  char device_name[256] = {};  // "NVIDIA H200"
  CudaRuntime runtime;
  const CudaOpEntry* announced = nullptr;  // its ops
  // For tests whose device memory the host can open. on_cuda runs an op's CPU version between (true) and (false).
  void (*reach_from_host)(bool) = nullptr;
};

// Null if the backend cannot be used. Loads the library once; thread-safe.
const CudaBackend* cuda_backend();
// The same, or Errc::device with the reason.
const CudaBackend& require_cuda(const char* who);
// For tests: replaces the library's table; null restores it. Not while ops run.
void replace_cuda_backend(const CudaBackend* table);
// "NVIDIA H200, 143771 MiB, sm_90, driver for CUDA 13.0, built with CUDA 13.0, 1 device", or why there is none.
const std::string& cuda_state();

// The exports of libkvlab_cuda.so. `kvlab_cuda_backend` fills the table and names the device in `state`. Without a
// usable device it returns false and the reason. `kvlab_cuda_build` returns the hash of the headers that the library
// was built with; another hash than libkvlab.so's is refused.
using CudaBuild = const char* (*)();
using CudaEntry = bool (*)(CudaBackend* table, std::string* state);

}  // namespace kvlab
