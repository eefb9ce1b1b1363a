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

__device__ inline PinLimits pin_limits(const DeviceKv& kv, int row, int head, int n, const Pins& pins,
                                       SelectShared& s) {
  PinLimits limits{-1, 0x7fffffff};
  const long long first = max(pins.first, 0), last = max(pins.last, 0);
  if (n <= 0 || first + last == 0) return limits;
  if (first + last >= n) {
    limits.oldest = 0x7ffffffe;
    return limits;
  }
  bool descends = false;
  for (int t = threadIdx.x; t + 1 < n; t += blockDim.x)
    descends |= kv.position(row, head, t) > kv.position(row, head, t + 1);
  if (!__syncthreads_or(descends)) {
    if (first > 0) limits.oldest = kv.position(row, head, static_cast<int>(first - 1));
    if (last > 0) limits.newest = kv.position(row, head, static_cast<int>(n - last));
    return limits;
  }
  const int bounds[] = {0, n};
  const auto flip = [](bool old, int position) {
    const auto x = static_cast<unsigned>(position);
    return static_cast<unsigned long long>(old ? 0xffffffffu - x : x) << 32;
  };
  const auto threshold = [&](bool old, unsigned wanted) {
    const auto key = [&](int, int t, unsigned, unsigned long long& k) {
      k = flip(old, kv.position(row, head, t));
      return true;
    };
    return static_cast<unsigned>(radix_threshold(key, bounds, 1, wanted, 32, s) >> 32);
  };
  if (first > 0) limits.oldest = static_cast<int>(0xffffffffu - threshold(true, static_cast<unsigned>(first)));
  if (last > 0) limits.newest = static_cast<int>(threshold(false, static_cast<unsigned>(last)));
  return limits;
}

}  // namespace kvlab::ops::device
