// The device finds wrong numbers of plugins.
#include <catch2/catch.hpp>
#include <kvlab/fill_heads.hpp>
#include <limits>

#include "compose/compose.hpp"
#include "engine/engine.hpp"
#include "plugin/loader.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

class Recency : public Scorer {
 public:
  explicit Recency(bool wrong) : wrong_(wrong) {}
  void score(const LayerKv& kv, Scores out, Stream s) override {
    ops::recency(kv.pages, out, s);
    if (wrong_ && kv.layer == 1) ops::scale(out, not_a_number, s);
  }

 private:
  bool wrong_;
};

// Ranks by a column that is 0, and NaN from a token's third decode step on.
class Overflowing : public Scorer {
 public:
  Needs needs() const override { return Needs{}.token_state("growing").token_state("rank").capturable(true); }
  int every() const override { return 1; }
  const char* column() const override { return "rank"; }
  void score(const LayerKv& kv, Scores out, Stream s) override { ops::read_state(kv.state("rank"), out, s); }
  void observe(const LayerKv& kv, Stream s) override {
    if (kv.chunk_queries) return;
    const Scores grown = kv.kv_head_scores("grown");
    ops::blend_state(kv.state("growing"), 1e13f, {}, 1e13f, s);
    ops::read_state(kv.state("growing"), grown, s);
    ops::blend_state(kv.state("rank"), 0, grown, 1, s);
    ops::blend_state(kv.state("rank"), 1, grown, -1, s);
  }
};

class Even : public Budget {
 public:
  explicit Even(int tokens) : tokens_(tokens) {}
  void allot(const Allotment& a, Stream s) override {
    if (tokens_ == 0) return ops::allot_uniform(a, s);
    ops::fill_heads(a.keep, tokens_, s);
  }

 private:
  int tokens_;
};

// Wraps the object as a plugin of this name.
template <class Interface>
Instance<Interface> plugin(const char* name, Interface* object) {
  PluginInfo info;
  info.name = name;
  info.library = "/lib/own.so";
  return guarded(
      info, Instance<Interface>(object, PluginDeleter{nullptr, [](void* p) { delete static_cast<Interface*>(p); }}));
}

// The error of a prompt of 40 tokens under a budget of 16, empty without one.
std::string said(bool nan_scores, int keep) {
  Composition parts;
  parts.scorer = plugin<Scorer>("own_scorer", new Recency(nan_scores));
  parts.split = plugin<Budget>("own_budget", new Even(keep));
  EngineOptions o;
  o.device = Device::cuda;
  o.max_tokens = 64;
  o.page_size = 8;
  o.budget = {BudgetAmount::tokens, 16};
  const auto model = fresh_tiny_model("llama-gqa3", DType::bf16, Device::cuda);
  Engine engine(model, compose(std::move(parts)), o);
  try {
    engine.prefill(engine.open(1), test_text(40, model->config.vocab), true, {});
  } catch (const Error& e) {
    CHECK(e.code() == Errc::plugin);
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("cuda verify: wrong numbers of a scorer or a budget fail the call and name plugin, file and callback") {
  CHECK(said(false, 0) == "");
  CHECK_THAT(said(true, 0),
             Catch::Contains("plugin own_scorer (/lib/own.so), score()") &&
                 Catch::Contains("got NaN as the score of the token at position 0 (layer 1, KV head 0)"));
  const std::string own_budget = "plugin own_budget (/lib/own.so), allot()";
  CHECK_THAT(said(false, -2),
             Catch::Contains(own_budget) && Catch::Contains("got -2 tokens to keep in layer 0, KV head 0"));
  CHECK_THAT(said(false, 41),
             Catch::Contains(own_budget) && Catch::Contains("got 41 tokens to keep in layer 0, KV head 0"));
  CHECK_THAT(said(false, 30), Catch::Contains(own_budget) && Catch::Contains("over all layers and KV heads"));
}

TEST_CASE("cuda verify: NaN in the column that ranks fails the step that reads it, on both devices, in a graph too") {
  for (const Device device : {Device::cpu, Device::cuda}) {
    CAPTURE(static_cast<int>(device));
    Composition parts;
    parts.scorer = plugin<Scorer>("own_scorer", new Overflowing);
    EngineOptions o;
    o.device = device;
    o.max_tokens = 64;
    o.page_size = 8;
    o.budget = {BudgetAmount::tokens, 16};
    const auto model = fresh_tiny_model("llama-gqa3", DType::bf16, device);
    Engine engine(model, compose(std::move(parts)), o);
    const std::vector<std::int32_t> slots{engine.open(1)};
    const std::vector<int> token{3};
    REQUIRE(engine.prefill(slots[0], test_text(40, model->config.vocab), true, {}) == Fit::ok);
    for (int i = 0; i < 2; ++i) REQUIRE(engine.step(slots, token, StepResult{}) == Fit::ok);
    CHECK(engine.store().length(0, slots[0], 0) == 16);
    CHECK_THROWS_WITH(engine.step(slots, token, StepResult{}),
                      Catch::Contains("plugin own_scorer (/lib/own.so), score()") &&
                          Catch::Contains("got NaN as the score of the token at position") &&
                          Catch::Contains("(layer 0, KV head 0)"));
    CHECK(engine.replays() == (device == Device::cuda ? 2 : 0));
  }
}
