#include "model/quants.hpp"

#include <bit>
#include <cstring>

#include "base/half.hpp"

namespace kvlab {
namespace {

// A block's fields are read byte by byte: blocks lie in files at any alignment.
std::uint8_t u8(const std::byte* p) { return static_cast<std::uint8_t>(*p); }

float half_at(const std::byte* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, 2);
  return half_to_float(bits);
}

std::uint32_t u32_at(const std::byte* p) {
  std::uint32_t bits;
  std::memcpy(&bits, p, 4);
  return bits;
}

int nibble(const std::byte* quants, int i) {  // 32 values in 16 bytes: the first 16 are the low halves
  return i < 16 ? u8(quants + i) & 15 : u8(quants + i - 16) >> 4;
}

void q8_0(const std::byte* b, float* out) {
  const float d = half_at(b);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<std::int8_t>(u8(b + 2 + i)));
}

void q4_0(const std::byte* b, float* out) {
  const float d = half_at(b);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(nibble(b + 2, i) - 8);
}

void q4_1(const std::byte* b, float* out) {
  const float d = half_at(b), m = half_at(b + 2);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(nibble(b + 4, i)) + m;
}

void q5_0(const std::byte* b, float* out) {
  const float d = half_at(b);
  const std::uint32_t high = u32_at(b + 2);
  for (int i = 0; i < 32; ++i) {
    const int q = nibble(b + 6, i) | static_cast<int>((high >> i) & 1u) << 4;
    out[i] = d * static_cast<float>(q - 16);
  }
}

void q5_1(const std::byte* b, float* out) {
  const float d = half_at(b), m = half_at(b + 2);
  const std::uint32_t high = u32_at(b + 4);
  for (int i = 0; i < 32; ++i) {
    const int q = nibble(b + 8, i) | static_cast<int>((high >> i) & 1u) << 4;
    out[i] = d * static_cast<float>(q) + m;
  }
}

// Each of 8 sub-blocks of 32 has a 6-bit scale and a 6-bit minimum, packed in 12 bytes. The low six bits of bytes 0-7
// are the first four scales and minima. The nibbles of bytes 8-11 and the top bits of bytes 0-7 are the last four.
struct ScaleMin {
  int scale, min;
};
ScaleMin scale_min(const std::byte* s, int j) {
  if (j < 4) return {u8(s + j) & 63, u8(s + j + 4) & 63};
  return {(u8(s + j + 4) & 15) | (u8(s + j - 4) >> 6) << 4, (u8(s + j + 4) >> 4) | (u8(s + j) >> 6) << 4};
}

// Value `in` of sub-block `j`: two neighbouring sub-blocks share 32 bytes, low halves first.
int k_nibble(const std::byte* quants, int j, int in) {
  const std::uint8_t pair = u8(quants + (j / 2) * 32 + in);
  return j % 2 == 0 ? pair & 15 : pair >> 4;
}

void q4_k(const std::byte* b, float* out) {
  const float d = half_at(b), dmin = half_at(b + 2);
  for (int j = 0; j < 8; ++j) {
    const ScaleMin s = scale_min(b + 4, j);
    const float scale = d * static_cast<float>(s.scale), low = dmin * static_cast<float>(s.min);
    for (int i = 0; i < 32; ++i) *out++ = scale * static_cast<float>(k_nibble(b + 16, j, i)) - low;
  }
}

void q5_k(const std::byte* b, float* out) {
  const float d = half_at(b), dmin = half_at(b + 2);
  for (int j = 0; j < 8; ++j) {
    const ScaleMin s = scale_min(b + 4, j);
    const float scale = d * static_cast<float>(s.scale), low = dmin * static_cast<float>(s.min);
    for (int i = 0; i < 32; ++i) {
      const int q = k_nibble(b + 48, j, i) | ((u8(b + 16 + i) >> j) & 1) << 4;
      *out++ = scale * static_cast<float>(q) - low;
    }
  }
}

// In each half of 128 values, four runs of 32 share 64 bytes of low nibbles and 32 bytes of high pairs of bits.
void q6_k(const std::byte* b, float* out) {
  const float d = half_at(b + 208);
  for (int half = 0; half < 2; ++half)
    for (int run = 0; run < 4; ++run)
      for (int i = 0; i < 32; ++i) {
        const std::uint8_t low = u8(b + half * 64 + (run % 2) * 32 + i);
        const std::uint8_t high = u8(b + 128 + half * 32 + i);
        const int q = (run < 2 ? low & 15 : low >> 4) | ((high >> (2 * run)) & 3) << 4;
        const auto scale = static_cast<std::int8_t>(u8(b + 192 + half * 8 + run * 2 + i / 16));
        *out++ = d * static_cast<float>(scale) * static_cast<float>(q - 32);
      }
}

using Decode = void (*)(const std::byte*, float*);
Decode decoder_of(StoredType type) {
  switch (type) {
    case StoredType::q8_0: return q8_0;
    case StoredType::q4_0: return q4_0;
    case StoredType::q4_1: return q4_1;
    case StoredType::q5_0: return q5_0;
    case StoredType::q5_1: return q5_1;
    case StoredType::q4_k: return q4_k;
    case StoredType::q5_k: return q5_k;
    case StoredType::q6_k: return q6_k;
    default: return nullptr;
  }
}

}  // namespace

BlockShape block_of(StoredType type) {
  switch (type) {
    case StoredType::f32: return {1, 4};
    case StoredType::f16:
    case StoredType::bf16: return {1, 2};
    case StoredType::q8_0: return {32, 34};
    case StoredType::q4_0: return {32, 18};
    case StoredType::q4_1: return {32, 20};
    case StoredType::q5_0: return {32, 22};
    case StoredType::q5_1: return {32, 24};
    case StoredType::q4_k: return {256, 144};
    case StoredType::q5_k: return {256, 176};
    case StoredType::q6_k: return {256, 210};
  }
  return {1, 1};
}

const char* name_of(StoredType type) {
  switch (type) {
    case StoredType::f32: return "f32";
    case StoredType::f16: return "f16";
    case StoredType::bf16: return "bf16";
    case StoredType::q8_0: return "q8_0";
    case StoredType::q4_0: return "q4_0";
    case StoredType::q4_1: return "q4_1";
    case StoredType::q5_0: return "q5_0";
    case StoredType::q5_1: return "q5_1";
    case StoredType::q4_k: return "q4_k";
    case StoredType::q5_k: return "q5_k";
    case StoredType::q6_k: return "q6_k";
  }
  return "?";
}

void dequantize(StoredType type, const std::byte* blocks, std::int64_t count, float* out) {
  switch (type) {
    case StoredType::f32: std::memcpy(out, blocks, static_cast<std::size_t>(count) * 4); return;
    case StoredType::f16:
      for (std::int64_t i = 0; i < count; ++i) out[i] = half_at(blocks + 2 * i);
      return;
    case StoredType::bf16:
      for (std::int64_t i = 0; i < count; ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, blocks + 2 * i, 2);
        out[i] = std::bit_cast<float>(std::uint32_t{bits} << 16);
      }
      return;
    default: break;
  }
  const BlockShape shape = block_of(type);
  const Decode decode = decoder_of(type);
  for (std::int64_t done = 0; done < count; done += shape.elements, blocks += shape.bytes) decode(blocks, out + done);
}

}  // namespace kvlab
