// The streaming kernel of oneDNN's bf16 layout, on a layout made by hand. kvlab chooses it on AVX-512 machines only.
#include <kvlab/dtype.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "base/cpu.hpp"
#include "ops/linear/linear_kernels.hpp"

using namespace kvlab;

TEST_CASE("pair_columns multiplies bf16 pairs as plain loops do") {
  if (!has_avx2()) return;
  const int width = GENERATE(16, 48, 64, 80, 128);
  constexpr std::int64_t pairs = 37;
  std::mt19937 random(width);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<std::uint32_t> words(static_cast<std::size_t>(pairs * width));
  std::vector<float> x(2 * pairs), y(static_cast<std::size_t>(width), 1e9f);
  std::vector<double> expected(static_cast<std::size_t>(width), 0);
  std::vector<std::int64_t> pair;
  for (auto& v : x) v = uniform(random);
  for (std::int64_t p = 0; p < pairs; ++p) {
    pair.push_back((pairs - 1 - p) * width);  // any order of the pairs in memory
    for (int c = 0; c < width; ++c) {
      const bf16 even(uniform(random)), odd(uniform(random));
      words[static_cast<std::size_t>(pair.back() + c)] = even.bits | std::uint32_t{odd.bits} << 16;
      expected[static_cast<std::size_t>(c)] += double(float(even)) * x[static_cast<std::size_t>(2 * p)] +
                                               double(float(odd)) * x[static_cast<std::size_t>(2 * p + 1)];
    }
  }
  ops::gemm::pair_columns(words.data(), width, pair.data(), pairs, x.data(), y.data());
  for (int c = 0; c < width; ++c)
    CHECK(std::abs(y[static_cast<std::size_t>(c)] - expected[static_cast<std::size_t>(c)]) < 1e-5);
}
