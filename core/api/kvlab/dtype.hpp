// Element types and where memory lives.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvlab {

enum class DType : std::uint8_t { f32, f16, bf16, i32, i64, u8 };
enum class Device : std::uint8_t { cpu, cuda };

// Brain float: the upper half of an IEEE f32. Conversion from f32 rounds to nearest even; NaN stays NaN.
struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float value) {
    std::uint32_t u;
    std::memcpy(&u, &value, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u)
      bits = static_cast<std::uint16_t>((u >> 16) | 0x40u);
    else
      bits = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    const std::uint32_t u = std::uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &u, 4);
    return value;
  }
};

constexpr const char* name_of(Device d) { return d == Device::cpu ? "cpu" : "cuda"; }

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::i64: return 8;
    case DType::u8: return 1;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
  }
  return "?";
}

}  // namespace kvlab
