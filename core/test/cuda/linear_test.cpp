#include "ops/linear/linear.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "base/backend.hpp"
#include "base/half.hpp"
#include "cases/place.hpp"
#include "cases/quick.hpp"
#include "ops/linear/norm.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

std::uint16_t to_16(float x, DType t) { return t == DType::f16 ? float_to_half(x) : bf16(x).bits; }
float from_16(std::uint16_t x, DType t) {
  bf16 b;
  b.bits = x;
  return t == DType::f16 ? half_to_float(x) : static_cast<float>(b);
}

struct Case {
  std::int64_t m = 1, n = 1, k = 8;
  DType dtype = DType::bf16;
  bool f32_x = false, bias = false, add = false, gated = false, blas = false, stream = false;
  std::int64_t pad = 0;  // floats between rows of x and y

  std::int64_t outputs() const { return gated ? n / 2 : n; }
  std::int64_t x_stride() const { return k + pad; }
  std::int64_t y_stride() const { return outputs() + pad; }
};

// The inputs of a case on the host. w holds 16-bit numbers.
struct Data {
  std::vector<float> x, bias, y;  // x is unrounded [m, x_stride], NaN between rows; y is as before the call
  std::vector<std::uint16_t> w;

  Data(const Case& c, unsigned seed)
      : x(static_cast<std::size_t>(c.m * c.x_stride()), nan_value),
        bias(static_cast<std::size_t>(c.n)),
        y(static_cast<std::size_t>(c.m * c.y_stride()), nan_value),
        w(static_cast<std::size_t>(c.n * c.k)) {
    std::mt19937 rng(seed);
    const auto value = [&] { return static_cast<float>(static_cast<int>(rng() & 1023) - 512) / 256; };
    for (std::int64_t r = 0; r < c.m; ++r)
      for (std::int64_t i = 0; i < c.k; ++i) x[static_cast<std::size_t>(r * c.x_stride() + i)] = value() * 1.01f;
    for (float& b : bias) b = value();
    for (auto& e : w) e = to_16(value() / 4, c.dtype);
    if (c.add)
      for (std::int64_t r = 0; r < c.m; ++r)
        for (std::int64_t i = 0; i < c.n; ++i) y[static_cast<std::size_t>(r * c.y_stride() + i)] = value();
  }
};

struct Product {
  double value = 0, size = 0;  // size: sum of the magnitudes
};
Product product(const Case& c, const Data& d, std::int64_t row, std::int64_t output) {
  Product p;
  for (std::int64_t i = 0; i < c.k; ++i) {
    const double t = double{from_16(to_16(d.x[static_cast<std::size_t>(row * c.x_stride() + i)], c.dtype), c.dtype)} *
                     double{from_16(d.w[static_cast<std::size_t>(output * c.k + i)], c.dtype)};
    p.value += t, p.size += std::abs(t);
  }
  return p;
}

// Runs one case on poisoned outputs. Returns y, or the gated half widened to f32, [m, y_stride].
std::vector<float> run(const Case& c, const Data& d, int times = 1) {
  OnDevice device;
  ops::LinearArgs a;
  a.weight = device.put(d.w.data(), d.w.size());
  a.dtype = c.dtype;
  a.n = c.n, a.k = c.k, a.m = c.m, a.x_stride = c.x_stride();
  std::vector<std::uint16_t> x16;
  for (const float v : d.x) x16.push_back(to_16(v, c.dtype));
  a.x = c.f32_x ? static_cast<const void*>(device.put(d.x.data(), d.x.size())) : device.put(x16.data(), x16.size());
  a.x_dtype = c.f32_x ? DType::f32 : c.dtype;
  if (c.bias) a.bias = device.put(d.bias.data(), d.bias.size());
  a.add = c.add;
  std::vector<std::uint16_t> y16(d.y.size(), to_16(nan_value, c.dtype));
  std::vector<float> got;
  for (int t = 0; t < times; ++t) {
    const auto extent = std::array<std::int64_t, 1>{static_cast<std::int64_t>(d.y.size())};
    if (c.gated) {
      const auto out = View<std::uint16_t, 1>::dense(device.put(y16.data(), y16.size()), extent);
      a.gated = out.data, a.gated_stride = c.y_stride();
      (c.blas ? ops::linear_blas : c.stream ? ops::linear_stream : ops::linear)(a, device.stream());
      const auto result = device.get(out);
      std::vector<float> wide;
      for (const auto e : result) wide.push_back(from_16(e, c.dtype));
      if (t > 0) CHECK(std::memcmp(wide.data(), got.data(), wide.size() * sizeof(float)) == 0);
      got = wide;
    } else {
      const auto out = View<float, 1>::dense(device.put(d.y.data(), d.y.size()), extent);
      a.y = out.data, a.y_stride = c.y_stride();
      (c.blas ? ops::linear_blas : c.stream ? ops::linear_stream : ops::linear)(a, device.stream());
      const auto result = device.get(out);
      if (t > 0) CHECK(std::memcmp(result.data(), got.data(), result.size() * sizeof(float)) == 0);
      got = result;
    }
  }
  return got;
}

std::string list(const std::set<std::int64_t>& of) {
  std::string text;
  int count = 0;
  for (const auto e : of) {
    if (++count > 20) return text + " ...";
    text += " " + std::to_string(e);
  }
  return text;
}

// Compares every output if that is cheap. Else compares a sample with every row, every place in a tile and both ends.
void compare(const Case& c, unsigned seed) {
  CAPTURE(c.m, c.n, c.k, name_of(c.dtype), c.f32_x, c.bias, c.add, c.gated, c.blas, c.stream, c.pad);
  const Data d(c, seed);
  const std::vector<float> got = run(c, d, 2);
  std::mt19937 rng(seed);
  const bool all = c.m * c.n * c.k < 30'000'000;
  std::int64_t bad = 0, checked = 0;
  std::set<std::int64_t> bad_rows, bad_places;
  std::string first;
  for (std::int64_t r = 0; r < c.m; ++r)
    for (std::int64_t o = 0; o < c.outputs(); ++o) {
      if (!all && o >= 70 && o + 70 < c.outputs() && rng() % 64) continue;
      const Product p = product(c, d, r, o);
      double wanted = p.value, room = 1e-5 * p.size + 1e-6;
      if (c.gated) {
        const Product up = product(c, d, r, o + c.outputs());
        const double silu = p.value / (1 + std::exp(-p.value));
        wanted = silu * up.value;
        room = 1e-5 * (1.2 * p.size * std::abs(up.value) + std::abs(silu) * up.size) +
               (c.dtype == DType::f16 ? 6e-4 : 4.5e-3) * std::abs(wanted) + 1e-6;
        if (c.blas || (c.m > ops::linear_stream_rows && !c.stream)) {  // gate and up are rounded in between
          const double e = c.dtype == DType::f16 ? 6e-4 : 4.5e-3;
          room += e * (1.2 * std::abs(p.value * up.value) + std::abs(wanted));
        }
      }
      const std::size_t at = static_cast<std::size_t>(r * c.y_stride() + o);
      if (c.bias) wanted += d.bias[static_cast<std::size_t>(o)];
      if (c.add) wanted += d.y[at];
      room += 2e-7 * std::abs(wanted);
      ++checked;
      if (std::abs(got[at] - wanted) <= room) continue;
      if (!bad++)
        first = "row " + std::to_string(r) + " output " + std::to_string(o) + ": got " + std::to_string(got[at]) +
                ", wanted " + std::to_string(wanted) + " within " + std::to_string(room);
      bad_rows.insert(r), bad_places.insert(o % 64);
    }
  INFO(bad << " of " << checked << " are wrong, first " << first << "; in rows" << list(bad_rows)
           << "; outputs modulo 64" << list(bad_places));
  CHECK(bad == 0);
  std::int64_t stray = 0;
  for (std::int64_t r = 0; r < c.m; ++r)
    for (std::int64_t o = c.outputs(); o < c.y_stride(); ++o)
      stray += !std::isnan(got[static_cast<std::size_t>(r * c.y_stride() + o)]);
  CHECK(stray == 0);  // the kernel writes nothing between rows
}

}  // namespace

// Row n of W is one at column p(n) alone, so y[m, n] = x[m, p(n)] exactly. A wrong value tells its source.
TEST_CASE("cuda linear: every output takes the column and the row that it should") {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const std::int64_t k : {8, 64, 128, 200, 1024, 4096})
      for (const std::int64_t m : {1, 8, 9, 16})
        for (const bool columns : {true, false}) {  // x encodes its column, or its row and the column's block of 8
          Case c;
          c.m = m, c.n = 150, c.k = k, c.dtype = dtype;
          CAPTURE(m, k, name_of(dtype), columns);
          Data d(c, 1);
          const auto says = [&](std::int64_t row, std::int64_t column) {
            return static_cast<float>(columns ? column % 128 : row * 8 + column / 8 % 8);
          };
          const auto picked = [&](std::int64_t n) { return (n * 37 + 5) % k; };
          for (std::int64_t r = 0; r < m; ++r)
            for (std::int64_t i = 0; i < k; ++i) d.x[static_cast<std::size_t>(r * k + i)] = says(r, i);
          std::fill(d.w.begin(), d.w.end(), std::uint16_t{0});
          for (std::int64_t n = 0; n < c.n; ++n) d.w[static_cast<std::size_t>(n * k + picked(n))] = to_16(1, dtype);
          const auto got = run(c, d);
          int bad = 0;
          std::string first;
          for (std::int64_t r = 0; r < m; ++r)
            for (std::int64_t n = 0; n < c.n; ++n)
              if (const float y = got[static_cast<std::size_t>(r * c.n + n)]; !(y == says(r, picked(n))) && bad++ < 12)
                first += "\n  row " + std::to_string(r) + " output " + std::to_string(n) + " (column " +
                         std::to_string(picked(n)) + "): got " + std::to_string(y) + ", wanted " +
                         std::to_string(says(r, picked(n)));
          INFO(bad << " of " << m * c.n << " are wrong:" << first);
          CHECK(bad == 0);
        }
}

TEST_CASE("cuda linear equals the reference up to 16 rows") {
  unsigned seed = 1;
  for (const std::int64_t k : {8, 56, 64, 72, 128, 136, 576, 1536, 4096, 14336})
    for (const std::int64_t n : {1, 7, 64, 65, 200, 576})
      for (const std::int64_t m : {1, 2, 5, 8, 9, 16}) {
        if (n * k * m > 30'000'000 || (n > 65 && (m == 2 || m == 9))) continue;
        Case c;
        c.m = m, c.n = n, c.k = k;
        c.dtype = seed % 2 ? DType::bf16 : DType::f16;
        c.f32_x = seed % 3 == 0;
        c.bias = seed % 5 < 2;
        c.add = seed % 7 < 3;
        c.pad = seed % 4 == 1 ? 8 : 0;
        compare(c, seed++);
      }
}

TEST_CASE("cuda linear: the streaming kernel above 16 rows") {
  unsigned seed = 300;
  for (const std::int64_t m : {17, 32, 33, 40, 41, 64})
    for (const bool gated : {false, true})
      for (const std::int64_t k : {136, 3000}) {
        Case c;
        c.m = m, c.n = 198, c.k = k, c.gated = gated, c.stream = true;
        c.dtype = seed % 2 ? DType::bf16 : DType::f16;
        compare(c, seed++);
      }
}

TEST_CASE("cuda linear: many tiles a block, as many tiles as blocks, slices of tiles") {
  for (const std::int64_t m : {1, 16}) {
    Case c;
    c.m = m;
    c.n = 20011, c.k = 136;
    compare(c, 11);
    c.n = 6144, c.k = 1032;
    compare(c, 12);
    c.n = 4096, c.k = 4096, c.add = true;
    compare(c, 13);
    c.n = 1000, c.k = 14336, c.bias = true;
    compare(c, 14);
    c.n = 5001, c.k = 136;
    compare(c, 15);
    c.n = 2561, c.k = 840;
    compare(c, 16);
  }
}

// One product leaves the norm of its sum, and the next takes it, plain or with a gate. The reference computes the norm
// in double between them. The shapes have tiles of 64 and 48 rows, whole and cut, and slices.
TEST_CASE("cuda linear: norms that are left and taken") {
  struct Shape {
    std::int64_t n, k;
  };
  constexpr float eps = 1e-5f;
  unsigned seed = 500;
  for (const Shape s : {Shape{64, 72}, {64, 4096}, {1024, 2816}, {2624, 136}, {5248, 72}, {6144, 64}})
    for (const std::int64_t m : {1, 7, 16})
      for (const bool gated : {false, true}) {
        CAPTURE(s.n, s.k, m, gated);
        Case first;
        first.m = m, first.n = s.n, first.k = s.k, first.add = m != 16;
        const Data d(first, seed++);
        OnDevice device;
        const auto rounded = [](const std::vector<float>& from) {
          std::vector<std::uint16_t> to;
          for (const float v : from) to.push_back(to_16(v, DType::bf16));
          return to;
        };
        std::vector<float> weight(static_cast<std::size_t>(s.n));
        for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = 0.5f + static_cast<float>(i % 7) / 8;
        const auto x16 = rounded(d.x);
        const std::vector<std::uint16_t> poison16(static_cast<std::size_t>(m * (s.n + 8)),
                                                  to_16(nan_value, DType::bf16));
        const std::vector<float> poison(static_cast<std::size_t>(m * s.n), nan_value);
        ops::LinearArgs a;
        a.weight = device.put(d.w.data(), d.w.size());
        a.n = s.n, a.k = a.x_stride = s.k, a.m = m;
        a.x = device.put(x16.data(), x16.size()), a.x_dtype = DType::bf16;
        a.y = device.put(d.y.data(), d.y.size()), a.y_stride = s.n, a.add = first.add;
        if (m == 7) a.bias = device.put(d.bias.data(), d.bias.size());
        a.left.weight = device.put(weight.data(), weight.size());
        a.left.out = device.put(poison16.data(), poison16.size()), a.left.out_stride = s.n + 8;
        a.left.squares = device.put(poison.data(), static_cast<std::size_t>(m * s.n / ops::norm_piece));
        ops::linear(a, device.stream());
        const auto x = device.get(View<float, 1>::dense(a.y, {m * s.n}));

        Case second;
        second.m = m, second.n = 130, second.k = s.n, second.gated = gated;
        const Data e(second, seed++);
        const std::vector<float> y_poison(static_cast<std::size_t>(m * 130), nan_value);
        const std::vector<std::uint16_t> gated_poison(static_cast<std::size_t>(m * 65), to_16(nan_value, DType::bf16));
        ops::LinearArgs b;
        b.weight = device.put(e.w.data(), e.w.size());
        b.n = 130, b.k = s.n, b.m = m;
        b.x = a.left.out, b.x_dtype = DType::bf16, b.x_stride = s.n + 8;
        b.taken.squares = a.left.squares, b.taken.eps = eps;
        if (gated)
          b.gated = device.put(gated_poison.data(), gated_poison.size()), b.gated_stride = 65;
        else
          b.y = device.put(y_poison.data(), y_poison.size()), b.y_stride = 130;
        ops::linear(b, device.stream());
        std::vector<float> got;
        if (gated)
          for (const auto v : device.get(View<std::uint16_t, 1>::dense(static_cast<std::uint16_t*>(b.gated), {m * 65})))
            got.push_back(from_16(v, DType::bf16));
        else
          got = device.get(View<float, 1>::dense(b.y, {m * 130}));

        int bad = 0;
        for (std::int64_t r = 0; r < m; ++r) {
          double squares = 0;
          for (std::int64_t i = 0; i < s.n; ++i)
            squares += std::pow(double{x[static_cast<std::size_t>(r * s.n + i)]}, 2);
          const double scale = 1 / std::sqrt(squares / static_cast<double>(s.n) + double{eps});
          const auto of = [&](std::int64_t output) {
            Product p;
            for (std::int64_t i = 0; i < s.n; ++i) {
              const float taken = x[static_cast<std::size_t>(r * s.n + i)] * weight[static_cast<std::size_t>(i)];
              const double t = scale * double{from_16(to_16(taken, DType::bf16), DType::bf16)} *
                               double{from_16(e.w[static_cast<std::size_t>(output * s.n + i)], DType::bf16)};
              p.value += t, p.size += std::abs(t);
            }
            return p;
          };
          for (std::int64_t o = 0; o < (gated ? 65 : 130); ++o) {
            const Product p = of(o);
            double wanted = p.value, room = 1e-5 * p.size + 1e-6;
            if (gated) {
              const Product up = of(o + 65);
              const double silu = p.value / (1 + std::exp(-p.value));
              wanted = silu * up.value;
              room = 1e-5 * (1.2 * p.size * std::abs(up.value) + std::abs(silu) * up.size) + 4.5e-3 * std::abs(wanted) +
                     1e-6;
            }
            bad += !(std::abs(got[static_cast<std::size_t>(r * (gated ? 65 : 130) + o)] - wanted) <= room);
          }
        }
        CHECK(bad == 0);
      }
}

TEST_CASE("cuda linear with a gate") {
  unsigned seed = 100;
  for (const bool blas : {false, true})
    for (const std::int64_t k : {8, 136, 576, 4096})
      for (const std::int64_t half : {2, 30, 32, 34, 768, 3000})
        for (const std::int64_t m : {1, 7, 16}) {
          if (half == 3000 && k > 576) continue;
          Case c;
          c.m = m, c.n = 2 * half, c.k = k, c.gated = true, c.blas = blas;
          c.dtype = seed % 2 ? DType::bf16 : DType::f16;
          c.f32_x = seed % 3 == 0 && !blas;
          c.pad = seed % 4 == 1 ? 8 : 0;
          compare(c, seed++);
        }
  Case c;
  c.m = 40, c.n = 1536, c.k = 576, c.gated = true, c.f32_x = true;
  compare(c, seed);
}

TEST_CASE("cuda linear through cuBLASLt") {
  unsigned seed = 200;
  for (const std::int64_t m : {1, 17, 40, 300})
    for (const std::int64_t n : {7, 64, 576})
      for (const std::int64_t k : {8, 136, 576}) {
        Case c;
        c.m = m, c.n = n, c.k = k, c.blas = m == 1;
        c.dtype = seed % 2 ? DType::bf16 : DType::f16;
        c.f32_x = seed % 3 == 0 && !c.blas;
        c.bias = seed % 5 < 2;
        c.add = seed % 7 < 3;
        c.pad = seed % 4 == 1 ? 8 : 0;
        compare(c, seed++);
      }
}

// 5376 outputs, gated or not, are 84 tiles of 64 rows or 112 of 48. Tiles of 48 spread better over 16 and over 132
// multiprocessors: they serve up to 8 rows of x, tiles of 64 more.
TEST_CASE("cuda linear: a row's result does not depend on how many rows there are, nor on what they hold") {
  for (const std::int64_t n : {576, 5376, 20000})
    for (const bool gated : {false, true}) {
      if (quick() && n == 20000) continue;
      CAPTURE(n, gated);
      Case c;
      c.m = 16, c.n = n, c.k = quick() ? 136 : 1536, c.gated = gated;
      const Data d(c, 5);
      const auto together = run(c, d);
      const auto same = [&](const std::vector<float>& got, std::int64_t first, std::int64_t from, std::int64_t rows) {
        return std::memcmp(got.data() + first * c.y_stride(), together.data() + from * c.y_stride(),
                           static_cast<std::size_t>(rows * c.y_stride()) * sizeof(float)) == 0;
      };
      for (const auto& [from, rows] : {std::pair{0, 1}, {3, 1}, {8, 1}, {15, 1}, {0, 8}, {8, 8}}) {
        CAPTURE(from, rows);
        Case fewer = c;
        fewer.m = rows;
        Data some(fewer, 6);
        some.w = d.w;
        std::copy_n(d.x.begin() + from * c.k, rows * c.k, some.x.begin());
        CHECK(same(run(fewer, some), 0, from, rows));
        if (rows > 1) continue;
        Data poisoned = d;
        std::fill(poisoned.x.begin(), poisoned.x.end(), nan_value);
        std::copy_n(d.x.begin() + from * c.k, c.k, poisoned.x.begin() + from * c.k);
        CHECK(same(run(c, poisoned), from, from, 1));
      }
    }
}

TEST_CASE("cuda linear: a norm that is left and taken does not depend on how many rows there are") {
  constexpr std::int64_t n = 64, k = 4096;
  Case c;
  c.m = 16, c.n = n, c.k = k;
  const Data d(c, 7);
  Case after;
  after.m = 16, after.n = 200, after.k = n;
  const Data e(after, 8);
  struct Result {
    std::vector<std::uint16_t> left;
    std::vector<float> squares, y;
  };
  const auto of = [&](std::int64_t from, std::int64_t rows) {
    OnDevice device;
    std::vector<std::uint16_t> x;
    for (std::int64_t i = from * k; i < (from + rows) * k; ++i)
      x.push_back(to_16(d.x[static_cast<std::size_t>(i)], DType::bf16));
    const std::vector<float> weight(n, 0.75f), room(static_cast<std::size_t>(rows * 200), nan_value);
    const std::vector<std::uint16_t> room16(static_cast<std::size_t>(rows * n), 0x7fff);
    ops::LinearArgs a, b;
    a.weight = device.put(d.w.data(), d.w.size());
    a.n = n, a.k = a.x_stride = k, a.m = b.m = rows;
    a.x = device.put(x.data(), x.size()), a.x_dtype = b.x_dtype = DType::bf16;
    a.y = device.put(room.data(), room.size()), a.y_stride = n;
    a.left.weight = device.put(weight.data(), weight.size());
    a.left.out = device.put(room16.data(), room16.size()), a.left.out_stride = n;
    a.left.squares = device.put(room.data(), room.size());
    b.weight = device.put(e.w.data(), e.w.size());
    b.n = 200, b.k = b.x_stride = n, b.x = a.left.out;
    b.taken.squares = a.left.squares, b.taken.eps = 1e-5f;
    b.y = device.put(room.data(), room.size()), b.y_stride = 200;
    ops::linear(a, device.stream());
    ops::linear(b, device.stream());
    return Result{device.get(View<std::uint16_t, 1>::dense(static_cast<std::uint16_t*>(a.left.out), {rows * n})),
                  device.get(View<float, 1>::dense(a.left.squares, {rows * n / ops::norm_piece})),
                  device.get(View<float, 1>::dense(b.y, {rows * 200}))};
  };
  const Result all = of(0, 16);
  for (const auto& [from, rows] : {std::pair{0, 1}, {9, 1}, {8, 8}, {3, 9}}) {
    CAPTURE(from, rows);
    const Result some = of(from, rows);
    const auto same = [&](const auto& part, const auto& whole, std::int64_t width) {
      return std::equal(part.begin(), part.end(), whole.begin() + from * width);
    };
    CHECK(same(some.left, all.left, n));
    CHECK(same(some.squares, all.squares, n / ops::norm_piece));
    CHECK(same(some.y, all.y, 200));
  }
}

// Kernels begin before the one in front of them ends. In this chain each kernel needs the whole output of the last one,
// so a missing wait shows.
TEST_CASE("cuda linear: a captured chain of layers gives what the same calls give one at a time") {
  constexpr std::int64_t hidden = 1024, ffn = 2816, steps = 24;
  for (const auto& [m, fused] : {std::pair{std::int64_t{1}, false}, {16, false}, {1, true}, {16, true}}) {
    CAPTURE(m, fused);
    Case up, down;
    up.m = down.m = m;
    up.n = 2 * ffn, up.k = hidden;
    down.n = hidden, down.k = ffn;
    const Data a(up, 1), b(down, 2);
    OnDevice device;
    const CudaRuntime& cuda = cuda_backend()->runtime;
    const Stream stream = device.stream();
    const std::vector<float> norm(hidden, 0.5f);
    std::vector<float> start(static_cast<std::size_t>(m * hidden));
    for (std::size_t i = 0; i < start.size(); ++i) start[i] = a.x[i];
    float* x = device.put(start.data(), start.size());
    const std::vector<std::uint16_t> room(static_cast<std::size_t>(m * ffn), 0x7fff);
    ops::NormArgs n;
    n.x = x, n.rows = m, n.n = n.x_stride = n.out_stride = hidden;
    n.weight = device.put(norm.data(), norm.size()), n.eps = 1e-5f;
    n.out = device.put(room.data(), room.size());
    ops::LinearArgs first, second;
    first.weight = device.put(a.w.data(), a.w.size());
    first.n = up.n, first.k = hidden, first.m = m, first.x = n.out, first.x_dtype = DType::bf16,
    first.x_stride = hidden;
    first.gated = device.put(room.data(), room.size()), first.gated_stride = ffn;
    second.weight = device.put(b.w.data(), b.w.size());
    second.n = hidden, second.k = ffn, second.m = m, second.x = first.gated, second.x_dtype = DType::bf16,
    second.x_stride = ffn;
    second.y = x, second.y_stride = hidden, second.add = true;
    const std::vector<float> no_squares(static_cast<std::size_t>(m * hidden / ops::norm_piece), nan_value);
    float* squares = device.put(no_squares.data(), no_squares.size());
    if (fused) {  // the second product leaves the norm, the first takes it
      second.left.weight = n.weight;
      second.left.out = n.out, second.left.out_stride = hidden;
      second.left.squares = squares;
    }
    const auto all = [&](bool one_at_a_time) {
      for (std::int64_t s = 0; s < steps; ++s) {
        first.taken = {fused && s > 0 ? squares : nullptr, n.eps};
        if (!first.taken.squares) ops::rms_norm(n, stream);
        if (one_at_a_time) device.synchronize();
        ops::linear(first, stream);
        if (one_at_a_time) device.synchronize();
        ops::linear(second, stream);
        if (one_at_a_time) device.synchronize();
      }
    };
    const auto reset = [&] {
      cuda.copy(x, start.data(), start.size() * sizeof(float), stream.handle());
      device.synchronize();
    };
    const auto values = [&] { return device.get(View<float, 1>::dense(x, {m * hidden})); };
    all(true);
    const auto wanted = values();
    CHECK(std::isfinite(wanted[0]));
    const auto same = [&] {
      const auto got = values();
      std::int64_t wrong = 0;
      for (std::size_t i = 0; i < got.size(); ++i) wrong += !(got[i] == wanted[i]);
      return wrong;
    };
    reset();
    all(false);
    CHECK(same() == 0);
    const auto work = [&] { all(false); };
    void* graph = cuda.capture(
        stream.handle(), [](void* f) { (*static_cast<decltype(work)*>(f))(); },
        const_cast<void*>(static_cast<const void*>(&work)));
    for (int i = 0; i < 20; ++i) {
      CAPTURE(i);
      reset();
      cuda.launch(graph, stream.handle());
      CHECK(same() == 0);
    }
    cuda.delete_graph(graph);
  }
}

TEST_CASE("cuda linear names what it cannot do") {
  ops::LinearArgs a;
  std::uint16_t memory[8] = {};
  float y = 0;
  a.weight = reinterpret_cast<void*>(std::uintptr_t{4096}), a.x = a.weight;
  a.n = 1, a.k = 12, a.x_stride = 16, a.m = 1, a.y = &y, a.y_stride = 1;
  OnDevice device;
  const auto call = [&] { ops::linear(a, device.stream()); };
  CHECK_THROWS_WITH(call(), Catch::Contains("1 x 12"));
  a.k = 16, a.dtype = DType::f32;
  CHECK_THROWS_WITH(call(), Catch::Contains("wanted bf16 or f16"));
  a.dtype = DType::bf16, a.x_dtype = DType::f16;
  CHECK_THROWS_WITH(call(), Catch::Contains("activations of f16"));
  a.x_dtype = DType::f32, a.gated = memory;
  CHECK_THROWS_WITH(call(), Catch::Contains("gated"));
}
