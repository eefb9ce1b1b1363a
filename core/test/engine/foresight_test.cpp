// LayerKv::future_mass: the recorded numbers of each row's own question and step, by the places of its tokens.
#include "engine/foresight.hpp"

#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>

#include <memory>
#include <set>

#include "compose/compose.hpp"
#include "engine/engine.hpp"
#include "model/bundled.hpp"
#include "model/synthetic.hpp"

using namespace kvlab;

namespace {

// A number that names all that decides it, exact in f32. Tokens from `known` on have none.
struct Named final : RecordedMass {
  static constexpr int known = 22;
  static float number(std::uint32_t question, bool prompt, int step, int layer, int head, int position) {
    const int who = static_cast<int>(question) * 2 + (prompt ? 1 : 0);
    return static_cast<float>((((who * 9 + step) * 8 + layer) * 8 + head) * known + position);
  }
  std::span<const float> from(std::uint32_t question, bool prompt, int step, int layer, int head) const override {
    now.resize(known);
    for (int p = 0; p < known; ++p) now[static_cast<std::size_t>(p)] = number(question, prompt, step, layer, head, p);
    return now;
  }
  mutable std::vector<float> now;
};

// Keeps tokens that a hash draws, so that places are no text positions, and compares what it is told.
struct Looker final : Scorer {
  int compared = 0, displaced = 0;
  std::set<int> steps;
  Needs needs() const override { return Needs{}.future_mass(true); }
  int every() const override { return 1; }
  void score(const LayerKv& kv, Scores out, Stream s) override {
    const View<const float, 3> mass = kv.future_mass();
    const Scores position = kv.kv_head_scores("positions");
    ops::recency(kv.pages, position, s);
    for (int row = 0; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        for (int t = 0; t < kv.pages.tokens(row, head); ++t) {
          const int at = static_cast<int>(position(row, head, t));
          const bool prompt = static_cast<bool>(kv.chunk_queries);
          const auto question = kv.question[kv.slots[row]];  // a CPU's views are host memory
          const float wanted = at >= Named::known
                                   ? 0
                                   : Named::number(question, prompt, prompt ? 0 : kv.step[row] + 1, kv.layer, head, at);
          CAPTURE(row, head, t, at);
          REQUIRE(mass(row, head, t) == wanted);
          ++compared, displaced += at != t;
          if (!prompt) steps.insert(kv.step[row]);
        }
    const std::vector<std::uint64_t> keys(static_cast<std::size_t>(kv.rows()), 7);
    ops::random_scores(kv.pages, kv.upload("keys", keys.data()), out, s);
  }
};

}  // namespace

TEST_CASE("future mass is that of each row's question and step, by the places of its tokens") {
  static const auto model = load_model(*open_model("synthetic/tiny", "", "."), DType::f32, "tiny");
  const Named recorded;
  auto* looker = new Looker;
  Composition parts;
  parts.scorer = Instance<Scorer>(looker, {nullptr, [](void* p) { delete static_cast<Looker*>(p); }});
  EngineOptions o;
  o.slots = 2;
  o.max_tokens = 64;
  o.page_size = 4;
  o.budget = {BudgetAmount::tokens, 12};
  o.recorded = &recorded;
  Engine engine(model, compose(std::move(parts)), o);
  const int a = engine.open(), b = engine.open();
  engine.ask(a, 3), engine.ask(b, 5);
  REQUIRE(engine.prefill(a, std::vector<int>(20, 1), true, {}) == Fit::ok);
  REQUIRE(engine.prefill(b, std::vector<int>(15, 2), true, {}) == Fit::ok);
  REQUIRE(engine.step({a}, std::vector<int>{4}, {}) == Fit::ok);  // now the rows differ in their steps
  for (int i = 0; i < 6; ++i) {
    if (i == 3) engine.ask(b, 6);
    REQUIRE(engine.step({b, a}, std::vector<int>{5, 6}, {}) == Fit::ok);
  }
  CHECK(looker->compared > 0);
  CHECK(looker->displaced > 0);
  CHECK(looker->steps == std::set<int>{0, 1, 2, 3, 4, 5, 6});
}

TEST_CASE("future mass that nobody recorded is refused, and a callback that did not ask for it gets none") {
  struct Asking final : Policy {
    bool wanted = true;
    Needs needs() const override { return Needs{}.future_mass(wanted); }
    void prefill(const LayerPrefill& kv, Edits&, Stream) override { kv.future_mass(); }
  };
  static const auto model = load_model(*open_model("synthetic/tiny", "", "."), DType::f32, "tiny");
  EngineOptions o;
  o.max_tokens = 16;
  Asking asks;
  CHECK(asks.needs().oracle());
  CHECK_THROWS_WITH(Engine::check(*model, asks, o), Catch::Contains("wanted a cell of `kvlab run` without a workload"));
  const Named recorded;
  o.recorded = &recorded;
  CHECK_NOTHROW(Engine::check(*model, asks, o));
  const auto silent = std::make_shared<Asking>();
  silent->wanted = false;
  Engine engine(model, silent, o);
  CHECK_THROWS_WITH(engine.prefill(engine.open(), std::vector<int>{1, 2}, true, {}),
                    Catch::Contains("wanted needs() to ask for it"));
}
