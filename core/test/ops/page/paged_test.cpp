#include "ops/page/paged.hpp"
#include "ops/page/reference.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <random>

#include "base/half.hpp"
#include "cases/paged_fixture.hpp"
#include "ops/page/codes.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

const CodecSpec int8{{8}, {8}};

struct Page {
  PageLayout layout;
  std::vector<std::byte> frame;
  Page(DType dtype, CodecSpec codec, int page_size, int dim, int columns)
      : layout(ops::make_layout(dtype, codec, page_size, dim, columns)), frame(layout.bytes, std::byte{0xEE}) {}
  std::vector<float> row(KvSide side, int offset) const {
    std::vector<float> x(layout.head_dim);
    ops::read_row(frame.data(), layout, side, offset, x.data());
    return x;
  }
};

std::vector<float> ramp(int n, float from, float step) {
  std::vector<float> x(n);
  for (int i = 0; i < n; ++i) x[i] = from + step * static_cast<float>(i);
  return x;
}

}  // namespace

TEST_CASE("half precision: known bit patterns, ties to even, limits") {
  const std::pair<float, std::uint16_t> exact[] = {{1.f, 0x3c00},
                                                   {-2.f, 0xc000},
                                                   {65504.f, 0x7bff},
                                                   {0.f, 0},
                                                   {6.103515625e-05f, 0x0400},  // smallest normal
                                                   {5.9604644775390625e-08f, 0x0001}};
  for (const auto& [value, bits] : exact) {
    CHECK(float_to_half(value) == bits);
    CHECK(half_to_float(bits) == value);
  }
  CHECK(float_to_half(1.f + 1.f / 2048) == 0x3c00);     // halfway to the next: even below
  CHECK(float_to_half(1.f + 3.f / 2048) == 0x3c02);     // halfway: even above
  CHECK(float_to_half(65520.f) == 0x7c00);              // rounds to infinity
  CHECK(float_to_half(2.98023223876953125e-08f) == 0);  // half of the smallest: to even
  CHECK(std::isnan(half_to_float(float_to_half(NAN))));
  for (int h = 0; h < 0x7c00; ++h) REQUIRE(float_to_half(half_to_float(static_cast<std::uint16_t>(h))) == h);
}

TEST_CASE("layouts: aligned segments that do not overlap") {
  const PageLayout l = ops::make_layout(DType::bf16, int8, 6, 40, 2);
  CHECK(l.k == 0);
  CHECK(l.v == 256);       // 6 * 40 codes = 240
  CHECK(l.k_meta == 512);  // 6 * 4 bytes
  CHECK(l.v_meta == 576);
  CHECK(l.positions == 640);
  CHECK(l.state == 704);  // 2 columns * 6 * 4 = 48
  CHECK(l.bytes == 768);
  const PageLayout plain = ops::make_layout(DType::bf16, {}, 16, 64, 0);
  CHECK(plain.v == 2048);
  CHECK(plain.positions == 4096);
  CHECK(plain.bytes == 4224);  // the positions take 64 bytes of a granule of 128
  CHECK(ops::make_layout(DType::f16, {}, 16, 64, 0).bytes == plain.bytes);
  CHECK_THROWS_AS(ops::make_layout(DType::i32, {}, 16, 64, 0), Error);
  CHECK_THROWS_AS(ops::make_layout(DType::f32, {{3}, {8}}, 16, 64, 0), Error);
  CHECK_THROWS_AS(ops::make_layout(DType::f32, {{8}, {16}}, 16, 64, 0), Error);
  CHECK_THROWS_AS(ops::make_layout(DType::f32, {{8}, {4, CodeKind::e4m3}}, 16, 64, 0), Error);
  CHECK_THROWS_AS(ops::make_layout(DType::f32, {{0, CodeKind::e4m3}, {}}, 16, 64, 0), Error);
  CHECK_THROWS_AS(ops::make_layout(DType::f32, {{8}, {2}}, 16, 72, 0), Error);
  CHECK_THROWS_AS(ops::make_layout(DType::f32, {}, 16, 60, 0), Error);
  CHECK_THROWS_AS(ops::make_layout(DType::f32, {}, 0, 64, 0), Error);
}

TEST_CASE("a run of tokens is written as its tokens one by one, and bits of bf16 as the numbers they stand for") {
  const auto [dtype, codec] = GENERATE(table<DType, CodecSpec>(
      {{DType::f32, {}}, {DType::bf16, {}}, {DType::f16, {}}, {DType::bf16, int8}, {DType::f32, {{4}, {0}}}}));
  constexpr int size = 8, dim = 24, heads = 3, count = 5, offset = 2, first = 100;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> k(count * heads * dim), v(k.size());
  std::vector<std::uint16_t> k_bits, v_bits;
  for (std::vector<float>* numbers : {&k, &v})
    for (float& x : *numbers) x = static_cast<float>(bf16(normal(random)));
  Page one(dtype, codec, size, dim, 2), run(dtype, codec, size, dim, 2), of_bits(dtype, codec, size, dim, 2);
  for (int head = 0; head < heads; ++head) {
    const int at = head * dim;
    for (int t = 0; t < count; ++t)
      ops::write_token(one.frame.data(), one.layout, offset + t, k.data() + t * heads * dim + at,
                       v.data() + t * heads * dim + at, first + t);
    ops::write_tokens(run.frame.data(), run.layout, offset, count, k.data() + at, v.data() + at, heads * dim, first);
    CHECK(run.frame == one.frame);
    k_bits.clear(), v_bits.clear();
    for (int t = 0; t < count; ++t)
      for (int d = 0; d < dim; ++d) {
        k_bits.push_back(bf16(k[t * heads * dim + at + d]).bits);
        v_bits.push_back(bf16(v[t * heads * dim + at + d]).bits);
      }
    const auto write_bits = [&] {
      ops::write_tokens(of_bits.frame.data(), of_bits.layout, offset, count, k_bits.data(), v_bits.data(), first);
    };
    if (dtype != DType::bf16 || codec.k.bits) {
      CHECK_THROWS_WITH(write_bits(), Catch::Contains("wanted pages of bf16"));
      continue;
    }
    write_bits();
    CHECK(of_bits.frame == one.frame);
  }
}

TEST_CASE("layouts: bytes of a token as LeanKV's card counts them") {
  const auto bytes = [](CodecSpec codec) { return ops::make_layout(DType::bf16, codec, 16, 128, 1).bytes / 16; };
  CHECK(bytes({{8}, {8}}) == 272);
  CHECK(bytes({{8}, {4}}) == 208);
  CHECK(bytes({{4}, {4}}) == 144);
  CHECK(bytes({{4}, {2}}) == 112);
  CHECK(bytes({fp8, fp8}) == 272);
  const PageLayout l = ops::make_layout(DType::bf16, {{4}, {2}}, 16, 128, 1);
  CHECK(l.v == 1024);
  CHECK(l.k_meta == 1536);
  CHECK(l.v_meta == 1600);
}

TEST_CASE("codes of 4 and 2 bits by hand: the vectors of the cards, packed from the low bits on") {
  Page page(DType::f32, {{4}, {2}}, 4, 16, 0);
  const auto bytes = [&](std::int64_t at) { return reinterpret_cast<const std::uint8_t*>(page.frame.data()) + at; };
  const auto write = [&](const std::vector<float>& k, const std::vector<float>& v) {
    ops::write_token(page.frame.data(), page.layout, 1, k.data(), v.data(), 0);
  };
  // LeanKV: -1, 0, 1, 2 have the codes 0, 5, 10, 15 and 0, 1, 2, 3.
  std::vector<float> x;
  for (int d = 0; d < 16; ++d) x.push_back(static_cast<float>(d % 4 - 1));
  write(x, x);
  for (int i = 0; i < 8; ++i) CHECK(int{bytes(page.layout.k + 8)[i]} == (i % 2 ? 0xfa : 0x50));
  for (int i = 0; i < 4; ++i) CHECK(int{bytes(page.layout.v + 4)[i]} == 0xe4);
  for (int d = 0; d < 16; ++d) CHECK(page.row(KvSide::key, 1)[d] == Approx(x[d]).margin(1e-3));
  CHECK(page.row(KvSide::value, 1) == x);
  // plain_quant: from -1 to 2 the step is 0.2, and 0.33 becomes 0.4. KIVI: 0, 1, 2, 6 have the codes 0, 0, 1, 3.
  std::vector<float> k(16, 0.f), v(16, 0.f);
  k[0] = -1, k[1] = 0.33f, k[2] = 2;
  v[1] = 1, v[2] = 2, v[3] = 6;
  write(k, v);
  CHECK(int{bytes(page.layout.k + 8)[0]} == 0x70);
  CHECK(int{bytes(page.layout.k + 8)[1]} == 0x5f);
  CHECK(page.row(KvSide::key, 1)[1] == Approx(0.4).margin(1e-3));
  CHECK(int{bytes(page.layout.v + 4)[0]} == 0xd0);
  CHECK(std::vector<float>{0, 0, 2, 6} == [&] {
    const auto row = page.row(KvSide::value, 1);
    return std::vector<float>(row.begin(), row.begin() + 4);
  }());
}

TEST_CASE("8 bits by hand: a real zero moves what lies between two codes") {
  // plain_quant's card: from -1 to 1 the zero is at 127.5 steps. 0 has the code 128, the even one, and becomes 0.0039.
  // Atom's integer zero, which is no codec here, would keep it.
  Page page(DType::f32, {{8}, {8}}, 4, 8, 0);
  const std::vector<float> x = {-1, 0, 1, 0.5f, -0.5f, 0.25f, 1, -1};
  ops::write_token(page.frame.data(), page.layout, 1, x.data(), x.data(), 0);
  CHECK(int{reinterpret_cast<const std::uint8_t*>(page.frame.data())[page.layout.k + 8 + 1]} == 128);
  CHECK(page.row(KvSide::key, 1)[1] == Approx(0.0039).margin(1e-4));
}

TEST_CASE("e4m3 by hand: every code survives, neighbours round to even, and what is too large saturates") {
  const std::pair<float, int> exact[] = {{0.f, 0},        {0x1p-9f, 1},  {0x7p-9f, 7},   {0x1p-6f, 8}, {1.f, 0x38},
                                         {-1.125f, 0xb9}, {448.f, 0x7e}, {-448.f, 0xfe}, {240.f, 0x77}};
  for (const auto& [x, code] : exact) {
    CHECK(int{ops::to_e4m3(x)} == code);
    CHECK(ops::from_e4m3(static_cast<unsigned>(code)) == x);
  }
  for (unsigned code = 0; code < 256; ++code)
    if ((code & 127) != 127) CHECK(ops::to_e4m3(ops::from_e4m3(code)) == code);
  CHECK(ops::to_e4m3(1.0625f) == 0x38);  // halfway between 1 and 1.125
  CHECK(ops::to_e4m3(1.1875f) == 0x3a);  // halfway between 1.125 and 1.25
  CHECK(ops::to_e4m3(0x1p-10f) == 0);    // halfway to the smallest
  CHECK(ops::to_e4m3(0x3p-10f) == 2);    // halfway between the first two
  CHECK(ops::to_e4m3(0x1.ep-7f) == 8);   // halfway to the smallest normal one
  CHECK(ops::to_e4m3(-1e9f) == 0xfe);
  CHECK(ops::to_e4m3(HUGE_VALF) == 0x7e);
  CHECK(std::isnan(ops::from_e4m3(ops::to_e4m3(NAN))));

  // The largest number of a token becomes 448, so the scale of this one is 2.
  Page page(DType::f32, {fp8, fp8}, 4, 8, 0);
  const std::vector<float> x = {896, -896, 2, -2.25f, 0, 2.125f, 0x1p-8f, 0x1p-9f};
  ops::write_token(page.frame.data(), page.layout, 1, x.data(), x.data(), 0);
  CHECK(page.row(KvSide::key, 1) == std::vector<float>{896, -896, 2, -2.25f, 0, 2, 0x1p-8f, 0});
  const auto* meta = reinterpret_cast<const std::uint16_t*>(page.frame.data() + page.layout.v_meta + 4);
  CHECK(half_to_float(meta[0]) == 2);
  CHECK(meta[1] == 0);
}

TEST_CASE("codes: the error is at most half a step, and multiples of the step are exact") {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (const CodecSide side : sides_with_codes)
    for (const int dim : {16, 64, 80, 128, 256})
      for (const float spread : {1e-3f, 1.f, 300.f}) {
        CAPTURE(int{side.bits}, static_cast<int>(side.kind), dim, spread);
        const bool floating = side.kind == CodeKind::e4m3;
        const int most = (1 << side.bits) - 1;
        Page page(DType::bf16, {side, side}, 4, dim, 0);
        std::vector<float> x(dim), y(dim);
        for (float& v : x) v = spread * (normal(rng) + 0.5f);
        // Whole steps of a power of 2, from the first code to the last.
        const float step = std::exp2(std::round(std::log2(spread)));
        for (int d = 0; d < dim; ++d) {
          const int code = d == 0 ? 0 : d == 1 ? (floating ? 126 : most) : static_cast<int>(rng() % (most + 1u));
          y[d] = floating ? step * ops::from_e4m3(code % 128 == 127 ? 0 : code) : step * static_cast<float>(code - 1);
        }
        ops::write_token(page.frame.data(), page.layout, 2, x.data(), y.data(), 0);
        CHECK(page.row(KvSide::value, 2) == y);
        const auto got = page.row(KvSide::key, 2);
        const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
        const double scale = (double{*hi} - *lo) / most, largest = std::max(std::abs(*lo), std::abs(*hi));
        // f16 rounds a number by at most 2^-11 of it, or by 2^-25.
        const double rounded = (std::abs(*lo) + most * scale) * 0x1p-11 + (most + 1) * 0x1p-25;
        for (int d = 0; d < dim; ++d) {
          const double wanted = floating ? std::max(std::abs(double{x[d]}) * 0x1p-4, largest / 448 * 0x1p-10) +
                                               largest * 0x1p-10 + 448 * 0x1p-25
                                         : scale / 2 + rounded + largest * 0x1p-22;
          CHECK(std::abs(double{got[d]} - x[d]) <= wanted);
        }
      }
}

TEST_CASE("codes: NaN, infinities, equal numbers and tiny ranges have a finite scale") {
  constexpr int dim = 16;
  const auto huge = std::numeric_limits<float>::max();
  for (const CodecSide side : sides_with_codes) {
    CAPTURE(int{side.bits}, static_cast<int>(side.kind));
    const bool floating = side.kind == CodeKind::e4m3;
    Page page(DType::f32, {side, side}, 4, dim, 0);
    const auto round_trip = [&](const std::vector<float>& x) {
      ops::write_token(page.frame.data(), page.layout, 1, x.data(), x.data(), 0);
      const auto* meta = reinterpret_cast<const std::uint16_t*>(page.frame.data() + page.layout.k_meta + 4);
      REQUIRE(std::isfinite(half_to_float(meta[0])));
      REQUIRE(std::isfinite(half_to_float(meta[1])));
      REQUIRE(half_to_float(meta[0]) >= 0);
      return page.row(KvSide::key, 1);
    };
    const auto with = [](float base, float at_0, float at_5) {
      std::vector<float> x(dim, base);
      x[0] = at_0, x[5] = at_5;
      return x;
    };
    // NaN changes no other number, wherever it stands.
    const auto plain = round_trip(with(1, 3, 0));
    for (const int at : {2, 7, 15}) {
      auto x = with(1, 3, 0);
      x[at] = NAN;
      const auto got = round_trip(x);
      for (int d = 0; d < dim; ++d) {
        if (d != at)
          CHECK(got[d] == plain[d]);
        else
          CHECK((floating ? std::isnan(got[d]) : got[d] == 0));
      }
    }
    CHECK(round_trip(with(1, NAN, 0))[5] == 0);
    for (const float y : round_trip(std::vector<float>(dim, NAN))) CHECK((floating ? std::isnan(y) : y == 0));
    for (const auto& x : {with(0, HUGE_VALF, 0), with(0, -HUGE_VALF, 0), with(-1, HUGE_VALF, -HUGE_VALF),
                          with(HUGE_VALF, HUGE_VALF, HUGE_VALF), with(-HUGE_VALF, -HUGE_VALF, -HUGE_VALF),
                          with(0, huge, -huge), with(HUGE_VALF, NAN, 0)}) {
      const auto got = round_trip(x);
      for (int d = 0; d < dim; ++d)
        if (!std::isnan(x[d])) CHECK(std::isfinite(got[d]));
    }
    CHECK(round_trip(with(0, HUGE_VALF, -1))[0] > 65504);
    CHECK(round_trip(with(0, -HUGE_VALF, 1))[0] <= -65504);
    CHECK(round_trip(std::vector<float>(dim, 0.f)) == std::vector<float>(dim, 0.f));
    for (const float y : round_trip(std::vector<float>(dim, 3.25f))) CHECK(y == Approx(3.25f).epsilon(1e-3));
    for (const float y : round_trip(with(1, 1.f + 1e-7f, 1))) CHECK(y == Approx(1).epsilon(1e-3));
    for (const float y : round_trip(with(0, 1e-9f, -1e-9f))) CHECK(std::abs(y) < 1e-6f);
  }
}

TEST_CASE("copying between two codecs equals writing the decoded values, and equal codes stay as they are") {
  std::mt19937 rng(9);
  std::normal_distribution<float> normal;
  std::vector<CodecSide> sides = {CodecSide{}};
  sides.insert(sides.end(), std::begin(sides_with_codes), std::end(sides_with_codes));
  for (const CodecSide from : sides)
    for (const CodecSide to : sides) {
      CAPTURE(int{from.bits}, static_cast<int>(from.kind), int{to.bits}, static_cast<int>(to.kind));
      Page a(DType::bf16, {from, to}, 4, 48, 0), b(DType::bf16, {to, to}, 8, 48, 0), direct = b;
      std::vector<float> k(48), v(48);
      for (float& x : k) x = normal(rng);
      for (float& x : v) x = normal(rng);
      ops::write_token(a.frame.data(), a.layout, 3, k.data(), v.data(), 5);
      ops::copy_token(a.frame.data(), a.layout, 3, b.frame.data(), b.layout, 6);
      const auto decoded = a.row(KvSide::key, 3);
      ops::write_token(direct.frame.data(), direct.layout, 6, decoded.data(), v.data(), 5);
      CHECK(b.row(KvSide::value, 6) == a.row(KvSide::value, 3));
      if (from == to)
        CHECK(b.row(KvSide::key, 6) == a.row(KvSide::key, 3));
      else
        CHECK(b.frame == direct.frame);
    }
}

TEST_CASE("int8 by hand: scale and zero in f16, half-even codes") {
  // min -1, max 1: scale = 2 / 255 rounds to 1028 * 2^-17 in f16; x = 0 has code 127.502 -> 128.
  Page page(DType::f32, int8, 4, 8, 0);
  const std::vector<float> x = {-1, 1, 0, 0.5f, -0.5f, 0, 0, 0};
  page.layout.codec = int8;
  ops::write_token(page.frame.data(), page.layout, 1, x.data(), x.data(), 5);
  const auto* codes = reinterpret_cast<const std::uint8_t*>(page.frame.data() + page.layout.k + 8);
  CHECK(int{codes[0]} == 0);
  CHECK(int{codes[1]} == 255);
  CHECK(int{codes[2]} == 128);
  CHECK(int{codes[3]} == 191);  // 1.5 / 0.00784302 = 191.25
  CHECK(int{codes[4]} == 64);   // 63.75
  CHECK(page.row(KvSide::key, 1)[2] == Approx(0.0039).epsilon(0.02));
  // x from 0 to 255 in whole steps: scale 1, zero 0, every code exact; 2.5 is a tie and goes to 2.
  std::vector<float> y = {0, 255, 2.5f, 3.5f, 7, 100, 200, 254};
  ops::write_token(page.frame.data(), page.layout, 0, y.data(), y.data(), 6);
  CHECK(page.row(KvSide::value, 0) == std::vector<float>{0, 255, 2, 4, 7, 100, 200, 254});
}

TEST_CASE("int8: constant rows, huge and tiny ranges stay finite; error is at most half a step") {
  Page page(DType::f32, int8, 4, 16, 0);
  std::vector<float> constant(16, 3.25f), huge(16, 0.f), tiny(16, 1.f);
  huge[0] = 1e9f;
  huge[1] = -1e9f;
  tiny[3] = 1.f + 1e-7f;
  ops::write_token(page.frame.data(), page.layout, 0, constant.data(), huge.data(), 0);
  ops::write_token(page.frame.data(), page.layout, 1, tiny.data(), constant.data(), 0);
  CHECK(page.row(KvSide::key, 0) == constant);
  for (const float x : page.row(KvSide::value, 0)) CHECK(std::isfinite(x));
  for (const float x : page.row(KvSide::key, 1)) CHECK(x == Approx(1));
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0.3f, 2.f);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<float> x(16);
    for (float& v : x) v = normal(rng);
    ops::write_token(page.frame.data(), page.layout, 2, x.data(), x.data(), 0);
    const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
    const double step = (*hi - *lo) / 255, f16_error = std::abs(*lo) / 2048 + 255 * step / 2048;
    const auto got = page.row(KvSide::key, 2);
    for (int d = 0; d < 16; ++d) CHECK(std::abs(got[d] - x[d]) <= step / 2 + f16_error + 1e-6);
  }
}

TEST_CASE("tokens round-trip, carry position and state, and write nothing else") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Page page(dtype, {}, 4, 16, 2);
    const auto k = ramp(16, -2, 0.25f), v = ramp(16, 1, 0.5f);  // exact in 16 bits
    const auto before = page.frame;
    ops::write_token(page.frame.data(), page.layout, 2, k.data(), v.data(), 77);
    CHECK(page.row(KvSide::key, 2) == k);
    CHECK(page.row(KvSide::value, 2) == v);
    const std::int64_t row = 16 * static_cast<std::int64_t>(size_of(dtype));
    for (std::int64_t i = 0; i < page.layout.bytes; ++i) {
      const auto in = [&](std::int64_t begin, std::int64_t n) { return i >= begin && i < begin + n; };
      const bool own = in(page.layout.k + 2 * row, row) || in(page.layout.v + 2 * row, row) ||
                       in(page.layout.positions + 8, 4) || in(page.layout.state + 8, 4) ||
                       in(page.layout.state + 16 + 8, 4);
      if (!own) REQUIRE(page.frame[i] == before[i]);
    }
    Page other(dtype, {}, 8, 16, 2);
    const float state = 4.5f;
    std::memcpy(page.frame.data() + page.layout.state + 16 + 8, &state, 4);
    ops::copy_token(page.frame.data(), page.layout, 2, other.frame.data(), other.layout, 7);
    CHECK(other.row(KvSide::key, 7) == k);
    float moved;
    std::memcpy(&moved, other.frame.data() + other.layout.state + 32 + 28, 4);
    CHECK(moved == 4.5f);
    std::int32_t position;
    std::memcpy(&position, other.frame.data() + other.layout.positions + 28, 4);
    CHECK(position == 77);
  }
}

TEST_CASE("copying between codecs equals writing the decoded values") {
  Page plain(DType::bf16, {}, 4, 16, 0), coded(DType::bf16, int8, 4, 16, 0), back(DType::bf16, {}, 4, 16, 0);
  const auto k = ramp(16, -1.3f, 0.17f), v = ramp(16, 4, -0.6f);
  ops::write_token(plain.frame.data(), plain.layout, 0, k.data(), v.data(), 1);
  ops::copy_token(plain.frame.data(), plain.layout, 0, coded.frame.data(), coded.layout, 3);
  Page direct(DType::bf16, int8, 4, 16, 0);
  const auto rounded_k = plain.row(KvSide::key, 0), rounded_v = plain.row(KvSide::value, 0);
  ops::write_token(direct.frame.data(), direct.layout, 3, rounded_k.data(), rounded_v.data(), 1);
  CHECK(coded.row(KvSide::key, 3) == direct.row(KvSide::key, 3));
  CHECK(coded.row(KvSide::value, 3) == direct.row(KvSide::value, 3));
  ops::copy_token(coded.frame.data(), coded.layout, 3, back.frame.data(), back.layout, 0);
  for (int d = 0; d < 16; ++d) CHECK(back.row(KvSide::key, 0)[d] == Approx(k[d]).margin(0.03));
}

// Four tokens of a page whose keys differ in two dimensions; the cards of Quest and ArkVale work with them.
static Page page_of_the_cards() {
  Page page(DType::f32, {}, 4, 8, 0);
  const float keys[4][2] = {{1, -2}, {3, 0}, {5, 4}, {-1, 2}};
  for (int t = 0; t < 4; ++t) {
    std::vector<float> k(8, 0.f);
    k[0] = keys[t][0];
    k[1] = keys[t][1];
    ops::write_token(page.frame.data(), page.layout, t, k.data(), k.data(), t);
  }
  return page;
}

TEST_CASE("page summaries: Quest's box of the card, means, and bf16 bounds that stay bounds") {
  Page page = page_of_the_cards();
  float box[16], mean[8];
  ops::summarize_page(page.frame.data(), page.layout, 4, Summary::min_max, DType::f32,
                      reinterpret_cast<std::byte*>(box));
  CHECK(box[0] == -1);
  CHECK(box[1] == -2);
  CHECK(box[8] == 5);
  CHECK(box[9] == 4);
  ops::summarize_page(page.frame.data(), page.layout, 4, Summary::mean, DType::f32, reinterpret_cast<std::byte*>(mean));
  CHECK(mean[0] == 2);
  CHECK(mean[1] == 1);
  ops::summarize_page(page.frame.data(), page.layout, 2, Summary::min_max, DType::f32,
                      reinterpret_cast<std::byte*>(box));
  CHECK(box[8] == 3);

  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  bf16 bounds[16];
  for (int t = 0; t < 4; ++t) {
    std::vector<float> k(8);
    for (float& x : k) x = normal(rng);
    ops::write_token(page.frame.data(), page.layout, t, k.data(), k.data(), t);
  }
  ops::summarize_page(page.frame.data(), page.layout, 4, Summary::min_max, DType::bf16,
                      reinterpret_cast<std::byte*>(bounds));
  for (int t = 0; t < 4; ++t)
    for (int d = 0; d < 8; ++d) {
      CHECK(float(bounds[d]) <= page.row(KvSide::key, t)[d]);
      CHECK(float(bounds[8 + d]) >= page.row(KvSide::key, t)[d]);
      CHECK(float(bounds[d]) >= -5.f);
    }
  std::uint16_t halves[16];
  ops::summarize_page(page.frame.data(), page.layout, 4, Summary::min_max, DType::f16,
                      reinterpret_cast<std::byte*>(halves));
  for (int t = 0; t < 4; ++t)
    for (int d = 0; d < 8; ++d) {
      CHECK(half_to_float(halves[d]) <= page.row(KvSide::key, t)[d]);
      CHECK(half_to_float(halves[8 + d]) >= page.row(KvSide::key, t)[d]);
    }
  CHECK(half_to_float(halves[8]) - half_to_float(halves[0]) < 10);
}

namespace {

// A summary in codes of a page of 4 keys of 8 elements, and what its codes read as.
struct CodedSummary {
  alignas(16) std::byte bytes[32] = {};
  float number(int i, Summary kind = Summary::min_max) const {
    float shared[2];
    std::memcpy(shared, bytes + 8 * summary_vectors(kind), sizeof shared);
    return static_cast<float>(std::to_integer<int>(bytes[i])) * shared[0] + shared[1];
  }
};

}  // namespace

TEST_CASE("page summaries in codes: by hand, bounds that stay bounds and are near, whatever the keys are") {
  Page page = page_of_the_cards();
  CodedSummary box, mean;
  const auto summary = [&](int tokens, Summary kind, CodedSummary& to) {
    ops::summarize_page(page.frame.data(), page.layout, tokens, kind, DType::f32, to.bytes, 8);
  };
  CHECK(summary_bytes(Summary::min_max, 8, DType::bf16, 8) == 32);
  CHECK(summary_bytes(Summary::mean, 8, DType::bf16, 8) == 16);
  CHECK(summary_bytes(Summary::min_max, 8, DType::f32, 128) == 272);
  CHECK(summary_bytes(Summary::none, 8, DType::f32, 128) == 0);
  // The box is [-1, 5] x [-2, 4] x {0} ...: least -2, most 5, a step of a little more than 7 / 255.
  summary(4, Summary::min_max, box);
  const std::vector<int> codes = {36, 0, 72, 72, 72, 72, 72, 72, 255, 219, 73, 73, 73, 73, 73, 73};
  for (int i = 0; i < 16; ++i) CHECK(std::to_integer<int>(box.bytes[i]) == codes[i]);
  CHECK(box.number(1) == -2);
  CHECK(box.number(8) >= 5);
  summary(4, Summary::mean, mean);  // 2, 1, 0 ...
  CHECK(std::to_integer<int>(mean.bytes[0]) == 255);
  CHECK(std::to_integer<int>(mean.bytes[1]) == 127);  // half of a step that is a little more than 2 / 255
  CHECK(mean.bytes[2] == std::byte{0});

  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 400; ++round) {
    std::vector<std::vector<float>> keys(4, std::vector<float>(8));
    const float size = round % 5 == 0 ? 1e-30f : round % 5 == 1 ? 1e20f : 1.f, place = round % 3 == 0 ? 1000 : 0;
    for (auto& key : keys)
      for (float& x : key) x = size * (normal(rng) + place);
    if (round % 4 == 1) keys[rng() % 4][rng() % 8] *= 1e4f;  // an outlier
    for (int t = 0; t < 4; ++t) ops::write_token(page.frame.data(), page.layout, t, keys[t].data(), keys[t].data(), t);
    for (const Summary kind : {Summary::min_max, Summary::centre_radius}) {
      float exact[16], least = INFINITY, most = -INFINITY;
      ops::summarize_page(page.frame.data(), page.layout, 4, kind, DType::f32, reinterpret_cast<std::byte*>(exact));
      for (const float x : exact) least = std::min(least, x), most = std::max(most, x);
      summary(4, kind, box);
      const float step = (most - least) / 255 * 1.001f + 0x1p-126f + std::abs(most) * 0x1p-22f;
      for (int d = 0; d < 8; ++d) {
        CAPTURE(round, d);
        REQUIRE(box.number(d) <= exact[d]);
        REQUIRE(box.number(8 + d) >= exact[8 + d]);
        REQUIRE(box.number(d) >= exact[d] - step);
        REQUIRE(box.number(8 + d) <= exact[8 + d] + step);
      }
    }
  }
}

TEST_CASE("page summaries in codes of keys that are not finite: the other elements keep their bounds") {
  Page page = page_of_the_cards();
  const auto write = [&](int token, std::vector<float> key) {
    ops::write_token(page.frame.data(), page.layout, token, key.data(), key.data(), token);
  };
  const float inf = INFINITY, nan = NAN, limit = 0x1p100f;
  write(0, {nan, 1, -inf, 3, 4, 5, 6, 7});
  write(1, {0, 1, 2, inf, 4, nan, 6, -7});
  CodedSummary box;
  ops::summarize_page(page.frame.data(), page.layout, 2, Summary::min_max, DType::f32, box.bytes, 8);
  CHECK(box.bytes[0] == std::byte{0});  // NaN came first and stays
  CHECK(box.bytes[8] == std::byte{255});
  CHECK(box.number(2) == -limit);
  CHECK(box.number(11) >= limit);
  for (const int d : {1, 4, 5, 6, 7}) {
    CHECK(box.number(d) <= (d == 7 ? -7 : d));
    CHECK(box.number(8 + d) >= d);
  }
  for (int i = 0; i < 16; ++i) CHECK(std::isfinite(box.number(i)));
  for (const float x : {nan, inf, -inf}) {
    for (int t = 0; t < 2; ++t) write(t, std::vector<float>(8, x));
    for (const Summary kind : {Summary::min_max, Summary::mean, Summary::centre_radius}) {
      ops::summarize_page(page.frame.data(), page.layout, 2, kind, DType::f32, box.bytes, 8);
      for (int i = 0; i < 8 * summary_vectors(kind); ++i) CHECK(std::isfinite(box.number(i, kind)));
    }
  }
}

TEST_CASE("page summaries: ArkVale's box of the card, which rounds outwards and stays inside the bounds") {
  Page page = page_of_the_cards();
  const auto summary = [&](int tokens, Summary kind, DType dtype, auto* to) {
    ops::summarize_page(page.frame.data(), page.layout, tokens, kind, dtype, reinterpret_cast<std::byte*>(to));
  };
  float box[16];
  summary(4, Summary::centre_radius, DType::f32, box);
  CHECK(std::vector<float>{box[0], box[1], box[8], box[9]} == std::vector<float>{0, -1, 4, 3});
  summary(1, Summary::centre_radius, DType::f32, box);
  CHECK(std::vector<float>{box[0], box[1], box[8], box[9]} == std::vector<float>{1, -2, 1, -2});

  std::mt19937 rng(6);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 50; ++round) {
    for (int t = 0; t < 4; ++t) {
      std::vector<float> k(8);
      for (float& x : k) x = normal(rng) + 3;
      ops::write_token(page.frame.data(), page.layout, t, k.data(), k.data(), t);
    }
    std::uint16_t half[16], outer_half[16];
    bf16 brief[16], outer_brief[16];
    summary(4, Summary::centre_radius, DType::f32, box);
    summary(4, Summary::centre_radius, DType::f16, half);
    summary(4, Summary::centre_radius, DType::bf16, brief);
    summary(4, Summary::min_max, DType::f16, outer_half);
    summary(4, Summary::min_max, DType::bf16, outer_brief);
    for (int d = 0; d < 8; ++d) {
      for (const auto& [low, high] : {std::pair{half_to_float(half[d]), half_to_float(half[8 + d])},
                                      std::pair{float(brief[d]), float(brief[8 + d])}}) {
        CHECK(low <= box[d]);
        CHECK(high >= box[8 + d]);
      }
      CHECK(half_to_float(outer_half[d]) <= half_to_float(half[d]));
      CHECK(half_to_float(outer_half[8 + d]) >= half_to_float(half[8 + d]));
      CHECK(float(outer_brief[d]) <= float(brief[d]));
      CHECK(float(outer_brief[8 + d]) >= float(brief[8 + d]));
    }
  }
}

TEST_CASE("ranks follow text positions") {
  PagedFixture cache({});
  const std::vector<float> x(16, 0.f);
  for (const int position : {4, 0, 90, 7, 5}) cache.append(0, 0, x, x, position);
  std::int32_t rank[5], position[5];
  ops::token_ranks(cache.view(), 0, 0, 5, rank);
  CHECK(std::vector<std::int32_t>(rank, rank + 5) == std::vector<std::int32_t>{1, 0, 4, 3, 2});
  ops::token_positions(cache.view(), 0, 0, 5, position);
  CHECK(std::vector<std::int32_t>(position, position + 5) == std::vector<std::int32_t>{4, 0, 90, 7, 5});
  cache.unmap(0, 0, 1);
  CHECK_THROWS_AS(ops::token_ranks(cache.view(), 0, 0, 5, rank), Error);
}

TEST_CASE("tokens of one text position have one rank: how many are older") {
  using Ints = std::vector<std::int32_t>;
  const std::vector<float> x(16, 0.f);
  const auto ranks = [&](const Ints& positions) {
    PagedFixture cache({});
    for (const int position : positions) cache.append(0, 0, x, x, position);
    Ints rank(positions.size());
    ops::token_ranks(cache.view(), 0, 0, static_cast<int>(rank.size()), rank.data());
    return rank;
  };
  CHECK(ranks({3, 3}) == Ints{0, 0});
  CHECK(ranks({4, 0, 4, 7, 4}) == Ints{1, 0, 1, 4, 1});
  CHECK(ranks({9, 9, 5, 5, 5, 2, 9, 1, 2, 0, 5}) ==
        Ints{8, 8, 4, 4, 4, 2, 8, 1, 2, 0, 4});  // many short ascending runs
}

TEST_CASE("rotation: half-split pairs by hand, inverse, relativity, far positions") {
  const float inv_freq[] = {1.f, 0.5f, 0.25f, 0.125f};
  const RopeTable rope{inv_freq, 8, 1.f};
  std::vector<float> x(8, 0.f);
  x[1] = 1;  // pairs with x[5]
  ops::rotate(x.data(), rope, 3);
  CHECK(x[1] == Approx(std::cos(1.5)));
  CHECK(x[5] == Approx(std::sin(1.5)));
  CHECK(x[0] == 0);
  ops::rotate(x.data(), rope, -3);
  CHECK(x[1] == Approx(1));
  CHECK(x[5] == Approx(0).margin(1e-6));

  const auto dot = [](const std::vector<float>& a, const std::vector<float>& b) {
    double s = 0;
    for (std::size_t i = 0; i < a.size(); ++i) s += double(a[i]) * b[i];
    return s;
  };
  std::vector<float> q = ramp(8, -1, 0.3f), k = ramp(8, 2, -0.4f), q2 = q, k2 = k;
  ops::rotate(q.data(), rope, 1000001);
  ops::rotate(k.data(), rope, 1000000);
  ops::rotate(q2.data(), rope, 1);
  CHECK(dot(q, k) == Approx(dot(q2, k2)).epsilon(1e-4));

  float cosine[4], sine[4];
  ops::rope_angles({inv_freq, 8, 2.f}, 1, cosine, sine);
  CHECK(cosine[0] == Approx(2 * std::cos(1.0)));
  CHECK(sine[3] == Approx(2 * std::sin(0.125)));
}

TEST_CASE("re-rotating equals rotating at the new position, without the attention scale") {
  PagedOptions o;
  PagedFixture cache(o);
  PagedKv kv = cache.view();
  kv.rope_table.attention_scale = 1.5f;
  const auto plain = ramp(16, -1, 0.21f);
  std::vector<std::vector<float>> wanted;
  for (int t = 0; t < 6; ++t) {
    auto k = plain, moved = plain;
    ops::rotate(k.data(), kv.rope_table, 10 * t);
    ops::rotate(moved.data(), kv.rope_table, 10 * t - 7 * t);
    cache.append(0, 0, k, plain);
    wanted.push_back(moved);
  }
  const std::int32_t delta[] = {0, -7, -14, -21, -28, -35};
  ops::re_rotate(kv, 0, 0, 6, delta);
  std::vector<float> keys(6 * 16), values(6 * 16);
  ops::gather_rows(kv, 0, 0, KvSide::key, 6, keys.data());
  ops::gather_rows(kv, 0, 0, KvSide::value, 6, values.data());
  for (int t = 0; t < 6; ++t)
    for (int d = 0; d < 16; ++d) {
      CHECK(keys[t * 16 + d] == Approx(wanted[t][d]).margin(1e-5));
      CHECK(values[t * 16 + d] == plain[d]);
    }
  CHECK(cache.guards_intact());
}

TEST_CASE("groups: a channel's tokens share a scale, as on KIVI's card") {
  constexpr int dim = 16;
  const CodecSide keys{2, CodeKind::integer, CodeAxis::channel, 4}, values{2, CodeKind::integer, CodeAxis::token, 8};
  Page from(DType::f32, {}, 4, dim, 0), to(DType::f32, {keys, values}, 4, dim, 0);
  constexpr float of_tokens[] = {0, 1, 2, 6};
  for (int t = 0; t < 4; ++t) {
    std::vector<float> k(dim), v(dim);
    for (int d = 0; d < dim; ++d) k[d] = d == 5 ? of_tokens[t] : 1, v[d] = d < 8 ? d % 4 : 100 * (d % 4);
    ops::write_token(from.frame.data(), from.layout, t, k.data(), v.data(), 7 * t);
  }
  ops::copy_page(from.frame.data(), from.layout, to.frame.data(), to.layout);
  constexpr float wanted[] = {0, 0, 2, 6};  // steps of 2, ties to even
  for (int t = 0; t < 4; ++t) {
    const auto k = to.row(KvSide::key, t), v = to.row(KvSide::value, t);
    for (int d = 0; d < dim; ++d) {
      CHECK(k[d] == (d == 5 ? wanted[t] : 1));
      CHECK(v[d] == (d < 8 ? d % 4 : 100 * (d % 4)));
    }
  }
}

TEST_CASE("groups: a page is stored as the reference stores it") {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  for (const int p : {8, 16, 32})
    for (const int dim : {16, 64, 128})
      for (const CodecSide side :
           {CodecSide{2, CodeKind::integer, CodeAxis::channel, 8},
            CodecSide{4, CodeKind::integer, CodeAxis::channel, 32},
            CodecSide{8, CodeKind::integer, CodeAxis::channel, 0}, CodecSide{8, CodeKind::e4m3, CodeAxis::channel, 8},
            CodecSide{2, CodeKind::integer, CodeAxis::token, 8},
            CodecSide{4, CodeKind::integer, CodeAxis::token, 32}}) {
        CAPTURE(p, dim, int{side.bits}, int(side.axis), side.group);
        const CodecSpec spec{side, {4, CodeKind::integer, CodeAxis::token, 16}};
        Page from(DType::bf16, {}, p, dim, 1), fast(DType::bf16, spec, p, dim, 1), slow(DType::bf16, spec, p, dim, 1);
        std::vector<float> x(dim), y(dim);
        for (int t = 0; t < p; ++t) {
          for (float& v : x) v = normal(rng);
          for (float& v : y) v = 5 * normal(rng);
          ops::write_token(from.frame.data(), from.layout, t, x.data(), y.data(), t);
        }
        ops::copy_page(from.frame.data(), from.layout, fast.frame.data(), fast.layout);
        ops::copy_page_reference(from.frame.data(), from.layout, slow.frame.data(), slow.layout);
        CHECK(fast.frame == slow.frame);
        std::vector<float> read(dim);
        for (int t = 0; t < p; ++t)
          for (const KvSide of : {KvSide::key, KvSide::value}) {
            ops::read_row_reference(slow.frame.data(), slow.layout, of, t, read.data());
            CHECK(fast.row(of, t) == read);
          }
        CHECK_THROWS_AS(side.axis == CodeAxis::channel
                            ? ops::write_token(fast.frame.data(), fast.layout, 0, x.data(), y.data(), 0)
                            : throw Error(Errc::internal, ""),
                        Error);
      }
}

TEST_CASE("groups: those that do not divide are refused") {
  const auto made = [](CodeAxis axis, std::uint16_t group) {
    const CodecSide side{4, CodeKind::integer, axis, group};
    return ops::make_layout(DType::bf16, {side, side}, 32, 80, 0);
  };
  CHECK_THROWS_AS(made(CodeAxis::token, 32), Error);
  CHECK_THROWS_AS(made(CodeAxis::token, 4), Error);
  CHECK_THROWS_AS(made(CodeAxis::channel, 12), Error);
  CHECK(made(CodeAxis::token, 16).codec.k.group == 16);
  CHECK(made(CodeAxis::token, 80).codec.k.group == 0);    // all of a token
  CHECK(made(CodeAxis::channel, 64).codec.k.group == 0);  // all of a page
}
