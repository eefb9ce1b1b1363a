#include "ops/linear/linear.hpp"

#include <omp.h>

#include <kvlab/error.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <random>
#include <vector>

#include "support/gemm_kernels.hpp"

using kvlab::bf16;
using kvlab::DType;
using kvlab::ops::Linear;
using kvlab::test::ForcedGemm;
using kvlab::test::gemm_kernels;

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

}  // namespace

TEST_CASE("Linear holds weights rounded to bf16, or exactly in f32") {
  for (const char* kernels : gemm_kernels()) {
    const ForcedGemm f(kernels);
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
  const ForcedGemm f("cublas");
  CHECK_THROWS_WITH(Linear::pack(4, 4, DType::f32, none), Catch::Contains("KVLAB_GEMM"));
}
