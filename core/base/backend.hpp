// The CUDA backend: one table of functions that libkvlab_cuda.so fills. It lies beside libkvlab.so and is loaded when a
// driver and a device are there; nothing else in core links to CUDA, so one build serves machines with and without a
// GPU. Ops look at the device of the stream they are given and go through this table.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/policy.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvlab {

namespace ops {
struct AttendArgs;
struct LinearArgs;
struct NormArgs;
struct EmbedArgs;
struct ArgmaxArgs;
struct RopeAppendArgs;
}  // namespace ops

// Memory and order on the current device. Errors are Errc::device; memory that does not fit is null.
struct CudaRuntime {
  void* (*allocate)(std::size_t bytes) = nullptr;  // device memory, 256-byte aligned; null when it does not fit
  void (*free)(void*) = nullptr;
  void* (*allocate_pinned)(std::size_t bytes) = nullptr;  // host memory that kernels reach
  void (*free_pinned)(void*) = nullptr;
  void (*copy)(void* to, const void* from, std::size_t bytes, void* stream) = nullptr;  // either direction
  void (*fill)(void* to, int byte, std::size_t bytes, void* stream) = nullptr;
  void* (*new_stream)() = nullptr;
  void (*delete_stream)(void* stream) = nullptr;
  void (*synchronize)(void* stream) = nullptr;  // throws what the stream's kernels ran into
  // What `work` gives to the stream, as one graph that can be launched again.
  void* (*capture)(void* stream, void (*work)(void*), void* context) = nullptr;
  void (*launch)(void* graph, void* stream) = nullptr;
  void (*delete_graph)(void* graph) = nullptr;
  // Milliseconds of each of `runs` launches by events; before each, all of the L2 cache is overwritten.
  void (*time_graph)(void* graph, void* stream, int runs, float* milliseconds) = nullptr;
  // Bytes per second at which all multiprocessors read together, best over grids, of `bytes` of fresh device memory.
  double (*read_rate)(std::size_t bytes, void* stream) = nullptr;
};

// The ops of kvlab/ops.hpp and ops/*.hpp on device memory; arguments mean what those headers say.
struct CudaOps {
  void (*attend)(const ops::AttendArgs& a, void* stream) = nullptr;
  // ops/linear_cuda.hpp
  void (*linear)(const ops::LinearArgs& a, void* stream) = nullptr;
  void (*linear_stream)(const ops::LinearArgs& a, void* stream) = nullptr;  // one way, whatever the number of rows
  void (*linear_blas)(const ops::LinearArgs& a, void* stream) = nullptr;    // the other one
  void (*rms_norm)(const ops::NormArgs& a, void* stream) = nullptr;
  void (*embed)(const ops::EmbedArgs& a, void* stream) = nullptr;
  void (*argmax)(const ops::ArgmaxArgs& a, void* stream) = nullptr;
  void (*rope_append)(const ops::RopeAppendArgs& a, void* stream) = nullptr;  // ops/rope_append_cuda.hpp
};

struct CudaBackend {
  static constexpr int version = 1;
  int table_version = 0;  // of the library; another one is refused
  CudaRuntime runtime;
  CudaOps ops;
};

// Null where the backend cannot be used; loaded once, thread-safe.
const CudaBackend* cuda_backend();
// The same, or Errc::device with the reason.
const CudaBackend& require_cuda(const char* who);
// "NVIDIA H200, 143771 MiB, sm_90, driver 580.159, CUDA 13.0", or why there is none.
const std::string& cuda_state();

// What libkvlab_cuda.so exports as `kvlab_cuda_backend`: fills the table and says what device it found; returns false
// and a reason where there is none that it can use.
using CudaEntry = bool (*)(CudaBackend* table, std::string* state);

}  // namespace kvlab
