// Policy::prompt_masks: prompts attend to what the masks leave, in chunks as in one.
#include <catch2/catch.hpp>
#include <cmath>
#include <memory>
#include <numeric>

#include "engine/engine.hpp"
#include "model/bundled.hpp"
#include "model/synthetic.hpp"

using namespace kvlab;

namespace {

constexpr int tokens = 90;

struct Masked final : Policy {
  std::vector<PromptMask> masks;
  std::vector<PromptMask> prompt_masks() const override { return masks; }
  Needs needs() const override { return {}; }
};

std::shared_ptr<const Model> model() {
  static const auto loaded = load_model(*open_model("synthetic/tiny", "", ""), DType::f32, "tiny");
  return loaded;
}

PromptMask mask_of(int layer, int head) {
  return layer == 0 ? PromptMask{} : PromptMask{3 * head, head % 2 ? 1 + 11 * layer : 0};
}

// The rows of all chunks, and attention's output.
struct Rows final : EngineObserver {
  std::vector<std::vector<float>> queries, keys, values, outputs;  // [layer][token, head, d]
  Prompt reads_of_prompt() const override { return Prompt::everything; }
  static void append(std::vector<std::vector<float>>& to, int layer, const View<const float, 3>& rows) {
    to.resize(std::max<std::size_t>(to.size(), static_cast<std::size_t>(layer) + 1));
    for (int t = 0; t < rows.extent[0]; ++t)
      for (int h = 0; h < rows.extent[1]; ++h)
        for (int d = 0; d < rows.extent[2]; ++d) to[static_cast<std::size_t>(layer)].push_back(rows(t, h, d));
  }
  void prompt(const PromptLayer& l, const Store&) override {
    append(queries, l.layer, l.queries), append(keys, l.layer, l.keys), append(values, l.layer, l.values);
    append(outputs, l.layer, l.output);
  }
};

Rows run(const std::vector<int>& chunks) {
  const ModelConfig& c = model()->config;
  auto policy = std::make_shared<Masked>();
  for (int l = 0; l < c.layers; ++l)
    for (int h = 0; h < c.kv_heads; ++h) policy->masks.push_back(mask_of(l, h));
  EngineOptions o;
  o.max_tokens = tokens;
  o.page_size = 8;
  Engine engine(model(), policy, o);
  Rows rows;
  engine.observe(&rows);
  std::vector<int> text(tokens);
  for (int t = 0; t < tokens; ++t) text[static_cast<std::size_t>(t)] = (t * 7 + 3) % c.vocab;
  const int slot = engine.open();
  int at = 0;
  for (const int n : chunks) {
    REQUIRE(engine.prefill(slot, std::span(text).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(n)),
                           at + n == tokens, {}) == Fit::ok);
    at += n;
  }
  return rows;
}

}  // namespace

TEST_CASE("prompts attend to what a policy's masks leave, in chunks as in one") {
  const ModelConfig& c = model()->config;
  REQUIRE(c.layers > 1);
  REQUIRE(c.kv_heads > 1);
  const auto dim = static_cast<std::size_t>(c.head_dim);
  const int group = c.heads / c.kv_heads;
  const Rows rows = run(GENERATE(std::vector<int>{tokens}, std::vector<int>{40, 1, 49}));
  int hidden = 0;
  for (int layer = 0; layer < c.layers; ++layer) {
    const auto l = static_cast<std::size_t>(layer);
    const auto row = [&](const std::vector<float>& all, int t, int head, int heads) {
      return all.data() + static_cast<std::size_t>(t * heads + head) * dim;
    };
    for (int t = 0; t < tokens; ++t)
      for (int head = 0; head < c.heads; ++head) {
        const PromptMask mask = mask_of(layer, head / group);
        std::vector<double> out(dim);
        double total = 0;
        for (int s = 0; s <= t; ++s) {
          if (mask.window > 0 && s >= mask.sinks && t - s >= mask.window) {
            ++hidden;
            continue;
          }
          const float *q = row(rows.queries[l], t, head, c.heads), *k = row(rows.keys[l], s, head / group, c.kv_heads);
          const double weight = std::exp(std::inner_product(q, q + dim, k, 0.0) / std::sqrt(static_cast<double>(dim)));
          total += weight;
          for (std::size_t d = 0; d < dim; ++d)
            out[d] += weight * double{row(rows.values[l], s, head / group, c.kv_heads)[d]};
        }
        const float* got = row(rows.outputs[l], t, head, c.heads);
        for (std::size_t d = 0; d < dim; ++d) {
          CAPTURE(layer, t, head, d);
          REQUIRE(double{got[d]} == Approx(out[d] / total).margin(1e-4));
        }
      }
  }
  CHECK(hidden > 1000);
}

TEST_CASE("masks of prompts that are not one for each layer and KV head are refused") {
  auto policy = std::make_shared<Masked>();
  policy->masks.resize(3 * static_cast<std::size_t>(model()->config.layers * model()->config.kv_heads));
  EngineOptions o;
  o.max_tokens = tokens;
  CHECK_THROWS_WITH(Engine(model(), policy, o), Catch::Contains("masks of prompts, wanted none or"));
}
