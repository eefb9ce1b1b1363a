// Levels of a prompt's tokens, and the token that steps down, by hand.
#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;
using ops::LevelRule;

namespace {

using Ints = std::vector<std::int32_t>;

constexpr float inf = std::numeric_limits<float>::infinity(), not_a_number = std::numeric_limits<float>::quiet_NaN();

LevelRule llama(int window) {
  LevelRule rule;
  rule.high_from = 1, rule.low_from = .02f, rule.window = window;
  return rule;
}

// A prompt of the same tokens in each head, whose sums are means for the divisor 1 where queries = 1.
struct Prompt {
  PagedFixture cache;
  std::vector<float> memory;
  Scores sums;
  Ints pending, first;
  ops::LevelNumbers numbers;
  std::vector<std::uint8_t> plan;

  Prompt(int heads, int tokens)
      : cache({1, heads, 8, 4, 32}), memory(static_cast<std::size_t>(heads * tokens)), pending(2, 3), first(2, 7) {
    const std::vector<float> x(8, 0.f);
    for (int h = 0; h < heads; ++h)
      for (int t = 0; t < tokens; ++t) cache.append(0, h, x, x);
    sums = Scores::dense(memory.data(), {1, heads, tokens});
    numbers = {HeadNumbers::dense(pending.data(), {1, 1, heads}), HeadNumbers::dense(first.data(), {1, 1, heads})};
  }
  Prompt(const Prompt&) = delete;
  std::vector<std::uint8_t> levels(const LevelRule& rule) {
    const PagedKv kv = cache.view();
    const std::int32_t seen = kv.tokens(0, 0);
    plan.assign(memory.size(), 7);
    ops::levels(kv, sums, &seen, rule, View<std::uint8_t, 3>::dense(plan.data(), sums.extent), numbers, Stream::cpu());
    return plan;
  }
};

// A head at text position 999: a page of low tokens, a page of high ones, and the newest token. Means are over all
// queries since the token.
struct OneStep {
  PagedFixture cache;
  Ints lower, pending, first;
  PagedKv kv;
  ops::LevelNumbers numbers;
  ListMemory memory[3];
  ops::Demotion to;

  explicit OneStep(const std::vector<std::vector<float>>& means_of_heads)
      : cache({1, static_cast<int>(means_of_heads.size()), 8, 4, 3, DType::f32, {}, 1}),
        lower(means_of_heads.size(), 1),
        pending(means_of_heads.size(), 0),
        first(means_of_heads.size(), 0) {
    const auto heads = static_cast<std::int64_t>(means_of_heads.size());
    const std::vector<float> x(8, 0.f);
    for (int h = 0; h < heads; ++h)
      for (int t = 0; t < 9; ++t) cache.append(0, h, x, x, t < 8 ? t : 999);
    kv = cache.view();
    kv.lower_pages = View<const std::int32_t, 2>::dense(lower.data(), {1, heads});
    numbers.pending = HeadNumbers::dense(pending.data(), {1, 1, heads});
    std::vector<float> sums;
    for (const auto& means : means_of_heads)
      for (int t = 0; t < 9; ++t) sums.push_back(t < 8 ? means[static_cast<std::size_t>(t)] * (1000.f - t) : 0);
    const auto of = View<const float, 3>::dense(sums.data(), {1, heads, 9});
    ops::blend_state({&kv, 0}, 0, of, 1, Stream::cpu());
    to = {{memory[0].empty({1, heads, 2})}, {memory[1].empty({1, heads, 1})}, {memory[2].empty({1, heads, 1})}};
  }
  OneStep(const OneStep&) = delete;

  static Ints listed(const IndexList& list, int head) {
    Ints out;
    for (int i = 0; i < list.count(0, head); ++i) out.push_back(list.index(0, head, i));
    return out;
  }
  // Runs the op and compares what it says about a head.
  void check(const LevelRule& rule, const Ints& pairs, const Ints& out, const Ints& full, int then_pending,
             int head = 0) {
    ops::demote({&kv, 0}, rule, numbers, to, Stream::cpu());
    CHECK(listed(to.pairs, head) == pairs);
    CHECK(listed(to.out, head) == out);
    CHECK(listed(to.full, head) == full);
    CHECK(pending[static_cast<std::size_t>(head)] == then_pending);
  }
};

// Low token 2 and high token 5 have these means, the others .5.
std::vector<float> least(float high, float low) { return {.5f, .5f, low, .5f, .5f, high, .5f, .5f}; }

}  // namespace

// The card's first hand test.
TEST_CASE("levels: a hundred tokens at 1 and .02 times 1/100, or times 1 over the token's number") {
  Prompt p(1, 100);
  LevelRule rule = llama(64);
  const auto set = [&](int t, float mean) { p.sums(0, 0, t) = mean * static_cast<float>(100 - t); };
  set(9, .012f), set(19, .004f), set(29, .0001f);
  auto plan = p.levels(rule);
  CHECK((plan[9] == 0 && plan[19] == 1 && plan[29] == level_gone));
  CHECK((plan[0] == level_gone && plan[35] == level_gone && plan[36] == 0 && plan[99] == 0));  // the window of 64
  CHECK((p.pending[0] == 0 && p.first[0] == 0));
  rule.unit = LevelRule::of_token;
  plan = p.levels(rule);
  CHECK((plan[9] == 1 && plan[19] == 1 && plan[29] == level_gone));
  // The first of 64 queries is that of token 36. Older tokens divide by 64.
  rule.unit = LevelRule::of_text, rule.queries = 64;
  p.sums(0, 0, 9) = .01001f * 64;
  p.sums(0, 0, 19) = .00999f * 64;
  plan = p.levels(rule);
  CHECK((plan[9] == 0 && plan[19] == 1));
  CHECK(p.first[0] == 36);
}

TEST_CASE("levels: constant, infinite and NaN sums, and a prompt that is not longer than the window") {
  Prompt p(1, 10);
  LevelRule rule = llama(2);
  rule.queries = 1;  // the divisor is 1
  for (int t = 0; t < 10; ++t) p.sums(0, 0, t) = .05f;
  CHECK(p.levels(rule) == std::vector<std::uint8_t>{1, 1, 1, 1, 1, 1, 1, 1, 0, 0});
  p.sums(0, 0, 1) = inf, p.sums(0, 0, 2) = -inf, p.sums(0, 0, 3) = not_a_number, p.sums(0, 0, 9) = not_a_number;
  CHECK(p.levels(rule) == std::vector<std::uint8_t>{1, 0, level_gone, level_gone, 1, 1, 1, 1, 0, 0});
  rule.high_from = rule.low_from = 0;
  CHECK(p.levels(rule) == std::vector<std::uint8_t>{0, 0, level_gone, level_gone, 0, 0, 0, 0, 0, 0});
  rule.window = 10;
  CHECK(p.levels(rule) == std::vector<std::uint8_t>(10, 0));
}

TEST_CASE("levels: heads with the same numbers keep the best tokens of each") {
  Prompt p(2, 7);
  LevelRule rule = llama(1);
  rule.queries = 1, rule.same_numbers = true;
  // 4 high and 1 low token, and 1 high and 2 low ones: the means are 2.5 and 1.5, rounded up 3 and 2.
  const float first[] = {.9f, .9f, .1f, .9f, .9f, 0, 0}, second[] = {0, .1f, not_a_number, .1f, .9f, 0, 0};
  std::copy_n(first, 7, p.memory.data()), std::copy_n(second, 7, p.memory.data() + 7);
  CHECK(p.levels(rule) == std::vector<std::uint8_t>{0, 0, 1, 0, 1, level_gone, 0, 1, 0, level_gone, 0, 0, 1, 0});
  rule.same_numbers = false;
  CHECK(p.levels(rule) ==
        std::vector<std::uint8_t>{0, 0, 1, 0, 0, level_gone, 0, level_gone, 1, level_gone, 1, 0, level_gone, 0});
}

// The card's fourth hand test.
TEST_CASE("demote: the four outcomes at text position 1000") {
  const LevelRule rule = llama(64);
  SECTION("b: the high token takes the low one's place") {
    OneStep(std::vector<std::vector<float>>{least(.0005f, .00001f)}).check(rule, {5, 2}, {5}, {}, 0);
  }
  SECTION("c: it becomes the last low token") {
    OneStep(std::vector<std::vector<float>>{least(.0005f, .0001f)}).check(rule, {5, 4}, {}, {}, 1);
  }
  SECTION("a: it is out") {
    OneStep(std::vector<std::vector<float>>{least(.00001f, .0001f)}).check(rule, {}, {5}, {}, 0);
  }
  SECTION("d: nothing") { OneStep(std::vector<std::vector<float>>{least(.002f, .00001f)}).check(rule, {}, {}, {}, 0); }
}

TEST_CASE("demote: low tokens that fill a page are full, and a token that is in place does not move") {
  std::vector<float> means(8, .5f);
  means[7] = .0005f;
  OneStep step({means});
  step.pending[0] = 3;
  step.check(llama(64), {}, {}, {1}, 0);
  step.pending[0] = 2;
  step.check(llama(64), {7, 6}, {}, {}, 3);
}

TEST_CASE("demote: a cache without lower pages may say that it has one codec") {
  OneStep step({least(.0005f, .6f)});
  step.kv.lower_pages = {};
  step.pending[0] = 3;  // the low token 2 waits with two others
  step.check(llama(64), {5, 3}, {}, {0}, 0);
}

TEST_CASE("demote: a token of the window does not compete") {
  OneStep step({least(.0005f, .5f)});
  step.check(llama(995), {5, 4}, {}, {}, 1);  // the window is 994 tokens and the next one
  step.pending[0] = 0;
  step.check(llama(996), {}, {}, {}, 0);
}

TEST_CASE("demote: constant, infinite and NaN sums") {
  const LevelRule rule = llama(64);
  LevelRule wide = rule;
  wide.high_from = 600;  // 0.6 of mean score
  SECTION("of equal means that of the higher index is the lowest") {
    OneStep(std::vector<std::vector<float>>{std::vector<float>(8, .5f)}).check(wide, {7, 4}, {}, {}, 1);
  }
  SECTION("infinity stays") {
    OneStep(std::vector<std::vector<float>>{std::vector<float>(8, inf)}).check(rule, {}, {}, {}, 0);
  }
  SECTION("NaN is below -infinity") {
    OneStep(std::vector<std::vector<float>>{{.5f, .5f, .5f, .5f, -inf, not_a_number, -inf, .5f}})
        .check(rule, {}, {5}, {}, 0);
  }
  SECTION("nothing but NaN") {
    OneStep(std::vector<std::vector<float>>{std::vector<float>(8, not_a_number)}).check(rule, {7, 3}, {7}, {}, 0);
  }
}

TEST_CASE("demote: a mean over the queries that count") {
  OneStep step({least(.0005f, .5f)});
  step.first[0] = 990;  // ten queries gave the sum, so the mean is .0005 * 995 / 10 = .05
  step.numbers.first = HeadNumbers::dense(step.first.data(), {1, 1, 1});
  step.check(llama(64), {}, {}, {}, 0);
  step.first[0] = 0;
  step.check(llama(64), {5, 4}, {}, {}, 1);
}

TEST_CASE("demote: the token that leaves the window decides") {
  const float stays = .5f, sinks = .0005f, goes = .00001f;
  LevelRule rule = llama(996);  // token 4 leaves
  rule.leaving_decides = true;
  const auto means = [](float leaving, float high, float low) {
    return std::vector<std::vector<float>>{{.5f, low, .5f, .5f, leaving, high, .5f, .5f}};
  };
  SECTION("it stays, and nothing follows") { OneStep(means(stays, stays, goes)).check(rule, {}, {}, {}, 0); }
  SECTION("it is out") { OneStep(means(goes, stays, goes)).check(rule, {}, {4}, {}, 0); }
  SECTION("it becomes low, in its place") { OneStep(means(sinks, stays, sinks)).check(rule, {}, {}, {}, 1); }
  SECTION("it takes the place of a low token") { OneStep(means(sinks, stays, goes)).check(rule, {4, 1}, {4}, {}, 0); }
  // Tokens 5 to 7 are of the window. The oldest high token stands at place 7.
  const auto older = [&](float high, int window) {
    OneStep step({{.5f, .5f, .5f, .5f, .5f, .5f, stays, high}});
    const PageEntry& e = step.kv.entry(0, 0, 1);
    const std::int32_t position[] = {600, 601, 5, 4};
    std::memcpy(step.kv.frame(e) + step.kv.layout(e).positions, position, sizeof(position));
    rule.window = window;
    ops::demote({&step.kv, 0}, rule, step.numbers, step.to, Stream::cpu());
    return std::pair{OneStep::listed(step.to.pairs, 0), OneStep::listed(step.to.out, 0)};
  };
  SECTION("it stays, and an older high token steps down") {
    CHECK(older(sinks, 995) == std::pair{Ints{7, 4}, Ints{}});
    CHECK(older(goes, 995) == std::pair{Ints{}, Ints{7}});
    CHECK(older(goes, 994) == std::pair{Ints{}, Ints{}});  // no token leaves
  }
}

TEST_CASE("demote: heads with the same numbers do the same") {
  LevelRule rule = llama(64);
  rule.same_numbers = true;
  // Alone the first head would drop its token and the second keep it. The mean is .0005.
  OneStep step({least(.00001f, .5f), {.5f, .5f, .5f, .5f, .5f, .5f, .00099f, .5f}});
  step.check(rule, {5, 4}, {}, {}, 1, 0);
  CHECK(OneStep::listed(step.to.pairs, 1) == Ints{6, 4});
  CHECK(step.pending == Ints{1, 1});
}

TEST_CASE("levels and demote refuse rules, caches and lists that do not fit") {
  OneStep step({least(.5f, .5f)});
  LevelRule rule = llama(64);
  const auto demote = [&] { ops::demote({&step.kv, 0}, rule, step.numbers, step.to, Stream::cpu()); };
  CHECK_NOTHROW(demote());
  SECTION("low above high") {
    rule.low_from = 2;
    CHECK_THROWS_WITH(demote(), Catch::Contains("wanted low_from to be the smaller one"));
    Prompt p(1, 5);
    CHECK_THROWS_AS(p.levels(rule), Error);
  }
  SECTION("no window") {
    rule.window = 0;
    CHECK_THROWS_WITH(demote(), Catch::Contains("wanted at least 1"));
  }
  SECTION("another column") {
    CHECK_THROWS_AS(ops::demote({&step.kv, 1}, rule, step.numbers, step.to, Stream::cpu()), Error);
  }
  SECTION("no numbers") {
    step.numbers.pending = {};
    CHECK_THROWS_WITH(demote(), Catch::Contains("pending"));
  }
  SECTION("a short list") {
    step.to.pairs.index.extent[2] = 1;
    CHECK_THROWS_WITH(demote(), Catch::Contains("wanted scratch for 2"));
  }
}
