// What the CPU and the GPU share of drifted_heads.
#pragma once

namespace kvlab::ops {

inline constexpr int most_overlaps = 64;  // rows of scores of a KV head

// The median of n > 0 numbers, none of them NaN; the mean of the two middle ones of an even n. Sorts them.
constexpr float median_of(float* x, int n) {
  for (int i = 1; i < n; ++i)
    for (int j = i; j > 0 && x[j] < x[j - 1]; --j) {
      const float lower = x[j];
      x[j] = x[j - 1], x[j - 1] = lower;
    }
  return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

}  // namespace kvlab::ops
