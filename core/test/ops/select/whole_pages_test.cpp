// Whole pages, thresholds, centres, and what attention leaves out: by hand, and what their ops refuse.
#include <catch2/catch.hpp>

#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/attend/left_out.hpp"
#include "ops/select/centres.hpp"
#include "ops/select/whole_pages.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// Tokens of one KV head in pages of four. Element 0 of a key is its number, and of its value twice that.
struct Scene {
  PagedFixture cache{{}};
  std::vector<float> data = std::vector<float>(64, -7);
  ListMemory memory;

  explicit Scene(const std::vector<float>& numbers) {
    for (const float x : numbers) {
      std::vector<float> key(16), value(16);
      key[0] = x, value[0] = 2 * x;
      cache.append(0, 0, key, value, tokens++);
    }
  }
  PagedKv kv() const { return const_cast<PagedFixture&>(cache).view(); }
  Scores scores(std::int64_t heads = 1) { return Scores::dense(data.data(), {1, heads, 8}); }
  int tokens = 0;
};

using Ints = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("pages spread over tokens, and tokens over pages, by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s({1, 2, 3, 4, 5, 6});
    const std::vector<float> pages{.5f, .25f}, in{1, 7, NAN, 2, -3, NAN, 9, 9};
    const auto of_pages = View<const float, 3>::dense(pages.data(), {1, 1, 2}),
               of_tokens = View<const float, 3>::dense(in.data(), {1, 1, 8});
    reference ? ops::spread_pages_reference(s.kv(), of_pages, s.scores())
              : ops::spread_pages(s.kv(), of_pages, s.scores(), Stream::cpu());
    CHECK(std::vector<float>(s.data.begin(), s.data.begin() + 7) ==
          std::vector<float>{.5f, .5f, .5f, .5f, .25f, .25f, -7});
    reference ? ops::page_greatest_reference(s.kv(), of_tokens, s.scores())
              : ops::page_greatest(s.kv(), of_tokens, s.scores(), Stream::cpu());
    CHECK(std::vector<float>(s.data.begin(), s.data.begin() + 7) == std::vector<float>{7, 7, 7, 7, -3, -3, -7});
  }
}

TEST_CASE("room for a page, by hand") {
  const auto kept = [](int tokens, std::int32_t most, bool reference) {
    const Scene s(std::vector<float>(static_cast<std::size_t>(tokens)));
    std::int32_t keep = -7;
    const auto out = View<std::int32_t, 2>::dense(&keep, {1, 1});
    reference ? ops::room_for_page_reference(s.kv(), &most, out)
              : ops::room_for_page(s.kv(), &most, out, Stream::cpu());
    return keep;
  };
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    CHECK(kept(5, 11, reference) == 5);  // 11 tokens are two pages, and the second one fills
    CHECK(kept(8, 11, reference) == 4);
    CHECK(kept(9, 11, reference) == 4);
    CHECK(kept(4, 11, reference) == 4);
    CHECK(kept(3, 8, reference) == 3);
    CHECK(kept(7, 8, reference) == 7);
    CHECK(kept(8, 8, reference) == 4);
    CHECK(kept(8, 12, reference) == 8);
  }
}

TEST_CASE("tokens beyond a share of the range, by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s({1, 2, 3, 4, 5, 6});
    s.data = {.1f, .5f, .47f, .3f, .2f, NAN, 9, 9};
    const auto beyond = [&](double share) {
      ListMemory memory;
      const TokenList list{memory.empty({1, 1, 8})};
      reference ? ops::tokens_beyond_reference(s.kv(), s.scores(), share, list)
                : ops::tokens_beyond(s.kv(), s.scores(), share, list, Stream::cpu());
      return Ints(memory.index.begin(), memory.index.begin() + memory.count[0]);
    };
    CHECK(beyond(0) == Ints{});
    CHECK(beyond(.05) == Ints{1});
    CHECK(beyond(.1) == Ints{1, 2});
    CHECK(beyond(1) == Ints{1, 2, 3, 4});
  }
}

TEST_CASE("greedy k-center, by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    // From 1, the farthest is 10; then 5 is 4 from the nearest; token 0 is left out.
    Scene s({50, 1, 2, 5, 10, 5});
    std::vector<float> near(8, 3);
    near[0] = -INFINITY;
    const auto nearest = Scores::dense(near.data(), {1, 1, 8});
    const PagedKv kv = s.kv();
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      reference ? ops::farthest_first_reference({&kv, side}, 3, nearest, s.scores())
                : ops::farthest_first({&kv, side}, 3, nearest, s.scores(), Stream::cpu());
      CHECK(std::vector<float>(s.data.begin(), s.data.begin() + 7) == std::vector<float>{0, 3, 0, 1, 2, 0, -7});
      CHECK(near[2] == (side == KvSide::key ? 1 : 4));
      CHECK(near[5] == 0);
      near.assign(8, 3), near[0] = -INFINITY;
    }
    // More centres than tokens: the equal ones come last.
    reference ? ops::farthest_first_reference({&kv, KvSide::key}, 9, nearest, s.scores())
              : ops::farthest_first({&kv, KvSide::key}, 9, nearest, s.scores(), Stream::cpu());
    CHECK(std::vector<float>(s.data.begin(), s.data.begin() + 6) == std::vector<float>{0, 9, 6, 7, 8, 5});
  }
}

TEST_CASE("means of values and shares of a list, by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s({1, 2, 3, 4, 5, 6});
    std::vector<float> mean(16, 100);
    const auto of = View<float, 3>::dense(mean.data(), {1, 1, 16});
    const auto add = [&](int newest) {
      reference ? ops::add_mean_value_reference(s.kv(), newest, of)
                : ops::add_mean_value(s.kv(), newest, of, Stream::cpu());
    };
    add(6);
    CHECK(mean[0] == 7);
    CHECK(mean[1] == 0);
    mean[0] = 1;  // of the first four
    add(2);
    CHECK(mean[0] == Approx((4 * 1 + 10 + 12) / 6.));

    const TokenList list{s.memory.empty({1, 1, 8})};
    list.index(0, 0, 0) = 1, list.index(0, 0, 1) = 3, list.count(0, 0) = 2;
    const float weights[] = {1, 2, 3, 4, 0, 0};
    for (int t = 0; t < 6; ++t) {
      s.scores(2)(0, 0, t) = t == 5 ? NAN : std::log(weights[t]);
      s.scores(2)(0, 1, t) = -INFINITY;
    }
    float shares[2];
    const auto share = View<float, 2>::dense(shares, {1, 2});
    reference ? ops::listed_share_reference(s.kv(), s.scores(2), list, share)
              : ops::listed_share(s.kv(), s.scores(2), list, share, Stream::cpu());
    CHECK(shares[0] == Approx(.6));
    CHECK(shares[1] == 1);
  }
}

TEST_CASE("whole pages, centres and what is left out: what cannot be is refused") {
  Scene s({1, 2, 3, 4, 5, 6});
  const Stream cpu = Stream::cpu();
  const PagedKv kv = s.kv();
  const std::int32_t most = 7;
  std::int32_t keep = 0;
  CHECK_THROWS_WITH(ops::room_for_page(kv, &most, View<std::int32_t, 2>::dense(&keep, {1, 1}), cpu),
                    Catch::Contains("got 7 tokens, wanted at least two pages"));
  CHECK_THROWS_WITH(ops::spread_pages(kv, View<const float, 3>::dense(s.data.data(), {1, 1, 1}), s.scores(), cpu),
                    Catch::Contains("got 1 pages"));
  const TokenList list{s.memory.empty({1, 1, 8})};
  CHECK_THROWS_WITH(ops::tokens_beyond(kv, s.scores(), 1.5, list, cpu), Catch::Contains("got a share of 1.5"));
  CHECK_THROWS_WITH(ops::farthest_first({&kv, KvSide::key}, 0, s.scores(), s.scores(), cpu),
                    Catch::Contains("got 0 centres"));
  CHECK_THROWS_WITH(ops::add_mean_value(kv, -1, View<float, 3>::dense(s.data.data(), {1, 1, 16}), cpu),
                    Catch::Contains("got -1 newest tokens"));
  CHECK_THROWS_WITH(ops::add_mean_value(kv, 1, View<float, 3>::dense(s.data.data(), {1, 1, 8}), cpu),
                    Catch::Contains("got mean values of another shape"));
  float share = 1;
  const auto of = View<float, 2>::dense(&share, {1, 1});
  list.index(0, 0, 0) = 6, list.count(0, 0) = 1;
  CHECK_THROWS_WITH(ops::listed_share(kv, s.scores(), list, of, cpu), Catch::Contains("got token 6 in a list"));
  Guarded<3> out({1, 1, 16});
  CHECK_THROWS_WITH(
      ops::blend_left_out(kv, {of, View<const float, 3>::dense(s.data.data(), {1, 1, 8})}, out.view(), nullptr, cpu),
      Catch::Contains("got mean values of another shape"));
  CHECK_THROWS_WITH(
      ops::blend_left_out(kv, {{}, View<const float, 3>::dense(s.data.data(), {1, 1, 16})}, out.view(), nullptr, cpu),
      Catch::Contains("got shares of another shape"));
}
