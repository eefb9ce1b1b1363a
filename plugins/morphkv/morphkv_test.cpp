#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// The tokens of a head that stay, by the queries at the newest `window` text positions.
std::vector<int> plain(const OnText& run, int layer, int head, int now, const std::vector<int>& tokens, int window,
                       int budget, bool sum) {
  const auto& seen = run.layer(layer);
  const auto old = static_cast<std::size_t>(static_cast<int>(tokens.size()) - window);
  std::vector<double> fused(old);
  for (int position = now - window; position < now; ++position) {
    std::vector<double> logits(old);
    for (int h = head * run.group(); h < (head + 1) * run.group(); ++h) {
      const auto& q = seen.queries.at[static_cast<std::size_t>(position)][static_cast<std::size_t>(h)];
      for (std::size_t i = 0; i < old; ++i)
        logits[i] += dot(q, seen.keys.at[static_cast<std::size_t>(tokens[i])][static_cast<std::size_t>(head)]) /
                     std::sqrt(static_cast<double>(q.size()));
    }
    logits = softmax(logits);
    for (std::size_t i = 0; i < old; ++i) fused[i] = sum ? fused[i] + logits[i] : std::max(fused[i], logits[i]);
  }
  const std::vector<int> older(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(old));
  auto kept = best(fused, older, static_cast<std::size_t>(budget - window));
  kept.insert(kept.end(), tokens.begin() + static_cast<std::ptrdiff_t>(old), tokens.end());
  return kept;
}

// Its one query gives old tokens these logits. The newest and the current token come behind them.
std::vector<int> kept_of(const std::vector<float>& old, int budget) {
  PagedFixture cache({1, 1, 8, 4, 4});
  const auto append = [&](float logit) {
    std::vector<float> k(8);
    k[0] = logit;
    cache.append(0, 0, k, k);
  };
  for (const float logit : old) append(logit);
  append(9);  // in the window: it stays, and its logit counts for nothing
  std::vector<float> query(8);
  query[0] = std::sqrt(8.f);
  Scored scored(cache, 1);
  const std::int32_t slot = 0;
  scored.kv.slots = &slot;
  scored.kv.window_queries = View<const float, 4>::dense(query.data(), {1, 1, 1, 8});
  auto scores = scored.by("morphkv", {{"window", std::int64_t{1}}});
  CHECK(scored.pins.last == 1);
  scores.back() = INFINITY;
  return best(scores, positions_to(static_cast<int>(scores.size())), static_cast<std::size_t>(budget));
}

}  // namespace

// The card: w = 1, C = 3, old columns (2, 0, 1) rank 0, 2, 1. It keeps C - w = 2 of them, the newest and the current
// token. kvlab decides after a step, so the current one is the newest.
TEST_CASE("morphkv: the card's case by hand") {
  CHECK(kept_of({2, 0, 1}, 3) == std::vector<int>{0, 2, 3});
  CHECK(kept_of({2, 0, 1}, 2) == std::vector<int>{0, 3});
}

TEST_CASE("morphkv keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 120, budget = 48, window = 12, steps = 24;
  for (const bool sum : {false, true})
    for (const int every : {1, 7}) {
      OnText run(Role::scorer, "morphkv",
                 {{"window", std::int64_t{window}},
                  {"fusion", std::string(sum ? "sum" : "max")},
                  {"every", std::int64_t{every}}},
                 budget, prompt + steps, 16);
      run.prefill(prompt);
      const auto heads = static_cast<std::size_t>(run.config().kv_heads);
      std::vector<std::vector<int>> kept(static_cast<std::size_t>(run.config().layers) * heads, positions_to(prompt));
      for (int now = prompt; now <= prompt + steps; ++now) {
        for (std::size_t i = 0; i < kept.size(); ++i) {
          const int layer = static_cast<int>(i / heads), head = static_cast<int>(i % heads);
          CAPTURE(sum, every, now, layer, head);
          if (now > prompt) kept[i].push_back(now - 1);
          if ((now - prompt) % every == 0) kept[i] = plain(run, layer, head, now, kept[i], window, budget, sum);
          REQUIRE(run.kept(layer, head) == kept[i]);
        }
        if (now < prompt + steps) run.step();
      }
    }
}

TEST_CASE("morphkv refuses a budget that holds no more than its window") {
  CHECK_THROWS_WITH(OnText(Role::scorer, "morphkv", {{"window", std::int64_t{40}}}, 40, 100, 16),
                    Catch::Contains("got a budget of 40 tokens, wanted at least 41"));
}
