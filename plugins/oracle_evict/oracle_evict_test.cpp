#include <map>

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// [decode step][token] attention that a run of the full cache gave the tokens of a prompt of six and of three steps.
// The last head has the numbers of the first in mirror order of the prompt's tokens.
using Steps = std::vector<std::map<int, float>>;
const Steps first{{{1, .5f}, {3, .3f}, {5, .2f}}, {{3, .6f}, {0, .4f}}, {{2, .8f}, {6, .2f}}};
const Steps mirrored{{{4, .5f}, {2, .3f}, {0, .2f}}, {{2, .6f}, {5, .4f}}, {{3, .8f}, {6, .2f}}};

struct Table final : RecordedMass {
  std::span<const float> from(std::uint32_t, bool, int step, int, int head) const override {
    const Steps& steps = head == 0 ? first : mirrored;
    sums.assign(9, 0);
    for (std::size_t s = static_cast<std::size_t>(step); s < steps.size(); ++s)
      for (const auto& [token, mass] : steps[s]) sums[static_cast<std::size_t>(token)] += mass;
    return sums;
  }
  mutable std::vector<float> sums;
};

// What stays of the first and of any other KV head: after the prompt, then after each step. All layers are alike.
using OfHeads = std::vector<std::vector<int>>;
std::vector<OfHeads> kept_by(const std::map<std::string, ParamValue>& params, int steps, int budget = 3) {
  Registry registry;
  const RegistryCatalog catalog(registry);
  PolicySpec spec;
  spec.name = "oracle_evict";
  spec.scorer = PluginUse{Role::scorer, spec.name, resolve(registry.require(Role::scorer, spec.name), params)};
  const Table table;
  EngineOptions o;
  o.budget = {BudgetAmount::tokens, static_cast<double>(budget)};
  o.max_tokens = 16;
  o.page_size = 2;
  o.recorded = &table;
  static const auto model = load_model(*open_model("bundled/recall", "", ""), DType::f32, "recall");
  Engine engine(model, build_policy(spec, catalog), o);
  const int slot = engine.open();
  REQUIRE(engine.prefill(slot, std::vector<int>{5, 6, 7, 8, 9, 10}, true, {}) == Fit::ok);
  std::vector<OfHeads> out;
  const auto note = [&] {
    out.push_back({engine.store().positions(0, slot, 0), engine.store().positions(0, slot, 1)});
    for (int layer = 0; layer < model->config.layers; ++layer)
      for (int head = 0; head < model->config.kv_heads; ++head)
        CHECK(engine.store().positions(layer, slot, head) == out.back()[head == 0 ? 0 : 1]);
  };
  note();
  for (int i = 0; i < steps; ++i) {
    REQUIRE(engine.step({slot}, std::vector<int>{11 + i}, {}) == Fit::ok);
    note();
  }
  return out;
}

}  // namespace

TEST_CASE("oracle_evict keeps what the steps to come attend to, for each KV head") {
  // The sums of all three steps are .4 .5 .8 .9 0 .2. Those after the first are .4 0 .8 .6 0 0, and .2 of token 6.
  // After the second token 2 has .8 and token 6 has .2. The others have nothing, so the newest stays. Then all have
  // nothing.
  const std::vector<OfHeads> kept = kept_by({}, 3);
  CHECK(kept[0] == OfHeads{{1, 2, 3}, {2, 3, 4}});
  CHECK(kept[1] == OfHeads{{2, 3, 6}, {2, 3, 6}});
  CHECK(kept[2] == OfHeads{{2, 6, 7}, {3, 6, 7}});
  CHECK(kept[3] == OfHeads{{6, 7, 8}, {6, 7, 8}});
}

TEST_CASE("oracle_evict with every: 0 chooses at the prompt's end alone") {
  const std::vector<OfHeads> kept = kept_by({{"every", std::int64_t{0}}}, 2);
  CHECK(kept[0] == OfHeads{{1, 2, 3}, {2, 3, 4}});
  CHECK(kept[2] == OfHeads{{1, 2, 3, 6, 7}, {2, 3, 4, 6, 7}});
}

TEST_CASE("oracle_evict: sinks and recent tokens take their part of the budget") {
  const auto both = kept_by({{"sinks", std::int64_t{1}}, {"recent", std::int64_t{1}}}, 0);
  CHECK(both[0] == OfHeads{{0, 3, 5}, {0, 2, 5}});
  CHECK(kept_by({{"recent", std::int64_t{5}}}, 0)[0][0] == std::vector<int>{3, 4, 5});
}
