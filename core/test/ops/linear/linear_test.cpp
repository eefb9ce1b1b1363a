#include "ops/linear/linear.hpp"

#include <omp.h>

#include <kvlab/error.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "base/cpu.hpp"
#include "cases/quick.hpp"
#include "ops/linear/reference.hpp"

using kvlab::bf16;
using kvlab::DType;
using kvlab::ops::Linear;

namespace {

std::vector<float> randoms(std::int64_t count, unsigned seed) {
  std::mt19937 g(seed);
  std::normal_distribution<float> d;
  std::vector<float> v(static_cast<std::size_t>(count));
  for (float& x : v) x = d(g);
  return v;
}

Linear pack(const std::vector<float>& w, std::int64_t n, std::int64_t k, DType dtype) {
  return Linear::pack(n, k, dtype, [&](std::int64_t begin, std::int64_t count, float* out) {
    std::copy_n(w.data() + begin * k, count * k, out);
  });
}

float stored(float w, DType dtype) { return dtype == DType::bf16 ? float(bf16(w)) : w; }

// Error of y [m, y_stride] in units of the rounding that a sum of k products may collect.
double worst_error(const std::vector<float>& x, std::int64_t x_stride, std::vector<float> w, DType dtype,
                   const std::vector<float>& y, std::int64_t y_stride, std::int64_t m, std::int64_t n, std::int64_t k,
                   double unit) {
  for (float& v : w) v = stored(v, dtype);
  std::vector<float> wanted(static_cast<std::size_t>(n)), size(wanted.size()), row, magnitude = w;
  double worst = 0;
  const std::int64_t step = std::max<std::int64_t>(1, m / 16);  // a few of many rows
  for (float& v : magnitude) v = std::abs(v);
  for (std::int64_t i = 0; i < m; i += step) {
    row.assign(x.begin() + i * x_stride, x.begin() + i * x_stride + k);
    kvlab::ops::linear_reference(row.data(), k, w.data(), wanted.data(), n, 1, n, k);
    for (float& v : row) v = std::abs(v);
    kvlab::ops::linear_reference(row.data(), k, magnitude.data(), size.data(), n, 1, n, k);
    for (std::int64_t j = 0; j < n; ++j) {
      const double got = y[i * y_stride + j];
      if (!std::isfinite(got)) return 1e30;
      worst = std::max(worst, std::abs(got - wanted[j]) / (double{size[j]} * unit + 1e-30));
    }
  }
  return worst;
}

void check_shape(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype) {
  CAPTURE(m, n, k, name_of(dtype));
  const std::int64_t xs = k + 3, ys = n + 5;
  const auto w = randoms(n * k, 1), x = randoms(m * xs, 2);
  const float poison = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> y(static_cast<std::size_t>(m * ys), poison);
  const Linear l = pack(w, n, k, dtype);
  l.apply(x.data(), xs, y.data(), ys, m);
  // A machine that multiplies bf16 rounds activations too.
  const double unit = l.kernel() == "onednn bf16" ? 0x1p-8 : 0x1p-23 * std::sqrt(double(k));
  CHECK(worst_error(x, xs, w, dtype, y, ys, m, n, k, unit) < 1);
  bool untouched = true;
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = n; j < ys; ++j) untouched = untouched && std::isnan(y[i * ys + j]);
  CHECK(untouched);
}

class Forced {
 public:
  explicit Forced(const char* kernels) { setenv("KVLAB_GEMM", kernels, 1); }
  ~Forced() { unsetenv("KVLAB_GEMM"); }
};

std::vector<const char*> kernel_choices() {
  std::vector<const char*> v{"", "onednn", "portable"};
  if (kvlab::has_avx2()) v.push_back("avx2");
  return v;
}

}  // namespace

TEST_CASE("Linear equals a double accumulation") {
  for (const char* kernels : kernel_choices())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Forced f(kernels);
      CAPTURE(kernels);
      check_shape(1, 1, 1, dtype);
      for (std::int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 40}) {
        check_shape(m, 17, 33, dtype);
        check_shape(m, 96, 65, dtype);
      }
      check_shape(3, 15, 1, dtype);
      check_shape(101, 80, 1601, dtype);  // several row and depth blocks
    }
}

TEST_CASE("Linear at the shapes of SmolLM2-135M") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    check_shape(1, 576, 576, dtype);
    check_shape(4, 192, 576, dtype);
    check_shape(33, 1536, 576, dtype);
    if (kvlab::cases::quick()) continue;
    check_shape(130, 576, 1536, dtype);
    check_shape(1, 49152, 576, dtype);
  }
  check_shape(1000, 192, 64, DType::bf16);  // more rows than are packed at once
}

TEST_CASE("Linear holds weights rounded to bf16, or exactly in f32") {
  for (const char* kernels : kernel_choices()) {
    const Forced f(kernels);
    CAPTURE(kernels);
    const std::int64_t n = 37, k = 29;
    const auto w = randoms(n * k, 3);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Linear l = pack(w, n, k, dtype);
      CHECK(l.n() == n);
      CHECK(l.k() == k);
      CHECK(l.bytes() >= n * k * static_cast<std::int64_t>(size_of(dtype)));
      std::vector<float> row(k);
      bool same = true;
      for (std::int64_t j = 0; j < n; ++j) {
        l.row(j, row.data());
        for (std::int64_t i = 0; i < k; ++i) same = same && row[i] == stored(w[j * k + i], dtype);
      }
      CHECK(same);
      CHECK_THROWS_AS(l.row(n, row.data()), kvlab::Error);
    }
  }
}

TEST_CASE("Linear does not depend on the number of threads, the other rows or how many they are") {
  const std::int64_t m = 57, n = 100, k = 1000;
  const auto w = randoms(n * k, 4);
  auto x = randoms(m * k, 5);
  std::vector<float> one(m * n), three(m * n), other(m * n), few(m * n);
  const int threads = omp_get_max_threads();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Linear l = pack(w, n, k, dtype);
    omp_set_num_threads(1);
    l.apply(x.data(), k, one.data(), n, m);
    omp_set_num_threads(3);
    l.apply(x.data(), k, three.data(), n, m);
    omp_set_num_threads(threads);
    CHECK(one == three);
    auto changed = x;
    for (std::int64_t i = 0; i < m * k; ++i)
      if (i / k != 11) changed[i] = std::numeric_limits<float>::infinity();
    l.apply(changed.data(), k, other.data(), n, m);
    CHECK(std::equal(one.begin() + 11 * n, one.begin() + 12 * n, other.begin() + 11 * n));
    if (l.kernel().find("onednn") == std::string::npos) {
      for (std::int64_t i = 0; i < m; i += 3) l.apply(x.data() + i * k, k, few.data() + i * n, n, 3);
      CHECK(one == few);
    }
  }
}

TEST_CASE("Linear takes rows in consecutive blocks and names what it refuses") {
  std::int64_t next = 0;
  Linear::pack(1000, 3, DType::bf16, [&](std::int64_t begin, std::int64_t count, float* out) {
    CHECK(begin == next);
    CHECK(count < 1000);
    std::fill_n(out, count * 3, 0.f);
    next += count;
  });
  CHECK(next == 1000);
  const auto none = [](std::int64_t, std::int64_t, float*) {};
  CHECK_THROWS_WITH(Linear::pack(4, 4, DType::f16, none), Catch::Contains("f16"));
  CHECK_THROWS_AS(Linear::pack(0, 4, DType::f32, none), kvlab::Error);
  const Forced f("cublas");
  CHECK_THROWS_WITH(Linear::pack(4, 4, DType::f32, none), Catch::Contains("KVLAB_GEMM"));
}
