#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "cases/paged_fixture.hpp"
#include "ops/score/low_rank.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

const Stream s = Stream::cpu();

// Rows of so many tokens and heads of 8 elements. The cache's own keys do not matter.
struct Joint {
  Joint(int of_tokens, int of_heads, int of_dim = 8)
      : tokens(of_tokens),
        heads(of_heads),
        dim(of_dim),
        cache({1, of_heads, of_dim, 4, (of_tokens + 3) / 4}),
        data(static_cast<std::size_t>(of_tokens * of_heads * of_dim)) {
    for (int h = 0; h < heads; ++h)
      for (int t = 0; t < tokens; ++t)
        cache.append(0, h, std::vector<float>(static_cast<std::size_t>(dim)),
                     std::vector<float>(static_cast<std::size_t>(dim)));
    kv = cache.view();
    rows = View<float, 4>::dense(data.data(), {1, heads, tokens, dim});
  }
  int width() const { return heads * dim; }
  float& at(int t, int i) { return rows(0, i / dim, t, i % dim); }
  // X^T X
  std::vector<double> gram() {
    std::vector<double> g;
    for (int i = 0; i < width(); ++i)
      for (int j = 0; j < width(); ++j) {
        double sum = 0;
        for (int t = 0; t < tokens; ++t) sum += double{at(t, i)} * double{at(t, j)};
        g.push_back(sum);
      }
    return g;
  }
  // The sum of the eigenvalues behind the first `rank`.
  double beyond(int rank) {
    std::vector<double> values, vectors;
    ops::eigen_reference(gram(), width(), values, vectors);
    double sum = 0;
    for (int i = rank; i < width(); ++i) sum += values[static_cast<std::size_t>(i)];
    return sum;
  }

  int tokens, heads, dim;
  PagedFixture cache;
  PagedKv kv;
  std::vector<float> data;
  View<float, 4> rows;
};

// Random rows whose spread falls from element to element, turned among each other.
Joint falling(int tokens, int heads, int dim, double fall) {
  Joint x(tokens, heads, dim);
  std::mt19937 rng(3);
  std::normal_distribution<double> normal;
  std::vector<double> mix(static_cast<std::size_t>(x.width() * x.width()));
  for (double& m : mix) m = normal(rng);
  for (int t = 0; t < tokens; ++t) {
    std::vector<double> sum(static_cast<std::size_t>(x.width()));
    for (int q = 0; q < x.width(); ++q) {
      const double along = normal(rng) * std::pow(fall, q);
      for (int i = 0; i < x.width(); ++i)
        sum[static_cast<std::size_t>(i)] += along * mix[static_cast<std::size_t>(q * x.width() + i)];
    }
    for (int i = 0; i < x.width(); ++i) x.at(t, i) = static_cast<float>(sum[static_cast<std::size_t>(i)]);
  }
  return x;
}

double squares(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - double{b[i]}, 2);
  return sum;
}

}  // namespace

TEST_CASE("low_rank: two directions by hand") {
  Joint x(3, 1);
  x.at(0, 0) = 3, x.at(1, 5) = 1, x.at(2, 0) = -1;
  const std::vector<float> whole = x.data;
  ops::low_rank(x.kv, 1, x.rows, s);
  CHECK(x.at(0, 0) == Approx(3));
  CHECK(x.at(2, 0) == Approx(-1));
  CHECK(x.at(1, 5) == Approx(0).margin(1e-7));
  x.data = whole;
  ops::low_rank(x.kv, 2, x.rows, s);
  CHECK(squares(x.data, whole) < 1e-12);
}

TEST_CASE("low_rank is joint over the KV heads") {
  Joint x(4, 2);
  for (int t = 0; t < 4; ++t) x.at(t, 2) = static_cast<float>(t + 1), x.at(t, 8 + 6) = static_cast<float>(-2 * (t + 1));
  const std::vector<float> whole = x.data;
  ops::low_rank(x.kv, 1, x.rows, s);  // one direction of both heads together
  CHECK(squares(x.data, whole) < 1e-12);
  x.at(3, 8 + 6) = 8;  // the last token's second head goes against the first
  const double energy = 30 + 4 * 30;
  const double beyond = x.beyond(1);
  CHECK(beyond > 1);
  const std::vector<float> mixed = x.data;
  ops::low_rank(x.kv, 1, x.rows, s);
  CHECK(squares(x.data, mixed) == Approx(beyond).margin(1e-6 * energy));
}

TEST_CASE("low_rank misses as little as any matrix of that rank, and has that rank") {
  const double fall = GENERATE(1., .95, .9, .5);
  const int tokens = GENERATE(200, 20);
  for (const int rank : {1, 7, 24, 40, 47}) {
    if (fall < .9 && rank > 7) continue;  // next to nothing is left out
    Joint x = falling(tokens, 3, 16, fall);
    CAPTURE(fall, tokens, rank);
    const std::vector<float> whole = x.data;
    const double energy = x.beyond(0), least = x.beyond(rank);
    ops::low_rank(x.kv, rank, x.rows, s);
    // Rounding to f32 moves all rows together by at most 2^-24 of their length, and eigenvalues in f64 by less.
    const double slack = 3e-7 * std::sqrt(energy), left = std::sqrt(std::max(0., least));
    if (rank < tokens) REQUIRE(left > 100 * slack);
    CHECK(std::abs(std::sqrt(squares(x.data, whole)) - left) <= slack);
    CHECK(x.beyond(rank) <= 1e-12 * energy);  // of rows that are rounded to f32
  }
}

TEST_CASE("low_rank keeps rows of no greater rank, and any rows at the full one") {
  Joint x = falling(50, 2, 8, 1);
  for (int t = 5; t < 50; ++t)
    for (int i = 0; i < 16; ++i) x.at(t, i) = x.at(t % 5, i) * static_cast<float>(t);
  const std::vector<float> whole = x.data;
  const double energy = x.beyond(0);
  for (const int rank : {5, 6, 15}) {
    x.data = whole;
    ops::low_rank(x.kv, rank, x.rows, s);
    CHECK(squares(x.data, whole) < 1e-12 * energy);
  }
  x.data = whole;
  ops::low_rank(x.kv, 16, x.rows, s);
  CHECK(x.data == whole);
  x.data = whole;
  ops::low_rank(x.kv, 4, x.rows, s);
  CHECK(squares(x.data, whole) > 1e-6 * energy);
}

TEST_CASE("low_rank: rows of zeros stay, and a number that is none spreads") {
  Joint x(5, 1);
  ops::low_rank(x.kv, 3, x.rows, s);
  CHECK(x.data == std::vector<float>(40));
  x.at(2, 3) = NAN;
  ops::low_rank(x.kv, 3, x.rows, s);
  for (const float y : x.data) CHECK(std::isnan(y));
}

TEST_CASE("low_rank refuses what it cannot do") {
  Joint x(5, 2);
  CHECK_THROWS_WITH(ops::low_rank(x.kv, 0, x.rows, s), Catch::Contains("got rank 0, wanted 1 to 16"));
  CHECK_THROWS_WITH(ops::low_rank(x.kv, 17, x.rows, s), Catch::Contains("got rank 17, wanted 1 to 16"));
  CHECK_THROWS_WITH(ops::low_rank(x.kv, 3, View<float, 4>::dense(x.data.data(), {1, 1, 5, 16}), s),
                    Catch::Contains("got rows of another shape"));
}
