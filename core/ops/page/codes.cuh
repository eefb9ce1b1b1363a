// Codes of a row in kernels: the codes that codes.hpp gives, in fewer instructions.
#pragma once
#include <cuda_fp16.h>

#include "base/ptx.cuh"
#include "ops/page/codes.hpp"

namespace kvlab::ops {

// x / scale, rounded as a division rounds it, for what no code saturates. inverse: 1 / scale. The scale is a number of
// f16: by Markstein's theorem one correction is enough where a divisor has so few bits.
__device__ __forceinline__ float quotient(float x, float scale, float inverse) {
  const float most = 1024 * scale;  // NaN stays NaN
  x = x > most ? most : x < -most ? -most : x;
  const float y = x * inverse;
  return fmaf(fmaf(-y, scale, x), inverse, y);
}

// code_scale for numbers that are integers of so many bits or, with 0, e4m3. A division by a constant is a product and
// a correction, by the same theorem.
__device__ __forceinline__ CodeScale scale_of(int bits, float min, float max) {
  if (!(min <= max)) return {};
  constexpr float most = 65504;
  constexpr float divisors[] = {448, most_code(2), most_code(4), most_code(8)};
  const auto of_bits = [&](float none, float two, float four, float eight) {
    return bits == 8 ? eight : bits == 4 ? four : bits == 2 ? two : none;
  };
  const float divisor = of_bits(divisors[0], divisors[1], divisors[2], divisors[3]),
              inverse = of_bits(1 / divisors[0], 1 / divisors[1], 1 / divisors[2], 1 / divisors[3]);
  const auto within = [](float x) { return fminf(fmaxf(x, -most), most); };
  const float x = bits ? max - min : fmaxf(-min, max), y = x * inverse;
  const float quotient = fmaf(fmaf(-y, divisor, x), inverse, y);
  const float scale = quotient < most ? quotient : most;  // NaN is of an infinite x
  if (bits == 0) return {scale + 0.f, 0};
  return {min < max ? scale : 0, within(min) + 0.f};
}

// Stores scale and zero if `writes`, and returns them as they are stored.
__device__ __forceinline__ CodeScale put_scale(CodeScale exact, std::byte* at, bool writes) {
  const __half scale = __float2half_rn(exact.scale), zero = __float2half_rn(exact.zero);
  if (writes)
    *reinterpret_cast<unsigned*>(at) = __half_as_ushort(scale) | static_cast<unsigned>(__half_as_ushort(zero)) << 16;
  return {__half2float(scale), __half2float(zero)};
}

// Codes of numbers that share scale and zero, which are numbers of f16.
class SharedScale {
 public:
  // Scale 0 makes all integers 0, also of what is above the zero, and all e4m3 +0.
  __device__ __forceinline__ explicit SharedScale(CodeScale of)
      : scale_(of.scale),
        zero_(of.scale > 0 ? of.zero : INFINITY),
        inverse_(of.scale > 0 ? 1 / of.scale : 0.f),
        sign_(of.scale > 0 ? 0x80000000u : 0) {}

  // NaN is 0. An infinite x makes the correction NaN, which is the most.
  __device__ __forceinline__ std::uint32_t integer(float x, int bits) const {
    const float above = fmaxf(x - zero_, 0.f), y = above * inverse_;
    const float code = fminf(fmaf(fmaf(-y, scale_, above), inverse_, y), static_cast<float>(most_code(bits)));
    constexpr float shift = 0x1.8p23f;  // a sum with it has the integer in its low bits
    return __float_as_uint(code + shift) - std::bit_cast<std::uint32_t>(shift);
  }
  __device__ __forceinline__ float e4m3(float x) const {  // not yet rounded; a zero keeps its sign
    const float y = quotient(x, scale_, inverse_);
    return __uint_as_float((__float_as_uint(y) & 0x7fffffffu) | (__float_as_uint(x) & sign_));
  }
  __device__ __forceinline__ std::uint32_t code(CodecSide side, float x) const {
    return side.kind == CodeKind::e4m3 ? cuda::e4m3_of_floats(e4m3(x), 0) & 0xffu : integer(x, side.bits);
  }

 private:
  float scale_, zero_, inverse_;
  std::uint32_t sign_;
};

// The codes of eight numbers, the first in the lowest bits.
struct EightCodes {
  unsigned low, high;  // high: of 8 bits
};

template <int Bits>
__device__ __forceinline__ EightCodes integer_codes(const float (&x)[8], const SharedScale& of) {
  constexpr int of_word = Bits == 8 ? 4 : 8;
  unsigned word[2] = {};
#pragma unroll
  for (int i = 7; i >= 0; --i) word[i / of_word] = (word[i / of_word] << Bits) + of.integer(x[i], Bits);
  return {word[0], word[1]};
}

__device__ __forceinline__ EightCodes e4m3_codes(const float (&x)[8], const SharedScale& of) {
  unsigned two[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) two[i] = cuda::e4m3_of_floats(of.e4m3(x[2 * i]), of.e4m3(x[2 * i + 1]));
  return {two[0] | two[1] << 16, two[2] | two[3] << 16};
}

template <int Bits>  // 0 = e4m3
__device__ __forceinline__ EightCodes codes_of(const float (&x)[8], const SharedScale& of) {
  if constexpr (Bits == 0)
    return e4m3_codes(x, of);
  else
    return integer_codes<Bits>(x, of);
}

// ops::lowered of all codes of 16 bytes, in order: 8 bytes from 8 bits to 4 or from 4 to 2, else 4 bytes.
template <int From, int To>
struct Lowered {
  static constexpr int bytes = 16 * To / From;
  unsigned word[bytes / 4];

  __device__ __forceinline__ explicit Lowered(uint4 codes) {
    const unsigned from[4] = {codes.x, codes.y, codes.z, codes.w};
    unsigned part[4];  // of each word, in its low bits
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = lower(from[i]);
#pragma unroll
    for (int w = 0; w < bytes / 4; ++w) {
      constexpr int parts = 16 / bytes, bits = 32 / parts;
      word[w] = 0;
#pragma unroll
      for (int i = 0; i < parts; ++i) word[w] |= part[w * parts + i] << i * bits;
    }
  }

 private:
  // The quotient of a small number is a product and a shift, in lanes that hold the product.
  static __device__ __forceinline__ unsigned lower(unsigned w) {
    if constexpr (From == 4) {  // (code + 2) / 5 = (code + 2) * 13 >> 6 up to 17, in 8 bits
      const auto nibbles = [](unsigned x) { return ((x & 0x0f0f0f0fu) + 0x02020202u) * 13 >> 6 & 0x03030303u; };
      const unsigned low = nibbles(w) | nibbles(w >> 4) << 2;  // four bits in each byte
      const unsigned pairs = (low | low >> 4) & 0x00ff00ffu;
      return (pairs | pairs >> 8) & 0xffffu;
    } else {
      // (code + 8) / 17 = (code + 8) * 241 >> 12 and (code + 42) / 85 = (code + 42) * 193 >> 14, in 16 bits
      constexpr unsigned add = To == 4 ? 0x00080008u : 0x002a002au, factor = To == 4 ? 241 : 193;
      constexpr unsigned shift = To == 4 ? 12 : 14, mask = To == 4 ? 0x000f000fu : 0x00030003u;
      const auto bytes_of = [](unsigned x) { return ((x & 0x00ff00ffu) + add) * factor >> shift & mask; };
      const unsigned pairs = bytes_of(w) | bytes_of(w >> 8) << To;
      return (pairs | pairs >> (16 - 2 * To)) & ((1u << 4 * To) - 1);
    }
  }
};

}  // namespace kvlab::ops
