// One block finds the tokens of a head that evict_surplus evicts.
#pragma once
#include "base/lanes.cuh"
#include "ops/select/pins.cuh"

namespace kvlab::ops::device {

// How many tokens leave. `place` is that of a single one.
struct Leaving {
  int count, place;
};

__device__ inline unsigned long long block_min(unsigned long long value, unsigned long long* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  value = cuda::least_of_lanes(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  for (int w = 0; w < warps; ++w) value = min(value, scratch[w]);
  __syncthreads();
  return value;
}

// at(t): text position of place t. score(t): its score, unless by_age. Two or more tokens that leave get their bits in
// chosen [n] set, and the other bits there cleared. Needs 0 <= keep < n and at least 256 threads.
template <class Position, class Score>
__device__ Leaving find_surplus(const Position& at, const Score& score, bool by_age, int n, int keep, const Pins& pins,
                                unsigned* chosen, SelectShared& s) {
  const int lane = threadIdx.x % 32, threads = static_cast<int>(blockDim.x);
  const bool pin = pins.first > 0 || pins.last > 0;
  const PinLimits limits = pin ? pin_limits(at, n, pins, s) : PinLimits{-1, 0x7fffffff};
  // The key of a token that is not pinned.
  const auto key = [&](int, int t, unsigned i, unsigned long long& k) {
    if (pin && limits.pinned(at(t))) return false;
    k = by_age ? static_cast<unsigned long long>(at(t)) << 32 | (0xffffffffu - i) : selection_key(score(t), i);
    return true;
  };
  unsigned long long worst = ~0ull;
  unsigned own = 0, free;
#pragma unroll 4
  for (int t = threadIdx.x; t < n; t += threads)
    if (unsigned long long k; key(0, t, static_cast<unsigned>(t), k)) worst = min(worst, k), ++own;
  block_scan(own, s.scan, free);
  const int stay = keep - (n - static_cast<int>(free)), lost = static_cast<int>(free) - max(0, stay);
  if (lost <= 0) return {0, -1};
  if (lost == 1) return {1, static_cast<int>(0xffffffffu - static_cast<unsigned>(block_min(worst, s.candidate)))};
  const int first[] = {0, n};
  const unsigned long long threshold =
      stay > 0 ? radix_threshold(key, first, 1, static_cast<unsigned>(stay), 0, s) : ~0ull;
  for (int base = threadIdx.x - lane; base < n; base += threads) {
    const int t = base + lane;
    unsigned long long k = 0;
    const bool leaves = t < n && key(0, t, static_cast<unsigned>(t), k) && k < threshold;
    const unsigned bits = __ballot_sync(all_lanes, leaves);
    if (lane == 0) chosen[base >> 5] = bits;
  }
  __syncthreads();
  return {lost, -1};
}

}  // namespace kvlab::ops::device
