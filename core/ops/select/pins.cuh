// One block finds the text positions that pins of a head cover.
#pragma once
#include "ops/page/paged.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops::device {

// Tokens at positions <= oldest or >= newest are pinned. Positions are not negative.
struct PinLimits {
  int oldest, newest;
  __device__ bool pinned(int position) const { return position <= oldest || position >= newest; }
};

// at(t): text position of place t.
template <class Position>
__device__ PinLimits pin_limits(const Position& at, int n, const Pins& pins, SelectShared& s) {
  PinLimits limits{-1, 0x7fffffff};
  const long long first = max(pins.first, 0), last = max(pins.last, 0);
  if (n <= 0 || first + last == 0) return limits;
  if (first + last >= n) {
    limits.oldest = 0x7ffffffe;
    return limits;
  }
  bool descends = false;
  int highest = -1;
  constexpr int at_once = 4;  // positions lie behind two loads each
  for (int begin = threadIdx.x; begin < n; begin += at_once * static_cast<int>(blockDim.x)) {
    int here[at_once], next[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int t = min(begin + i * static_cast<int>(blockDim.x), n - 1);  // the last one is in order in any case
      here[i] = at(t), next[i] = at(min(t + 1, n - 1));
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) descends |= here[i] > next[i], highest = max(highest, here[i]);
  }
  if (!__syncthreads_or(descends)) {
    if (first > 0) limits.oldest = at(static_cast<int>(first - 1));
    if (last > 0) limits.newest = at(static_cast<int>(n - last));
    return limits;
  }
  // After evictions the text often still begins at position 0, and its newest tokens are all there.
  highest = block_max(highest, s.scan);
  const PinLimits guess{first > 0 ? static_cast<int>(first - 1) : -1,
                        last > 0 ? static_cast<int>(highest - last + 1) : 0x7fffffff};
  unsigned found = 0;
  for (int t = threadIdx.x; t < n; t += blockDim.x) {
    const int position = at(t);
    found += (position <= guess.oldest) + (static_cast<unsigned>(position >= guess.newest) << 16);
  }
  unsigned olds, news;
  block_scan(found & 0xffff, s.scan, olds);
  block_scan(found >> 16, s.scan, news);
  if (olds == first && news == last) return guess;
  const int bounds[] = {0, n};
  const auto flip = [](bool old, int position) {
    const auto x = static_cast<unsigned>(position);
    return static_cast<unsigned long long>(old ? 0xffffffffu - x : x) << 32;
  };
  const auto threshold = [&](bool old, unsigned wanted) {
    const auto key = [&](int, int t, unsigned, unsigned long long& k) {
      k = flip(old, at(t));
      return true;
    };
    return static_cast<unsigned>(radix_threshold(key, bounds, 1, wanted, 32, s) >> 32);
  };
  if (first > 0) limits.oldest = static_cast<int>(0xffffffffu - threshold(true, static_cast<unsigned>(first)));
  if (last > 0) limits.newest = static_cast<int>(threshold(false, static_cast<unsigned>(last)));
  return limits;
}

__device__ inline PinLimits pin_limits(const DeviceKv& kv, int row, int head, int n, const Pins& pins,
                                       SelectShared& s) {
  return pin_limits([&](int t) { return kv.position(row, head, t); }, n, pins, s);
}

}  // namespace kvlab::ops::device
