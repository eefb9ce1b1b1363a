// Blocks of tokens by hand, and what their ops refuse.
#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/retrieve/prompt_mass.hpp"
#include "ops/select/blocks.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

// One KV head of 8 elements, two query heads, pages of 2. Two blocks of 4 tokens follow 2 sinks, and 3 tokens are the
// window.
struct Scene {
  PagedFixture cache{{.head_dim = 8, .page_size = 2}};
  std::vector<float> key = std::vector<float>(2 * 3 * 8, -7), mass = std::vector<float>(2 * 20);
  std::vector<float> scores = std::vector<float>(3, -7), queries = std::vector<float>(16);
  Ints made{0}, index = Ints(16), count{-7}, most{1};
  BlockRule rule{2, 4, 3, 2};

  Scene() {
    const float keys[][2] = {{9, 9}, {9, 9}, {9, 9}, {1, 0}, {9, 9}, {0, 1}, {9, 9}, {.9f, 0}, {9, 9}, {.9f, -2}};
    for (int t = 0; t < 13; ++t) {
      std::vector<float> k(8);
      if (t < 10) k[0] = keys[t][0], k[1] = keys[t][1];
      cache.append(0, 0, k, k, t);
    }
    const float local[] = {.1f, .9f, .3f, .8f};
    for (int t = 2; t < 10; ++t) mass[static_cast<std::size_t>(t)] = local[(t - 2) % 4];
    queries[0] = 2;  // the second query head's is all zeros
  }
  KeyBlocks blocks() {
    KeyBlocks b;
    b.key = View<float, 4>::dense(key.data(), {1, 2, 3, 8});
    b.mass = View<float, 3>::dense(mass.data(), {1, 2, 20});
    b.made = View<std::int32_t, 1>::dense(made.data(), {1});
    return b;
  }
  void make(bool reference) {
    reference ? ops::make_blocks_reference(cache.view(), rule, blocks())
              : ops::make_blocks(cache.view(), rule, blocks(), Stream::cpu());
  }
  PageList list(std::int64_t room = 16) {
    PageList l;
    l.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, room});
    l.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
    return l;
  }
  Ints pages(bool reference, std::int64_t room = 16) {
    const auto q = View<const float, 3>::dense(queries.data(), {1, 2, 8});
    reference ? ops::block_pages_reference(cache.view(), q, rule, most.data(), blocks(), list(room))
              : ops::block_pages(cache.view(), q, rule, most.data(), blocks(), Scores::dense(scores.data(), {1, 1, 3}),
                                 list(room), Stream::cpu());
    return {index.begin(), index.begin() + count[0]};
  }
  float vector(int block, int d, int head = 0) { return key[static_cast<std::size_t>((head * 3 + block) * 8 + d)]; }
};

}  // namespace

TEST_CASE("blocks: the card's vectors and scores by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    s.make(reference);
    CHECK(s.made[0] == 2);
    CHECK(s.vector(0, 0) == .5f);  // of {1, 0} and {0, 1}
    CHECK(s.vector(0, 1) == .5f);
    CHECK(s.vector(1, 0) == Approx(.9f));
    CHECK(s.vector(1, 1) == -1);
    CHECK(s.vector(0, 0, 1) == 5);  // all of its masses are equal, so its first two tokens count
    CHECK(s.vector(2, 0) == -7);
    CHECK(s.pages(reference) == Ints{0, 3, 4, 5, 6});  // block 1 is pages 3 and 4
    if (!reference) {
      CHECK(s.scores[0] == Approx(1.));
      CHECK(s.scores[1] == Approx(1.8));
    }
    s.key[(3 + 0) * 8 + 4] = 1;  // all query heads count: 1 + 1 and 1.8 + 0
    s.queries[8 + 4] = 1;
    CHECK(s.pages(reference) == Ints{0, 1, 2, 5, 6});
    s.queries[8 + 4] = .7f;
    CHECK(s.pages(reference) == Ints{0, 3, 4, 5, 6});
    s.most[0] = 2;
    CHECK(s.pages(reference) == Ints{0, 1, 2, 3, 4, 5, 6});
    s.most[0] = 0;
    CHECK(s.pages(reference) == Ints{0, 5, 6});
  }
}

TEST_CASE("blocks: mass of the newest tokens, and blocks as the text grows") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    s.rule.window = 4;  // 13 tokens have a block, and 14 have two
    s.make(reference);
    CHECK(s.made[0] == 1);
    const std::vector<float> ones(2 * 13, 1.f);
    const auto mass = View<const float, 3>::dense(ones.data(), {1, 2, 13});
    reference ? ops::add_block_mass_reference(s.cache.view(), mass, 6, s.blocks())
              : ops::add_block_mass(s.cache.view(), mass, 6, s.blocks(), Stream::cpu());
    CHECK(s.mass[6] == .1f);  // token 7 is the sixth from the end
    CHECK(s.mass[7] == Approx(1.9f));
    CHECK(s.mass[20 + 12] == 1);
    s.cache.append(0, 0, std::vector<float>(8), std::vector<float>(8), 13);
    const float before = s.vector(0, 0);
    s.key[0] = -5;  // a block that has a vector keeps it
    s.make(reference);
    CHECK(s.made[0] == 2);
    CHECK(before == .5f);
    CHECK(s.vector(0, 0) == -5);
    CHECK(s.vector(1, 1) == -1);
  }
}

TEST_CASE("blocks: keys that RoPE did not turn, and queries at another place") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s;
    const double slow = std::pow(10000., -2. * 1 / 8);  // the pair of elements 1 and 5
    s.rule.unturned = true;
    s.rule.representatives = 1;
    std::vector<float> k(8), mass(2 * 30), key(2 * 4 * 8), turned(16, -7);
    k[1] = 2;
    for (int t = 13; t < 21; ++t) s.cache.append(0, 0, k, k, t);
    PagedKv kv = s.cache.view();
    kv.rope_table.attention_scale = 3;  // is in keys and queries already
    mass[15] = 1;                       // of block 3, the places 14 to 17
    KeyBlocks b = s.blocks();
    b.key = View<float, 4>::dense(key.data(), {1, 2, 4, 8});
    b.mass = View<float, 3>::dense(mass.data(), {1, 2, 30});
    reference ? ops::make_blocks_reference(kv, s.rule, b) : ops::make_blocks(kv, s.rule, b, Stream::cpu());
    REQUIRE(s.made[0] == 4);
    CHECK(b.key(0, 0, 3, 1) == Approx(2 * std::cos(15 * slow)));
    CHECK(b.key(0, 0, 3, 5) == Approx(-2 * std::sin(15 * slow)));
    CHECK(b.key(0, 0, 3, 0) == 0);
    s.queries[1] = 2, s.queries[0] = 0;
    const auto q = View<const float, 3>::dense(s.queries.data(), {1, 2, 8});
    const auto out = View<float, 3>::dense(turned.data(), {1, 2, 8});
    reference ? ops::turn_queries_reference(kv, q, 3, out) : ops::turn_queries(kv, q, 3, out, Stream::cpu());
    CHECK(turned[1] == Approx(2 * std::cos(17 * slow)));  // from place 20 to 3
    CHECK(turned[5] == Approx(-2 * std::sin(17 * slow)));
    CHECK(turned[8] == 0);
  }
}

TEST_CASE("blocks: mass of a prompt's chunk") {
  // One query head of two asks for element 0, the other one for nothing. The chunk has the last two of four tokens.
  PagedFixture cache{{.head_dim = 8, .page_size = 2}};
  for (int t = 0; t < 4; ++t) {
    std::vector<float> k(8);
    k[0] = static_cast<float>(std::sqrt(8.) * std::log(t + 1.));  // shares are in the ratio 1 : 2 : 3 : 4
    cache.append(0, 0, k, k, t);
  }
  for (const bool reference : {false, true})
    for (const int newest : {1, 2, 9}) {
      CAPTURE(reference, newest);
      std::vector<float> queries(2 * 2 * 8), key(16), mass(2 * 6, 1.f);
      queries[0] = queries[8] = 1;
      std::vector<std::int32_t> made{0};
      const std::int32_t slots[] = {0}, position[] = {4};
      KeyBlocks b;
      b.key = View<float, 4>::dense(key.data(), {1, 2, 1, 8});
      b.mass = View<float, 3>::dense(mass.data(), {1, 2, 6});
      b.made = View<std::int32_t, 1>::dense(made.data(), {1});
      Shape shape;
      shape.query_heads = 2, shape.kv_heads = 1, shape.head_dim = 8;
      HeapWorkspace w;
      LayerPrefill kv;
      kv.shape = &shape;
      kv.pages = cache.view();
      kv.workspace = &w;
      kv.slots = slots, kv.position = position, kv.max_length = 4;
      kv.chunk_queries = View<const float, 4>::dense(queries.data(), {1, 2, 2, 8});
      const auto add = [&] {
        reference ? ops::add_prompt_mass_reference(kv, newest, b) : ops::add_prompt_mass(kv, newest, b, Stream::cpu());
      };
      add();
      // Of the chunk's first query, which sees three tokens, and of the second one.
      const double first[] = {1 / 6., 2 / 6., 3 / 6., 0}, second[] = {.1, .2, .3, .4};
      for (int t = 0; t < 4; ++t) {
        const double one = (t > 2 - newest ? first[t] : 0) + (t > 3 - newest ? second[t] : 0),
                     even = (t > 2 - newest && t < 3 ? 1 / 3. : 0) + (t > 3 - newest ? 1 / 4. : 0);
        CHECK(mass[static_cast<std::size_t>(t)] == Approx(1 + one));
        CHECK(mass[static_cast<std::size_t>(6 + t)] == Approx(1 + even));
      }
      CHECK(mass[5] == 1);
      if (reference) continue;
      kv.lse = View<const float, 3>::dense(queries.data(), {1, 2, 1});
      CHECK_THROWS_WITH(add(), Catch::Contains("got lse [1, 2, 1], wanted one of each of the queries [1, 2, 2, 8]"));
      kv.lse = {};
      b.mass.extent[2] = 3;
      CHECK_THROWS_WITH(add(), Catch::Contains("wanted sums of as many query heads, of 4 tokens"));
      b.mass.extent[2] = 6;
      CHECK_THROWS_WITH(ops::add_prompt_mass(kv, 0, b, Stream::cpu()), Catch::Contains("got 0 newest tokens"));
      kv.pages.rows = 0;
      CHECK_THROWS_WITH(add(), Catch::Contains("got no chunk of one prompt"));
    }
}

TEST_CASE("blocks: what the ops refuse") {
  Scene s;
  s.rule.block = 3;
  CHECK_THROWS_WITH(s.make(false), Catch::Contains("got blocks of 3 tokens from place 2 on, wanted whole pages of 2"));
  s.rule = {1, 4, 3, 2};
  CHECK_THROWS_WITH(s.make(false), Catch::Contains("from place 1 on, wanted whole pages"));
  s.rule = {2, 4, 3, 5};
  CHECK_THROWS_WITH(s.make(false), Catch::Contains("5 representatives, wanted at least 0, and 1 to 4"));
  s.rule = {0, 2, 0, 1};
  CHECK_THROWS_WITH(s.make(false), Catch::Contains("got 6 blocks, wanted at most 3"));
  s.rule = {2, 4, 3, 2};
  CHECK_THROWS_WITH(s.pages(false, 6), Catch::Contains("got a list for 6 pages, wanted room for 7"));
  KeyBlocks other = s.blocks();
  other.key.extent[3] = 4;
  CHECK_THROWS_WITH(ops::make_blocks(s.cache.view(), s.rule, other, Stream::cpu()),
                    Catch::Contains("got blocks of [1, 2, 3, 4] numbers and [1, 2, 20] sums"));
  PagedKv kv = s.cache.view();
  kv.rope = RopeRegime::cache_relative;
  CHECK_THROWS_WITH(ops::make_blocks(kv, s.rule, s.blocks(), Stream::cpu()), Catch::Contains("cache_relative"));
  const auto q = View<const float, 3>::dense(s.queries.data(), {1, 2, 8});
  std::vector<float> turned(16);
  const auto turn = [&] {
    ops::turn_queries(kv, q, 3, View<float, 3>::dense(turned.data(), {1, 2, 8}), Stream::cpu());
  };
  const auto make = [&] { ops::make_blocks(kv, s.rule, s.blocks(), Stream::cpu()); };
  CHECK_THROWS_WITH(turn(), Catch::Contains("wanted the regime original"));
  kv.rope = RopeRegime::re_rotate;
  CHECK_NOTHROW(make());
  s.rule.unturned = true;
  s.made[0] = 0;
  CHECK_THROWS_WITH(make(), Catch::Contains("wanted the regime original"));
  CHECK_THROWS_WITH(turn(), Catch::Contains("wanted the regime original"));
  kv.rope = RopeRegime::original;
  CHECK_NOTHROW(make());
  CHECK_NOTHROW(turn());
  kv.rope_table.inv_freq = nullptr;
  CHECK_THROWS_WITH(make(), Catch::Contains("got no RoPE table"));
  CHECK_THROWS_WITH(turn(), Catch::Contains("got no RoPE table"));
  PagedFixture ragged{{.kv_heads = 2, .head_dim = 8, .page_size = 2}};
  for (int t = 0; t < 3; ++t) ragged.append(0, t == 2, std::vector<float>(8), std::vector<float>(8), t);
  CHECK_THROWS_WITH(ops::make_blocks(ragged.view(), s.rule, s.blocks(), Stream::cpu()),
                    Catch::Contains("wanted the same tokens in all of them"));
}
