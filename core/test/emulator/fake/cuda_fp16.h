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
