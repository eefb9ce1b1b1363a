#include <kvlab/clusters.hpp>

#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

// A cache of 6 tokens and one head. Places 1 to 3 are cluster 0, and 0 is cluster 1. Cluster 2 is empty, and its
// centroid would get nearly all attention.
struct Shares {
  PagedFixture cache{{1, 1, 8, 4, 16}};
  PagedKv kv;
  std::vector<float> centroid = std::vector<float>(24), out = {-7, -7, -7, -7};
  Ints size{3, 1, 0}, token{1, 2, 3, 0, 0, 0}, bound{3, 4}, index = Ints(6), count = Ints(1);
  KeyClusters clusters;
  std::vector<float> query = std::vector<float>(16), threshold{-7};
  HeapWorkspace workspace;

  Shares() {
    for (int t = 0; t < 6; ++t) cache.append(0, 0, std::vector<float>(8, 1.f), std::vector<float>(8, 1.f), t);
    kv = cache.view();
    clusters.centroid = View<float, 4>::dense(centroid.data(), {1, 1, 3, 8});
    clusters.size = View<std::int32_t, 3>::dense(size.data(), {1, 1, 3});
    clusters.token = View<std::int32_t, 3>::dense(token.data(), {1, 1, 6});
    clusters.bound = View<std::int32_t, 3>::dense(bound.data(), {1, 1, 2});
    centroid[8 + 3] = 2;
    centroid[16 + 3] = 2000;
    query[3] = 1;  // the second query head's is all zeros
  }
  std::vector<float> shares(std::int64_t heads, std::int64_t queries) {
    ops::cluster_shares(kv, View<const float, 4>::dense(query.data(), {1, heads, queries, 8}), std::log(3.f) / 2,
                        clusters, View<float, 3>::dense(out.data(), {1, 1, 4}), workspace, Stream::cpu());
    return out;
  }
  float quantile(double q) {
    ops::share_quantile(kv, View<const float, 3>::dense(out.data(), {1, 1, 3}), q, clusters,
                        View<float, 1>::dense(threshold.data(), {1}), Stream::cpu());
    return threshold[0];
  }
  Ints above(float t, std::int64_t room = 6) {
    threshold[0] = t;
    TokenList list;
    list.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, room});
    list.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
    ops::cluster_tokens_above(kv, View<const float, 3>::dense(out.data(), {1, 1, 3}),
                              View<const float, 1>::dense(threshold.data(), {1}), clusters, list, Stream::cpu());
    return {index.begin(), index.begin() + count[0]};
  }
};

}  // namespace

TEST_CASE("cluster_shares: the card's numbers by hand") {
  Shares x;
  auto got = x.shares(1, 1);  // 3 * 1 + 1 * 3 = 6
  CHECK(got[0] == Approx(1. / 6));
  CHECK(got[1] == Approx(1. / 2));
  CHECK(got[2] == 0);
  CHECK(got[3] == -7);  // behind the clusters
  // A query of zeros gives each of the four tokens a quarter. It may be of another head, or another query of the head.
  for (const bool head : {false, true}) {
    got = x.shares(head ? 2 : 1, head ? 1 : 2);
    CHECK(got[0] == Approx((1. / 6 + 1. / 4) / 2));
    CHECK(got[1] == Approx((1. / 2 + 1. / 4) / 2));
  }
}

TEST_CASE("cluster_shares: large logits stay finite") {
  Shares x;
  x.query[3] = 5000;
  const auto got = x.shares(1, 1);
  CHECK(got[0] == 0);
  CHECK(got[1] == 1);
}

TEST_CASE("cluster_shares: clusters that are all empty get nothing") {
  Shares x;
  x.size = {0, 0, 0};
  const auto got = x.shares(1, 1);
  for (std::size_t c = 0; c < 3; ++c) CHECK(got[c] == 0);
}

TEST_CASE("cluster_shares: a NaN of one cluster makes all shares NaN but those of empty clusters") {
  Shares x;
  x.centroid[8 + 4] = NAN;
  const auto got = x.shares(1, 1);
  CHECK(std::isnan(got[0]));
  CHECK(std::isnan(got[1]));
  CHECK(got[2] == 0);
}

TEST_CASE("share_quantile and cluster_tokens_above by hand") {
  Shares x;
  x.out = {1.f / 6, .5f, 100.f, 0};  // the empty cluster owns no tokens
  CHECK(x.quantile(0) == 1.f / 6);
  CHECK(x.quantile(.5) == 1.f / 6);
  CHECK(x.quantile(.9) == Approx(1. / 6 + .7 / 3));  // place 2.7 of 1/6, 1/6, 1/6, 1/2
  CHECK(x.quantile(1) == .5f);
  CHECK(x.above(.3f) == Ints{0, 4, 5});
  CHECK(x.above(.1f) == Ints{0, 1, 2, 3, 4, 5});
  CHECK(x.above(.5f) == Ints{4, 5});  // not above
  x.out[1] = NAN;
  CHECK(x.above(-1) == Ints{1, 2, 3, 4, 5});
  CHECK(x.quantile(0) == 0);
  x.bound = {0, 0};
  CHECK(x.quantile(.9) == 0);
  CHECK(x.above(.9f) == Ints{0, 1, 2, 3, 4, 5});
}

TEST_CASE("ops of cluster shares refuse what they cannot do") {
  Shares x;
  CHECK_THROWS_WITH(x.shares(1, 0), Catch::Contains("got queries of another shape"));
  CHECK_THROWS_WITH(x.quantile(1.5), Catch::Contains("got q 1.5"));
  CHECK_THROWS_WITH(x.quantile(NAN), Catch::Contains("wanted 0 to 1"));
  CHECK_THROWS_WITH(x.above(.5f, 5), Catch::Contains("got a list for 5 tokens, wanted room for 6"));
  const auto none = View<float, 1>::dense(nullptr, {0});
  const auto shares = View<const float, 3>::dense(x.out.data(), {1, 1, 2});
  CHECK_THROWS_WITH(ops::share_quantile(x.kv, shares, .5, x.clusters, none, Stream::cpu()),
                    Catch::Contains("got shares of another shape"));
  CHECK_THROWS_WITH(ops::cluster_tokens_above(x.kv, shares, none, x.clusters, {}, Stream::cpu()),
                    Catch::Contains("got"));
  x.clusters.size.extent[2] = 2;
  CHECK_THROWS_WITH(x.quantile(.5), Catch::Contains("got clusters of another shape"));
}
