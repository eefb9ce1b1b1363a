// Codes of stored rows (CodecSide) in CPU code and in kernels. Both get the same bits.
#pragma once
#include <kvlab/kv.hpp>

#include <bit>
#include <cstdint>
#include <limits>

namespace kvlab::ops {

// Bytes of one token's K or V.
constexpr std::int64_t row_bytes(CodecSide side, DType dtype, int head_dim) {
  return side.bits ? std::int64_t{head_dim} * side.bits / 8 : head_dim * static_cast<std::int64_t>(size_of(dtype));
}

// One side of a layout: its format, the bytes of a token's row, and where row and metadata of the token at `offset`
// lie.
constexpr CodecSide side_of(const PageLayout& l, bool key) { return key ? l.codec.k : l.codec.v; }
constexpr std::int64_t row_bytes(const PageLayout& l, bool key) {
  return row_bytes(side_of(l, key), l.dtype, l.head_dim);
}
constexpr std::int64_t row_offset(const PageLayout& l, bool key, int offset) {
  return (key ? l.k : l.v) + offset * row_bytes(l, key);
}

// Numbers that share a scale.
constexpr int group_of(CodecSide side, int page_size, int head_dim) {
  if (side.group) return side.group;
  return side.axis == CodeAxis::channel ? page_size : head_dim;
}
constexpr std::int64_t meta_offset(const PageLayout& l, bool key, int offset) {  // of a side that is not grouped
  return (key ? l.k_meta : l.v_meta) + std::int64_t{offset} * 4;
}
constexpr std::int64_t meta_offset(const PageLayout& l, bool key, int offset, int d) {
  const CodecSide side = side_of(l, key);
  const int group = group_of(side, l.page_size, l.head_dim);
  const int at =
      side.axis == CodeAxis::channel ? offset / group * l.head_dim + d : offset * (l.head_dim / group) + d / group;
  return (key ? l.k_meta : l.v_meta) + std::int64_t{at} * 4;
}

constexpr int most_code(int bits) { return (1 << bits) - 1; }

// The e4m3 number nearest to x, ties to even. It saturates; NaN stays NaN. Without branches, so that loops are vectors.
constexpr std::uint8_t to_e4m3(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = u >> 24 & 0x80u, size = u & 0x7fffffffu, within = size < 0x43e00000u ? size : 0x43e00000u;
  const std::uint32_t rounded = (within + 0x7ffffu + (within >> 20 & 1u)) >> 20;
  // Below 2^-6 the sum with 2^14 leaves round(x * 2^9) in the low bits.
  const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(within) + 0x1p14f);
  const std::uint32_t code = within < 0x3c800000u ? small & 0xfu : rounded - (120u << 3);
  return static_cast<std::uint8_t>(size > 0x7f800000u ? 0x7fu : sign | code);
}

constexpr float from_e4m3(std::uint32_t code) {
  const std::uint32_t size = code & 0x7fu, nan = size == 0x7fu ? 0x7fc00000u : 0u;
  // The product moves the exponent. It is exact, also for subnormals.
  const auto exact = std::bit_cast<std::uint32_t>(std::bit_cast<float>(size << 20) * 0x1p120f);
  return std::bit_cast<float>(exact | nan | (code & 0x80u) << 24);
}

// Scale and zero of a token's side, not yet rounded to f16. min and max leave NaN out; min > max if all are NaN.
struct CodeScale {
  float scale = 0, zero = 0;
};
constexpr CodeScale code_scale(CodecSide side, float min, float max) {
  constexpr float most = 65504;  // of f16
  if (!(min <= max)) return {};
  const auto within = [](float x) { return x < -most ? -most : x < most ? x : most; };
  // The sums turn -0 into 0: which of both a minimum is depends on the order.
  if (side.kind == CodeKind::e4m3) return {within((-min < max ? max : -min) / 448.f) + 0.f, 0};
  const auto most_of = static_cast<float>(most_code(side.bits));
  if (side.kind == CodeKind::whole_zero) {
    constexpr float least_range = 1e-5f, shift = 0x1.8p23f;  // a sum with the shift rounds to a whole number
    const float range = max - min > least_range ? max - min : least_range, scale = within(range / most_of);
    const float below = -min / scale, above = below > 0 ? below : 0, z = (above < most_of ? above : most_of) + shift;
    return {scale, within(-scale * (z - shift)) + 0.f};
  }
  return {min < max ? within((max - min) / most_of) : 0, within(min) + 0.f};
}

// Code of a number in units of the scale. An integer rounds to the nearest, ties to even, and NaN is 0.
constexpr std::uint32_t nearest_code(CodecSide side, float y) {
  if (side.kind == CodeKind::e4m3) return to_e4m3(y);
  const auto most = static_cast<float>(most_code(side.bits));
  const float above = y > 0.f ? y : 0.f;
  return std::bit_cast<std::uint32_t>((above < most ? above : most) + 0x1.8p23f) & 0xffu;
}
// Code of x, whose scale and zero are those of f16.
constexpr std::uint32_t code_of(CodecSide side, float x, CodeScale of) {
  return nearest_code(side, of.scale > 0 ? (x - of.zero) / of.scale : x != x ? x : 0.f);
}

// What a code counts, in units of the scale.
constexpr float value_of(CodecSide side, std::uint32_t code) {
  return side.kind == CodeKind::e4m3 ? from_e4m3(code) : static_cast<float>(code);
}

// How many units of `from` one of `to` is: 17 from 8 bits to 4, 5 from 4 to 2. 0 = codes do not become codes.
constexpr int code_ratio(CodecSide from, CodecSide to) {
  if (from.grouped() || to.grouped()) return 0;
  const bool lowers = to.bits && from.bits > to.bits && from.kind == CodeKind::integer && to.kind == CodeKind::integer;
  return lowers ? most_code(from.bits) / most_code(to.bits) : 0;
}
// Such a code: the nearest one. There are no ties, because the ratio is odd.
constexpr std::uint32_t lowered(std::uint32_t code, int ratio) {
  return (code + static_cast<std::uint32_t>(ratio) / 2) / static_cast<std::uint32_t>(ratio);
}
// Its scale, not yet rounded to f16.
constexpr float lowered_scale(float scale, int ratio) {
  const float x = scale * static_cast<float>(ratio);
  return x < 65504 ? x : 65504;
}

// Element d of a row of codes.
constexpr std::uint32_t code_at(CodecSide side, const std::byte* row, int d) {
  const int at = d * side.bits;
  return static_cast<std::uint32_t>(row[at >> 3]) >> (at & 7) & static_cast<std::uint32_t>(most_code(side.bits));
}

}  // namespace kvlab::ops
