// The CUDA backend: libkvlab_cuda.so, which gives its runtime and a list of its ops. It lies beside libkvlab.so and is
// loaded when a driver and a device are there; nothing else in core links to CUDA, so one build serves machines with
// and without a GPU. KVLAB_CUDA_LIBRARY=PATH names another library instead, whether there is a driver or not (the
// tests' emulator, core/test/emulator, is one). base/device_op.hpp is how an op finds its CUDA version.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvlab {

struct CudaOpEntry;

// Memory and order on the current device. Errors are Errc::device; memory that does not fit is null.
struct CudaRuntime {
  void* (*allocate)(std::size_t bytes) = nullptr;  // device memory, 256-byte aligned; null when it does not fit
  void (*free)(void*) = nullptr;
  void* (*allocate_pinned)(std::size_t bytes) = nullptr;  // host memory that kernels reach
  void (*free_pinned)(void*) = nullptr;
  std::size_t (*free_bytes)() = nullptr;  // device memory that is not in use
  void (*copy)(void* to, const void* from, std::size_t bytes, void* stream) = nullptr;  // either direction
  void (*fill)(void* to, int byte, std::size_t bytes, void* stream) = nullptr;
  void* (*new_stream)() = nullptr;
  // Waits for it and frees what kernels keep for it: graphs that were captured from it are not to be launched again.
  void (*delete_stream)(void* stream) = nullptr;
  void (*synchronize)(void* stream) = nullptr;  // throws what the stream's kernels ran into
  // What `work` gives to the stream, as one graph that can be launched again. Pageable memory that it copies from is
  // read now.
  void* (*capture)(void* stream, void (*work)(void*), void* context) = nullptr;
  void (*launch)(void* graph, void* stream) = nullptr;
  void (*delete_graph)(void* graph) = nullptr;
  // How often memory that kernels keep between calls has moved, streams that are gone aside. A graph that was captured
  // before the latest move is not to be launched again.
  std::int64_t (*scratch_moves)() = nullptr;
  // Milliseconds of each of `runs` launches by events; before each, all of the L2 cache is overwritten.
  void (*time_graph)(void* graph, void* stream, int runs, float* milliseconds) = nullptr;
  // Milliseconds on the device of what `work` gives to the stream, by events; waits for it.
  float (*time)(void* stream, void (*work)(void*), void* context) = nullptr;
  // Points in a stream's time. elapsed: milliseconds between two that were recorded; waits for `end`.
  void* (*new_event)() = nullptr;
  void (*delete_event)(void* event) = nullptr;
  void (*record)(void* event, void* stream) = nullptr;
  float (*elapsed)(void* begin, void* end) = nullptr;
  // Bytes per second at which all multiprocessors read together, best over grids, of `bytes` of fresh device memory.
  double (*read_rate)(std::size_t bytes, void* stream) = nullptr;
};

struct CudaBackend {
  char device_name[256] = {};  // "NVIDIA H200"
  CudaRuntime runtime;
  const CudaOpEntry* announced = nullptr;  // its ops
  // For tests, of memory that the host may open: on_cuda runs an op's CPU version between (true) and (false).
  void (*reach_from_host)(bool) = nullptr;
};

// Null where the backend cannot be used; loaded once, thread-safe.
const CudaBackend* cuda_backend();
// The same, or Errc::device with the reason.
const CudaBackend& require_cuda(const char* who);
// For tests: this table in place of the library's, null = the library's again. Not while ops run.
void replace_cuda_backend(const CudaBackend* table);
// "NVIDIA H200, 143771 MiB, sm_90, driver for CUDA 13.0, built with CUDA 13.0, 1 device", or why there is none.
const std::string& cuda_state();

// What libkvlab_cuda.so exports as `kvlab_cuda_backend`: fills the table and says what device it found; returns false
// and a reason where there is none that it can use. `kvlab_cuda_build` is the hash of the headers that it was built
// with: a library of others is refused.
using CudaBuild = const char* (*)();
using CudaEntry = bool (*)(CudaBackend* table, std::string* state);

}  // namespace kvlab
