// LayerStep::next_queries on a GPU: beside a plain forward pass, and in graphs.
#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "base/stream_memory.hpp"
#include "engine/engine.hpp"
#include "model/bundled.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"
#include "support/plain_layers.hpp"

using namespace kvlab;

namespace {

std::shared_ptr<const Model> model_on(Device device, const std::string& name) {
  if (name.starts_with("synthetic/")) return load_model(*open_model(name, "", "."), DType::bf16, name, device);
  return load_model(*open_checkpoint(test::golden("tiny/" + name)), DType::bf16, name, device);
}

EngineOptions options() {
  EngineOptions o;
  o.device = Device::cuda;
  o.slots = 2;
  o.max_tokens = 64;
  o.page_size = 8;
  return o;
}

std::vector<float> copied(const float* from, std::int64_t count, Stream s) {
  std::vector<float> out(static_cast<std::size_t>(count));
  copy_memory(out.data(), from, out.size() * sizeof(float), s);
  synchronize(s);
  return out;
}

// Follows the rows' hidden states through the layers and compares. CUDA rounds inputs of products to bf16.
class Compares final : public Policy {
 public:
  explicit Compares(std::shared_ptr<const Model> on_cpu) : model_(std::move(on_cpu)) {}
  Needs needs() const override { return Needs{}.next_queries(true); }
  void select(const LayerStep& step, Edits&, Stream s) override {
    if (step.layer == 0) {
      x_.clear();
      for (const int token : fed) x_.push_back(test::embedded(*model_, token));
    }
    if (step.layer + 1 == step.shape->layers) return;
    const auto out = step.query_head_vectors("queries");
    step.next_queries(out, s);
    const std::int64_t dim = out.extent[2], width = out.extent[1] * dim;
    const auto got = copied(out.data, step.rows() * width, s);
    for (int r = 0; r < step.rows(); ++r) {
      const auto wanted =
          test::queries_ahead(*model_, step.layer, x_[static_cast<std::size_t>(r)], step.position[r] - 1);
      for (std::int64_t first = 0; first < width; first += dim, ++seen) {
        double apart = 0, size = 0;
        for (std::int64_t i = first; i < first + dim; ++i) {
          const double w = wanted[static_cast<std::size_t>(i)], g = got[static_cast<std::size_t>(r * width + i)];
          apart += (g - w) * (g - w), size += w * w;
        }
        CHECK(std::sqrt(apart) < .03 * std::sqrt(size));
      }
    }
  }
  void observe(const LayerStep& step, Edits&, Stream s) override {
    const View<const float, 3> output = step.output.f32();
    const std::int64_t width = output.extent[1] * output.extent[2];
    for (int r = 0; r < step.rows(); ++r) {
      const auto row = copied(output.data + r * output.stride[0], width, s);
      test::finish_layer(*model_, step.layer, {row.begin(), row.end()}, x_[static_cast<std::size_t>(r)]);
    }
  }
  std::vector<int> fed;
  int seen = 0;

 private:
  std::shared_ptr<const Model> model_;
  std::vector<test::Vector> x_;
};

// Leaves the queries of all layers in memory that lasts.
class Leaves final : public Policy {
 public:
  Needs needs() const override { return Needs{}.next_queries(true).capturable(true); }
  void attach(const Shape& s, const BudgetAmount&, Workspace& w) override {
    of_layer_ = std::int64_t{s.max_slots} * s.query_heads * s.head_dim;
    count = of_layer_ * (s.layers - 1);
    queries = static_cast<float*>(w.room("queries", static_cast<std::size_t>(count) * sizeof(float)));
  }
  void select(const LayerStep& step, Edits&, Stream s) override {
    if (step.layer + 1 < step.shape->layers)
      step.next_queries(View<float, 3>::dense(queries + step.layer * of_layer_,
                                              {step.rows(), step.shape->query_heads, step.pages.head_dim}),
                        s);
  }
  float* queries = nullptr;
  std::int64_t count = 0;

 private:
  std::int64_t of_layer_ = 0;
};

const std::vector<int> prompt{5, 6, 7, 8, 9, 3, 4};

}  // namespace

TEST_CASE("cuda engine: next_queries are the next layer's projection of this layer's attention input") {
  // Products leave norms for the next one where hidden sizes are multiples of 64.
  const std::string name = GENERATE("llama-gqa3", "qwen2", "qwen3", "synthetic/tiny-deep");
  CAPTURE(name);
  const auto policy = std::make_shared<Compares>(model_on(Device::cpu, name));
  const auto model = model_on(Device::cuda, name);
  Engine engine(model, policy, options());
  REQUIRE(engine.open() == 0);
  REQUIRE(engine.open() == 1);
  REQUIRE(engine.prefill(0, prompt, true, {}) == Fit::ok);
  REQUIRE(engine.prefill(1, std::span(prompt).first(3), true, {}) == Fit::ok);
  policy->fed = {11, 12};
  REQUIRE(engine.step({1, 0}, policy->fed, StepResult{}) == Fit::ok);
  policy->fed = {13};
  REQUIRE(engine.step({0}, policy->fed, StepResult{}) == Fit::ok);
  CHECK(policy->seen == 3 * (model->config.layers - 1) * model->config.heads);
}

TEST_CASE("cuda engine: next_queries of replayed steps equal those of eager ones") {
  const std::string name = GENERATE("llama-gqa3", "synthetic/tiny-deep");
  CAPTURE(name);
  const auto model = model_on(Device::cuda, name);
  std::vector<float> left[2];
  for (const bool graphs : {true, false}) {
    const auto policy = std::make_shared<Leaves>();
    EngineOptions o = options();
    o.graphs = graphs;
    Engine engine(model, policy, o);
    REQUIRE(engine.open() == 0);
    REQUIRE(engine.open() == 1);
    REQUIRE(engine.prefill(0, prompt, true, {}) == Fit::ok);
    REQUIRE(engine.prefill(1, std::span(prompt).first(3), true, {}) == Fit::ok);
    for (int i = 0; i < 6; ++i) {
      const std::vector<int> tokens{11 + i, 32 - i};
      REQUIRE(engine.step({1, 0}, tokens, StepResult{}) == Fit::ok);
      const auto queries = copied(policy->queries, policy->count, engine.store().stream());
      left[graphs].insert(left[graphs].end(), queries.begin(), queries.end());
    }
    CHECK((engine.replays() > 0) == graphs);
  }
  CHECK(left[0] == left[1]);
  CHECK(std::ranges::any_of(left[0], [](float x) { return x != 0; }));
}
