#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// Attention of one query to the tokens at these text positions, the mean over all query heads.
std::vector<double> attention(const OnText& run, int layer, int query, const std::vector<int>& tokens) {
  const auto& seen = run.layer(layer);
  std::vector<double> mean(tokens.size());
  for (std::size_t h = 0; h < static_cast<std::size_t>(run.config().heads); ++h) {
    const auto& q = seen.queries.at[static_cast<std::size_t>(query)][h];
    std::vector<double> s;
    for (const int t : tokens)
      s.push_back(dot(q, seen.keys.at[static_cast<std::size_t>(t)][h / static_cast<std::size_t>(run.group())]) /
                  std::sqrt(static_cast<double>(q.size())));
    s = softmax(s);
    for (std::size_t i = 0; i < s.size(); ++i) mean[i] += s[i] / run.config().heads;
  }
  return mean;
}

}  // namespace

TEST_CASE("tova keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 160, budget = 48, steps = 40;
  for (const bool keep_last : {false, true}) {
    OnText run("tova", {{"keep_last", keep_last}}, budget, prompt + steps);
    run.prefill(prompt);
    std::vector<std::vector<int>> kept(static_cast<std::size_t>(run.config().layers), positions_to(prompt));
    for (int now = prompt; now <= prompt + steps; ++now) {
      for (int layer = 0; layer < run.config().layers; ++layer) {
        CAPTURE(keep_last, now, layer);
        auto& tokens = kept[static_cast<std::size_t>(layer)];
        if (now > prompt) tokens.push_back(now - 1);
        std::vector<double> scores = attention(run, layer, now - 1, tokens);
        if (keep_last) scores.back() = 2;
        tokens = best(scores, tokens, budget);
        for (int head = 0; head < run.config().kv_heads; ++head) REQUIRE(run.kept(layer, head) == tokens);
      }
      if (now < prompt + steps) run.step();
    }
  }
}

TEST_CASE("tova: two query heads by hand, and the newest token where it stays") {
  PagedFixture cache({1, 1, 8, 4, 4});
  for (int t = 0; t < 4; ++t) cache.append(0, 0, std::vector<float>(8), std::vector<float>(8));
  const auto kept = [&](std::vector<float> rows, bool keep_last) {
    Scored scored(cache, 2);
    scored.kv.mass = View<const float, 3>::dense(rows.data(), {1, 2, 4});
    std::vector<double> scores = scored.by("tova", {{"keep_last", keep_last}});
    if (scored.pins.last == 1) scores.back() = 2;
    return best(scores, positions_to(4), 3);
  };
  using Ints = std::vector<int>;
  CHECK(kept({.5f, .1f, .2f, .2f, .1f, .1f, .6f, .2f}, false) == Ints{0, 2, 3});
  const std::vector<float> newest_least = {.5f, .2f, .25f, .05f, .1f, .2f, .65f, .05f};
  CHECK(kept(newest_least, false) == Ints{0, 1, 2});
  CHECK(kept(newest_least, true) == Ints{0, 2, 3});
}
