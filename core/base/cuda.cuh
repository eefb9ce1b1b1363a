// Shared by all kernel files: checked calls, memory that kernels keep between calls, and PTX.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <kvlab/error.hpp>
#include <kvlab/stream.hpp>
#include <string>

#include "base/device_op.hpp"
#include "base/ptx.cuh"

namespace kvlab::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw Error(
        Errc::device,
        std::string("got ") + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + "), wanted success",
        std::string("CUDA ") + what);
}
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

inline cudaStream_t stream_of(void* handle) { return static_cast<cudaStream_t>(handle); }
inline cudaStream_t stream_of(Stream s) { return stream_of(s.handle()); }

int multiprocessors();  // of the current device
// Work beside a decode step has some multiprocessors to itself: a kernel of the step whose block waits for one of these
// would take twice as long. left_free: how many kernels of the step that are launched next leave to their own cache's
// work and to that of others.
constexpr int copying_multiprocessors = 4;
constexpr int checking_multiprocessors = 32;  // of checks for drift beside the next-token layer
struct LeftFree {
  int to_cache = 0, to_others = 0;
};
extern LeftFree left_free;
inline int step_multiprocessors() {
  const int all = multiprocessors(),
            left = left_free.to_cache > left_free.to_others ? left_free.to_cache : left_free.to_others;
  return all >= 64 ? all - left : all;
}
std::int64_t shared_bytes();  // shared memory that one block may have
// Device memory that is kept for the stream and the tag. zeroed(): zero at first, and every user leaves it zero.
// kept(): uninitialised.
void* zeroed(void* stream, const char* tag, std::size_t bytes);
void* kept(void* stream, const char* tag, std::size_t bytes);

}  // namespace kvlab::cuda
