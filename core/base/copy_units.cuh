// Copies in units of 16 bytes, by which kernels move pages.
#pragma once
#include "base/cuda.cuh"

namespace kvlab::cuda {

// Copies `units` units with `threads` threads. A thread has up to 8 loads under way. from(i) is the address of unit i.
template <class From>
__device__ inline void copy_units(const From& from, uint4* to, int units, int thread, int threads) {
  constexpr int batch = 8;
  int i = thread;
  for (; i + (batch - 1) * threads < units; i += batch * threads) {
    uint4 x[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j) x[j] = *from(i + j * threads);
#pragma unroll
    for (int j = 0; j < batch; ++j) to[i + j * threads] = x[j];
  }
  for (; i < units; i += threads) to[i] = *from(i);
}

}  // namespace kvlab::cuda
