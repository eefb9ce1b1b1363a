// Made-up tokens that a policy lets attention read.
#include <catch2/catch.hpp>

#include <array>

#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Reader final : Policy {
  enum Wrong { nothing, twice, with_mass, by_rank, in_observe };
  explicit Reader(Wrong w, float weight = 0) : wrong(w), weight_(weight) {}
  Needs needs() const override {
    return Needs{}
        .mass(wrong == with_mass ? Mass::decode : Mass::none)
        .rope(wrong == by_rank ? RopeRegime::cache_relative : RopeRegime::original);
  }
  void attach(const Shape& s, const BudgetAmount&, Workspace& w) override { kept_ = KeptMadeUp("kept", s, 2, w); }
  void prefill(const LayerPrefill& kv, Edits&, Stream) override {
    const MadeUpTokens made = kept_.of(kv);
    for (int h = 0; h < kv.kv_heads(); ++h) {
      CHECK(made.weights(kv.slots[0], h, 0) == 0);  // of a sequence before
      made.weights(kv.slots[0], h, 0) = weight_;
      for (int d = 0; d < kv.pages.head_dim; ++d)
        made.keys(kv.slots[0], h, 0, d) = 0, made.values(kv.slots[0], h, 0, d) = 3;
    }
  }
  void select(const LayerStep& step, Edits& edits, Stream) override {
    for (int i = 0; i < (wrong == twice ? 2 : wrong == in_observe ? 0 : 1); ++i) edits.read_made_up(kept_.of(step));
  }
  void observe(const LayerStep& step, Edits& edits, Stream) override {
    if (wrong == in_observe) edits.read_made_up(kept_.of(step));
    const View<const float, 3> out = step.output.f32();
    for (std::int64_t h = 0; h < out.extent[1]; ++h)
      for (std::int64_t d = 0; d < out.extent[2]; ++d) outputs.push_back(out(0, h, d));
  }
  Wrong wrong;
  std::vector<float> outputs;

 private:
  float weight_;
  KeptMadeUp kept_;
};

std::vector<float> outputs(Reader::Wrong wrong, float weight = 0) {
  static const std::shared_ptr<const Model> model =
      load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny");
  const auto policy = std::make_shared<Reader>(wrong, weight);
  EngineOptions o;
  o.max_tokens = 64;
  Engine engine(model, policy, o);
  for (int sequence = 0; sequence < 2; ++sequence) {
    const int slot = engine.open(), token = 8;
    policy->outputs.clear();
    REQUIRE(engine.prefill(slot, std::vector<int>{1, 2, 3, 4, 5}, true, {}) == Fit::ok);
    const Fit fit = engine.step({slot}, {&token, 1}, {});  // it may throw
    REQUIRE(fit == Fit::ok);
    engine.close(slot);
  }
  return policy->outputs;
}

}  // namespace

TEST_CASE("attention of steps reads made-up tokens, by their weight") {
  const std::vector<float> none = outputs(Reader::nothing), all = outputs(Reader::nothing, 1e20f);
  REQUIRE(none.size() == all.size());
  for (const float x : all) CHECK(x == Approx(3));
  CHECK(std::abs(none[0]) < 2.9f);
}

TEST_CASE("made-up tokens are refused twice, with mass, where keys turn by rank and outside of select") {
  for (const auto wrong : {Reader::twice, Reader::with_mass, Reader::by_rank})
    CHECK_THROWS_WITH(outputs(wrong), Catch::Contains("select: got made-up tokens to read twice, with mass"));
  CHECK_THROWS_WITH(outputs(Reader::in_observe), Catch::Contains("observe: got logits to keep or made-up tokens"));
}
