// A block turns marks of places into a list.
#pragma once
#include "ops/select/select.cuh"

namespace kvlab::ops::device {

// A bit for each of so many places, in shared memory. Longer caches take several rounds.
constexpr int places_at_once = 1 << 18;

__device__ __forceinline__ unsigned lowest_bits(int count) { return count >= 32 ? ~0u : (1u << max(count, 0)) - 1; }

// index = the places of [0, n) below `first`, those from `end` on, and those that `each` calls its argument with, in
// order and once. Returns their number. marks: [places_at_once / 32], scan: [32], shared memory. All threads of the
// block take part, and `each` may have barriers.
template <class Each>
__device__ __forceinline__ int list_places(int n, int first, int end, std::int32_t* index, unsigned* marks,
                                           unsigned* scan, const Each& each) {
  unsigned kept = 0;
  for (int begin = 0; begin < n; begin += places_at_once) {
    const int places = min(places_at_once, n - begin), words = (places + 31) / 32;
    for (int w = threadIdx.x; w < words; w += blockDim.x) {
      const int at = begin + 32 * w;
      marks[w] = (lowest_bits(first - at) | ~lowest_bits(end - at)) & lowest_bits(n - at);
    }
    __syncthreads();
    each([&](int t) {
      if (static_cast<unsigned>(t - begin) < static_cast<unsigned>(places))
        atomicOr(marks + (t - begin) / 32, 1u << (t - begin) % 32);
    });
    __syncthreads();
    for (int from = 0; from < words; from += blockDim.x) {
      const int w = from + threadIdx.x;
      unsigned bits = w < words ? marks[w] : 0, total = 0;
      unsigned at = kept + block_scan(__popc(bits), scan, total);
      for (; bits; bits &= bits - 1) index[at++] = begin + 32 * w + __ffs(bits) - 1;
      kept += total;
    }
    __syncthreads();
  }
  return static_cast<int>(kept);
}

}  // namespace kvlab::ops::device
