#include "model/quants.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <random>
#include <vector>

#include "base/half.hpp"
using namespace kvlab;

namespace {

// IEEE half precision by its definition.
double half(unsigned bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

using Block = std::vector<unsigned char>;
double half_at(const Block& b, std::size_t at) { return half(b[at] | b[at + 1] << 8); }

// Bit `i` of a little-endian field that begins at byte `at`.
int bit(const Block& b, std::size_t at, std::size_t i) { return b[at + i / 8] >> (i % 8) & 1; }
int nibble(const Block& b, std::size_t at, bool high) { return high ? b[at] / 16 : b[at] % 16; }

// Element e of a block, by the formats' descriptions.
double element(StoredType type, const Block& b, std::size_t e) {
  const std::size_t low = e % 16;
  switch (type) {
    case StoredType::q8_0: return half_at(b, 0) * (b[2 + e] < 128 ? b[2 + e] : b[2 + e] - 256);
    case StoredType::q4_0: return half_at(b, 0) * (nibble(b, 2 + low, e >= 16) - 8);
    case StoredType::q4_1: return half_at(b, 0) * nibble(b, 4 + low, e >= 16) + half_at(b, 2);
    case StoredType::q5_0: return half_at(b, 0) * (nibble(b, 6 + low, e >= 16) + 16 * bit(b, 2, e) - 16);
    case StoredType::q5_1: return half_at(b, 0) * (nibble(b, 8 + low, e >= 16) + 16 * bit(b, 4, e)) + half_at(b, 2);
    case StoredType::q4_k:
    case StoredType::q5_k: {
      const std::size_t j = e / 32;
      int scale, min;
      if (j < 4) {
        scale = b[4 + j] % 64, min = b[8 + j] % 64;
      } else {
        scale = b[8 + j] % 16 + b[j] / 64 * 16;
        min = b[8 + j] / 16 + b[4 + j] / 64 * 16;
      }
      const bool five = type == StoredType::q5_k;
      int q = nibble(b, (five ? 48 : 16) + e / 64 * 32 + e % 32, j % 2 == 1);
      if (five) q += 16 * (b[16 + e % 32] >> j & 1);
      return half_at(b, 0) * scale * q - half_at(b, 2) * min;
    }
    case StoredType::q6_k: {
      const std::size_t part = e / 128, in = e % 128, run = in / 32, l = in % 32;
      const int q = nibble(b, part * 64 + in % 64, run >= 2) + 16 * (b[128 + part * 32 + l] >> (2 * run) & 3);
      const int scale = b[192 + e / 16] < 128 ? b[192 + e / 16] : b[192 + e / 16] - 256;
      return half_at(b, 208) * scale * (q - 32);
    }
    default: return NAN;
  }
}

}  // namespace

TEST_CASE("half precision converts exactly, subnormals and infinities too") {
  CHECK(half_to_float(0x3c00) == 1.0f);
  CHECK(half_to_float(0xc000) == -2.0f);
  CHECK(half_to_float(0x0001) == 0x1p-24f);
  CHECK(half_to_float(0x7bff) == 65504.0f);
  CHECK(std::isinf(half_to_float(0x7c00)));
  CHECK(std::isnan(half_to_float(0x7e00)));
  CHECK(std::signbit(half_to_float(0x8000)));
  for (unsigned bits = 0; bits < 0x7c00; ++bits)
    REQUIRE(double{half_to_float(static_cast<std::uint16_t>(bits))} == half(bits));
}

TEST_CASE("a block worked out by hand") {
  // Q4_1: scale 0.5, minimum -1; byte 0 = 0x73: element 0 is 3 * 0.5 - 1, element 16 is 7 * 0.5 - 1.
  std::vector<std::byte> block(20);
  block[1] = std::byte{0x38}, block[3] = std::byte{0xbc}, block[4] = std::byte{0x73};
  std::vector<float> out(32);
  dequantize(StoredType::q4_1, block.data(), 32, out.data());
  CHECK(out[0] == 0.5f);
  CHECK(out[16] == 2.5f);
  CHECK(out[1] == -1.0f);
}

TEST_CASE("every block format agrees with its description on random blocks") {
  std::mt19937 random(7);
  for (const StoredType type : {StoredType::q8_0, StoredType::q4_0, StoredType::q4_1, StoredType::q5_0,
                                StoredType::q5_1, StoredType::q4_k, StoredType::q5_k, StoredType::q6_k}) {
    const BlockShape shape = block_of(type);
    const int blocks = 20;
    Block bytes(static_cast<std::size_t>(shape.bytes * blocks));
    for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
    const auto tame = [&](std::size_t at) {
      bytes[at + 1] = static_cast<unsigned char>((bytes[at + 1] & 0x83) | 0x30);
    };
    for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(shape.bytes)) {
      if (type == StoredType::q6_k)
        tame(at + 208);
      else
        tame(at), tame(at + 2);  // bytes at + 2 are a minimum or free values
    }
    std::vector<float> out(static_cast<std::size_t>(shape.elements * blocks));
    dequantize(type, reinterpret_cast<const std::byte*>(bytes.data()), static_cast<std::int64_t>(out.size()),
               out.data());
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto per = static_cast<std::size_t>(shape.elements), size = static_cast<std::size_t>(shape.bytes);
      const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(i / per * size);
      const double want = element(type, Block(begin, begin + shape.bytes), i % per);
      INFO(name_of(type) << " element " << i);
      REQUIRE(out[i] == Approx(want).epsilon(1e-5).margin(1e-4));
    }
  }
}
