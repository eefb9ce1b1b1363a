// A block turns marks of places into a list.
#pragma once
#include "ops/select/select.cuh"

namespace kvlab::ops::device {

// index[0 .. n) holds a mark for each place, 0 or not, that the whole block sees. Then it begins with the marked places
// in order. Returns their number. scan: [32] shared memory. All threads of the block take part.
__device__ inline int list_marked(std::int32_t* index, int n, unsigned* scan) {
  unsigned kept = 0;
  for (int begin = 0; begin < n; begin += blockDim.x) {
    const int t = begin + threadIdx.x;
    const bool marked = t < n && index[t];
    unsigned total = 0;
    const unsigned at =
        kept + block_scan(marked, scan, total);  // all marks of these places are read before any is lost
    if (marked) index[at] = t;
    kept += total;
    __syncthreads();
  }
  return static_cast<int>(kept);
}

}  // namespace kvlab::ops::device
