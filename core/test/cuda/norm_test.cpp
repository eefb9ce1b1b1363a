#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>

#include "base/half.hpp"
#include "cases/place.hpp"
#include "cases/quick.hpp"
#include "ops/linear/argmax.hpp"
#include "ops/linear/embed.hpp"
#include "ops/linear/norm.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

float widened(const std::uint8_t* at, DType t) {
  if (t == DType::f32) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
  }
  std::uint16_t u;
  std::memcpy(&u, at, 2);
  bf16 b;
  b.bits = u;
  return t == DType::f16 ? half_to_float(u) : static_cast<float>(b);
}

}  // namespace

TEST_CASE("cuda rms_norm and rounding equal the reference") {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t n : {8, 72, 576, 4096, 5120, 20008})
      for (const std::int64_t rows : {1, 3, 70})
        for (const bool norm : {true, false}) {
          CAPTURE(name_of(dtype), n, rows, norm);
          const std::int64_t x_stride = n + 4, out_stride = n + 8;
          const std::size_t size = size_of(dtype);
          std::vector<float> x(static_cast<std::size_t>(rows * x_stride), nan_value),
              weight(static_cast<std::size_t>(n));
          for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t i = 0; i < n; ++i) x[static_cast<std::size_t>(r * x_stride + i)] = 3 * normal(rng);
          for (float& w : weight) w = normal(rng);
          const std::vector<std::uint8_t> poison(static_cast<std::size_t>(rows * out_stride) * size, 0xff);
          OnDevice device;
          ops::NormArgs a;
          a.x = device.put(x.data(), x.size());
          a.rows = rows, a.n = n, a.x_stride = x_stride;
          if (norm) a.weight = device.put(weight.data(), weight.size());
          a.eps = 1e-5f;
          const auto out = View<std::uint8_t, 1>::dense(device.put(poison.data(), poison.size()),
                                                        {static_cast<std::int64_t>(poison.size())});
          a.out = out.data, a.dtype = dtype, a.out_stride = out_stride;
          ops::rms_norm(a, device.stream());
          const auto got = device.get(out);
          int bad = 0, stray = 0;
          std::string first;
          for (std::int64_t r = 0; r < rows; ++r) {
            double sum = 0;
            for (std::int64_t i = 0; i < n; ++i) {
              const double v = x[static_cast<std::size_t>(r * x_stride + i)];
              sum += v * v;
            }
            const double factor = 1 / std::sqrt(sum / static_cast<double>(n) + 1e-5);
            for (std::int64_t i = 0; i < out_stride; ++i) {
              const std::size_t at = static_cast<std::size_t>(r * out_stride + i) * size;
              if (i >= n) {
                for (std::size_t b = 0; b < size; ++b) stray += got[at + b] != 0xff;
                continue;
              }
              const double v = x[static_cast<std::size_t>(r * x_stride + i)];
              const double wanted = norm ? v * factor * weight[static_cast<std::size_t>(i)] : v;
              const double room = dtype == DType::f32 ? (norm ? 1e-5 : 0) : dtype == DType::f16 ? 5e-4 : 4e-3;
              const float y = widened(got.data() + at, dtype);
              if (!(std::abs(y - wanted) <= room * std::abs(wanted) + (room > 0 ? 1e-7 : 0)) && !bad++)
                first = "row " + std::to_string(r) + " element " + std::to_string(i) + ": got " + std::to_string(y) +
                        ", wanted " + std::to_string(wanted);
            }
          }
          INFO(bad << " of " << rows * n << " are wrong, first " << first);
          CHECK(bad == 0);
          CHECK(stray == 0);
        }
}

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

TEST_CASE("cuda embed copies rows of the table; an unknown token gives NaN") {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const std::int64_t vocabulary = 100, k = 72;
    std::vector<std::uint16_t> table;
    for (std::int64_t i = 0; i < vocabulary * k; ++i) {
      const float v = static_cast<float>(i % 251) - 120.f;
      table.push_back(dtype == DType::f16 ? float_to_half(v) : bf16(v).bits);
    }
    const std::vector<std::int32_t> token = {99, 0, 5, 5, 100, -1};
    const std::vector<float> poison(token.size() * static_cast<std::size_t>(k), 77.f);
    OnDevice device;
    ops::EmbedArgs a;
    a.table = device.put(table.data(), table.size());
    a.dtype = dtype;
    a.vocabulary = vocabulary, a.k = k;
    a.token = device.put(token.data(), token.size());
    a.rows = static_cast<std::int64_t>(token.size());
    const auto out = View<float, 2>::dense(device.put(poison.data(), poison.size()), {a.rows, k});
    a.out = out.data;
    ops::embed(a, device.stream());
    const auto got = device.get(out);
    for (std::size_t r = 0; r < token.size(); ++r)
      for (std::int64_t i = 0; i < k; ++i) {
        const float y = got[r * static_cast<std::size_t>(k) + static_cast<std::size_t>(i)];
        if (token[r] < 0 || token[r] >= vocabulary) {
          REQUIRE(std::isnan(y));
        } else {
          REQUIRE(y == static_cast<float>((token[r] * k + i) % 251) - 120.f);
        }
      }
  }
}

TEST_CASE("cuda argmax takes the lowest of equal values, and none of a row that is not finite") {
  std::mt19937 rng(9);
  for (const std::int64_t n : {1, 31, 256, 5000, 49152, 128256}) {
    CAPTURE(n);
    constexpr float inf = std::numeric_limits<float>::infinity();
    const std::int64_t rows = 10, stride = n + 3;
    std::vector<float> x(static_cast<std::size_t>(rows * stride), 1e30f);  // gaps must not be read
    std::vector<std::int32_t> wanted;
    for (std::int64_t r = 0; r < rows; ++r) {
      float* row = x.data() + r * stride;
      for (std::int64_t i = 0; i < n; ++i) row[i] = static_cast<float>(rng() % 1000) - 2000.f;
      std::int64_t at = static_cast<std::int64_t>(rng() % static_cast<unsigned>(n));
      if (r == 1) at = 0;
      if (r == 2) at = n - 1;
      row[at] = -3.f;
      for (std::int64_t i = at + 1; i < n; i += 97) row[i] = -3.f;  // ties
      // A value that is not finite: first, last, anywhere, or everywhere.
      if (r == 3) row[0] = nan_value;
      if (r == 4) row[n - 1] = nan_value;
      if (r == 5) row[rng() % static_cast<unsigned>(n)] = -inf;
      if (r == 6) row[rng() % static_cast<unsigned>(n)] = inf;
      if (r == 7) std::fill_n(row, n, nan_value);
      if (r == 8) std::fill_n(row, n, -inf);
      wanted.push_back(r >= 3 && r <= 8 ? -1 : static_cast<std::int32_t>(at));
    }
    std::vector<std::int32_t> marks(static_cast<std::size_t>(rows), 0), wanted_marked = wanted;
    marks[1] = marks[9] = 1;
    wanted_marked[1] = wanted_marked[9] = -1;
    const std::vector<std::int32_t> poison(static_cast<std::size_t>(rows), -7);
    OnDevice device;
    ops::ArgmaxArgs a;
    a.x = device.put(x.data(), x.size());
    a.rows = rows, a.n = n, a.x_stride = stride;
    for (int again = 0; again < 2; ++again) {
      const auto out = View<std::int32_t, 1>::dense(device.put(poison.data(), poison.size()), {rows});
      a.index = out.data;
      ops::argmax(a, device.stream());
      CHECK(device.get(out) == wanted);
    }
    const auto marked = View<std::int32_t, 1>::dense(device.put(marks.data(), marks.size()), {rows});
    a.nonfinite = marked.data;
    ops::argmax(a, device.stream());
    CHECK(device.get(View<std::int32_t, 1>::dense(a.index, {rows})) == wanted_marked);
    CHECK(device.get(marked) == std::vector<std::int32_t>(static_cast<std::size_t>(rows), 0));
  }
}
