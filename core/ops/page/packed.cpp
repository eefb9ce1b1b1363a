#include "ops/page/packed.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <array>
#include <cstring>

namespace kvlab::ops {
namespace {

std::uint16_t number_at(const std::byte* side, std::int64_t i) {
  std::uint16_t x;
  std::memcpy(&x, side + 2 * i, sizeof x);
  return x;
}
unsigned exponent_of(std::uint16_t x) { return x >> 7 & 0xffu; }

// The base that gives most exponents a code; the greatest of several.
unsigned base_of(const std::byte* side, std::int64_t numbers) {
  std::array<std::int64_t, 256> count{};
  for (std::int64_t i = 0; i < numbers; ++i) ++count[exponent_of(number_at(side, i))];
  int most = 255;
  while (count[static_cast<std::size_t>(most)] == 0) --most;
  int best = most;
  std::int64_t best_coded = -1;
  for (int base = most; base > most - packed_bases && base >= 0; --base) {
    std::int64_t coded = 0;
    for (int e = base; e > base - int{packed_escape} && e >= 0; --e) coded += count[static_cast<std::size_t>(e)];
    if (coded > best_coded) best = base, best_coded = coded;
  }
  return static_cast<unsigned>(std::max(best, int{packed_escape} - 1));
}

void set_bits(std::byte* at, std::int64_t bit, unsigned bits) {
  at[bit / 8] |= static_cast<std::byte>(bits << bit % 8);
}
unsigned bits_at(const std::byte* at, std::int64_t bit) { return static_cast<unsigned>(at[bit / 8]) >> bit % 8; }

}  // namespace

void check_packable(const PageLayout& l) {
  const auto refuse = [](const char* got) {
    throw Error(Errc::unsupported, std::string("got a codec that packs pages on the host with ") + got, "the cache");
  };
  if (l.dtype != DType::bf16) refuse("numbers that are not bf16, wanted dtype: bf16");
  if (l.codec.k.bits || l.codec.v.bits) refuse("codes, wanted keys and values in bf16");
  if (l.state_columns > 0) refuse("token state, wanted a method without it");
  if (l.bytes > most_packable) refuse("pages of more than 95 KiB, wanted a smaller page_size");
}

int pack_page(const std::byte* frame, const PageLayout& l, std::byte* to) {
  const PackedPlaces at(l);
  std::fill(to, to + at.exponents, std::byte{});
  std::memcpy(to, frame + l.positions, static_cast<std::size_t>(at.tail));
  PackedHead head;
  std::int64_t escaped = 0;
  for (int s = 0; s < 2; ++s) {
    const std::byte* side = frame + (s == 0 ? l.k : l.v);
    const unsigned base = base_of(side, at.numbers);
    head.base[s] = static_cast<std::uint8_t>(base);
    for (std::int64_t i = 0; i < at.numbers; ++i) {
      const std::uint16_t x = number_at(side, i);
      const unsigned e = exponent_of(x), code = std::min(base - e, packed_escape);  // below 0 wraps around
      to[at.rest[s] + i] = static_cast<std::byte>((x >> 8 & 0x80u) | (x & 0x7fu));
      set_bits(to + at.low[s], 2 * i, code & 3u);
      set_bits(to + at.high[s], i, code >> 2);
      if (code != packed_escape) continue;
      if (packed_units(l, escaped + 1) == 0) return 0;
      to[at.exponents + escaped++] = static_cast<std::byte>(e);
      ++head.escaped[2 * s + (i < at.half ? 0 : 1)];
    }
  }
  std::memcpy(to + at.tail, &head, sizeof head);
  const int units = packed_units(l, escaped);
  std::fill(to + at.exponents + escaped, to + std::max(at.exponents + escaped, units * packed_unit(l)), std::byte{});
  return units;
}

void unpack_page(const std::byte* packed, const PageLayout& l, std::byte* frame) {
  const PackedPlaces at(l);
  PackedHead head;
  std::memcpy(&head, packed + at.tail, sizeof head);
  std::memcpy(frame + l.positions, packed, static_cast<std::size_t>(at.tail));
  const std::byte* exponent = packed + at.exponents;
  for (int s = 0; s < 2; ++s) {
    std::byte* side = frame + (s == 0 ? l.k : l.v);
    for (std::int64_t i = 0; i < at.numbers; ++i) {
      const unsigned rest = static_cast<unsigned>(packed[at.rest[s] + i]);
      const unsigned code = (bits_at(packed + at.low[s], 2 * i) & 3u) | (bits_at(packed + at.high[s], i) & 1u) << 2;
      const unsigned e = code == packed_escape ? static_cast<unsigned>(*exponent++) : head.base[s] - code;
      const auto x = static_cast<std::uint16_t>((rest & 0x80u) << 8 | e << 7 | (rest & 0x7fu));
      std::memcpy(side + 2 * i, &x, sizeof x);
    }
  }
}

}  // namespace kvlab::ops
