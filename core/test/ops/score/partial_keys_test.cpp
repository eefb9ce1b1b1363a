// Partial keys by hand, what their ops refuse, and eigenvectors.
#include <catch2/catch.hpp>
#include <kvlab/eigen.hpp>

#include <cmath>
#include <random>

#include "base/half.hpp"
#include "cases/paged_fixture.hpp"
#include "ops/score/low_rank.hpp"
#include "ops/score/partial_keys.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// One KV head of 16 elements, two query heads, three tokens, channels 1 and 3 of five places.
struct Scene {
  PagedFixture cache{{}};
  std::vector<std::uint16_t> rows = std::vector<std::uint16_t>(64 * 8, 0xffff);
  std::vector<std::int32_t> channels = {1, 3};
  std::vector<float> directions = std::vector<float>(256), queries = std::vector<float>(32),
                     scores = std::vector<float>(64, -7), sums = std::vector<float>(16, 1);
  HeapWorkspace workspace;

  Scene() {
    for (const std::vector<float>& key : {std::vector<float>{9, 1, 9, 2}, {9, 3, 9, -1}, {9, 1e6f, 9, .1f}}) {
      std::vector<float> k = key;
      k.resize(16);
      cache.append(0, 0, k, k, cache.view().tokens(0, 0));
    }
    queries[1] = 2, queries[3] = 1, queries[0] = 50;
    queries[17] = -1, queries[19] = 4;
    // Channel 1 is (element 0 + element 1) / 2, channel 3 is element 3.
    directions[16] = directions[17] = .5f, directions[48 + 3] = 1;
  }
  PartialKeys keys(bool turned = false) {
    PartialKeys k;
    k.rows = {rows.data(), {1, 1, 64, 2}, {64 * 8, 64 * 8, 8, 1}};
    k.channels = View<const std::int32_t, 3>::dense(channels.data(), {1, 1, 2});
    if (turned) k.directions = Directions::dense(directions.data(), {1, 16, 16});
    return k;
  }
  float row(int token, int i) const { return half_to_float(rows[static_cast<std::size_t>(token * 8 + i)]); }
  View<const float, 3> asked() const { return View<const float, 3>::dense(queries.data(), {1, 2, 16}); }
  Scores out() { return Scores::dense(scores.data(), {1, 1, 64}); }
};

const Stream s = Stream::cpu();

}  // namespace

TEST_CASE("partial keys and scores by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene x;
    const auto copy = [&](int newest, bool turned = false) {
      reference ? ops::copy_partial_keys_reference(x.cache.view(), newest, x.keys(turned))
                : ops::copy_partial_keys(x.cache.view(), newest, x.keys(turned), s);
    };
    const auto score = [&](bool turned = false, int newest = 0) {
      reference ? ops::partial_scores_reference(x.cache.view(), x.asked(), x.keys(turned), .5f, newest, x.out())
                : ops::partial_scores(x.cache.view(), x.asked(), x.keys(turned), .5f, newest, x.out(), x.workspace, s);
    };
    copy(1);
    CHECK(x.rows[0] == 0xffff);
    CHECK(x.rows[8] == 0xffff);
    CHECK(x.row(2, 0) == 65504);  // all that f16 holds
    copy(99);
    CHECK(x.row(0, 0) == 1);
    CHECK(x.row(0, 1) == 2);
    CHECK(x.row(1, 1) == -1);
    CHECK(double{x.row(2, 1)} == Approx(.1).epsilon(5e-4));
    CHECK(x.rows[2] == 0xffff);  // between rows
    score();
    CHECK(x.scores[0] == 3.5f);  // the greater of 2 * 1 + 2 and -1 + 4 * 2, halved
    CHECK(x.scores[1] == 2.5f);  // of 2 * 3 - 1 and -3 - 4
    CHECK(x.scores[3] == -7);    // there is no such token
    score(false, 2);
    CHECK(x.scores[0] == 3.5f);
    CHECK(x.scores[1] == INFINITY);
    CHECK(x.scores[2] == INFINITY);
    copy(3, true);
    CHECK(x.row(0, 0) == 5);
    CHECK(x.row(1, 0) == 6);
    CHECK(x.row(1, 1) == -1);
    score(true);
    CHECK(x.scores[0] == (26 * 5 + 2) / 2.f);  // channel 1 of the first query is (50 + 2) / 2
    CHECK(x.scores[1] == (26 * 6 - 1) / 2.f);
    x.queries[3] = NAN;
    score(true);
    CHECK(x.scores[0] == (-.5f * 5 + 4 * 2) / 2);  // NaN is never the greatest
    x.queries[3] = 1;

    const Tensor<4> queries = View<const float, 4>::dense(x.queries.data(), {1, 2, 1, 16});
    const auto sums = View<float, 3>::dense(x.sums.data(), {1, 1, 16});
    reference ? ops::add_channel_magnitudes_reference(x.cache.view(), queries.f32(), x.keys(true).directions, sums)
              : ops::add_channel_magnitudes(x.cache.view(), queries, x.keys(true).directions, sums, x.workspace, s);
    CHECK(x.sums[0] == 1);
    CHECK(x.sums[1] == 1 + 26 + .5f);
    CHECK(x.sums[3] == 1 + 1 + 4);
  }
}

TEST_CASE("partial keys: what cannot be is refused") {
  Scene x;
  PagedKv kv = x.cache.view();
  const auto copy = [&](const PartialKeys& k, int newest = 1) { ops::copy_partial_keys(kv, newest, k, s); };
  const auto score = [&](const PartialKeys& k, float factor, int newest = 0) {
    ops::partial_scores(kv, x.asked(), k, factor, newest, x.out(), x.workspace, s);
  };
  CHECK_THROWS_WITH(copy(x.keys(), -1), Catch::Contains("got -1 newest tokens"));
  CHECK_THROWS_WITH(score(x.keys(), 0), Catch::Contains("got the factor 0"));
  CHECK_THROWS_WITH(score(x.keys(), 1, -1), Catch::Contains("-1 newest places"));
  PartialKeys wrong = x.keys();
  wrong.rows.extent[3] = 3;
  CHECK_THROWS_WITH(copy(wrong), Catch::Contains("got partial keys [1, 1, 64, 3] of channels [1, 1, 2]"));
  wrong = x.keys();
  wrong.rows.extent[2] = 2;
  CHECK_THROWS_WITH(copy(wrong),
                    Catch::Contains("got 3 tokens of slot 0, wanted partial keys that have room for them"));
  wrong = x.keys(true);
  wrong.directions.extent[1] = 8;
  CHECK_THROWS_WITH(copy(wrong), Catch::Contains("got directions [1, 8, 16], wanted [1 KV heads, 16, 16]"));
  x.channels[1] = 16;
  CHECK_THROWS_WITH(copy(x.keys()), Catch::Contains("got channel 16, wanted 0 to 15"));
  x.channels[1] = 3;
  kv.rope = RopeRegime::cache_relative;
  CHECK_THROWS_WITH(copy(x.keys()), Catch::Contains("cache_relative"));
  Shape shape;
  shape.layers = shape.kv_heads = shape.max_slots = 1, shape.head_dim = 16, shape.max_tokens = 8;
  CHECK_THROWS_WITH(KeptPartialKeys("k", shape, 17, 0, {}, x.workspace),
                    Catch::Contains("got partial keys of 17 channels, wanted 1 to 16"));
  CHECK_THROWS_WITH(KeptPartialKeys("k", shape, 2, 0, {1, 2}, x.workspace),
                    Catch::Contains("got 2 numbers of directions, wanted 256"));
}

TEST_CASE("pages of tokens by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    PagedFixture cache({.page_size = 4, .max_pages = 4});
    for (int t = 0; t < 14; ++t) cache.append(0, 0, std::vector<float>(16), std::vector<float>(16), t);
    ListMemory memory[2];
    const TokenList tokens{memory[0].empty({1, 1, 14})};
    const PageList pages{memory[1].empty({1, 1, 4})};
    const auto list = [&](const std::vector<int>& listed, int newest = 0) {
      tokens.count(0, 0) = static_cast<int>(listed.size());
      std::copy(listed.begin(), listed.end(), tokens.index.data);
      reference ? ops::token_pages_reference(cache.view(), tokens, newest, pages)
                : ops::token_pages(cache.view(), tokens, newest, pages, s);
      return std::vector<int>(pages.index.data, pages.index.data + pages.count(0, 0));
    };
    CHECK(list({0, 3, 8, 11, 12}) == std::vector<int>{0, 2, 3});
    CHECK(list({}).empty());
    CHECK(list({7}) == std::vector<int>{1});
    CHECK(list({7, 12, 13}, 1) == std::vector<int>{1, 3});
    CHECK(list({7, 12, 13}, 2) == std::vector<int>{1});
  }
}

TEST_CASE("eigenvectors of a symmetric matrix are those of Jacobi's rotations") {
  const int n = 13;
  std::mt19937 rng(5);
  std::normal_distribution<double> normal;
  std::vector<double> a(n * n), values, vectors;
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j <= i; ++j) a[i * n + j] = a[j * n + i] = normal(rng);
  ops::eigen_reference(a, n, values, vectors);
  const Eigen got = eigen_of_symmetric(a, n);
  REQUIRE(got.vectors.size() == vectors.size());
  for (std::size_t i = 0; i < n; ++i) {
    CHECK(got.values[i] == Approx(values[i]).margin(1e-10));
    double cosine = 0;
    for (std::size_t d = 0; d < n; ++d) cosine += got.vectors[i * n + d] * vectors[i * n + d];
    CHECK(std::abs(cosine) == Approx(1).margin(1e-10));
  }
  const Eigen zero = eigen_of_symmetric(std::vector<double>(4), 2);
  CHECK(zero.values == std::vector<double>{0, 0});
  CHECK_THROWS_WITH(eigen_of_symmetric(a, 5), Catch::Contains("got 169 numbers, wanted those of a matrix of 5 x 5"));
}
