// Pages of bf16 packed without loss, for the link between tiers. The exponents of a page's keys, or of its values, lie
// close together: most of them take 3 bits instead of 8. Sign and mantissa stay as they are.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>

namespace kvlab::ops {

// An exponent e has the code base - e, if that is below 7. Otherwise its code is 7, and e itself follows in a list.
inline constexpr unsigned packed_escape = 7;
// The base is one of the greatest exponents of its side: the largest, or up to so many below. It is 6 at least.
inline constexpr int packed_bases = 10;

struct PackedHead {
  std::uint8_t base[2] = {};      // of keys, of values
  std::uint16_t escaped[4] = {};  // exponents of their own in each half of the keys, and of the values
  std::uint16_t unused[3] = {};
};
static_assert(sizeof(PackedHead) == 16);

// Byte offsets in a packed frame. First comes what a plain frame has behind K and V, then a PackedHead. `rest` has a
// byte for each number: sign and mantissa. `low` and `high` have 2 bits and 1 bit of its code. Numbers of a side are in
// the order of its rows, little end first. Exponents of their own end the page, those of keys first.
struct PackedPlaces {
  std::int64_t numbers = 0;  // of a side; a multiple of 8
  std::int64_t half = 0;     // numbers of a side's first half; another multiple
  std::int64_t tail = 0;     // bytes behind K and V
  std::int64_t rest[2] = {}, low[2] = {}, high[2] = {}, exponents = 0;

  constexpr explicit PackedPlaces(const PageLayout& l)
      : numbers(std::int64_t{l.page_size} * l.head_dim), half((numbers / 8 + 1) / 2 * 8), tail(l.bytes - l.positions) {
    std::int64_t at = tail + std::int64_t{sizeof(PackedHead)};
    for (std::int64_t& side : rest) side = at, at += numbers;
    for (std::int64_t& side : low) side = at, at += numbers / 4;
    for (std::int64_t& side : high) side = at, at += numbers / 8;
    exponents = at;
  }
};

// Bytes that PageEntry::packed counts in; 16 divides them.
constexpr std::int64_t packed_unit(const PageLayout& l) { return 16 * ((l.bytes / 16 + 254) / 255); }
constexpr std::int64_t packed_bytes(const PageLayout& l, const PageEntry& e) {
  return e.packed ? e.packed * packed_unit(l) : l.bytes;
}
// Units of a page with so many exponents of their own; 0 = packing it saves nothing.
constexpr int packed_units(const PageLayout& l, std::int64_t escaped) {
  const std::int64_t unit = packed_unit(l), units = (PackedPlaces(l).exponents + escaped + unit - 1) / unit;
  return units * unit < l.bytes ? static_cast<int>(units) : 0;
}
// Where the text positions of a page's tokens lie.
constexpr std::int64_t positions_of(const PageLayout& l, const PageEntry& e) { return e.packed ? 0 : l.positions; }

// Bytes of a page. Two fit into a multiprocessor's shared memory.
inline constexpr std::int64_t most_packable = 95 << 10;
// Errc::unsupported for a layout whose pages are not packed: other numbers than bf16, codes, token state.
void check_packable(const PageLayout& l);
// Packs a full page into `to`, which has room for a plain one and does not overlap it. Returns its units; 0 = it packs
// badly, and `to` holds nothing.
int pack_page(const std::byte* frame, const PageLayout& l, std::byte* to);
void unpack_page(const std::byte* packed, const PageLayout& l, std::byte* frame);

}  // namespace kvlab::ops
