#include <fmt/format.h>

#include <random>

#include "bench/cases.hpp"
#include "ops/linear/linear.hpp"

namespace kvlab::bench {
namespace {

struct Kind {
  const char* name;
  std::int64_t n, k;
};
constexpr Kind block[] = {{"q and o", 576, 576}, {"k, v", 192, 576}, {"gate, up", 1536, 576}, {"down", 576, 1536}};
constexpr Kind head = {"lm_head", 49152, 576};

ops::Linear random_linear(const Kind& kind, DType dtype) {
  std::minstd_rand g(1);
  return ops::Linear::pack(kind.n, kind.k, dtype, [&](std::int64_t, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count * kind.k; ++i) out[i] = static_cast<float>(g()) * 0x1p-31f - 0.5f;
  });
}

std::string shape(const Kind& kind, std::int64_t m) {
  return fmt::format("{} m={} n={} k={}", kind.name, m, kind.n, kind.k);
}

}  // namespace

// Each kind of matrix has so many copies that they do not fit a cache, as in decoding.
std::vector<Line> gemv_cases() {
  std::vector<Line> lines;
  std::vector<float> x(4 * 1536, 0.5f), y(4 * 49152);
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const Kind& kind : {block[0], block[1], block[2], block[3], head}) {
      std::vector<ops::Linear> copies;
      constexpr std::int64_t beyond_cache = std::int64_t{160} << 20;
      do copies.push_back(random_linear(kind, dtype));
      while (copies[0].bytes() * static_cast<std::int64_t>(copies.size()) < beyond_cache);
      for (const std::int64_t m : {1, 4}) {
        const Times t = time_runs(10, [&] {
          for (const auto& l : copies) l.apply(x.data(), kind.k, y.data(), kind.n, m);
        });
        const double count = static_cast<double>(copies.size());
        Line l{"gemv", shape(kind, m), copies[0].kernel(), t.median / count, t.best / count};
        l.bytes = static_cast<double>(kind.n * kind.k) * static_cast<double>(size_of(dtype));
        l.flops = 2. * static_cast<double>(m * kind.n * kind.k);
        l.reads = true;
        lines.push_back(l);
      }
    }
  return lines;
}

std::vector<Line> gemm_cases() {
  std::vector<Line> lines;
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const std::int64_t m : {64, 2048})
      for (const Kind& kind : block) {
        const auto l = random_linear(kind, dtype);
        std::vector<float> x(static_cast<std::size_t>(m * kind.k), 0.5f), y(static_cast<std::size_t>(m * kind.n));
        const Times t = time_runs(10, [&] { l.apply(x.data(), kind.k, y.data(), kind.n, m); });
        Line line{"gemm", shape(kind, m), l.kernel(), t.median, t.best};
        line.bytes = static_cast<double>(l.bytes());
        line.flops = 2. * static_cast<double>(m * kind.n * kind.k);
        lines.push_back(line);
      }
  return lines;
}

}  // namespace kvlab::bench
