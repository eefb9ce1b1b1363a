#include "ops/page/row_kernels.hpp"

#include <kvlab/dtype.hpp>
#include <kvlab/error.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/cpu.hpp"
#include "base/half.hpp"
#include "ops/linear/norm.hpp"
#include "ops/page/codes.hpp"
#include "ops/page/reference.hpp"

using namespace kvlab;
using ops::RowKernels;

namespace {

std::vector<const RowKernels*> all_kernels() {
  std::vector<const RowKernels*> all = {&ops::row_kernels_portable()};
  if (has_avx2() && ops::row_kernels_avx2()) all.push_back(ops::row_kernels_avx2());
  if (has_avx512_bf16() && ops::row_kernels_avx512()) all.push_back(ops::row_kernels_avx512());
  return all;
}

// Rows of one storage with their exact values, cut into runs of `run` rows with gaps between rows.
struct Rows {
  std::vector<std::uint8_t> bytes;
  std::vector<std::uint16_t> meta;
  std::vector<std::vector<float>> value;
  std::vector<ops::RowRun> runs;
  int run_count = 0;

  Rows(ops::RowKind kind, int count, int dim, int run, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    const int stride = dim * 4 + 8;
    bytes.resize(std::size_t(count) * stride);
    for (int t = 0; t < count; ++t) {
      std::uint8_t* row = bytes.data() + std::size_t(t) * stride;
      const float smaller = kind == ops::RowKind::e4m3 ? 0x1p-5f : 1.f;
      meta.push_back(float_to_half(smaller * (t % 3 ? 0.01f * static_cast<float>(t % 3) : 3e-6f)));  // subnormal, too
      meta.push_back(float_to_half(-1.f + 0.4f * static_cast<float>(t % 4)));
      const float scale = half_to_float(meta[2 * t]), zero = half_to_float(meta[2 * t + 1]);
      value.emplace_back(dim);
      for (int d = 0; d < dim; ++d) {
        if (kind == ops::RowKind::u8) {
          row[d] = static_cast<std::uint8_t>(rng());
          value[t][d] = static_cast<float>(row[d] * double{scale} + zero);
        } else if (kind == ops::RowKind::e4m3) {
          row[d] = static_cast<std::uint8_t>(rng());
          if (row[d] % 128 == 127) row[d] = 0;
          value[t][d] = static_cast<float>(ops::from_e4m3(row[d]) * double{scale} + zero);
        } else if (kind == ops::RowKind::u4 || kind == ops::RowKind::u2) {
          const int bits = kind == ops::RowKind::u4 ? 4 : 2;
          const unsigned code = static_cast<unsigned>(rng()) % (1u << bits);
          if (d * bits % 8 == 0) row[d * bits / 8] = 0;
          row[d * bits / 8] = static_cast<std::uint8_t>(row[d * bits / 8] | code << d * bits % 8);
          value[t][d] = static_cast<float>(code * double{scale} + zero);
        } else if (kind == ops::RowKind::bf16) {
          const bf16 b(normal(rng));
          std::memcpy(row + 2 * d, &b, 2);
          value[t][d] = static_cast<float>(b);
        } else {
          value[t][d] = normal(rng);
          std::memcpy(row + 4 * d, &value[t][d], 4);
        }
      }
    }
    for (int t = 0; t < count; t += run, ++run_count)
      runs.push_back(
          {bytes.data() + std::size_t(t) * stride, meta.data() + 2 * t, stride, std::min(run, count - t), kind});
    runs.resize(run_count + ops::run_ahead);
  }
};

}  // namespace

TEST_CASE("row kernels equal plain loops in double") {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (const RowKernels* kernels : all_kernels())
    for (const auto kind : {ops::RowKind::f32, ops::RowKind::bf16, ops::RowKind::u8, ops::RowKind::u4, ops::RowKind::u2,
                            ops::RowKind::e4m3})
      for (const int dim : {8, 24, 64, 80, 128, 256})
        for (const int count : {1, 7, 8, 33})
          for (const int queries : {1, 2, 3, 4, 7}) {
            INFO(kernels->name << " kind " << int(kind) << " dim " << dim << " count " << count);
            const Rows rows(kind, count, dim, queries % 2 ? 16 : 5, rng);
            const int stride = count + 3;
            std::vector<float> q(queries * dim), out(queries * stride, 77.f), values(queries * dim, 0.5f);
            for (float& x : q) x = normal(rng);
            kernels->dot(rows.runs.data(), rows.run_count, dim, q.data(), dim, queries, 0.5f, out.data(), stride);
            kernels->accumulate(rows.runs.data(), rows.run_count, dim, out.data(), stride, queries, values.data(), dim);
            double worst_dot = 0, worst_sum = 0;
            for (int i = 0; i < queries; ++i) {
              for (int t = 0; t < count; ++t) {
                double s = 0;
                for (int d = 0; d < dim; ++d) s += 0.5 * double(q[i * dim + d]) * rows.value[t][d];
                worst_dot = std::max(worst_dot, std::abs(s - out[i * stride + t]));
              }
              for (int t = count; t < stride; ++t) REQUIRE(out[i * stride + t] == 77.f);
              for (int d = 0; d < dim; ++d) {
                double s = 0.5;
                for (int t = 0; t < count; ++t) s += double(out[i * stride + t]) * rows.value[t][d];
                worst_sum = std::max(worst_sum, std::abs(s - values[i * dim + d]));
              }
            }
            REQUIRE(worst_dot < 5e-5);
            std::vector<float> cosine(3 * dim / 2), sine(3 * dim / 2), turned(out);
            std::vector<std::int32_t> rank(count);
            for (auto* v : {&cosine, &sine})
              for (float& x : *v) x = normal(rng);
            for (auto& r : rank) r = static_cast<std::int32_t>(rng() % 3);
            kernels->dot_turned(rows.runs.data(), rows.run_count, dim, q.data(), dim, queries, 0.5f,
                                {rank.data(), cosine.data(), sine.data()}, turned.data(), stride);
            double worst_turned = 0;
            for (int i = 0; i < queries; ++i)
              for (int t = 0; t < stride; ++t) {
                if (t >= count) {
                  REQUIRE(turned[i * stride + t] == 77.f);
                  continue;
                }
                double s = 0;
                for (int d = 0; d < dim / 2; ++d) {
                  const double c = cosine[rank[t] * dim / 2 + d], z = sine[rank[t] * dim / 2 + d];
                  const double a = rows.value[t][d], b = rows.value[t][d + dim / 2];
                  s += 0.5 * (q[i * dim + d] * (a * c - b * z) + q[i * dim + d + dim / 2] * (b * c + a * z));
                }
                worst_turned = std::max(worst_turned, std::abs(s - turned[i * stride + t]));
              }
            REQUIRE(worst_turned < 2e-4);
            REQUIRE(worst_sum < 2e-3);  // sums of up to 33 terms of size 8 x 3

            std::vector<float> squares(count), decoded(count * dim);
            for (int i = 0, t = 0; i < rows.run_count; t += rows.runs[i++].count) {
              kernels->square_sum(rows.runs[i], dim, squares.data() + t);
              kernels->decode(rows.runs[i], dim, decoded.data() + t * dim, dim);
            }
            for (int t = 0; t < count; ++t) {
              double s = 0;
              for (int d = 0; d < dim; ++d) {
                s += double(rows.value[t][d]) * rows.value[t][d];
                REQUIRE(std::abs(decoded[t * dim + d] - rows.value[t][d]) < 1e-6);
              }
              REQUIRE(squares[t] == Approx(s).epsilon(1e-5));
            }
          }
}

TEST_CASE("row kernels decode every code") {
  const std::uint16_t meta[] = {float_to_half(1), 0};
  std::uint8_t codes[256];
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
  for (const RowKernels* kernels : all_kernels()) {
    float x[512];
    kernels->decode({codes, meta, 256, 1, ops::RowKind::e4m3}, 256, x, 256);
    for (unsigned i = 0; i < 256; ++i) CHECK((i % 128 == 127 ? std::isnan(x[i]) : x[i] == ops::from_e4m3(i)));
    kernels->decode({codes, meta, 256, 1, ops::RowKind::u4}, 512, x, 512);
    for (int i = 0; i < 512; ++i) CHECK(x[i] == static_cast<float>(codes[i / 2] >> 4 * (i % 2) & 15));
    for (const int first : {0, 128}) {
      kernels->decode({codes + first, meta, 128, 1, ops::RowKind::u2}, 512, x, 512);
      for (int i = 0; i < 512; ++i) CHECK(x[i] == static_cast<float>(codes[first + i / 4] >> 2 * (i % 4) & 3));
    }
  }
}

// Numbers of every kind: far apart, all the same, NaN and infinite ones.
static std::vector<float> any_numbers(int n, int trial, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) {
    v = trial % 5 == 1 ? 0.5f : normal(rng) * (trial % 5 == 2 ? 1e30f : 1.f);
    if (trial % 5 == 3 && rng() % 8 == 0) v = std::nanf("");
    if (trial % 5 == 4 && rng() % 8 == 0) v = rng() % 2 ? HUGE_VALF : -HUGE_VALF;
  }
  if (trial % 35 == 3) std::fill(x.begin(), x.end(), std::nanf(""));
  return x;
}

TEST_CASE("row kernels encode with the bits of the formula, number by number") {
  std::mt19937 rng(11);
  for (int trial = 0; trial < 400; ++trial) {
    const int n = 8 * (1 + static_cast<int>(rng() % 33));
    const bool each = trial % 2 != 0;
    const std::vector<float> x = any_numbers(n, trial, rng);
    std::vector<float> scale, zero;
    for (int d = 0; d < n; ++d) {
      scale.push_back(rng() % 8 == 0 ? 0.f : static_cast<float>(rng() % 1000) * 1e-4f);
      zero.push_back(static_cast<float>(rng() % 1000) * 4e-3f - 2.f);
    }
    for (const auto& [kind, side] : {std::pair{ops::RowKind::u8, CodecSide{8}},
                                     {ops::RowKind::u4, CodecSide{4}},
                                     {ops::RowKind::u2, CodecSide{2}},
                                     {ops::RowKind::e4m3, CodecSide{8, CodeKind::e4m3}}}) {
      std::vector<std::uint8_t> wanted(static_cast<std::size_t>(n * side.bits / 8) + 4, 0);
      for (int d = 0; d < n; ++d) {
        const std::size_t i = each ? static_cast<std::size_t>(d) : 0;
        const unsigned code = ops::code_of(side, x[static_cast<std::size_t>(d)], {scale[i], zero[i]});
        std::uint8_t& byte = wanted[static_cast<std::size_t>(d * side.bits / 8)];
        byte = static_cast<std::uint8_t>(byte | code << d * side.bits % 8);
      }
      for (const RowKernels* kernels : all_kernels()) {
        CAPTURE(kernels->name, int(kind), n, each, trial);
        std::vector<std::uint8_t> got(wanted.size(), 0);  // nothing is written past the row
        kernels->encode(x.data(), n, kind, scale.data(), zero.data(), each, got.data());
        REQUIRE(got == wanted);
      }
    }
  }
}

TEST_CASE("row kernels lower codes to fewer bits as the scalar formula does") {
  std::mt19937 rng(13);
  for (const auto& [bits, fewer] : {std::pair{8, 4}, {8, 2}, {4, 2}}) {
    const CodecSide from{static_cast<std::uint8_t>(bits)}, to{static_cast<std::uint8_t>(fewer)};
    const int ratio = ops::code_ratio(from, to);
    for (int bytes = 4; bytes <= 264; bytes += 4)
      for (int trial = 0; trial < 4; ++trial) {
        std::vector<std::byte> codes(static_cast<std::size_t>(bytes));
        for (std::size_t i = 0; i < codes.size(); ++i)  // first every byte
          codes[i] = static_cast<std::byte>(trial == 0 ? i : rng());
        std::vector<std::uint8_t> wanted(static_cast<std::size_t>(bytes * fewer / bits) + 4, 0);
        for (int d = 0; d < bytes * 8 / bits; ++d) {
          const unsigned low = ops::lowered(ops::code_at(from, codes.data(), d), ratio);
          std::uint8_t& byte = wanted[static_cast<std::size_t>(d * fewer / 8)];
          byte = static_cast<std::uint8_t>(byte | low << d * fewer % 8);
        }
        for (const RowKernels* kernels : all_kernels()) {
          CAPTURE(kernels->name, bits, fewer, bytes, trial);
          std::vector<std::uint8_t> got(wanted.size(), 0);  // nothing is written past the row
          kernels->lower(reinterpret_cast<const std::uint8_t*>(codes.data()), bytes, bits, fewer, got.data());
          REQUIRE(got == wanted);
        }
      }
  }
}

TEST_CASE("row kernels find the least and the greatest number, NaN left out") {
  std::mt19937 rng(12);
  for (int trial = 0; trial < 200; ++trial) {
    const int n = 1 + static_cast<int>(rng() % 140), rows = 1 + static_cast<int>(rng() % 5), stride = n + 3;
    const std::vector<float> x = any_numbers(rows * stride, trial, rng);
    std::vector<float> least(static_cast<std::size_t>(n), HUGE_VALF), most(least.size(), -HUGE_VALF);
    for (int t = 0; t < rows; ++t)
      for (int d = 0; d < n; ++d) {
        const float v = x[static_cast<std::size_t>(t * stride + d)];
        float &lo = least[static_cast<std::size_t>(d)], &hi = most[static_cast<std::size_t>(d)];
        lo = std::fmin(lo, v), hi = std::fmax(hi, v);
      }
    for (const RowKernels* kernels : all_kernels()) {
      CAPTURE(kernels->name, n, rows, trial);
      std::vector<float> lo(least.size()), hi(least.size());
      kernels->ranges(x.data(), stride, rows, n, lo.data(), hi.data());
      REQUIRE(lo == least);
      REQUIRE(hi == most);
      float row_lo = HUGE_VALF, row_hi = -HUGE_VALF;
      for (int d = 0; d < n; ++d)
        row_lo = std::fmin(row_lo, x[static_cast<std::size_t>(d)]),
        row_hi = std::fmax(row_hi, x[static_cast<std::size_t>(d)]);
      kernels->range(x.data(), n, lo.data(), hi.data());
      REQUIRE(lo[0] == row_lo);
      REQUIRE(hi[0] == row_hi);
    }
  }
}

TEST_CASE("panel products equal plain dot products") {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  for (const RowKernels* kernels : all_kernels())
    for (const int dim : {16, 64, 80})
      for (const int count : {1, 9, 16})
        for (const int queries : {1, 5, 6, 13}) {
          const Rows rows(ops::RowKind::f32, count, dim, 16, rng);
          std::vector<float> dense;
          for (const auto& v : rows.value) dense.insert(dense.end(), v.begin(), v.end());
          std::vector<float> panel(dim * ops::panel_width), q(queries * dim), out(queries * 20);
          for (float& x : q) x = normal(rng);
          kernels->pack_panel(dense.data(), count, dim, panel.data());
          kernels->panel_dot(panel.data(), dim, q.data(), dim, queries, out.data(), 20);
          for (int i = 0; i < queries; ++i)
            for (int t = 0; t < ops::panel_width; ++t) {
              double s = 0;
              for (int d = 0; t < count && d < dim; ++d) s += double(q[i * dim + d]) * rows.value[t][d];
              REQUIRE(std::abs(s - out[i * 20 + t]) < 5e-5);
            }
        }
}

TEST_CASE("vector exp: relative error below 3e-7, limits, NaN") {
  const float inf = std::numeric_limits<float>::infinity();
  for (const RowKernels* kernels : all_kernels()) {
    std::vector<float> x, wanted;
    for (float v = -87.f; v <= 0.f; v += 0.0173f) x.push_back(v);
    std::vector<float> y = x;
    const float total = kernels->exp_sum(y.data(), static_cast<int>(y.size()), 0.f);
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double e = std::exp(double(x[i]));
      sum += e;
      REQUIRE(std::abs(y[i] - e) <= 3e-7 * e);
    }
    CHECK(total == Approx(sum).epsilon(1e-6));
    float odd[] = {-inf, -100.f, 0.f, std::nanf(""), 1.f};
    kernels->exp_sum(odd, 5, 0.f);
    CHECK(odd[0] == 0);
    CHECK(odd[1] == 0);
    CHECK(odd[2] == 1);
    CHECK(std::isnan(odd[3]));
    CHECK(odd[4] == Approx(2.7182818f));
    CHECK(kernels->max(odd, 0) == -inf);
    const float values[] = {-3, 5, 2, -inf, 4, 1, 0, 2, 9, 3, -8};
    CHECK(kernels->max(values, 11) == 9);
    CHECK(kernels->max(values, 8) == 5);
  }
}

static void rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n, float* out) {
  ops::NormArgs a;
  a.x = x, a.out = out;
  a.rows = rows, a.n = a.x_stride = a.out_stride = n;
  a.weight = weight, a.eps = eps;
  a.dtype = DType::f32;
  ops::rms_norm(a, Stream::cpu());
}

TEST_CASE("rms_norm, silu, add and rounding by hand") {
  const float x[] = {3, 4, 0, 0, 0, 0, 0, 0, 0, 0}, weight[] = {2, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  float out[10];
  rms_norm(x, weight, 0.f, 1, 10, out);  // rms = sqrt(25 / 10)
  CHECK(out[0] == Approx(6 / std::sqrt(2.5)));
  CHECK(out[1] == Approx(4 / std::sqrt(2.5)));
  CHECK(out[2] == 0);
  rms_norm(x, weight, 0.5f, 5, 2, out);  // rows of two; rms = sqrt(12.5 + 0.5), zeros stay zeros
  CHECK(out[0] == Approx(6 / std::sqrt(13.0)));
  CHECK(out[2] == 0);

  const float gate[] = {0, 1, -1, 100, -100}, up[] = {5, 2, 2, 3, 3};
  ops::silu_mul(gate, up, 5, out);
  CHECK(out[0] == 0);
  CHECK(out[1] == Approx(2 / (1 + std::exp(-1.0))));
  CHECK(out[2] == Approx(-2 / (1 + std::exp(1.0))));
  CHECK(out[3] == Approx(300));
  CHECK(out[4] == Approx(0).margin(1e-30));

  float sums[] = {1, 2, 3};
  ops::add(up, 3, sums);
  CHECK(sums[0] == 6);
  CHECK(sums[2] == 5);
  float rounded[] = {1.00390625f, 1.01171875f, -0.1f};
  float kept[] = {1.00390625f};
  ops::round_to(rounded, 3, 2);
  ops::round_to(kept, 1, 4);
  CHECK(rounded[0] == 1.f);
  CHECK(rounded[1] == 1.015625f);
  CHECK(rounded[2] == static_cast<float>(bf16(-0.1f)));
  CHECK(kept[0] == 1.00390625f);
  CHECK_THROWS_AS(ops::round_to(kept, 1, 3), Error);
}

TEST_CASE("row kernels round to bf16 as the type does") {
  std::vector<float> x{0.f,
                       -0.f,
                       1.f,
                       1.00390625f,
                       1.01171875f,
                       3.4e38f,
                       -1e-40f,
                       std::nanf(""),
                       -std::nanf(""),
                       std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  std::mt19937 random(3);
  for (int i = 0; i < 1000; ++i) {
    const std::uint32_t bits = random();
    float value;
    std::memcpy(&value, &bits, 4);
    x.push_back(value);
  }
  for (const ops::RowKernels* k : all_kernels())
    for (std::size_t n : {x.size(), std::size_t{7}, std::size_t{0}}) {
      std::vector<std::uint16_t> out(n);
      k->to_bf16(x.data(), static_cast<std::int64_t>(n), out.data());
      for (std::size_t i = 0; i < n; ++i) CHECK(out[i] == bf16(x[i]).bits);
    }
}
