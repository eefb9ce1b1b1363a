// Page summaries in kernels. Every function here gives the bits that ops::summarize_page gives.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kvlab::ops {

// One element of a page's keys. The tokens are added in their order in the page.
struct KeyElement {
  float least = 0, most = 0, total = 0;

  __device__ void add(float x, bool first) {
    least = first || x < least ? x : least;
    most = first || most < x ? x : most;
    total = first ? x : __fadd_rn(total, x);
  }
  __device__ float mean(int tokens) const { return __fdiv_rn(total, static_cast<float>(tokens)); }

  // Once all tokens are added, a second pass over them makes `total` the sum of their distances from the centre. Then
  // low and high are the ends of Summary::centre_radius.
  __device__ float centre() const { return __fadd_rn(__fmul_rn(.5f, least), __fmul_rn(.5f, most)); }
  __device__ void add_distance(float x, bool first) {
    total = __fadd_rn(first ? 0 : total, fabsf(__fsub_rn(x, centre())));
  }
  __device__ float low(int tokens) const {
    const float end = __fsub_rn(centre(), mean(tokens));
    return least < end ? end : least;
  }
  __device__ float high(int tokens) const {
    const float end = __fadd_rn(centre(), mean(tokens));
    return end < most ? end : most;
  }
};

// nearest_bits rounds x to the nearest 16-bit value and returns its bits. bound_bits rounds to the nearest value that
// is not above x, or with `upper` not below x, so a bound stays a bound.
__device__ inline unsigned short nearest_bits(float x, bool half) {
  return half ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ inline unsigned short bound_bits(float x, bool upper, bool half) {
  const unsigned short bits = nearest_bits(x, half);
  const float y = half ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
  if (upper ? !(y < x) : !(y > x)) return bits;
  return upper == (x > 0) ? bits + 1 : bits - 1;
}

}  // namespace kvlab::ops
