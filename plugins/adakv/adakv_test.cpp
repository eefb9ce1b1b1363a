#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Settings = std::map<std::string, ParamValue>;

// The counts of two heads of six tokens each, without pins.
std::vector<std::int32_t> counts(std::vector<float> scores, int total, const Settings& params) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::budget, "adakv");
  const Instance<Budget> budget = create<Budget>(info, resolve(info, params));
  constexpr int tokens = 6;
  PagedFixture cache({1, 2, 8, 4, 2});
  const std::vector<float> row(8);
  for (int h = 0; h < 2; ++h)
    for (int t = 0; t < tokens; ++t) cache.append(0, h, row, row);
  Scored scored(cache, tokens);
  const std::vector<std::int32_t> length = {tokens, tokens};
  std::vector<std::int32_t> keep(2);
  const std::int32_t mean = total;
  const Pins none;
  Allotment a;
  a.layers = 1;
  a.scores = Scores::dense(scores.data(), {1, 2, tokens});
  a.length = View<const std::int32_t, 2>::dense(length.data(), {1, 2});
  a.pins = a.host_pins = &none;
  a.total = a.host_total = &mean;
  a.keep = View<std::int32_t, 2>::dense(keep.data(), {1, 2});
  a.kv = &scored.kv;
  budget->allot(a, Stream::cpu());
  return keep;
}

const std::vector<float> card = {.9f, .8f, .7f, .6f, .5f, .4f, .35f, .2f, .1f, .05f, .01f, .001f};

}  // namespace

TEST_CASE("adakv: both kinds of floor by hand") {
  using Counts = std::vector<std::int32_t>;
  CHECK(counts(card, 4, {{"floor", .5}}) == Counts{5, 3});
  CHECK(counts(card, 4, {{"floor", .5}, {"floor_is", std::string("minimum")}}) == Counts{6, 2});
  // Three quarters: three of each head, then the two best of the others, which the first head has.
  CHECK(counts(card, 4, {{"floor", .75}, {"floor_is", std::string("minimum")}}) == Counts{5, 3});
  CHECK(counts(card, 4, {{"floor", 1.}, {"floor_is", std::string("minimum")}}) == Counts{4, 4});
  CHECK(counts(card, 4, {{"floor", 0.}, {"floor_is", std::string("minimum")}}) == Counts{6, 2});
}

// kvpress: the best trunc(floor * budget) of each head are safe. Of all others the lowest leave.
TEST_CASE("adakv with a minimum keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 120, budget = 30;
  constexpr double floor = 0.4;
  OnText run(Role::scorer, "knorm", {}, budget, prompt + 2, 16, OnText::MakeProfile(),
             OnText::Split{"adakv", {{"floor", floor}, {"floor_is", std::string("minimum")}}});
  run.prefill(prompt);
  const int heads = run.config().kv_heads, safe = static_cast<int>(std::trunc(budget * floor));
  bool divided = false;
  for (int layer = 0; layer < run.config().layers; ++layer) {
    const auto& keys = run.layer(layer).keys.at;
    const auto norm = [&](int t, int h) {
      const auto& key = keys[static_cast<std::size_t>(t)][static_cast<std::size_t>(h)];
      return std::sqrt(std::inner_product(key.begin(), key.end(), key.begin(), 0.));
    };
    struct Token {
      double score;
      int head, at;
    };
    std::vector<Token> others;
    std::vector<std::vector<int>> stay(static_cast<std::size_t>(heads));
    for (int h = 0; h < heads; ++h) {
      std::vector<Token> own;
      for (int t = 0; t < prompt; ++t) own.push_back({-norm(t, h), h, t});
      std::stable_sort(own.begin(), own.end(), [](const Token& a, const Token& b) { return a.score > b.score; });
      for (int i = 0; i < safe; ++i) stay[static_cast<std::size_t>(h)].push_back(own[static_cast<std::size_t>(i)].at);
      others.insert(others.end(), own.begin() + safe, own.end());
    }
    std::stable_sort(others.begin(), others.end(), [](const Token& a, const Token& b) { return a.score > b.score; });
    for (int i = 0; i < heads * (budget - safe); ++i) {
      const Token& t = others[static_cast<std::size_t>(i)];
      stay[static_cast<std::size_t>(t.head)].push_back(t.at);
    }
    for (int h = 0; h < heads; ++h) {
      auto& own = stay[static_cast<std::size_t>(h)];
      std::sort(own.begin(), own.end());
      CAPTURE(layer, h);
      // Equal tokens have equal norms in layer 0, but for what RoPE rounds.
      const std::vector<int> kept = run.kept(layer, h);
      REQUIRE(kept.size() == own.size());
      const auto norms = [&](const std::vector<int>& tokens) {
        std::vector<double> out;
        for (const int t : tokens) out.push_back(norm(t, h));
        std::sort(out.begin(), out.end());
        return out;
      };
      const std::vector<double> of_kept = norms(kept), of_own = norms(own);
      for (std::size_t i = 0; i < own.size(); ++i) CHECK(of_kept[i] == Approx(of_own[i]).epsilon(1e-6));
      CHECK((layer == 0 || kept == own));
      divided = divided || static_cast<int>(own.size()) != budget;
    }
  }
  CHECK(divided);
}
