#include "ops/linear/linear.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <random>

#include "base/backend.hpp"
#include "cases/numbers.hpp"
#include "cases/place.hpp"
#include "cases/quick.hpp"
#include "ops/linear/norm.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::int64_t m = 1, n = 1, k = 8;
  bool gated = false;
  std::int64_t outputs() const { return gated ? n / 2 : n; }
};

// The inputs of a case on the host. w holds bf16.
struct Data {
  std::vector<float> x;  // unrounded [m, k]
  std::vector<std::uint16_t> w;

  Data(const Case& c, unsigned seed) : x(static_cast<std::size_t>(c.m * c.k)), w(static_cast<std::size_t>(c.n * c.k)) {
    std::mt19937 rng(seed);
    const auto value = [&] { return static_cast<float>(static_cast<int>(rng() & 1023) - 512) / 256; };
    for (float& v : x) v = value() * 1.01f;
    for (auto& e : w) e = to_16(value() / 4, DType::bf16);
  }
};

// Returns y, or the gated half widened to f32, [m, outputs].
std::vector<float> run(const Case& c, const Data& d) {
  OnDevice device;
  ops::LinearArgs a;
  a.weight = device.put(d.w);
  a.n = c.n, a.k = a.x_stride = c.k, a.m = c.m;
  a.x = put_as(device, d.x, DType::bf16), a.x_dtype = DType::bf16;
  const std::vector<float> poison(static_cast<std::size_t>(c.m * c.outputs()), nan_value);
  if (c.gated)
    a.gated = put_as(device, poison, DType::bf16), a.gated_stride = c.outputs();
  else
    a.y = device.put(poison), a.y_stride = c.outputs();
  ops::linear(a, device.stream());
  return c.gated ? get_as(device, a.gated, DType::bf16, c.m * c.outputs())
                 : get_as(device, a.y, DType::f32, c.m * c.outputs());
}

}  // namespace

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
        return std::memcmp(got.data() + first * c.outputs(), together.data() + from * c.outputs(),
                           static_cast<std::size_t>(rows * c.outputs()) * sizeof(float)) == 0;
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
