// The ops of codebooks and their kernels share how a number is coded.
#pragma once
#include <kvlab/codebooks.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/on_both.hpp"

namespace kvlab::ops {

struct Thresholds {
  double lower, upper;
};

KVLAB_ON_BOTH inline float coded(float x, const Thresholds& t, const Coding& how) {
  if (x - x != 0) return x;  // NaN or infinite
  if (how.exact_outliers && (double{x} < t.lower || double{x} > t.upper)) return x;
  const double zero = (t.upper + t.lower) / 2, range = (t.upper - t.lower) / 2;
  if (!(range > 0)) return static_cast<float>(zero);
  const double at = (double{x} - zero) / range;
  int nearest = 0;
  double least = fabs(at - double{how.book.centres.data[0]});
  for (int i = 1; i < how.book.centres.extent[0]; ++i)
    if (const double far = fabs(at - double{how.book.centres.data[i]}); far < least) nearest = i, least = far;
  return static_cast<float>(zero + range * double{how.book.levels.data[nearest]});
}

// A quantile of n ascending numbers: the number at `low` and a part of the way to the next one.
struct QuantileAt {
  int low;
  double part;

  KVLAB_ON_BOTH QuantileAt(double quantile, int n) {
    const double at = quantile * (n - 1);
    low = static_cast<int>(at);
    part = at - low;
  }
};

// Unsigned numbers in the order of floats, NaN included.
KVLAB_ON_BOTH inline std::uint32_t ordered(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
KVLAB_ON_BOTH inline float from_ordered(std::uint32_t order) {
  const std::uint32_t bits = order >> 31 ? order & 0x7fffffffu : ~order;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace kvlab::ops
