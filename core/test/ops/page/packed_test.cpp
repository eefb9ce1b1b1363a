#include <kvlab/error.hpp>

#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "ops/page/packed.hpp"
#include "ops/page/paged.hpp"

using namespace kvlab;

namespace {

PageLayout layout(int page_size, int head_dim) { return ops::make_layout(DType::bf16, {}, page_size, head_dim, 0); }

// A frame whose keys and values come from key(i) and value(i), bits of bf16. All else in it is random.
template <class Key, class Value>
std::vector<std::byte> frame_of(const PageLayout& l, const Key& key, const Value& value) {
  std::mt19937 random(1);
  std::vector<std::byte> frame(static_cast<std::size_t>(l.bytes));
  for (std::byte& b : frame) b = static_cast<std::byte>(random());
  for (int i = 0; i < l.page_size * l.head_dim; ++i) {
    const auto k = static_cast<std::uint16_t>(key(i)), v = static_cast<std::uint16_t>(value(i));
    std::memcpy(frame.data() + l.k + 2 * i, &k, 2);
    std::memcpy(frame.data() + l.v + 2 * i, &v, 2);
  }
  return frame;
}

std::uint16_t bits_of(float x) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16); }

// Packs and unpacks a frame; checks that numbers and what follows them come back. Returns the units.
int round_trip(const PageLayout& l, const std::vector<std::byte>& frame) {
  std::vector<std::byte> packed(frame.size(), std::byte{0xaa}), back(frame.size(), std::byte{0x55});
  const int units = ops::pack_page(frame.data(), l, packed.data());
  if (units == 0) return 0;
  PageEntry e;
  e.packed = static_cast<std::uint8_t>(units);
  CHECK(units < 256);
  CHECK(ops::packed_bytes(l, e) < l.bytes);
  packed.resize(static_cast<std::size_t>(ops::packed_bytes(l, e)));  // no byte behind them is read
  ops::unpack_page(packed.data(), l, back.data());
  const auto side = static_cast<std::size_t>(l.page_size) * static_cast<std::size_t>(l.head_dim) * 2;
  CHECK(std::memcmp(back.data() + l.k, frame.data() + l.k, side) == 0);
  CHECK(std::memcmp(back.data() + l.v, frame.data() + l.v, side) == 0);
  CHECK(std::memcmp(back.data() + l.positions, frame.data() + l.positions,
                    static_cast<std::size_t>(l.bytes - l.positions)) == 0);
  return units;
}

}  // namespace

TEST_CASE("packed pages: the bytes of a small page by hand") {
  const PageLayout l = layout(2, 8);
  REQUIRE(l.bytes == 256);
  REQUIRE(l.positions == 128);
  // Exponents: 127 of 1, 128 of -2.5, 0 of 0; 120 of the values 2^-7.
  const auto frame = frame_of(
      l, [](int i) { return bits_of(i == 3   ? -2.5f
                                    : i == 9 ? 0.f
                                             : 1.f); }, [](int) { return bits_of(0x1.2p-7f); });
  std::vector<std::byte> packed(256);
  // 128 bytes behind the numbers, 16 of the head, 32 of signs and mantissas, 8 and 4 of codes, one exponent: 189.
  CHECK(ops::packed_unit(l) == 16);
  REQUIRE(ops::pack_page(frame.data(), l, packed.data()) == 12);
  const auto at = [&](int i) { return std::to_integer<int>(packed[static_cast<std::size_t>(i)]); };
  CHECK(std::memcmp(packed.data(), frame.data() + 128, 128) == 0);
  CHECK(at(128) == 128);  // the base of keys: codes 1 of 127, 0 of 128
  CHECK(at(129) == 120);
  for (int i = 0; i < 8; ++i) CHECK(at(130 + i) == (i == 2));  // one exponent, of the second half of the keys
  for (int i = 0; i < 16; ++i) CHECK(at(144 + i) == (i == 3 ? 0xa0 : 0));  // -2.5 = -1.25 * 2: mantissa 0x20
  for (int i = 0; i < 16; ++i) CHECK(at(160 + i) == 0x10);                 // 1.125: mantissa 0x10
  // Low bits of the keys' codes: 1 but for number 3, whose code is 0, and number 9, whose code is 7.
  const int low[] = {0b00010101, 0b01010101, 0b01011101, 0b01010101};
  for (int i = 0; i < 4; ++i) CHECK(at(176 + i) == low[i]);
  for (int i = 0; i < 4; ++i) CHECK(at(180 + i) == 0);
  CHECK(at(184) == 0);
  CHECK(at(185) == 0b10);  // number 9
  CHECK(at(186) == 0);
  CHECK(at(187) == 0);
  CHECK(at(188) == 0);  // the exponent of 0
  round_trip(l, frame);
}

TEST_CASE("packed pages: bits come back, whatever the numbers") {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const auto& [page_size, head_dim] : {std::pair{1, 8}, {3, 24}, {8, 64}, {16, 128}, {32, 128}, {64, 256}}) {
    const PageLayout l = layout(page_size, head_dim);
    CAPTURE(page_size, head_dim);
    const auto gauss = [&](int) { return bits_of(normal(random)); };
    const int units = round_trip(l, frame_of(l, gauss, gauss));
    if (page_size >= 16) CHECK(static_cast<double>(units * ops::packed_unit(l)) < 0.73 * static_cast<double>(l.bytes));
    // Keys with a channel 64 times as large as others: the base does not follow it.
    const auto loud = [&, dim = head_dim](int i) { return bits_of((i % dim == 5 ? 64.f : 1.f) * normal(random)); };
    const int of_loud = round_trip(l, frame_of(l, loud, gauss));
    if (page_size >= 16)
      CHECK(static_cast<double>(of_loud * ops::packed_unit(l)) < 0.76 * static_cast<double>(l.bytes));
    round_trip(l, frame_of(
                      l, [](int) { return 0; }, [](int i) { return i % 2 ? 0x8000 : 0; }));
    round_trip(l, frame_of(
                      l, [](int i) { return i % 7 ? 0x7f80 : 0xffc1; }, [](int i) { return 0x0001 + i % 3; }));
    round_trip(l, frame_of(
                      l, [&](int i) { return bits_of(std::ldexp(1.f, i % 7)); }, gauss));
    const auto noise = [&](int) { return static_cast<int>(random() & 0xffffu); };
    if (page_size >= 16) CHECK(round_trip(l, frame_of(l, noise, noise)) == 0);
    round_trip(l, frame_of(l, noise, gauss));
  }
}

TEST_CASE("packed pages: what cannot be packed is refused") {
  const auto refused = [](const PageLayout& l, const char* what) {
    CHECK_THROWS_WITH(ops::check_packable(l), Catch::Contains(what));
  };
  ops::check_packable(layout(16, 128));
  refused(ops::make_layout(DType::f32, {}, 16, 128, 0), "bf16");
  refused(ops::make_layout(DType::bf16, {{8}, {}}, 16, 128, 0), "codes");
  refused(ops::make_layout(DType::bf16, {}, 16, 128, 1), "token state");
  refused(layout(256, 256), "page_size");
}
