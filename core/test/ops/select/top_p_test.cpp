// Lists of the fewest tokens that make up a share, and products with rows of listed pages, by hand.
#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
using Places = std::vector<int>;

// The places that a KV head with these weights of its query heads takes.
Places taken(const std::vector<std::vector<float>>& of_heads, float p, Pins pins = {}, int room = 8) {
  const std::size_t n = of_heads[0].size();
  PagedFixture cache{{1, 1, 8, 4, 4}};
  std::vector<float> weights;
  for (const auto& head : of_heads) {
    weights.insert(weights.end(), head.begin(), head.end());
    weights.push_back(1e30f);  // past the head's length
  }
  for (std::size_t t = 0; t < n; ++t) cache.append(0, 0, std::vector<float>(8), std::vector<float>(8));
  ListMemory memory;
  const TokenList list{memory.empty({1, 1, room})};
  ops::top_p_tokens(cache.view(),
                    View<const float, 3>::dense(weights.data(), {1, static_cast<std::int64_t>(of_heads.size()),
                                                                 static_cast<std::int64_t>(n) + 1}),
                    p, pins, list, Stream::cpu());
  return {memory.index.begin(), memory.index.begin() + memory.count[0]};
}

}  // namespace

TEST_CASE("top_p_tokens: Twilight's weights by hand") {
  // .5, .2, .15, .1, .05 in twentieths, which are exact.
  const std::vector<float> w{10, 4, 3, 2, 1};
  CHECK(taken({w}, .8f) == Places{0, 1, 2});
  CHECK(taken({w}, .6f) == Places{0, 1});
  CHECK(taken({w}, .5f) == Places{0});
  CHECK(taken({w}, 1) == Places{0, 1, 2, 3, 4});
  CHECK(taken({{1, 3, 10, 2, 4}}, .8f) == Places{1, 2, 4});  // the sink need not have the most
}

TEST_CASE("top_p_tokens: groups, pins, ties and special weights") {
  CHECK(taken({{8, 1, 1}, {0, 0, 3}}, .5f) == Places{0, 2});
  CHECK(taken({{8, 1, 1}}, .5f, {.last = 1}) == Places{0, 2});
  CHECK(taken({{8, 1, 1}}, .5f, {.first = 1, .last = 1}) == Places{0, 2});
  CHECK(taken({{1, 1, 1, 1}}, .5f) == Places{0, 1});
  CHECK(taken({{1, 1, 1, 1}}, .51f) == Places{0, 1, 2});
  CHECK(taken({{2, 0, 1e-30f, 0}}, 1) == Places{0, 2});  // an f64 sum of both is 2
  CHECK(taken({{0, 0, 0}}, .9f) == Places{});
  CHECK(taken({{0, 0, 0}}, .9f, {.last = 1}) == Places{2});
  CHECK(taken({{NAN, 1, -5}}, 1) == Places{1});
  CHECK(taken({{1, infinity, infinity}}, .9f) == Places{1});
  CHECK_THROWS_WITH(taken({{1, 1, 1}}, 1, {}, 2), Catch::Contains("got a list with room for 2, wanted 3"));
  CHECK_THROWS_WITH(taken({{1}}, 0), Catch::Contains("got a share of 0") && Catch::Contains("wanted more than 0"));
  CHECK_THROWS_WITH(taken({{1}}, NAN), Catch::Contains("wanted more than 0 and at most 1"));
}

TEST_CASE("listed_row_dot by hand") {
  PagedFixture cache{{1, 1, 8, 2, 4}};
  // The first key has the codes 0, 8 and 15 of 4 bits, which give -1.5, 0.1 and 1.5. The others repeat the first
  // number.
  for (const auto& k :
       {std::vector<float>{-1.5f, .13f, 1.5f, -1.5f, -1.5f, -1.5f, -1.5f, -1.5f}, {1, 2}, {3}, {5, 5}}) {
    std::vector<float> key = k;
    key.resize(8);
    cache.append(0, 0, key, key);
  }
  cache.append(0, 0, std::vector<float>(8, 4), std::vector<float>(8));
  const PagedKv kv = cache.view();
  const std::vector<float> q{1, 10, 100, 0, 0, 0, 0, 0};
  const auto dots = [&](std::vector<std::int32_t> pages, int bits) {
    std::vector<std::int32_t> count{static_cast<std::int32_t>(pages.size())};
    pages.resize(4);
    PageList list;
    list.index = View<std::int32_t, 3>::dense(pages.data(), {1, 1, 4});
    list.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
    Guarded<3> out({1, 1, 5});
    ops::listed_row_dot({&kv, KvSide::key}, View<const float, 3>::dense(q.data(), {1, 1, 8}), list, bits, out.view(),
                        Stream::cpu());
    return out.values();
  };
  const auto exact = dots({0, 2}, 0);
  CHECK(exact[0] == Approx(149.8));
  CHECK(exact[1] == 21);
  CHECK(exact[2] == -infinity);
  CHECK(exact[3] == -infinity);
  CHECK(exact[4] == 444);
  const auto rounded = dots({0, 2}, 4);
  CHECK(rounded[0] == Approx(149.5));
  CHECK(rounded[4] == 444);  // all elements are equal
  CHECK(dots({}, 4) == std::vector<float>(5, -infinity));
  cache.unmap(0, 0, 1);
  CHECK(dots({0, 2}, 0) == exact);  // no other page is read
  CHECK_THROWS_AS(dots({1}, 0), Error);
  CHECK_THROWS_WITH(dots({3}, 0), Catch::Contains("got page 3 in a list, wanted one of 3"));
  CHECK_THROWS_WITH(ops::listed_row_dot({}, {}, {}, 0, {}, Stream::cpu()), Catch::Contains("got no cache"));
  CHECK_THROWS_WITH(dots({0}, 9), Catch::Contains("got codes of 9 bits, wanted 0 to 8"));
}
