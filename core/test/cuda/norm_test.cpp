#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <tuple>

#include "cases/place.hpp"
#include "cases/quick.hpp"
#include "ops/linear/norm.hpp"

using namespace kvlab;
using namespace kvlab::cases;

// A block takes several rows if there are many. A single row is the first of its block.
TEST_CASE("cuda rms_norm and rounding: a row's bits do not depend on how many rows there are") {
  std::mt19937 rng(4);
  std::normal_distribution<float> normal;
  for (const std::int64_t n : {72, 4096, 8192, 8200}) {
    const std::int64_t rows = cases::quick() ? 603 : 5003;  // more than the blocks that run at once
    std::vector<float> x(static_cast<std::size_t>(rows * n)), weight(static_cast<std::size_t>(n));
    for (float& v : x) v = normal(rng);
    for (float& w : weight) w = normal(rng);
    const std::vector<std::uint16_t> poison(x.size(), 0xffff);
    OnDevice device;
    ops::NormArgs a;
    a.n = a.x_stride = a.out_stride = n;
    a.eps = 1e-5f;
    const float* from = device.put(x.data(), x.size());
    const float* weights = device.put(weight.data(), weight.size());
    std::uint16_t *together = device.put(poison.data(), poison.size()),
                  *apart = device.put(poison.data(), poison.size());
    for (const bool norm : {true, false}) {
      CAPTURE(n, norm);
      a.weight = norm ? weights : nullptr;
      a.x = from, a.out = together, a.rows = rows;
      ops::rms_norm(a, device.stream());
      a.rows = 1;
      for (std::int64_t r = 0; r < rows; ++r) {
        a.x = from + r * n, a.out = apart + r * n;
        ops::rms_norm(a, device.stream());
      }
      const auto all = device.get(View<std::uint16_t, 1>::dense(together, {rows * n}));
      CHECK(all == device.get(View<std::uint16_t, 1>::dense(apart, {rows * n})));
      CHECK(std::count(all.begin(), all.end(), 0xffff) == 0);
    }
  }
}

TEST_CASE("cuda rms_norm names what it cannot do") {
  OnDevice device;
  const std::vector<float> zeros(64);
  float* x = device.put(zeros.data(), zeros.size());
  float* out = device.put(zeros.data(), zeros.size());
  ops::NormArgs good;
  good.x = x, good.weight = x, good.out = out, good.dtype = DType::f32;
  good.rows = 2, good.n = good.x_stride = good.out_stride = 16;
  const auto call = [&](auto change) {
    ops::NormArgs a = good;
    change(a);
    ops::rms_norm(a, device.stream());
    device.synchronize();
  };
  CHECK_NOTHROW(call([](ops::NormArgs&) {}));
  for (const auto& [n, x_stride, out_stride, text] : {std::tuple{12, 16, 16, "rows of 12, 16 and 16 apart"},
                                                      {16, 18, 16, "rows of 16, 18 and 16 apart"},
                                                      {16, 16, 20, "rows of 16, 16 and 20 apart"},
                                                      {16, 12, 16, "rows of 16, 12 and 16 apart"},
                                                      {16, 16, 8, "rows of 16, 16 and 8 apart"}})
    CHECK_THROWS_WITH(call([&](ops::NormArgs& a) { a.n = n, a.x_stride = x_stride, a.out_stride = out_stride; }),
                      Catch::Contains(text));
  const auto* off = "off a multiple of 16 bytes";
  CHECK_THROWS_WITH(call([&](ops::NormArgs& a) { a.x = x + 2; }), Catch::Contains(off));
  CHECK_THROWS_WITH(call([&](ops::NormArgs& a) { a.weight = x + 1; }), Catch::Contains(off));
  CHECK_THROWS_WITH(call([&](ops::NormArgs& a) { a.out = out + 2; }), Catch::Contains(off));
  CHECK_THROWS_WITH(call([&](ops::NormArgs& a) { a.out = x; }), Catch::Contains("their own output"));
}
