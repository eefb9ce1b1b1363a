#include <catch2/catch.hpp>
#include <limits>

#include "cases/append_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

static Appended run(const AppendFixture& f) {
  OnDevice device;
  const ops::RopeAppendArgs a = f.put(device);
  ops::rope_append(a, device.stream());
  return Appended(device, f, a);
}

TEST_CASE("cuda rope_append leaves a row alone whose position has no angles") {
  AppendOptions s;
  s.append = false;
  s.rounded = DType::bf16;
  AppendFixture f(s, 1060);
  f.position[1] = -1;
  const Appended a = run(f);
  CHECK(a.error == ops::append_no_angle);
  const auto row = [&](const std::vector<float>& of, int r) {
    const auto begin = of.begin() + r * f.stride();
    return std::vector<float>(begin, begin + f.stride() - 8);
  };
  CHECK(row(a.qkv, 1) == row(f.qkv, 1));
  CHECK(row(a.qkv, 2) != row(f.qkv, 2));
  CHECK(a.cache_unchanged(f));
}

TEST_CASE("cuda rope_append marks the rows with numbers that are not finite") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  using Marks = std::vector<std::int32_t>;
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const CodecSpec codec : {CodecSpec{}, CodecSpec{{8}, {8}}, CodecSpec{{4}, {8, CodeKind::e4m3}}})
      for (const bool append : {true, false}) {
        AppendOptions s;
        s.rows = 4, s.dtype = dtype, s.codec = codec, s.append = append;
        CAPTURE(name_of(dtype), int{codec.k.bits}, append);
        const auto marks = [&](int row, int head, int element, float value) {
          AppendFixture f(s, 3);
          if (head >= 0) f.qkv[static_cast<std::size_t>(row * f.stride() + head * s.dim + element)] = value;
          const Appended a = run(f);
          REQUIRE(a.error == 0);
          return a.marks;
        };
        CHECK(marks(0, -1, 0, 0) == Marks{0, 0, 0, 0});
        const int key = s.heads, value = s.heads + s.kv_heads;
        for (const float bad : {nan, inf, -inf}) {
          CAPTURE(bad);
          CHECK(marks(0, 0, 0, bad) == Marks{1, 0, 0, 0});
          CHECK(marks(2, s.heads - 1, s.dim - 1, bad) == Marks{0, 0, 1, 0});
          CHECK(marks(3, key, 0, bad) == Marks{0, 0, 0, 1});
          CHECK(marks(1, key + s.kv_heads - 1, s.dim / 2, bad) == Marks{0, 1, 0, 0});
          if (append) CHECK(marks(3, value, s.dim - 1, bad) == Marks{0, 0, 0, 1});
          if (append) CHECK(marks(1, value + s.kv_heads - 1, 0, bad) == Marks{0, 1, 0, 0});
        }
        // 65519 stays finite in f16, -65520 is rounded to infinity.
        if (append) CHECK(marks(1, value, 5, 65519.f) == Marks{0, 0, 0, 0});
        if (append) CHECK(marks(1, value, 5, -65520.f) == Marks{0, dtype == DType::f16, 0, 0});
        CHECK(marks(1, 0, 5, 65520.f) == Marks{0, 0, 0, 0});  // a query is not cached
        s.mark_step = 0;
        CHECK(marks(2, key, 0, nan) == Marks{1, 0, 0, 0});
      }
}

TEST_CASE("cuda rope_append says why a token does not fit and leaves the cache as it was") {
  AppendOptions s;
  s.rows = 1, s.kv_heads = 1, s.heads = 1;
  s.summary = Summary::min_max;
  SECTION("no frame") {
    s.frames = 0;
    AppendFixture f(s, 1);
    const Appended a = run(f);
    CHECK(a.error == ops::append_no_frame);
    CHECK(a.cache_unchanged(f));
  }
  SECTION("fewer frames than heads: some fit") {
    s.rows = 20, s.frames = 5;
    AppendFixture f(s, 1);
    const Appended a = run(f);
    CHECK(a.error == ops::append_no_frame);
    CHECK(a.left == 0);
    int longer = 0;
    for (const int n : a.length) longer += n;
    CHECK(longer == 5);
  }
  SECTION("a full table") {
    s.lengths = {32};
    AppendFixture f(s, 1);
    const Appended a = run(f);
    CHECK(a.error == ops::append_no_page);
    CHECK(a.cache_unchanged(f));
  }
  SECTION("a position without angles") {
    AppendFixture f(s, 1);
    f.position[0] = AppendFixture::angles;
    const Appended a = run(f);
    CHECK(a.error == ops::append_no_angle);
    CHECK(a.cache_unchanged(f));
  }
  SECTION("the newest page is elsewhere") {
    s.lengths = {3};
    AppendFixture f(s, 1);
    f.table[0].frame = null_frame;
    const Appended a = run(f);
    CHECK(a.error == ops::append_page_absent);
    CHECK(a.cache_unchanged(f));
  }
}
