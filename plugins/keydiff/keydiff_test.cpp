#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

TEST_CASE("keydiff keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 200, budget = 64;
  OnText run("keydiff", {}, budget, prompt);
  run.prefill(prompt);
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      const auto& keys = run.layer(layer).keys.at;
      std::vector<double> anchor(static_cast<std::size_t>(run.config().head_dim)), scores;
      const auto key = [&](std::size_t t) { return keys[t][static_cast<std::size_t>(head)]; };
      for (std::size_t t = 0; t < prompt; ++t)
        for (std::size_t d = 0; d < anchor.size(); ++d)
          anchor[d] += key(t)[d] / std::sqrt(dot(key(t), key(t))) / prompt;
      for (std::size_t t = 0; t < prompt; ++t)
        scores.push_back(-dot(key(t), anchor) / std::sqrt(dot(key(t), key(t)) * dot(anchor, anchor)));
      CHECK(run.kept(layer, head) == best(scores, positions_to(prompt), budget));
    }
}

TEST_CASE("keydiff: three keys by hand, whatever their lengths") {
  PagedFixture cache({1, 1, 8, 4, 4});
  for (const auto& [x, y] : {std::pair{1.f, 0.f}, {5.f, 0.f}, {0.f, 2.f}}) {
    std::vector<float> k(8);
    k[0] = x, k[1] = y;
    cache.append(0, 0, k, k);
  }
  // The anchor is (2/3, 1/3).
  const auto scores = Scored(cache, 1).by("keydiff", {});
  CHECK(scores[0] == Approx(-2 / std::sqrt(5.)));
  CHECK(scores[1] == Approx(-2 / std::sqrt(5.)));
  CHECK(scores[2] == Approx(-1 / std::sqrt(5.)));
}
