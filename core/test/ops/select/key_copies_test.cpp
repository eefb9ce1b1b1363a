// Copies of keys by hand, and what their ops refuse.
#include <catch2/catch.hpp>

#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/score/key_channels.hpp"
#include "ops/score/key_codes.hpp"
#include "ops/select/top_p.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

Shape one_head() {
  Shape s;
  s.layers = 3, s.max_slots = 1, s.kv_heads = 1, s.query_heads = 2, s.head_dim = 16, s.page_size = 4;
  s.max_tokens = 30, s.dtype = DType::f32;
  return s;
}

// Six tokens of one KV head in pages of four, two query heads, and the second page alone as a list.
struct Scene {
  PagedFixture cache{{}};
  HeapWorkspace workspace;
  std::vector<float> vectors = std::vector<float>(32), out = std::vector<float>(2 * 32, -7);
  ListMemory memory;
  PageList second{memory.empty({1, 1, 2})};
  LayerKv layer;

  Scene() {
    for (int t = 0; t < 6; ++t) {
      std::vector<float> key(16, 1.5f);
      key[0] = -1.5f, key[1] = .13f, key[2] = t == 5 ? -1.5f : 1.5f;
      cache.append(0, 0, key, key, t);
    }
    second.index(0, 0, 0) = 1, second.count(0, 0) = 1;
    vectors[1] = 1, vectors[16 + 2] = 2;
    layer.layer = 1;
  }
  PagedKv kv() const { return const_cast<PagedFixture&>(cache).view(); }
  View<const float, 3> asked() const { return View<const float, 3>::dense(vectors.data(), {1, 2, 16}); }
  Scores scores(std::int64_t heads = 2) { return Scores::dense(out.data(), {1, heads, 8}); }
};

}  // namespace

TEST_CASE("keys in 4 bits by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    const KeyCodes codes = KeptKeyCodes("codes", one_head(), {1, 2}, s.workspace).of(s.layer);
    reference ? ops::code_keys_reference(s.kv(), 3, codes) : ops::code_keys(s.kv(), 3, codes, Stream::cpu());
    CHECK(codes.range(0, 0, 2, 1) == 0);  // nothing but zeros so far
    CHECK(codes.range(0, 0, 3, 0) == -1.5f);
    CHECK(codes.range(0, 0, 3, 1) == Approx(.2));
    CHECK(codes.code(0, 0, 3, 0) == (0 | 8 << 4));
    CHECK(codes.code(0, 0, 3, 1) == (15 | 15 << 4));
    CHECK(codes.code(0, 0, 5, 1) == (0 | 15 << 4));
    reference ? ops::coded_entry_dot_reference(s.kv(), s.asked(), s.second, 4, codes, s.scores())
              : ops::coded_row_dot(s.kv(), s.asked(), s.second, codes, s.scores(), Stream::cpu());
    CHECK(s.scores()(0, 0, 0) == Approx(.1));
    CHECK(s.scores()(0, 1, 0) == Approx(3));
    CHECK(s.scores()(0, 1, 1) == Approx(-3));
    CHECK(s.scores()(0, 1, 2) == -INFINITY);  // the page has two tokens
    CHECK(s.scores()(0, 1, 4) == -7);         // it is not listed
    ListMemory memory;
    const TokenList two{memory.empty({1, 1, 2})};
    two.index(0, 0, 0) = 3, two.index(0, 0, 1) = 5, two.count(0, 0) = 2;
    reference ? ops::coded_entry_dot_reference(s.kv(), s.asked(), two, 1, codes, s.scores())
              : ops::coded_row_dot(s.kv(), s.asked(), two, codes, s.scores(), Stream::cpu());
    CHECK(s.scores()(0, 0, 1) == Approx(.1));
    CHECK(s.scores()(0, 1, 0) == Approx(3));
    CHECK(s.scores()(0, 1, 1) == Approx(-3));
    CHECK(s.scores()(0, 1, 2) == -INFINITY);  // as it was
  }
}

TEST_CASE("candidates of a share by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    s.second.index(0, 0, 0) = 0, s.second.index(0, 0, 1) = 1, s.second.count(0, 0) = 2;
    const float weights[] = {10, 4, 3, 2, 1};
    for (int i = 0; i < 8; ++i) {
      s.scores()(0, 0, i) = i < 5 ? 2 * std::log(weights[i]) : -INFINITY;
      s.scores()(0, 1, i) = i == 4 ? 0 : -INFINITY;
    }
    const auto taken = [&](float p, int newest) {
      ListMemory memory;
      const TokenList list{memory.empty({1, 1, 8})};
      reference ? ops::top_p_entries_reference(s.kv(), s.scores(), s.second, 4, 2, p, newest, list)
                : ops::top_p_candidates(s.kv(), s.scores(), s.second, 2, p, newest, list, Stream::cpu());
      return std::vector<int>(memory.index.begin(), memory.index.begin() + memory.count[0]);
    };
    CHECK(taken(.8f, 0) == std::vector<int>{0, 1, 2, 4});
    CHECK(taken(.6f, 0) == std::vector<int>{0, 1, 4});
    CHECK(taken(.4f, 1) == std::vector<int>{0, 4, 5});
    CHECK(taken(1, 0) == std::vector<int>{0, 1, 2, 3, 4});
    s.second.index(0, 0, 0) = 0, s.second.count(0, 0) = 1;  // the second page's newest tokens are no candidates
    CHECK(taken(.4f, 2) == std::vector<int>{0, 4, 5});
    CHECK(taken(.4f, 100) == std::vector<int>{0, 1, 2, 3, 4, 5});

    // The same weights for tokens 0, 1, 2, 4 and 5 alone.
    ListMemory listed;
    const TokenList from{listed.empty({1, 1, 5})};
    from.count(0, 0) = 0;
    for (const int t : {0, 1, 2, 4, 5}) from.index(0, 0, from.count(0, 0)++) = t;
    s.scores()(0, 1, 4) = -INFINITY;
    const auto of_list = [&](float p, int newest) {
      ListMemory memory;
      const TokenList list{memory.empty({1, 1, 8})};
      reference ? ops::top_p_entries_reference(s.kv(), s.scores(), from, 1, 2, p, newest, list)
                : ops::top_p_candidates(s.kv(), s.scores(), from, 2, p, newest, list, Stream::cpu());
      return std::vector<int>(memory.index.begin(), memory.index.begin() + memory.count[0]);
    };
    CHECK(of_list(.8f, 0) == std::vector<int>{0, 1, 2});
    CHECK(of_list(.6f, 1) == std::vector<int>{0, 1, 5});
    CHECK(of_list(.9f, 3) == std::vector<int>{0, 1, 2, 3, 4, 5});
    CHECK(of_list(1, 0) == std::vector<int>{0, 1, 2, 4, 5});
  }
}

TEST_CASE("keys by channel by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    const KeyChannels copy = KeptKeyChannels("channels", one_head(), {1, 2}, s.workspace).of(s.layer);
    reference ? ops::copy_channels_reference(s.kv(), 3, copy) : ops::copy_channels(s.kv(), 3, copy, Stream::cpu());
    const auto at = [&](int d, int t) { return reinterpret_cast<const float*>(copy.at(0, 0, 0, d))[t]; };
    CHECK(at(1, 2) == 0);
    CHECK(at(1, 3) == .13f);
    CHECK(at(2, 5) == -1.5f);

    // The card's query: the largest channels of 2, -1, .5 are the first two.
    s.vectors.assign(32, 0);
    s.vectors[0] = 2, s.vectors[1] = -1, s.vectors[2] = .5f;
    std::vector<float> query(16, -7);
    const auto sum = View<float, 3>::dense(query.data(), {1, 1, 16});
    ListMemory memory;
    const IndexList list = memory.empty({1, 1, 3});
    const auto large = [&](bool scaled) {
      reference ? ops::large_channels_reference(s.kv(), s.asked(), 2, scaled, list, sum)
                : ops::large_channels(s.kv(), s.asked(), 2, scaled, list, sum, Stream::cpu());
    };
    large(false);
    CHECK(memory.index == std::vector<std::int32_t>{0, 1, -7});
    CHECK(memory.count[0] == 2);
    CHECK(query[0] == 2);
    CHECK(query[1] == -1);
    CHECK(query[2] == 0);
    large(true);
    CHECK(query[0] == Approx(2 / std::sqrt(16 * 3 / 3.5)));
    const auto dot = [&](int newest) {
      reference ? ops::channel_dot_reference(s.kv(), sum, list, copy, newest, s.scores(1))
                : ops::channel_dot(s.kv(), sum, list, copy, newest, s.scores(1), Stream::cpu());
    };
    // Of query heads: the second one is zeros, and the sum is that of the first.
    std::vector<float> own(32, -7), each(16, -7);
    const auto of_heads = View<float, 3>::dense(own.data(), {1, 2, 16});
    const auto products = Scores::dense(each.data(), {1, 2, 8});
    reference ? ops::large_channels_reference(s.kv(), s.asked(), 2, true, list, of_heads)
              : ops::large_channels(s.kv(), s.asked(), 2, true, list, of_heads, Stream::cpu());
    CHECK(own[0] == Approx(2 / std::sqrt(16 * 3 / 3.5)));
    CHECK(own[2] == 0);
    CHECK(own[16] == 0);
    reference ? ops::channel_dot_reference(s.kv(), of_heads, list, copy, 2, s.scores(1), products)
              : ops::channel_dot(s.kv(), of_heads, list, copy, 2, s.scores(1), Stream::cpu(), products);
    CHECK(each[3] == Approx(-3.13 / std::sqrt(16 * 3 / 3.5)));
    CHECK(each[5] == Approx(-3.13 / std::sqrt(16 * 3 / 3.5)));  // the newest, too
    CHECK(each[6] == -7);
    CHECK(each[8 + 3] == 0);
    CHECK(s.out[3] == Approx(each[3]));
    CHECK(s.out[5] == INFINITY);
    dot(2);
    CHECK(s.out[3] == Approx(-3.13 / std::sqrt(16 * 3 / 3.5)));
    CHECK(s.out[4] == INFINITY);
    CHECK(s.out[5] == INFINITY);
    CHECK(s.out[6] == -7);
  }
}

TEST_CASE("copies of keys: what cannot be is refused") {
  Scene s;
  const KeyCodes codes = KeptKeyCodes("codes", one_head(), {1}, s.workspace).of(s.layer);
  const KeyChannels copy = KeptKeyChannels("channels", one_head(), {1}, s.workspace).of(s.layer);
  ListMemory memory;
  const TokenList list{memory.empty({1, 1, 1})};
  PagedKv kv = s.kv();
  const Stream cpu = Stream::cpu();
  const auto choose = [&](float temperature, float p, int newest) {
    ops::top_p_candidates(kv, s.scores(), s.second, temperature, p, newest, list, cpu);
  };
  CHECK_THROWS_WITH(ops::code_keys(kv, -1, codes, cpu), Catch::Contains("got -1 newest tokens"));
  CHECK_THROWS_WITH(ops::code_keys(kv, 1, KeyCodes{}, cpu), Catch::Contains("got codes of another shape"));
  CHECK_THROWS_WITH(ops::coded_row_dot(kv, s.asked(), s.second, codes, s.scores(1), cpu),
                    Catch::Contains("got vectors or an output of another shape"));
  s.second.index(0, 0, 0) = 2;
  CHECK_THROWS_WITH(ops::coded_row_dot(kv, s.asked(), s.second, codes, s.scores(), cpu),
                    Catch::Contains("got page 2 in a list, wanted one of 2"));
  list.index(0, 0, 0) = 6, list.count(0, 0) = 1;
  CHECK_THROWS_WITH(ops::coded_row_dot(kv, s.asked(), list, codes, s.scores(), cpu),
                    Catch::Contains("got token 6 in a list, wanted one of 6"));
  s.second.index(0, 0, 0) = 1;
  CHECK_THROWS_WITH(ops::coded_row_dot(kv, s.asked(), s.second, codes, Scores::dense(s.out.data(), {1, 2, 3}), cpu),
                    Catch::Contains("got room for 3 candidates, wanted 4"));
  CHECK_THROWS_WITH(choose(0, .5f, 0), Catch::Contains("got a temperature of 0"));
  CHECK_THROWS_WITH(choose(1, 0, 0), Catch::Contains("got a share of 0"));
  CHECK_THROWS_WITH(choose(1, 1.5f, 0), Catch::Contains("got a share of 1.5"));
  CHECK_THROWS_WITH(choose(1, .5f, -1), Catch::Contains("got -1 newest tokens"));
  CHECK_THROWS_WITH(choose(1, .5f, 2), Catch::Contains("and 1 tokens, wanted 2"));
  CHECK_THROWS_WITH(ops::copy_channels(kv, -1, copy, cpu), Catch::Contains("got -1 newest tokens"));
  CHECK_THROWS_WITH(ops::copy_channels(kv, 1, KeyChannels{}, cpu),
                    Catch::Contains("got keys by channel of another shape"));
  const auto sum = View<float, 3>::dense(s.out.data(), {1, 1, 16});
  for (const int rank : {0, 2, 17})
    CHECK_THROWS_WITH(ops::large_channels(kv, s.asked(), rank, true, list, sum, cpu), Catch::Contains("wanted 1 to 1"));
  list.index(0, 0, 0) = 16, list.count(0, 0) = 1;
  CHECK_THROWS_WITH(ops::channel_dot(kv, sum, list, copy, 0, s.scores(1), cpu),
                    Catch::Contains("got channel 16 in a list, wanted one of 16"));
  kv.rope = RopeRegime::cache_relative;
  CHECK_THROWS_WITH(ops::code_keys(kv, 1, codes, cpu), Catch::Contains("cache_relative"));
  CHECK_THROWS_WITH(ops::copy_channels(kv, 1, copy, cpu), Catch::Contains("cache_relative"));
}
