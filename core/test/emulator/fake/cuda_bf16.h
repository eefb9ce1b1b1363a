// Stands in for CUDA's header.
#pragma once
#include <cuda_runtime.h>

#include <kvlab/dtype.hpp>

struct __nv_bfloat16 {
  std::uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : bits(kvlab::bf16(x).bits) {}
  operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 x;
  x.bits = bits;
  return x;
}
