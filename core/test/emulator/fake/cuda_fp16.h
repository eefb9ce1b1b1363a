// Stands in for CUDA's header.
#pragma once
#include <cuda_runtime.h>

#include "base/half.hpp"

struct __half {
  std::uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(kvlab::float_to_half(x)) {}
  operator float() const { return kvlab::half_to_float(bits); }
};
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.bits = bits;
  return x;
}
