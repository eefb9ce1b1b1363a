// Runs a policy over real text in f32 and records the queries, keys and values of its layers. Tests compare it with
// plain implementations.
#pragma once
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "cases/paged_fixture.hpp"
#include "engine/engine.hpp"
#include "experiment/build_policy.hpp"
#include "model/bundled.hpp"
#include "model/checkpoint.hpp"
#include "plugin/parameters.hpp"
#include "support/golden.hpp"

namespace kvlab::test {

using namespace cases;

// Queries, keys or values of a layer: [text position][head][d].
struct SeenRows {
  std::vector<std::vector<std::vector<double>>> at;

  void append(const View<const float, 3>& x) {
    for (std::int64_t t = 0; t < x.extent[0]; ++t) {
      auto& heads = at.emplace_back();
      for (std::int64_t h = 0; h < x.extent[1]; ++h) heads.emplace_back(&x(t, h, 0), &x(t, h, 0) + x.extent[2]);
    }
  }
};

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

inline std::vector<double> softmax(std::vector<double> x) {
  double most = -INFINITY, sum = 0;
  for (const double y : x) most = std::max(most, y);
  for (double& y : x) sum += y = std::exp(y - most);
  for (double& y : x) y /= sum;
  return x;
}

// Text positions, ascending, of the `count` best scores.
inline std::vector<int> best(const std::vector<double>& scores, const std::vector<int>& positions, std::size_t count) {
  std::vector<std::size_t> order(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  std::vector<int> kept;
  for (std::size_t i = 0; i < count; ++i) kept.push_back(positions[order[i]]);
  std::sort(kept.begin(), kept.end());
  return kept;
}

// Scores a cache of one row. The caller sets the views that a scorer needs beside the cache.
class Scored {
 public:
  Scored(PagedFixture& cache, int query_heads) : pages_(cache.view()) {
    const PagedOptions& o = cache.options();
    shape_.layers = shape_.max_slots = 1;
    shape_.query_heads = query_heads, shape_.kv_heads = o.kv_heads, shape_.head_dim = o.head_dim;
    shape_.page_size = o.page_size, shape_.max_tokens = o.page_size * o.max_pages;
    kv.shape = &shape_;
    kv.pages = pages_;
    kv.keys = {&pages_, KvSide::key}, kv.values = {&pages_, KvSide::value};
    kv.workspace = &workspace_;
    position_ = kv.max_length = pages_.tokens(0, 0);
    kv.position = &position_;
  }
  std::vector<double> by(const std::string& name, const std::map<std::string, ParamValue>& params) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::scorer, name);
    const auto scorer = create<Scorer>(info, resolve(info, params));
    scorer->attach(shape_, {}, workspace_);
    scorer->observe(kv, Stream::cpu());
    Guarded<3> out({1, shape_.kv_heads, kv.max_length});
    scorer->score(kv, out.view(), Stream::cpu());
    pins = scorer->pins(kv.max_length);
    const auto values = out.values();
    return {values.begin(), values.end()};
  }
  LayerKv kv;
  Pins pins;

 private:
  PagedKv pages_;
  Shape shape_;
  HeapWorkspace workspace_;
  std::int32_t position_ = 0;
};

class OnText final : public EngineObserver {
 public:
  struct Layer {
    SeenRows queries, keys, values;
  };

  OnText(const std::string& scorer, const std::map<std::string, ParamValue>& params, int budget, int tokens)
      : model_(load_model(*open_model("bundled/recall", "", ""), DType::f32, "recall")) {
    static Registry registry;
    const RegistryCatalog catalog(registry);
    PolicySpec spec;
    spec.name = scorer;
    spec.scorer = {Role::scorer, scorer, resolve(registry.require(Role::scorer, scorer), params)};
    EngineOptions o;
    o.budget = {BudgetAmount::tokens, static_cast<double>(budget)};
    o.max_tokens = tokens;
    engine_ = std::make_unique<Engine>(model_, build_policy(spec, catalog), o);
    engine_->observe(this);
    std::ifstream in(golden("text/english.txt"), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    text_ = model_->tokenizer->encode(text, false, false);
    REQUIRE(static_cast<int>(text_.size()) >= tokens);
    layers_.resize(static_cast<std::size_t>(model_->config.layers));
    slot_ = engine_->open();
  }

  void prompt(const PromptLayer& l, const Store&) override { add(l.layer, l.queries, l.keys, l.values); }
  void attended(const DecodeLayer& l, const Store&) override { add(l.layer, l.queries, l.keys, l.values); }

  void prefill(int tokens) {
    REQUIRE(engine_->prefill(slot_, std::span(text_).first(static_cast<std::size_t>(tokens)), true, {}) == Fit::ok);
    fed_ = tokens;
  }
  void step() {  // feeds the text's next token
    REQUIRE(engine_->step({slot_}, {&text_[static_cast<std::size_t>(fed_++)], 1}, {}) == Fit::ok);
  }
  std::vector<int> kept(int layer, int head) const { return engine_->store().positions(layer, slot_, head); }
  const Layer& layer(int l) const { return layers_[static_cast<std::size_t>(l)]; }
  const ModelConfig& config() const { return model_->config; }
  int group() const { return config().heads / config().kv_heads; }
  RopeTable rope() const { return model_->rope(); }

 private:
  void add(int layer, const View<const float, 3>& q, const View<const float, 3>& k, const View<const float, 3>& v) {
    Layer& to = layers_[static_cast<std::size_t>(layer)];
    to.queries.append(q), to.keys.append(k), to.values.append(v);
  }

  std::shared_ptr<const Model> model_;
  std::unique_ptr<Engine> engine_;
  std::vector<int> text_;
  std::vector<Layer> layers_;
  int slot_ = -1, fed_ = 0;
};

inline std::vector<int> positions_to(int n) {
  std::vector<int> all;
  for (int p = 0; p < n; ++p) all.push_back(p);
  return all;
}

}  // namespace kvlab::test
