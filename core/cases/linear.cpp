// Linear layers. The CPU multiplies with ops::Linear and CUDA with ops::linear; LinearArgs describes a call on both.
#include "ops/linear/linear.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cases/case.hpp"
#include "cases/numbers.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/quick.hpp"
#include "ops/linear/reference.hpp"

namespace kvlab::cases {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

enum class Way { usual, stream, blas };  // the last two are the implementations of ops::linear

struct Product {
  std::int64_t m = 1, n = 1, k = 8;
  DType dtype = DType::bf16;  // of the weights
  bool f32_x = false, bias = false, add = false, gated = false;
  Way way = Way::usual;
  bool gaps = false;         // between rows of x and y
  bool one_in_row = false;   // W[n, picked(n)] = 1 is all that a row of W has, so y[m, n] = x[m, picked(n)]
  bool sliced = false;       // W's rows lie in those of a wider matrix; not on the CPU
  std::int64_t row_tag = 0;  // then x encodes its column, or its row and the column's block of 8 if this is not 0

  std::int64_t outputs() const { return gated ? n / 2 : n; }
  std::int64_t picked(std::int64_t output) const { return (output * 37 + 5) % k; }
  double bytes() const { return static_cast<double>(n * k) * static_cast<double>(size_of(dtype)); }
  double flops() const { return 2. * static_cast<double>(m * n * k); }
  // The CPU has f32 activations, no f16, and leaves bias, sums and gates to other ops.
  Product on(Device device) const {
    Product p = *this;
    if (device == Device::cuda) return p;
    if (p.dtype == DType::f16) p.dtype = DType::f32;
    p.f32_x = true;
    p.bias = p.add = p.gated = p.sliced = false;
    return p;
  }
  std::string text() const {
    return fmt::format("m={} n={} k={} {}{}{}{}{}{}{}", m, n, k, name_of(dtype), f32_x ? ", f32 x" : "",
                       bias ? ", bias" : "", add ? ", add" : "", gated ? ", gated" : "", gaps ? ", gaps" : "",
                       row_tag ? ", row tags" : "") +
           (sliced ? ", sliced" : "");
  }
};

// Weights are this pool over and over: a full matrix in f32 would be larger than the weights. No row repeats another,
// since the pool's size has no factor in common with a row's.
constexpr std::int64_t pool_size = 1021 * 4099;
const std::vector<float>& pool() {
  static const std::vector<float> of_all = randoms(pool_size);
  return of_all;
}
const std::vector<std::uint16_t>& pool_16(DType t) {
  const auto rounded = [](DType type) {
    std::vector<std::uint16_t> to;
    for (const float x : pool()) to.push_back(to_16(x, type));
    return to;
  };
  static const auto bf = rounded(DType::bf16), half = rounded(DType::f16);
  return t == DType::f16 ? half : bf;
}
// `count` numbers of the pool. Different inputs begin at different places.
std::vector<float> pooled(std::int64_t count, std::int64_t first) {
  std::vector<float> v(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    v[static_cast<std::size_t>(i)] = pool()[static_cast<std::size_t>((first + i) % pool_size)];
  return v;
}

struct Weights {
  Product of;

  // Row o as stored.
  void row(std::int64_t o, float* out) const {
    for (std::int64_t i = 0, at = o * of.k % pool_size; i < of.k; ++i) {
      out[i] = of.one_in_row ? static_cast<float>(i == of.picked(o))
                             : stored(pool()[static_cast<std::size_t>(at)], of.dtype);
      if (++at == pool_size) at = 0;
    }
  }
  ops::Linear pack() const {
    return ops::Linear::pack(of.n, of.k, of.dtype, [this](std::int64_t begin, std::int64_t count, float* out) {
      for (std::int64_t i = 0; i < count; ++i) row(begin + i, out + i * of.k);
    });
  }
  // Elements from row to row of a sliced matrix, which begins at its column 8.
  std::int64_t sliced_stride() const { return of.k + 24; }
  const std::uint16_t* put_sliced(Place& place) const {
    std::vector<std::uint16_t> all(static_cast<std::size_t>(of.n * sliced_stride()), to_16(nan_value, of.dtype));
    std::vector<float> wide(static_cast<std::size_t>(of.k));
    for (std::int64_t o = 0; o < of.n; ++o) {
      row(o, wide.data());
      for (std::int64_t i = 0; i < of.k; ++i)
        all[static_cast<std::size_t>(o * sliced_stride() + 8 + i)] = to_16(wide[static_cast<std::size_t>(i)], of.dtype);
    }
    return place.put(all) + 8;
  }
  // Puts copies one after the other.
  const std::uint16_t* put(Place& place, int copies) const {
    const std::int64_t count = of.n * of.k;
    auto* to = place.take<std::uint16_t>(static_cast<std::size_t>(count * copies));
    const auto copy = [&](std::int64_t at, const std::uint16_t* from, std::int64_t numbers) {
      copy_memory(to + at, from, static_cast<std::size_t>(numbers) * 2, place.stream());
    };
    if (of.one_in_row) {
      std::vector<float> wide(static_cast<std::size_t>(of.k));
      std::vector<std::uint16_t> all;
      for (std::int64_t o = 0; o < of.n; ++o) {
        row(o, wide.data());
        for (const float x : wide) all.push_back(to_16(x, of.dtype));
      }
      copy(0, all.data(), count);
    } else {
      for (std::int64_t at = 0; at < count; at += pool_size)
        copy(at, pool_16(of.dtype).data(), std::min(pool_size, count - at));
    }
    for (int c = 1; c < copies; ++c) copy(c * count, to, count);
    place.synchronize();
    return to;
  }
};

struct Wanted {
  double value = 0, room = 0;
};

// Compares what a call wrote with its reference, which takes the call's inputs as they lie at the place. It takes all
// outputs if that is cheap. Else it takes both ends and every 61st: those lie at every place of a tile.
class Comparison {
 public:
  // before: y, or the gated outputs widened, as they were. unit: room for a sum of products whose sizes add up to one.
  Comparison(Place& place, const Weights& w, const ops::LinearArgs& a, std::vector<float> before, double unit,
             bool between)
      : place_(place), w_(w), a_(a), before_(std::move(before)), unit_(unit), between_(between) {
    x_ = get_as(place, a.x, a.x_dtype, a.m * a.x_stride);
    if (place.stream().device() == Device::cuda)
      for (float& v : x_) v = stored(v, a.dtype);
    for (const float v : x_) sizes_.push_back(std::abs(v));
    scale_.assign(static_cast<std::size_t>(a.m), 1);
    if (a.taken.squares) {
      const std::int64_t pieces = a.k / ops::norm_piece;
      const auto squares = get_as(place, a.taken.squares, DType::f32, a.m * pieces);
      for (std::int64_t r = 0; r < a.m; ++r) {
        double sum = 0;
        for (std::int64_t i = 0; i < pieces; ++i) sum += squares[static_cast<std::size_t>(r * pieces + i)];
        scale_[static_cast<std::size_t>(r)] = 1 / std::sqrt(sum / static_cast<double>(a.k) + double{a.taken.eps});
      }
    }
    if (a.bias) bias_ = get_as(place, a.bias, DType::f32, a.n);
  }

  void run(Check& check) const {
    const std::int64_t outputs = a_.gated ? a_.n / 2 : a_.n, stride = a_.gated ? a_.gated_stride : a_.y_stride;
    std::vector<std::int64_t> which;
    for (std::int64_t o = 0; o < outputs; ++o)
      if (a_.m * a_.n * a_.k < 30'000'000 || o < 70 || o + 70 >= outputs || o % 61 == 0) which.push_back(o);
    std::vector<Wanted> wanted(which.size() * static_cast<std::size_t>(a_.m));
#pragma omp parallel for schedule(dynamic)
    for (std::size_t i = 0; i < which.size(); ++i) column(which[i], &wanted[i * static_cast<std::size_t>(a_.m)]);

    const auto got =
        a_.gated ? get_as(place_, a_.gated, a_.dtype, a_.m * stride) : get_as(place_, a_.y, DType::f32, a_.m * stride);
    double worst = 0;
    std::int64_t wrong = 0, stray = 0;
    std::string where = "outputs";
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const std::int64_t o = which[i / static_cast<std::size_t>(a_.m)], r = static_cast<std::int64_t>(i) % a_.m;
      const double y = got[static_cast<std::size_t>(r * stride + o)],
                   d = std::abs(y - wanted[i].value) / wanted[i].room;
      wrong += !(d <= 1);
      if (d <= worst) continue;
      worst = std::isnan(d) ? INFINITY : d;
      where = fmt::format("outputs, worst of row {}, output {}, tile place {}: got {}, wanted {} within {}", r, o,
                          o % 64, y, wanted[i].value, wanted[i].room);
    }
    check.within(wrong ? fmt::format("{} of {} {}", wrong, wanted.size(), where) : where, worst, 1);
    for (std::int64_t r = 0; r < a_.m; ++r)
      for (std::int64_t o = outputs; o < stride; ++o)
        stray += !std::isnan(got[static_cast<std::size_t>(r * stride + o)]);
    check.that("nothing is written between rows", stray == 0);
    if (a_.left.weight) compare_norm(check, got);
  }

 private:
  // Row o of W times the rows of x.
  void multiply(std::int64_t o, std::vector<float>& value, std::vector<float>& size) const {
    std::vector<float> row(static_cast<std::size_t>(a_.k));
    value.resize(static_cast<std::size_t>(a_.m)), size.resize(value.size());
    w_.row(o, row.data());
    ops::linear_reference(x_.data(), a_.x_stride, row.data(), value.data(), 1, a_.m, 1, a_.k);
    for (float& v : row) v = std::abs(v);
    ops::linear_reference(sizes_.data(), a_.x_stride, row.data(), size.data(), 1, a_.m, 1, a_.k);
  }

  void column(std::int64_t o, Wanted* wanted) const {
    std::vector<float> values, sizes, ups, up_sizes;
    multiply(o, values, sizes);
    if (a_.gated) multiply(o + a_.n / 2, ups, up_sizes);
    const double rounding = a_.dtype == DType::f16 ? 6e-4 : 4.5e-3;  // a bit more than a half step of 16-bit numbers
    for (std::int64_t r = 0; r < a_.m; ++r) {
      const auto i = static_cast<std::size_t>(r);
      double value = values[i] * scale_[i], size = sizes[i] * scale_[i], room = size * unit_;
      if (a_.gated) {
        const double up = ups[i] * scale_[i], up_size = up_sizes[i] * scale_[i];
        const double silu = value / (1 + std::exp(-value)), gate = value;
        value = silu * up;
        room = unit_ * (1.2 * size * std::abs(up) + std::abs(silu) * up_size) + rounding * std::abs(value);
        if (between_) room += rounding * (1.2 * std::abs(gate * up) + std::abs(value));
      }
      const std::size_t at = static_cast<std::size_t>(r * (a_.gated ? a_.gated_stride : a_.y_stride) + o);
      if (a_.bias) value += bias_[static_cast<std::size_t>(o)];
      if (a_.add) value += before_[at];
      wanted[r] = {value, room + 2e-7 * std::abs(value) + 1e-30};
    }
  }

  // The norm that the call left is that of the y which it wrote.
  void compare_norm(Check& check, const std::vector<float>& y) const {
    const auto weight = get_as(place_, a_.left.weight, DType::f32, a_.n);
    const auto out = get_as(place_, a_.left.out, a_.dtype, a_.m * a_.left.out_stride);
    std::vector<float> wanted, squares;
    for (std::int64_t r = 0; r < a_.m; ++r) {
      const float* row = y.data() + r * a_.y_stride;
      for (std::int64_t i = 0; i < a_.left.out_stride; ++i)
        wanted.push_back(i < a_.n ? stored(row[i] * weight[static_cast<std::size_t>(i)], a_.dtype) : nan_value);
      for (std::int64_t i = 0; i < a_.n; i += ops::norm_piece) {
        double sum = 0;
        for (std::int64_t j = i; j < i + ops::norm_piece; ++j) sum += double{row[j]} * row[j];
        squares.push_back(static_cast<float>(sum));
      }
    }
    check.equal("x * weight of the norm that is left", out, wanted, 0);
    check.equal("squares of the norm that is left",
                get_as(place_, a_.left.squares, DType::f32, static_cast<std::int64_t>(squares.size())), squares, 2e-6);
  }

  Place& place_;
  const Weights& w_;
  const ops::LinearArgs& a_;
  std::vector<float> before_, x_, sizes_, bias_;
  std::vector<double> scale_;
  double unit_;
  bool between_;  // gate and up are rounded before their product
};

using Products = std::vector<Product>;

class ProductScene final : public Scene {
 public:
  // seed: chooses x, bias and what y holds before.
  ProductScene(Place& place, const Product& of, int copies, unsigned seed)
      : args(), place_(place), of_(of.on(place.stream().device())), weights_{of_} {
    const bool cuda = place.stream().device() == Device::cuda;
    const std::int64_t gap = of_.gaps ? (cuda ? 8 : 3) : 0, first = 1'000'003 + 7919 * std::int64_t{seed};
    ops::LinearArgs& a = args;
    a.dtype = of_.dtype, a.m = of_.m, a.n = of_.n, a.k = of_.k;
    a.x_stride = of_.k + gap;
    std::vector<float> x = pooled(of_.m * a.x_stride, first);
    for (std::int64_t r = 0; r < of_.m; ++r)
      for (std::int64_t i = 0; i < a.x_stride; ++i) {
        float& v = x[static_cast<std::size_t>(r * a.x_stride + i)];
        if (i >= of_.k)
          v = nan_value;
        else if (of_.one_in_row)
          v = static_cast<float>(of_.row_tag ? r * of_.row_tag + i / 8 % 8 : i % 128);
      }
    a.x_dtype = of_.f32_x ? DType::f32 : of_.dtype;
    a.x = put_as(place, x, a.x_dtype);
    if (of_.bias) a.bias = place.put(pooled(of_.n, first + 5));
    a.add = of_.add;
    const std::int64_t stride = of_.outputs() + gap;
    before_.assign(static_cast<std::size_t>(of_.m * stride), nan_value);
    if (of_.add) {
      before_ = pooled(of_.m * stride, first + 9);
      for (std::int64_t i = 0; i < of_.m * stride; ++i)
        if (i % stride >= of_.outputs()) before_[static_cast<std::size_t>(i)] = nan_value;
    }
    if (of_.gated)
      a.gated = put_as(place, before_, of_.dtype), a.gated_stride = stride;
    else
      a.y = place.put(before_), a.y_stride = stride;
    if (!cuda)
      for (int c = 0; c < copies; ++c) linears_.push_back(weights_.pack());
    else if (of_.sliced)
      matrices_ = weights_.put_sliced(place), a.weight_stride = weights_.sliced_stride();
    else
      matrices_ = weights_.put(place, copies);
    place.synchronize();
  }

  void run(int copy) override {
    const auto c = static_cast<std::size_t>(copy);
    if (!linears_.empty()) {
      linears_[c].apply(static_cast<const float*>(args.x), args.x_stride, args.y, args.y_stride, args.m);
      return;
    }
    args.weight = matrices_ + c * static_cast<std::size_t>(of_.n * of_.k);
    const auto call = of_.way == Way::blas     ? ops::linear_blas
                      : of_.way == Way::stream ? ops::linear_stream
                                               : ops::linear;
    call(args, place_.stream());
  }

  void check(Check& check) override {
    const auto scope = check.in(of_.text());
    // A sum of k products in f32 is off by about sqrt(k) roundings. Tensor cores cut where f32 rounds, and a machine
    // that multiplies bf16 rounds activations too.
    const double unit = place_.stream().device() == Device::cuda ? 1e-5
                        : kernel() == "onednn bf16"              ? 0x1p-8
                                                                 : 0x1p-23 * std::sqrt(static_cast<double>(of_.k));
    const bool between = of_.way == Way::blas || (of_.way == Way::usual && of_.m > ops::linear_stream_rows);
    restore();
    run(0);
    const auto once = result();
    restore();
    run(0);
    check.that("the same bits again", std::memcmp(result().data(), once.data(), once.size() * sizeof(float)) == 0);
    Comparison(place_, weights_, args, before_, of_.one_in_row ? 0 : unit, between).run(check);
  }
  std::string kernel() const override { return linears_.empty() ? "" : linears_[0].kernel(); }

  ops::LinearArgs args;

 private:
  std::vector<float> result() const {
    const auto count = static_cast<std::int64_t>(before_.size());
    return args.gated ? get_as(place_, args.gated, args.dtype, count) : get_as(place_, args.y, DType::f32, count);
  }
  void restore() {
    if (args.gated) {
      std::vector<std::uint16_t> rounded;
      for (const float v : before_) rounded.push_back(to_16(v, args.dtype));
      copy_memory(args.gated, rounded.data(), rounded.size() * 2, place_.stream());
    } else {
      copy_memory(args.y, before_.data(), before_.size() * sizeof(float), place_.stream());
    }
    place_.synchronize();
  }

  Place& place_;
  Product of_;
  Weights weights_;
  std::vector<float> before_;
  std::vector<ops::Linear> linears_;         // on the CPU
  const std::uint16_t* matrices_ = nullptr;  // on CUDA, one copy after the other
};

// `from` leaves the norm of its sum. `gap`: elements between rows.
void leave(Place& place, ProductScene& from, std::int64_t gap) {
  ops::LinearArgs& a = from.args;
  std::vector<float> weight(static_cast<std::size_t>(a.n));
  for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = 0.5f + static_cast<float>(i % 7) / 8;
  a.left.weight = place.put(weight);
  a.left.out_stride = a.n + gap;
  a.left.out = put_as(place, std::vector<float>(static_cast<std::size_t>(a.m * a.left.out_stride), nan_value), a.dtype);
  a.left.squares = place.put(std::vector<float>(static_cast<std::size_t>(a.m * a.n / ops::norm_piece), nan_value));
}
void take(ProductScene& to, const ProductScene& from) {
  const ops::NormLeft& left = from.args.left;
  to.args.x = left.out, to.args.x_stride = left.out_stride;
  to.args.taken = {left.squares, 1e-5f};
}

// One product leaves the norm of its sum, and the next takes it, plain or with a gate. The shapes have tiles of 64 and
// 48 rows, whole and cut, and slices.
void check_norms(Place& place, Check& check) {
  unsigned seed = 500;
  for (const auto& [n, k] : {std::pair{64, 72}, {64, 4096}, {1024, 2816}, {2624, 136}, {5248, 72}, {6144, 64}})
    for (const int m : {1, 7, 16})
      for (const bool gated : {false, true}) {
        Place here(place.stream().device());
        ProductScene first(here, {.m = m, .n = n, .k = k, .bias = m == 7, .add = m != 16}, 1, seed++);
        leave(here, first, 8);
        ProductScene second(here, {.m = m, .n = 130, .k = n, .gated = gated}, 1, seed++);
        take(second, first);
        first.check(check);
        second.check(check);
      }
}

// A layer of a decode step without attention: four products. Two of them leave a norm that the next one takes.
class LayerScene final : public Scene {
 public:
  LayerScene(Place& place, std::int64_t m, int copies)
      : qkv_(place, {.m = m, .n = 6144, .k = 4096}, copies, 1),
        output_(place, {.m = m, .n = 4096, .k = 4096, .add = true}, copies, 2),
        gate_up_(place, {.m = m, .n = 28672, .k = 4096, .gated = true}, copies, 3),
        down_(place, {.m = m, .n = 4096, .k = 14336, .add = true}, copies, 4) {
    leave(place, output_, 0);
    down_.args.left = output_.args.left;
    down_.args.y = output_.args.y;
    take(gate_up_, output_);
    // The first product takes what the layer before it left.
    copy_memory(output_.args.left.out, qkv_.args.x, static_cast<std::size_t>(m * 4096 * 2), place.stream());
    const std::vector<float> ones(static_cast<std::size_t>(m * 4096 / ops::norm_piece), 1.f);
    copy_memory(output_.args.left.squares, ones.data(), ones.size() * sizeof(float), place.stream());
    place.synchronize();
    take(qkv_, output_);
    down_.args.x = gate_up_.args.gated;
  }
  void run(int copy) override {
    for (ProductScene* p : {&qkv_, &output_, &gate_up_, &down_}) p->run(copy);
  }
  void check(Check& check) override {
    for (ProductScene* p : {&qkv_, &output_, &gate_up_, &down_}) p->check(check);
  }
  static double bytes() { return 2. * 4096 * (6144 + 4096 + 28672 + 14336); }

 private:
  ProductScene qkv_, output_, gate_up_, down_;
};

// A case that takes a list of products.
Case sweep(const char* op, const char* shape, Products (*of)(), unsigned seed) {
  return checked(op, shape, [of, seed](Place& place, Check& check) {
    unsigned s = seed;
    for (const Product& p : of()) {
      Place here(place.stream().device());
      ProductScene(here, p, 1, s++).check(check);
      check.that("memory around inputs and outputs is as it was", here.margins_intact());
    }
  });
}

// Gives every product a type, and some of them a bias, a sum and gaps.
Products varied(Products all) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    Product& p = all[i];
    const std::size_t seed = i + 1;
    p.dtype = seed % 2 ? DType::bf16 : DType::f16;
    p.f32_x = seed % 3 == 0 && p.way == Way::usual;
    p.gaps = seed % 4 == 1;
    if (p.gated) continue;
    p.bias = seed % 5 < 2;
    p.add = seed % 7 < 3;
  }
  return all;
}

// Every output takes the column and the row that it should, exactly. A wrong value tells its source.
Products picks() {
  Products all;
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const std::int64_t k : {8, 64, 128, 200, 1024, 4096})
      for (const std::int64_t m : {1, 8, 9, 16})
        for (const std::int64_t row_tag : {0, 8})
          all.push_back({.m = m, .n = 150, .k = k, .dtype = dtype, .one_in_row = true, .row_tag = row_tag});
  return all;
}

Products few_rows() {
  Products all;
  std::size_t i = 0;
  for (const std::int64_t k : {8, 56, 64, 72, 128, 136, 576, 1536, 4096, 14336})
    for (const std::int64_t n : {1, 7, 64, 65, 200, 576})
      for (const std::int64_t m : {1, 2, 5, 8, 9, 16}) {
        if (n * k * m > 30'000'000 || (n > 65 && (m == 2 || m == 9))) continue;
        if (!quick() || i++ % 11 == 0) all.push_back({.m = m, .n = n, .k = k});
      }
  return varied(all);
}

Products streamed() {
  Products all;
  for (const std::int64_t m : {17, 32, 33, 40, 41, 64})
    for (const bool gated : {false, true})
      for (const std::int64_t k : {136, 3000}) {
        if (quick() && k == 3000 && m != 17 && m != 64) continue;
        all.push_back({.m = m,
                       .n = 198,
                       .k = k,
                       .dtype = all.size() % 2 ? DType::bf16 : DType::f16,
                       .gated = gated,
                       .way = Way::stream});
      }
  return all;
}

Products tiles() {
  Products all;
  for (const std::int64_t m : {1, 16})
    for (const Product& p : {Product{.n = 20011, .k = 136},
                             {.n = 6144, .k = 1032},
                             {.n = 4096, .k = 4096, .add = true},
                             {.n = 1000, .k = 14336, .bias = true},
                             {.n = 5001, .k = 136},
                             {.n = 2561, .k = 840}}) {
      if (quick() && m * p.n * p.k > 3'000'000) continue;
      all.push_back(p);
      all.back().m = m;
    }
  return all;
}

Products gates() {
  Products all;
  std::size_t i = 0;
  for (const Way way : {Way::usual, Way::blas})
    for (const std::int64_t k : {8, 136, 576, 4096})
      for (const std::int64_t half : {2, 30, 32, 34, 768, 3000})
        for (const std::int64_t m : {1, 7, 16})
          if ((half < 3000 || k <= 576) && (!quick() || i++ % 11 == 0))
            all.push_back({.m = m, .n = 2 * half, .k = k, .gated = true, .way = way});
  all = varied(all);
  if (!quick()) all.push_back({.m = 40, .n = 1536, .k = 576, .f32_x = true, .gated = true});
  return all;
}

Products many_rows() {
  Products all;
  for (const std::int64_t m : {1, 17, 40, 300})
    for (const std::int64_t n : {7, 64, 576})
      for (const std::int64_t k : {8, 136, 576})
        if (!quick() || m * n * k < 1'000'000)
          all.push_back({.m = m, .n = n, .k = k, .way = m == 1 ? Way::blas : Way::usual});
  return varied(all);
}

Products slices() {
  Products all;
  for (const std::int64_t m : {1, 16, 17, 40, 300})
    for (const std::int64_t k : {8, 64, 136})
      if (!quick() || m * k < 3000) all.push_back({.m = m, .n = 150, .k = k, .sliced = true});
  return varied(all);
}

Products odd_shapes() {
  Products all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    all.push_back({.dtype = dtype, .gaps = true});
    all.back().k = 1;
    for (const std::int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 40}) {
      all.push_back({.m = m, .n = 17, .k = 33, .dtype = dtype, .gaps = true});
      all.push_back({.m = m, .n = 96, .k = 65, .dtype = dtype, .gaps = true});
    }
    all.push_back({.m = 3, .n = 15, .k = 1, .dtype = dtype, .gaps = true});
    all.push_back({.m = 101, .n = 80, .k = 1601, .dtype = dtype, .gaps = true});  // several row and depth blocks
  }
  return all;
}

Products small_model() {
  Products all;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    all.push_back({.n = 576, .k = 576, .dtype = dtype, .gaps = true});
    all.push_back({.m = 4, .n = 192, .k = 576, .dtype = dtype, .gaps = true});
    if (quick()) continue;
    all.push_back({.m = 33, .n = 1536, .k = 576, .dtype = dtype, .gaps = true});
    all.push_back({.m = 130, .n = 576, .k = 1536, .dtype = dtype, .gaps = true});
    all.push_back({.n = 49152, .k = 576, .dtype = dtype, .gaps = true});
    all.push_back({.m = 1000, .n = 192, .k = 64, .dtype = dtype, .gaps = true});  // more rows than are packed at once
  }
  return all;
}

struct Kind {
  const char* name;
  std::int64_t n, k;
  bool gated = false;
};

Case timed(const char* op, const Kind& kind, const Product& p, std::string shape) {
  Case c{op, fmt::format("{} m={} n={} k={}{}", kind.name, p.m, p.n, p.k, shape)};
  c.make = [p](Place& place, int copies) { return std::make_unique<ProductScene>(place, p, copies, 1); };
  c.work = {p.bytes(), p.flops(), true};
  return c;
}

Case on_cpu(const char* op, const Kind& kind, std::int64_t m, DType dtype) {
  Case c = timed(op, kind, {.m = m, .n = kind.n, .k = kind.k, .dtype = dtype}, fmt::format(" {}", name_of(dtype)));
  c.timed_cpu = true;
  return c;
}

// Goes over copies of the weights, as the layers of a step follow each other. They make half a gigabyte, but are at
// most 64.
Case on_cuda(const Kind& kind, std::int64_t m, bool blas) {
  const Product p{.m = m, .n = kind.n, .k = kind.k, .gated = kind.gated, .way = blas ? Way::blas : Way::stream};
  const int copies = static_cast<int>(std::clamp(512e6 / p.bytes(), 1., 64.));
  Case c = timed("gemv", kind, p, fmt::format(", one of {}{}", copies, blas ? ", blas" : ""));
  c.timed_cuda = true;
  c.copies = copies;
  c.kernel = blas ? "cublaslt" : "mma, bulk copies";
  return c;
}

Case layer(std::int64_t m) {
  Case c{"gemv", fmt::format("a layer without attention, m={}, one of 2", m)};
  c.make = [m](Place& place, int copies) { return std::make_unique<LayerScene>(place, m, copies); };
  c.timed_cuda = true;
  c.work = {LayerScene::bytes(), static_cast<double>(m) * LayerScene::bytes(), true};
  c.copies = 2;
  c.kernel = "mma, bulk copies";
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  const auto only_cuda = [&](Case c) {
    c.cpu = false;
    v.push_back(std::move(c));
  };
  v.push_back(sweep("gemv", "every output takes the column and the row that it should", picks, 1));
  v.push_back(sweep("gemv", "up to 16 rows", few_rows, 1));
  v.push_back(sweep("gemv", "many tiles a block, as many tiles as blocks, slices of tiles", tiles, 11));
  v.push_back(sweep("gemm", "the shapes of SmolLM2-135M, many rows", small_model, 1));
  v.push_back(sweep("gemm", "17 rows and more, and one through cuBLASLt", many_rows, 200));
  v.push_back(sweep("gemm", "rows whose size is no multiple of 8", odd_shapes, 1));
  v.back().cuda = false;  // wants rows of 8 elements
  only_cuda(sweep("gemm", "weights within a wider matrix", slices, 700));
  only_cuda(sweep("gemv", "the streaming kernel above 16 rows", streamed, 300));
  only_cuda(sweep("gemv", "gates", gates, 100));
  only_cuda(checked("gemv", "norms that are left and taken", check_norms));

  constexpr Kind block[] = {{"q and o", 576, 576}, {"k, v", 192, 576}, {"gate, up", 1536, 576}, {"down", 576, 1536}},
                 small_head{"lm_head", 49152, 576};
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const Kind& kind : {block[0], block[1], block[2], block[3], small_head})
      for (const std::int64_t m : {1, 4}) {
        v.push_back(on_cpu("gemv", kind, m, dtype));
        v.back().copies = copies_beyond(v.back().work.bytes, 160 << 20, 1 << 20);
      }
    for (const std::int64_t m : {64, 2048})
      for (const Kind& kind : block) {
        v.push_back(on_cpu("gemm", kind, m, dtype));
        v.back().work.reads = false;
      }
  }
  constexpr Kind qkv{"qkv", 6144, 4096}, output{"o", 4096, 4096}, gate_up{"gate, up", 28672, 4096, true},
      down{"down", 4096, 14336}, head{"lm_head", 128256, 4096};
  for (const Kind& kind : {qkv, output, gate_up, down, head})
    for (const std::int64_t m : {1, 8, 16}) v.push_back(on_cuda(kind, m, false));
  for (const std::int64_t m : {1, 8, 16}) v.push_back(layer(m));
  for (const Kind& kind : {output, gate_up, down})
    for (const std::int64_t m : {8, 32, 40})
      for (const bool blas : {false, true})
        if (blas || m > 8) v.push_back(on_cuda(kind, m, blas));
  for (const Kind& kind : {Kind{"qkv", 960, 576},
                           {"o", 576, 576},
                           {"gate, up", 3072, 576, true},
                           {"down", 576, 1536},
                           small_head,
                           {"gate, up", 1536, 256, true},
                           {"lm_head", 4096, 256}})
    v.push_back(on_cuda(kind, 1, false));
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
