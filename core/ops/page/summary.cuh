// Page summaries in kernels. Every function here gives the bits that ops::summarize_page gives.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "ops/page/summary_codes.hpp"

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

// What the codes of a page's summary share, and the codes.
class SummaryCodes {
 public:
  // What a number counts as. NaN stays NaN.
  static __device__ float within(float x) {
    return x < -summary_limit ? -summary_limit : x > summary_limit ? summary_limit : x;
  }

  // least, most: of the summary's numbers but NaN, as they count. Without any, summary_limit and -summary_limit.
  __device__ SummaryCodes(float least, float most) {
    zero_ = __fadd_rn(least, 0.f);  // no -0: which of two zeros came first does not matter
    scale_ = fmaxf(__fmul_rn(__fsub_rn(most, least), summary_step), least_summary_scale);
    inverse_ = __fdiv_rn(1.f, scale_);
  }
  __device__ std::byte nearest(float x) const {
    return static_cast<std::byte>(x != x ? 0 : static_cast<int>(rintf(place(within(x)))));
  }
  __device__ std::byte below(float x) const {
    if (x != x) return std::byte{0};
    x = within(x);
    int code = static_cast<int>(place(x));
    if (code > 0 && number(code) > x) --code;
    if (code < 255 && number(code + 1) <= x) ++code;
    return static_cast<std::byte>(code);
  }
  __device__ std::byte above(float x) const {
    if (x != x) return std::byte{255};
    x = within(x);
    int code = static_cast<int>(ceilf(place(x)));
    if (code < 255 && number(code) < x) ++code;
    if (code > 0 && number(code - 1) >= x) --code;
    return static_cast<std::byte>(code);
  }
  // Behind so many codes.
  __device__ void put(std::byte* summary, int numbers) const {
    float2* to = reinterpret_cast<float2*>(summary + numbers);
    to[0] = make_float2(scale_, zero_);
    if (numbers % 16 == 0) to[1] = make_float2(0, 0);
  }

 private:
  __device__ float number(int code) const { return __fadd_rn(__fmul_rn(static_cast<float>(code), scale_), zero_); }
  __device__ float place(float x) const { return fminf(fmaxf(__fmul_rn(__fsub_rn(x, zero_), inverse_), 0.f), 255.f); }

  float scale_, zero_, inverse_;
};

}  // namespace kvlab::ops
