#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/score/moments.hpp"

using namespace kvlab;
using namespace kvlab::cases;

TEST_CASE("layer_reduce: TOVA's rows by hand, and heads that hold other tokens in another order") {
  // Two query heads of one KV head, each with a row of attention.
  PagedFixture one({1, 1, 8, 4, 4});
  for (int t = 0; t < 4; ++t) one.append(0, 0, std::vector<float>(8), std::vector<float>(8));
  const float rows[] = {.5f, .1f, .2f, .2f, .1f, .1f, .6f, .2f};
  Guarded<3> mean({1, 1, 4});
  ops::layer_reduce(one.view(), View<const float, 3>::dense(rows, {1, 2, 4}), GroupRule::mean, mean.view(),
                    Stream::cpu());
  const float wanted[] = {.3f, .1f, .4f, .2f};
  for (int t = 0; t < 4; ++t) CHECK(mean(0, 0, t) == Approx(wanted[t]));

  // Head 0 holds the positions 7, 2, 5; head 1 holds 5, 9, 7.
  PagedFixture two({1, 2, 8, 2, 4});
  for (const auto& [head, position] : {std::pair{0, 7}, {0, 2}, {0, 5}, {1, 5}, {1, 9}, {1, 7}})
    two.append(0, head, std::vector<float>(8), std::vector<float>(8), position);
  const float in[] = {1, 10, 100, 1000, 10000, 100000};
  const auto reduced = [&](GroupRule rule) {
    Guarded<3> out({1, 2, 3});
    ops::layer_reduce(two.view(), View<const float, 3>::dense(in, {1, 2, 3}), rule, out.view(), Stream::cpu());
    return out.values();
  };
  CHECK(reduced(GroupRule::sum) == std::vector<float>{100001, 10, 1100, 1100, 10000, 100001});
  CHECK(reduced(GroupRule::mean) == std::vector<float>{50000.5f, 10, 550, 550, 10000, 50000.5f});
  CHECK(reduced(GroupRule::max) == std::vector<float>{100000, 10, 1000, 1000, 10000, 100000});
  CHECK_THROWS_AS(reduced(GroupRule::softmax_mean), Error);
}

TEST_CASE("mean_turn is the mean of cos and sin, for fast and for slow pairs") {
  for (const double frequency : {1., .3, 1e-3, 1e-7, 0.})
    for (const int count : {1, 2, 512}) {
      double cosine = 0, sine = 0;
      for (int p = 100; p < 100 + count; ++p) cosine += std::cos(p * frequency), sine += std::sin(p * frequency);
      const ops::MeanTurn turn = ops::mean_turn(frequency, 100, count);
      CHECK(turn.cosine == Approx(cosine / count).margin(1e-12));
      CHECK(turn.sine == Approx(sine / count).margin(1e-12));
    }
}

TEST_CASE("quadratic forms and cosines by hand") {
  PagedFixture cache({1, 1, 8, 4, 4});
  for (const auto& k : {std::vector<float>{1, 0, 0, 0, 0, 0, 0, 0}, {0, 2, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0}})
    cache.append(0, 0, k, k);
  const PagedKv kv = cache.view();
  std::vector<float> matrix(64), vector(8);
  matrix[0] = 3, matrix[9] = 5, matrix[1] = 7;
  vector[0] = -2, vector[1] = 2;
  const KvRows keys{&kv, KvSide::key};
  Guarded<3> out({1, 1, 3}), mean({1, 1, 8});
  ops::row_quadratic(keys, View<const float, 4>::dense(matrix.data(), {1, 1, 8, 8}), out.view(), Stream::cpu());
  CHECK(out.values() == std::vector<float>{3, 20, 0});
  ops::row_dot(keys, View<const float, 3>::dense(vector.data(), {1, 1, 8}), out.view(), Stream::cpu());
  CHECK(out.values() == std::vector<float>{-2, 4, 0});
  ops::row_cosine(keys, View<const float, 3>::dense(vector.data(), {1, 1, 8}), out.view(), Stream::cpu());
  CHECK(out(0, 0, 0) == Approx(-std::sqrt(.5)));
  CHECK(out(0, 0, 1) == Approx(std::sqrt(.5)));
  CHECK(out(0, 0, 2) == 0);
  ops::normalised_mean(keys, mean.view(), Stream::cpu());
  CHECK(mean(0, 0, 0) == Approx(1. / 3));
  CHECK(mean(0, 0, 1) == Approx(1. / 3));
  CHECK(mean(0, 0, 2) == 0);
}

TEST_CASE("ops on scores refuse views that do not fit") {
  PagedFixture cache({1, 2, 8, 4, 4});
  cache.append(0, 0, std::vector<float>(8), std::vector<float>(8));
  const PagedKv kv = cache.view();
  const KvRows keys{&kv, KvSide::key};
  const Stream s = Stream::cpu();
  Guarded<3> two({1, 2, 4}), three({1, 3, 4}), short_one({1, 2, 3}), vectors({1, 2, 16});
  Guarded<4> matrix({1, 2, 8, 4}), rows({1, 2, 4, 16});
  CHECK_THROWS_AS(ops::add(three.view(), two.view(), 1, s), Error);
  CHECK_THROWS_AS(ops::copy(two.view(), short_one.view(), s), Error);
  CHECK_THROWS_AS(ops::softmax(kv, two.view(), 0, s), Error);
  CHECK_THROWS_AS(ops::softmax(kv, three.view(), 1, s), Error);
  CHECK_THROWS_AS(ops::row_dot(keys, vectors.view(), two.view(), s), Error);
  CHECK_THROWS_AS(ops::row_quadratic(keys, matrix.view(), two.view(), s), Error);
  CHECK_THROWS_AS(ops::read_rows(keys, rows.view(), s), Error);
  CHECK_THROWS_AS(ops::normalised_mean(keys, vectors.view(), s), Error);
  CHECK_THROWS_AS(ops::page_sum(kv, two.view(), three.view(), s), Error);
  CHECK_THROWS_AS(ops::blend_state({&kv, 0}, 1, {}, 1, s), Error);
  std::vector<float> state(100);
  CHECK_THROWS_AS(ops::add_moments(Tensor<4>(Guarded<4>({1, 2, 1, 8}).view()), nullptr, kv, 0,
                                   View<float, 3>::dense(state.data(), {1, 2, 50}), s),
                  Error);
  cache.unmap(0, 0, 0);
  CHECK_THROWS_AS(ops::row_dot(keys, View<const float, 3>(Guarded<3>({1, 2, 8}).view()), two.view(), s), Error);
}
