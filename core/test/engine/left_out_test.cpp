// What counts for the tokens that a step's attention does not read.
#include <catch2/catch.hpp>

#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Filler final : Policy {
  enum Wrong { nothing, fills, twice, one_head, short_mean, in_observe, in_prefill };
  explicit Filler(Wrong w) : wrong(w) {}
  Needs needs() const override { return {}; }
  void prefill(const LayerPrefill&, Edits& edits, Stream) override {
    if (wrong == in_prefill) edits.fill_left_out({});
  }
  // Head h keeps the share 1 / (h + 1). The mean of KV head h is 10 h + d.
  void select(const LayerStep& step, Edits& edits, Stream) override {
    if (wrong == nothing || wrong == in_observe || wrong == in_prefill) return;
    LeftOut of;
    const auto share = step.scratch<float>("share", {1, wrong == one_head ? 1 : step.shape->query_heads});
    for (std::int64_t h = 0; h < share.extent[1]; ++h) share(0, h) = 1 / static_cast<float>(h + 1);
    const std::int64_t dim = step.shape->head_dim - (wrong == short_mean ? 1 : 0);
    const auto mean = step.scratch<float>("mean", {step.shape->max_slots, step.kv_heads(), dim});
    for (std::int64_t h = 0; h < step.kv_heads(); ++h)
      for (std::int64_t d = 0; d < dim; ++d) mean(0, h, d) = static_cast<float>(10 * h + d);
    of.share = share, of.mean = mean;
    for (int i = 0; i < (wrong == twice ? 2 : 1); ++i) edits.fill_left_out(of);
  }
  void observe(const LayerStep& step, Edits& edits, Stream) override {
    if (wrong == in_observe) edits.fill_left_out({});
    if (step.layer > 0) return;
    const View<const float, 3> out = step.output.f32();
    for (std::int64_t h = 0; h < out.extent[1]; ++h)
      for (std::int64_t d = 0; d < out.extent[2]; ++d) outputs.push_back(out(0, h, d));
  }
  Wrong wrong;
  std::vector<float> outputs;
};

std::shared_ptr<const Model> tiny() {
  static const auto model = load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return model;
}

// The output of the first layer's attention, and the logits of the step.
std::pair<std::vector<float>, std::vector<float>> outputs(Filler::Wrong wrong) {
  const auto policy = std::make_shared<Filler>(wrong);
  EngineOptions o;
  o.max_tokens = 64;
  Engine engine(tiny(), policy, o);
  const int slot = engine.open(), token = 8;
  const Fit begun = engine.prefill(slot, std::vector<int>{1, 2, 3, 4, 5}, true, {});  // it may throw
  REQUIRE(begun == Fit::ok);
  std::vector<float> logits(static_cast<std::size_t>(tiny()->config.vocab));
  const Fit fit = engine.step({slot}, {&token, 1}, View<float, 2>::dense(logits.data(), {1, std::ssize(logits)}));
  REQUIRE(fit == Fit::ok);
  return {policy->outputs, logits};
}

}  // namespace

TEST_CASE("a mean value counts for what a step's attention does not read") {
  const auto [plain, logits] = outputs(Filler::nothing);
  const auto [filled, other] = outputs(Filler::fills);
  const ModelConfig& c = tiny()->config;
  REQUIRE(plain.size() == static_cast<std::size_t>(c.heads * c.head_dim));
  for (int h = 0; h < c.heads; ++h)
    for (int d = 0; d < c.head_dim; ++d) {
      CAPTURE(h, d);
      const auto at = static_cast<std::size_t>(h * c.head_dim + d);
      const double share = 1. / (h + 1), mean = 10 * (h / (c.heads / c.kv_heads)) + d;
      CHECK(filled[at] == Approx(share * double{plain[at]} + (1 - share) * mean));
    }
  CHECK(logits != other);
}

TEST_CASE("a mean for what is not read is refused twice, of another shape, and outside of select") {
  using Catch::Contains;
  CHECK_THROWS_WITH(outputs(Filler::twice), Contains("select: got what counts for tokens that are not read twice"));
  for (const auto wrong : {Filler::one_head, Filler::short_mean})
    CHECK_THROWS_WITH(outputs(wrong), Contains("select: got shares or means of another shape"));
  CHECK_THROWS_WITH(outputs(Filler::in_observe), Contains("observe: got logits to keep"));
  CHECK_THROWS_WITH(outputs(Filler::in_prefill), Contains("prefill: got logits to keep"));
}
