// What every kernel file shares: checked calls, what is kept between them, and PTX.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <kvlab/error.hpp>
#include <string>

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

int multiprocessors();                                           // of the current device
std::int64_t shared_bytes();                                     // that one block may have
void* zeroed(void* stream, const char* tag, std::size_t bytes);  // kept for the stream, zero at first; whoever uses it
                                                                 // leaves it zero
void* kept(void* stream, const char* tag, std::size_t bytes);    // kept for the stream, uninitialised

}  // namespace kvlab::cuda
