// Guessed scores by hand, and what their ops refuse.
#include <catch2/catch.hpp>

#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/score/speculation.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

// A cache of two KV heads of five tokens and the step's own.
struct Scene {
  PagedFixture cache{{.kv_heads = 2, .head_dim = 8}};
  std::vector<float> scores{9, 6.2f, 5.1f, 4.9f, 1, 99, 3, 2.9f, 2.5f, -1.5f, -.5f, 99};
  NearGreatest rule{.within = 4, .newest = 1};

  Scene() {
    for (int h = 0; h < 2; ++h)
      for (int t = 0; t < 6; ++t) cache.append(0, h, std::vector<float>(8), std::vector<float>(8), t);
  }
  Ints numbers(bool reference) {
    Ints out{-7, -7};
    const auto x = View<const float, 3>::dense(scores.data(), {1, 2, 6});
    const auto to = View<std::int32_t, 2>::dense(out.data(), {1, 2});
    reference ? ops::near_greatest_reference(cache.view(), x, rule, to)
              : ops::near_greatest(cache.view(), x, rule, to, Stream::cpu());
    return out;
  }
};

}  // namespace

TEST_CASE("near_greatest: the card's numbers by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    CHECK(s.numbers(reference) == Ints{4, 4});  // 3 and 4 tokens, 3 of each head, and the newest
    s.rule.most = 2;
    CHECK(s.numbers(reference) == Ints{3, 3});
    s.rule.most = 9, s.rule.most_share = .4f;  // of five
    CHECK(s.numbers(reference) == Ints{3, 3});
    s.rule.most_share = .1f;  // at least one
    CHECK(s.numbers(reference) == Ints{2, 2});
    s.rule = {.within = 3.9f, .newest = 0};  // the newest alone is near itself, in each head
    CHECK(s.numbers(reference) == Ints{1, 1});
    s.rule = {.within = 4, .newest = 6};
    CHECK(s.numbers(reference) == Ints{6, 6});
    s.rule.newest = 1;
    for (int t = 0; t < 5; ++t) s.scores[static_cast<std::size_t>(t)] = t == 2 ? -1 : NAN;
    CHECK(s.numbers(reference) == Ints{3, 3});  // 1 and 4
  }
}

TEST_CASE("add_magnitudes by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    std::vector<float> queries(4 * 2 * 8), sums(2 * 8);  // four query heads, two queries
    sums[3] = 1;
    queries[3] = -2, queries[8 + 3] = .5f, queries[16 + 3] = -4, queries[3 * 16 + 7] = 3;
    const auto q = View<const float, 4>::dense(queries.data(), {1, 4, 2, 8});
    const auto to = View<float, 3>::dense(sums.data(), {1, 2, 8});
    reference ? ops::add_magnitudes_reference(s.cache.view(), q, to)
              : ops::add_magnitudes(s.cache.view(), q, to, Stream::cpu());
    CHECK(sums[3] == 7.5f);
    CHECK(sums[8 + 7] == 3);
    CHECK(sums[0] == 0);
  }
}

TEST_CASE("speculation: what the ops refuse") {
  Scene s;
  s.rule.newest = -1;
  CHECK_THROWS_WITH(s.numbers(false), Catch::Contains("got -1 newest tokens"));
  std::vector<float> x(64);
  const auto queries = View<const float, 4>::dense(x.data(), {1, 3, 2, 8});
  const auto sums = View<float, 3>::dense(x.data(), {1, 2, 8});
  CHECK_THROWS_WITH(ops::add_magnitudes(s.cache.view(), queries, sums, Stream::cpu()),
                    Catch::Contains("got queries [1, 3, 2, 8], wanted [row, query head, i, 8]"));
  CHECK_THROWS_WITH(ops::add_magnitudes(s.cache.view(), View<const float, 4>::dense(x.data(), {1, 2, 2, 8}),
                                        View<float, 3>::dense(x.data(), {1, 1, 8}), Stream::cpu()),
                    Catch::Contains("got sums [1, 1, 8], wanted [slot, 2 KV heads, 8]"));
}
