// IEEE half precision, as 16 bits in memory.
#pragma once
#include <cstdint>
#include <cstring>

namespace kvlab {

inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t{h & 0x8000u} << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  std::uint32_t u;
  if (exponent == 0) {  // zero and subnormal: mantissa * 2^-24 is exact in f32
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&u, &value, 4);
    u |= sign;
  } else if (exponent == 31) {
    u = sign | 0x7f800000u | (mantissa << 13);
  } else {
    u = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  }
  float value;
  std::memcpy(&value, &u, 4);
  return value;
}

// Rounds to nearest even; a magnitude of 65520 or more becomes infinity, NaN stays NaN.
inline std::uint16_t float_to_half(float value) {
  std::uint32_t u;
  std::memcpy(&u, &value, 4);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (u >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (u < 0x38800000u) {  // below 2^-14: adding 0.5 leaves round(value * 2^24) in the low bits
    float magnitude;
    std::memcpy(&magnitude, &u, 4);
    magnitude += 0.5f;
    std::uint32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<std::uint16_t>(sign | (bits - 0x3f000000u));
  }
  const std::uint32_t rounded = u + 0xfffu + ((u >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

}  // namespace kvlab
