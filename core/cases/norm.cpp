// Norms and other ops on rows of activations: rms_norm, silu_mul, embed and argmax.
#include "ops/linear/norm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "cases/case.hpp"
#include "cases/numbers.hpp"
#include "cases/paged_fixture.hpp"
#include "ops/linear/argmax.hpp"
#include "ops/linear/embed.hpp"
#include "ops/linear/reference.hpp"

namespace kvlab::cases {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

std::vector<float> normals(std::int64_t count, float spread, std::mt19937& rng) {
  std::normal_distribution<float> normal(0.f, spread);
  std::vector<float> v(static_cast<std::size_t>(count));
  for (float& x : v) x = normal(rng);
  return v;
}

// The largest difference relative to a value or, below `least`, to `least`. NaN must be where NaN is wanted.
double worst_relative(const std::vector<float>& got, const std::vector<float>& wanted, double least) {
  double worst = got.size() == wanted.size() ? 0 : INFINITY;
  for (std::size_t i = 0; i < std::min(got.size(), wanted.size()); ++i) {
    if (std::isnan(got[i]) && std::isnan(wanted[i])) continue;
    const double d = std::abs(double{got[i]} - wanted[i]) / std::max(std::abs(double{wanted[i]}), least);
    worst = d <= worst ? worst : std::isnan(d) ? INFINITY : d;
  }
  return worst;
}

// What f32 arithmetic may lose: sums of squares a root and two products; then a half step of the
// output's type.
double room_of(DType t) { return t == DType::f32 ? 1e-5 : t == DType::f16 ? 5e-4 : 4e-3; }

// Rows of x with gaps, their norms in `dtype`, or x rounded without a weight.
struct Norm {
  std::int64_t rows = 1, n = 1;
  DType dtype = DType::f32;
  bool weight = true;
  std::int64_t x_gap = 4, out_gap = 8;

  // The CPU takes f32 and a weight only, CUDA rows of 8 elements.
  bool on(Device device) const { return device == Device::cpu ? weight && dtype == DType::f32 : n % 8 == 0; }
  double bytes() const {
    return static_cast<double>(rows * n) * static_cast<double>(4 + size_of(dtype)) + 4 * static_cast<double>(n);
  }
};

class NormScene final : public Scene {
 public:
  NormScene(Place& place, const Norm& of, int copies, std::vector<float> x)
      : place_(place), of_(of), x_(std::move(x)), weight_(randoms(of.n)) {
    ops::NormArgs& a = args_;
    a.rows = of.rows, a.n = of.n;
    a.x_stride = of.n + of.x_gap, a.out_stride = of.n + of.out_gap;
    a.dtype = of.dtype, a.eps = 1e-5f;
    if (of.weight) a.weight = place.put(weight_);
    for (std::int64_t r = 0; r < of.rows; ++r) std::fill_n(x_.begin() + r * a.x_stride + of.n, of.x_gap, nan_value);
    for (int c = 0; c < copies; ++c) {
      from_.push_back(place.put(x_));
      to_.push_back(
          put_as(place, std::vector<float>(static_cast<std::size_t>(of.rows * a.out_stride), nan_value), of.dtype));
    }
  }
  void run(int copy) override {
    args_.x = from_[static_cast<std::size_t>(copy)];
    args_.out = to_[static_cast<std::size_t>(copy)];
    ops::rms_norm(args_, place_.stream());
  }
  void check(Check& check) override {
    run(0);
    std::vector<float> wanted(static_cast<std::size_t>(of_.rows * args_.out_stride), nan_value);
    for (std::int64_t r = 0; r < of_.rows; ++r) {
      const float* x = x_.data() + r * args_.x_stride;
      float* out = wanted.data() + r * args_.out_stride;
      if (of_.weight)
        ops::rms_norm_reference(x, weight_.data(), args_.eps, 1, of_.n, out);
      else
        std::transform(x, x + of_.n, out, [&](float v) { return stored(v, of_.dtype); });
    }
    const auto got = get_as(place_, to_[0], of_.dtype, static_cast<std::int64_t>(wanted.size()));
    check.within(fmt::format("{} of {} rows of {} to {}", of_.weight ? "norms" : "rounding", of_.rows, of_.n,
                             name_of(of_.dtype)),
                 worst_relative(got, wanted, 1e-2), of_.weight ? room_of(of_.dtype) : 0);
  }

 private:
  Place& place_;
  Norm of_;
  std::vector<float> x_, weight_;
  ops::NormArgs args_;
  std::vector<const float*> from_;
  std::vector<void*> to_;
};

void check_norms(Place& place, Check& check) {
  std::mt19937 rng(3);
  for (const std::int64_t n : {1, 8, 31, 72, 576, 1536, 4096, 5120, 20008})
    for (const std::int64_t rows : {1, 3, 70})
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
        for (const bool weight : {true, false}) {
          const Norm of{rows, n, dtype, weight};
          if (of.on(place.stream().device()))
            NormScene(place, of, 1, normals(rows * (n + of.x_gap), 3, rng)).check(check);
        }
}

void check_gates(Place&, Check& check) {
  std::mt19937 rng(3);
  for (const std::int64_t count : {1, 8, 31, 576, 8192, 61440}) {
    const auto gate = normals(count, 3, rng), up = normals(count, 3, rng);
    std::vector<float> got(gate.size()), wanted(gate.size());
    ops::silu_mul(gate.data(), up.data(), count, got.data());
    ops::silu_mul_reference(gate.data(), up.data(), count, wanted.data());
    check.within(fmt::format("silu_mul of {}", count), worst_relative(got, wanted, 1e-6), 2e-6);
  }
}

void check_embed(Place& place, Check& check) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    constexpr std::int64_t vocabulary = 100, k = 72;
    const auto value = [](std::int64_t i) { return static_cast<float>(i % 251) - 120.f; };
    std::vector<float> table, wanted;
    for (std::int64_t i = 0; i < vocabulary * k; ++i) table.push_back(value(i));
    const std::vector<std::int32_t> token = {99, 0, 5, 5, 100, -1};  // the last two are unknown
    for (const std::int32_t t : token)
      for (std::int64_t i = 0; i < k; ++i) wanted.push_back(t < 0 || t >= vocabulary ? nan_value : value(t * k + i));
    ops::EmbedArgs a;
    a.table = put_as(place, table, dtype);
    a.dtype = dtype, a.vocabulary = vocabulary, a.k = k;
    a.token = place.put(token);
    a.rows = static_cast<std::int64_t>(token.size());
    a.out = place.put(std::vector<float>(wanted.size(), 77.f));
    ops::embed(a, place.stream());
    check.equal(std::string("rows of ") + name_of(dtype),
                get_as(place, a.out, DType::f32, static_cast<std::int64_t>(wanted.size())), wanted, 0);
  }
}

// The lowest of equal values wins, and a row with a value that is not finite has no winner.
void check_argmax(Place& place, Check& check) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  std::mt19937 rng(9);
  for (const std::int64_t n : {1, 31, 256, 5000, 49152, 128256}) {
    const std::int64_t rows = 10, stride = n + 3;
    std::vector<float> x(static_cast<std::size_t>(rows * stride), 1e30f);  // gaps must not be read
    std::vector<std::int32_t> wanted;
    for (std::int64_t r = 0; r < rows; ++r) {
      float* row = x.data() + r * stride;
      const auto anywhere = [&] { return static_cast<std::int64_t>(rng() % static_cast<unsigned>(n)); };
      for (std::int64_t i = 0; i < n; ++i) row[i] = static_cast<float>(rng() % 1000) - 2000.f;
      const std::int64_t at = r == 1 ? 0 : r == 2 ? n - 1 : anywhere();
      for (std::int64_t i = at; i < n; i += i == at ? 1 : 97) row[i] = -3.f;  // ties
      if (r == 3) row[0] = nan_value;
      if (r == 4) row[n - 1] = nan_value;
      if (r == 5) row[anywhere()] = -inf;
      if (r == 6) row[anywhere()] = inf;
      if (r == 7) std::fill_n(row, n, nan_value);
      if (r == 8) std::fill_n(row, n, -inf);
      wanted.push_back(r >= 3 && r <= 8 ? -1 : static_cast<std::int32_t>(at));
    }
    const auto scope = check.in(fmt::format("rows of {}", n));
    ops::ArgmaxArgs a;
    a.x = place.put(x);
    a.rows = rows, a.n = n, a.x_stride = stride;
    const auto call = [&] {
      const auto out = View<std::int32_t, 1>::dense(place.put(std::vector<std::int32_t>(rows, -7)), {rows});
      a.index = out.data;
      ops::argmax(a, place.stream());
      return place.get(out);
    };
    check.equal("index", call(), wanted);
    check.equal("index again", call(), wanted);
    std::vector<std::int32_t> marks(rows, 0);
    marks[1] = marks[9] = 1;
    wanted[1] = wanted[9] = -1;
    const auto marked = View<std::int32_t, 1>::dense(place.put(marks), {rows});
    a.nonfinite = marked.data;
    check.equal("index of marked rows", call(), wanted);
    check.equal("marks are gone", place.get(marked), std::vector<std::int32_t>(rows, 0));
  }
}

// A prompt's chunk, without gaps.
Case timed(const Norm& of, bool cuda) {
  Case c{"norm", fmt::format("rms_norm, {} rows of {} to {}", of.rows, of.n, name_of(of.dtype))};
  c.make = [of](Place& place, int copies) {
    return std::make_unique<NormScene>(place, of, copies, randoms(of.rows * of.n));
  };
  (cuda ? c.timed_cuda : c.timed_cpu) = true;
  c.work.bytes = of.bytes();
  c.copies = copies_beyond(of.bytes(), cuda ? 300e6 : 160e6, 1 << 20);
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  v.push_back(checked("norm", "norms and rounding of rows with gaps", check_norms));
  v.push_back(checked("norm", "silu_mul", check_gates));
  v.back().cuda = false;
  v.push_back(checked("norm", "embed: rows of the table, NaN for an unknown token", check_embed));
  v.back().cpu = false;
  v.push_back(checked("norm", "argmax: ties, values that are not finite, marks", check_argmax));
  v.back().cpu = false;
  v.push_back(timed({2048, 576, DType::f32, true, 0, 0}, false));
  v.push_back(timed({2048, 4096, DType::bf16, true, 0, 0}, true));
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
