#include <kvlab/clusters.hpp>

#include <catch2/catch.hpp>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

// A cache of one head, and its clusters. A key has two numbers that are not 0.
struct Head {
  PagedFixture cache{{1, 1, 8, 4, 16}};
  PagedKv kv;
  std::vector<float> centroid;
  Ints size, token, bound{0, 0};
  KeyClusters clusters;
  HeapWorkspace workspace;

  explicit Head(const std::vector<std::pair<float, float>>& keys, int room = 4) {
    for (std::size_t t = 0; t < keys.size(); ++t) {
      std::vector<float> key(8, 0.f);
      key[0] = keys[t].first, key[5] = keys[t].second;
      cache.append(0, 0, key, key, static_cast<int>(t));
    }
    kv = cache.view();
    centroid.resize(static_cast<std::size_t>(room) * 8);
    size.resize(static_cast<std::size_t>(room));
    token.resize(keys.size());
    clusters.centroid = View<float, 4>::dense(centroid.data(), {1, 1, room, 8});
    clusters.size = View<std::int32_t, 3>::dense(size.data(), {1, 1, room});
    clusters.token = View<std::int32_t, 3>::dense(token.data(), {1, 1, static_cast<std::int64_t>(keys.size())});
    clusters.bound = View<std::int32_t, 3>::dense(bound.data(), {1, 1, 2});
  }
  void make(const ClusterRange& range, int iterations = 20) {
    ops::cluster_keys(kv, {range}, {.iterations = iterations}, clusters, workspace, Stream::cpu());
  }
  std::pair<float, float> at(std::size_t c) const { return {centroid[c * 8], centroid[c * 8 + 5]}; }
};

}  // namespace

TEST_CASE("cluster_centroids: coarse clusters of three clusters by hand, and what they leave") {
  Head finer({{1, 0}}, 3);
  finer.bound = {3, 9};
  finer.size = {4, 2, 3};
  const std::pair<float, float> centroids[] = {{1, .1f}, {0, 5}, {3, 0}};
  for (std::size_t c = 0; c < 3; ++c)
    finer.centroid[c * 8] = centroids[c].first, finer.centroid[c * 8 + 5] = centroids[c].second;
  Head coarse({{1, 0}}, 2);
  coarse.token.resize(3);
  coarse.clusters.token = View<std::int32_t, 3>::dense(coarse.token.data(), {1, 1, 3});
  const auto make = [&](const ClusterRange& range) {
    ops::cluster_centroids(finer.kv, finer.clusters, {range}, {}, coarse.clusters, coarse.workspace, Stream::cpu());
  };
  make({.tokens = 3, .clusters = 2});
  CHECK(coarse.bound == Ints{2, 3});
  const std::size_t along = coarse.size[0] == 7 ? 0 : 1;
  CHECK(coarse.size[along] == 7);  // tokens
  CHECK(coarse.size[1 - along] == 2);
  const auto a = static_cast<std::int32_t>(along);
  CHECK(coarse.token == Ints{a, 1 - a, a});
  CHECK(coarse.at(along).first == Approx(2));  // each centroid counts once
  CHECK(coarse.at(along).second == Approx(.05));
  Ints left{-7, -7, -7};
  std::vector<float> shares{.2f, .2f}, threshold{.2f};
  shares[along] = .3f;
  const auto within = [&](std::int64_t room) {
    ops::sizes_within(finer.kv, View<const float, 3>::dense(shares.data(), {1, 1, 2}),
                      View<const float, 1>::dense(threshold.data(), {1}), coarse.clusters, finer.clusters,
                      View<std::int32_t, 3>::dense(left.data(), {1, 1, room}), Stream::cpu());
    return left;
  };
  CHECK(within(3) == Ints{4, 0, 3});
  finer.bound[0] = 2;
  make({.tokens = 3, .clusters = 1});  // there are two
  CHECK(coarse.bound == Ints{2, 3});
  finer.bound[0] = 3;
  make({.tokens = 1, .clusters = 1});
  shares[0] = 0;
  CHECK(within(3) == Ints{0, 2, 3});  // the others are in no coarse cluster
  CHECK_THROWS_WITH(within(2), Catch::Contains("got sizes of another shape"));
  CHECK_THROWS_WITH(make({.from = 1, .tokens = 2, .clusters = 1}),
                    Catch::Contains("got clusters 1 to 3, wanted them from 0 to at most 3"));
  CHECK_THROWS_WITH(make({.tokens = 2, .clusters = 1, .append = true}), Catch::Contains("to append"));
}

TEST_CASE("cluster_keys: two directions by hand") {
  // Whatever two keys are drawn, the first iteration or the second parts the axes: only the angle counts.
  Head head({{9, 9}, {1, 0}, {0, 4}, {100, 1}, {.1f, 6}, {2, 0}});
  head.make({.from = 1, .tokens = 5, .clusters = 2});
  CHECK(head.bound == Ints{2, 6});
  const std::size_t along = head.size[0] == 3 ? 0 : 1;
  CHECK(head.size[along] == 3);
  CHECK(head.size[1 - along] == 2);
  CHECK(head.token == (along == 0 ? Ints{1, 3, 5, 2, 4, 0} : Ints{2, 4, 1, 3, 5, 0}));
  CHECK(head.at(along).first == Approx(103. / 3));  // the mean of keys as stored, not of directions
  CHECK(head.at(along).second == Approx(1. / 3));
  CHECK(head.at(1 - along).first == Approx(.05));
  CHECK(head.at(1 - along).second == Approx(5));
}

TEST_CASE("cluster_keys: an empty cluster keeps its centroid") {
  // Both centroids have one direction, and ties go to the first.
  Head head({{1, 0}, {3, 0}});
  head.make({.tokens = 2, .clusters = 2});
  CHECK(head.size == Ints{2, 0, 0, 0});
  CHECK(head.token == Ints{0, 1});
  CHECK(head.at(0) == std::pair{2.f, 0.f});
  CHECK(head.at(1) == std::pair{3.f, 0.f});
}

TEST_CASE("cluster_keys: clusters of later places come behind, where they fit") {
  Head head({{1, 0}, {0, 1}, {1, 0}, {0, 1}, {5, 5}, {7, 7}});
  head.make({.from = 1, .tokens = 2, .clusters = 2});
  CHECK(head.bound == Ints{2, 3});
  const ClusterRange two{.tokens = 2, .clusters = 1, .append = true};
  head.make(two);
  CHECK(head.bound == Ints{3, 5});
  CHECK(head.size == Ints{1, 1, 2, 0});
  CHECK(Ints(head.token.begin(), head.token.begin() + 4) == Ints{1, 2, 3, 4});
  CHECK(head.at(2) == std::pair{2.5f, 3.f});
  head.make(two);  // one place is left
  CHECK(head.bound == Ints{3, 5});
  head.make({});
  CHECK(head.bound == Ints{3, 5});
  head.make({.from = 6, .clusters = 0});
  CHECK(head.bound == Ints{0, 6});
}

TEST_CASE("cluster ops refuse what they cannot do") {
  Head head({{1, 0}, {0, 1}, {1, 1}});
  CHECK_THROWS_WITH(head.make({.tokens = 3, .clusters = 4}), Catch::Contains("got 4 clusters of 3 tokens"));
  CHECK_THROWS_WITH(head.make({.tokens = 3, .clusters = 0}), Catch::Contains("got 0 clusters of 3 tokens"));
  CHECK_THROWS_WITH(head.make({.from = 1, .tokens = 3, .clusters = 1}), Catch::Contains("got places 1 to 4"));
  CHECK_THROWS_WITH(head.make({.tokens = 3, .clusters = 1}, -1), Catch::Contains("got -1 iterations"));
  CHECK_THROWS_WITH(ops::cluster_keys(head.kv, {}, {}, head.clusters, head.workspace, Stream::cpu()),
                    Catch::Contains("got 0 ranges, wanted one for each of 1 rows"));
  Head small({{1, 0}, {0, 1}, {1, 1}}, 2);
  CHECK_THROWS_WITH(small.make({.tokens = 3, .clusters = 3}), Catch::Contains("got 3 clusters, wanted at most 2"));
  head.kv.rope = RopeRegime::cache_relative;
  head.kv.rope_table.head_dim = 8;
  const float frequencies[4] = {1, 1, 1, 1};
  head.kv.rope_table.inv_freq = frequencies;
  CHECK_THROWS_WITH(head.make({.tokens = 3, .clusters = 1}), Catch::Contains("got keys before RoPE"));
  head.kv.rope = RopeRegime::original;

  std::vector<float> scores(4), query(8);
  Ints most{3}, index(2), count(1);
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, 2});
  list.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
  const auto of = [&](std::int64_t n) { return View<float, 3>::dense(scores.data(), {1, 1, n}); };
  const auto choose = [&](std::int64_t n) {
    ops::cluster_tokens(head.kv, of(n), View<const std::int32_t, 2>::dense(most.data(), {1, 1}), 0, head.clusters, list,
                        Stream::cpu());
  };
  CHECK_THROWS_WITH(choose(4), Catch::Contains("got a list for 2 tokens, wanted room for 3"));
  CHECK_THROWS_WITH(choose(3), Catch::Contains("got too few scores"));
  CHECK_THROWS_WITH(ops::cluster_scores(head.kv, View<const float, 3>::dense(query.data(), {1, 1, 8}), head.clusters,
                                        of(3), Stream::cpu()),
                    Catch::Contains("got too few scores"));
  CHECK_THROWS_WITH(ops::cluster_scores(head.kv, View<const float, 3>::dense(query.data(), {1, 1, 4}), head.clusters,
                                        of(4), Stream::cpu()),
                    Catch::Contains("got queries of another shape"));
  head.cache.unmap(0, 0, 0);
  CHECK_THROWS_AS(head.make({.tokens = 3, .clusters = 1}), Error);
}
