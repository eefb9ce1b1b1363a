// LayerStep::next_queries beside a plain forward pass in double precision.
#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>

#include <memory>
#include <vector>

#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"
#include "support/plain_layers.hpp"

using namespace kvlab;

using test::Vector, test::queries_ahead, test::finish_layer;

namespace {

std::shared_ptr<const Model> tiny(const std::string& name) {
  return load_model(*open_checkpoint(test::golden("tiny/" + name)), DType::f32, name);
}

EngineOptions options(int slots) {
  EngineOptions o;
  o.slots = slots;
  o.max_tokens = 64;
  o.page_size = 4;
  return o;
}

// Asks in every callback of a step, and follows the rows' hidden states through the layers.
class Asks final : public Policy {
 public:
  explicit Asks(std::shared_ptr<const Model> model) : model_(std::move(model)) {}
  Needs needs() const override { return Needs{}.next_queries(true); }
  void select(const LayerStep& step, Edits&, Stream s) override {
    for (int r = 0; step.layer == 0 && r < step.rows(); ++r) {
      x_.resize(fed.size());
      x_[static_cast<std::size_t>(r)] = test::embedded(*model_, fed[static_cast<std::size_t>(r)]);
    }
    ask(step, s);
  }
  void observe(const LayerStep& step, Edits&, Stream s) override {
    ask(step, s);
    const View<const float, 3> output = step.output.f32();
    for (int r = 0; r < step.rows(); ++r) {
      Vector& x = x_[static_cast<std::size_t>(r)];
      const Vector attended(&output(r, 0, 0), &output(r, 0, 0) + output.extent[1] * output.extent[2]);
      finish_layer(*model_, step.layer, attended, x);
    }
  }
  std::vector<int> fed;  // tokens of the step
  int seen = 0;

 private:
  void ask(const LayerStep& step, Stream s) {
    const auto out = step.query_head_vectors("queries");
    if (step.layer + 1 == step.shape->layers) {
      CHECK_THROWS_WITH(step.next_queries(out, s), Catch::Contains("the last one, wanted it where a layer follows"));
      return;
    }
    step.next_queries(out, s);
    for (int r = 0; r < step.rows(); ++r) {
      const Vector wanted = queries_ahead(*model_, step.layer, x_[static_cast<std::size_t>(r)], step.position[r] - 1);
      REQUIRE(wanted.size() == static_cast<std::size_t>(out.extent[1] * out.extent[2]));
      for (std::size_t i = 0; i < wanted.size(); ++i, ++seen)
        CHECK(out.data[r * out.stride[0] + static_cast<std::int64_t>(i)] == Approx(wanted[i]).margin(2e-4));
    }
  }
  std::shared_ptr<const Model> model_;
  std::vector<Vector> x_;
};

}  // namespace

TEST_CASE("next_queries are the next layer's projection of this layer's attention input") {
  const std::string name = GENERATE("llama-gqa3", "llama-mqa7", "qwen2", "qwen3");
  CAPTURE(name);
  const auto model = tiny(name);
  const auto policy = std::make_shared<Asks>(model);
  Engine engine(model, policy, options(2));
  REQUIRE(engine.open() == 0);
  REQUIRE(engine.open() == 1);
  const std::vector<int> prompt{5, 6, 7, 8, 9, 3, 4};
  REQUIRE(engine.prefill(0, prompt, true, {}) == Fit::ok);
  REQUIRE(engine.prefill(1, std::span(prompt).first(3), true, {}) == Fit::ok);
  policy->fed = {11, 12};
  REQUIRE(engine.step({1, 0}, policy->fed, StepResult{}) == Fit::ok);
  policy->fed = {13};
  REQUIRE(engine.step({0}, policy->fed, StepResult{}) == Fit::ok);
  const ModelConfig& c = model->config;
  CHECK(policy->seen == 3 * 2 * (c.layers - 1) * c.heads * c.head_dim);
}

TEST_CASE("next_queries: who did not ask gets none, and some needs do not go with it") {
  struct Silent final : Policy {
    Needs needs() const override { return {}; }
    void select(const LayerStep& step, Edits&, Stream s) override {
      step.next_queries(step.query_head_vectors("queries"), s);
    }
  };
  struct Wrong final : Policy {
    Needs needs() const override { return Needs{}.next_queries(true); }
    void select(const LayerStep& step, Edits&, Stream s) override {
      step.next_queries(step.kv_head_vectors("queries"), s);
    }
  };
  const auto model = tiny("llama-gqa3");
  const std::vector<int> prompt{1, 2, 3}, token{4};
  const auto step = [&](const std::shared_ptr<Policy>& policy) {
    Engine engine(model, policy, options(1));
    engine.prefill(engine.open(), prompt, true, {});
    engine.step({0}, token, StepResult{});
  };
  CHECK_THROWS_WITH(step(std::make_shared<Silent>()),
                    Catch::Contains("got next_queries() in a callback, wanted needs() to ask for it"));
  CHECK_THROWS_WITH(step(std::make_shared<Wrong>()), Catch::Contains("wanted [row, query head, head_dim], dense"));
  struct Needy final : Policy {
    explicit Needy(Needs needs) : of(std::move(needs)) {}
    Needs needs() const override { return of; }
    Needs of;
  };
  for (const Needs& needs :
       {Needs{}.next_queries(true).observe_beside(true), Needs{}.next_queries(true).rope(RopeRegime::cache_relative)})
    CHECK_THROWS_WITH(Engine(model, std::make_shared<Needy>(needs), options(1)), Catch::Contains("wanted neither"));
}
