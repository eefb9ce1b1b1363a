// A distance beyond which attention of decode steps reads no token.
#include <catch2/catch.hpp>

#include <memory>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Clamps final : Policy {
  std::vector<int> distances;
  RopeRegime regime = RopeRegime::original;
  bool in_observe = false, in_prefill = false;
  std::vector<float> outputs;

  explicit Clamps(std::vector<int> of = {}) : distances(std::move(of)) {}
  Needs needs() const override { return Needs{}.rope(regime).prompt_lse(true); }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream) override {
    CHECK(!kv.lse);  // a GPU alone leaves it
    if (in_prefill) edits.clamp_distance(3);
  }
  void select(const LayerStep&, Edits& edits, Stream) override {
    for (const int d : distances) edits.clamp_distance(d);
  }
  void observe(const LayerStep& step, Edits& edits, Stream) override {
    if (in_observe) edits.clamp_distance(3);
    if (step.layer > 0) return;
    const View<const float, 3> out = step.output.f32();
    for (std::int64_t h = 0; h < out.extent[1]; ++h)
      for (std::int64_t d = 0; d < out.extent[2]; ++d) outputs.push_back(out(0, h, d));
  }
};

// The outputs of the first layer's attention to six tokens.
std::vector<float> outputs_of(const std::shared_ptr<Clamps>& policy) {
  static const std::shared_ptr<const Model> model =
      load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny");
  EngineOptions o;
  o.max_tokens = 64;
  Engine engine(model, policy, o);
  const int slot = engine.open(), token = 8;
  const Fit prompt = engine.prefill(slot, std::vector<int>{1, 2, 3, 4, 5}, true, {});  // both may throw
  REQUIRE(prompt == Fit::ok);
  const Fit step = engine.step({slot}, {&token, 1}, {});
  REQUIRE(step == Fit::ok);
  return policy->outputs;
}
std::vector<float> outputs(std::vector<int> distances) {
  return outputs_of(std::make_shared<Clamps>(std::move(distances)));
}

}  // namespace

TEST_CASE("a distance that no token exceeds changes nothing, and a shorter one does") {
  const std::vector<float> all = outputs(std::vector<int>{});
  CHECK(outputs({5}) == all);
  CHECK(outputs({1000}) == all);
  CHECK(outputs({4}) != all);
  CHECK(outputs({1}) != outputs({4}));
}

TEST_CASE("distances that are refused") {
  CHECK_THROWS_WITH(outputs({0}), Catch::Contains("got the distance 0"));
  CHECK_THROWS_WITH(outputs({3, 3}), Catch::Contains("wanted at least 1, once"));
  for (const RopeRegime regime : {RopeRegime::cache_relative, RopeRegime::re_rotate}) {
    const auto policy = std::make_shared<Clamps>(std::vector<int>{3});
    policy->regime = regime;
    CHECK_THROWS_WITH(outputs_of(policy), Catch::Contains("the regime original"));
  }
  const auto late = std::make_shared<Clamps>(), early = std::make_shared<Clamps>();
  late->in_observe = true, early->in_prefill = true;
  CHECK_THROWS_AS(outputs_of(late), Error);
  CHECK_THROWS_AS(outputs_of(early), Error);
}
