// Runs a policy over random tokens in f32 and records each layer's rows and attention outputs by text position. Tests
// compare the outputs with plain attention.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/on_text.hpp"

namespace kvlab::test {

class Recorded final : public EngineObserver {
 public:
  struct Layer {
    SeenRows queries, keys, values, outputs;
  };

  // profile: empty = the policy reads none.
  Recorded(const std::string& policy, const std::map<std::string, ParamValue>& params, const Profile& profile,
           int tokens)
      : model_(load_model(*open_model("bundled/recall", "", ""), DType::f32, "recall")) {
    static Registry registry;
    const RegistryCatalog catalog(registry);
    PolicySpec spec;
    spec.name = policy;
    spec.policy = PluginUse{Role::policy, spec.name, resolve(registry.require(Role::policy, spec.name), params)};
    if (!profile.empty()) spec.profile = "scores";
    EngineOptions o;
    o.max_tokens = tokens;
    o.page_size = 8;
    engine_ = std::make_unique<Engine>(model_, build_policy(spec, catalog, &profile), o);
    engine_->observe(this);
    layers.resize(static_cast<std::size_t>(model_->config.layers));
    slot_ = engine_->open();
  }
  void prompt(const PromptLayer& l, const Store&) override { add(l); }
  void attended(const DecodeLayer& l, const Store&) override { add(l); }

  void prefill(int tokens) {
    std::vector<int> text;
    for (int t = 0; t < tokens; ++t) text.push_back(token(t));
    REQUIRE(engine_->prefill(slot_, text, true, {}) == Fit::ok);
    fed_ = tokens;
  }
  void step() {
    const int next = token(fed_++);
    REQUIRE(engine_->step({slot_}, {&next, 1}, {}) == Fit::ok);
  }
  // A sequence goes on in a slot of another engine, as after a saved cache.
  SavedSequence save() { return engine_->save(slot_); }
  void restore(const SavedSequence& saved, int fed) {
    REQUIRE(engine_->restore(slot_, saved) == Fit::ok);
    fed_ = fed;
  }
  std::vector<int> kept(int layer, int head) const { return engine_->store().positions(layer, slot_, head); }
  const ModelConfig& config() const { return model_->config; }
  std::vector<Layer> layers;

 private:
  int token(int t) const { return (t * t * 7 + 31 * t + 3) % std::min(model_->config.vocab, 200); }
  void add(const LayerRows& l) {
    Layer& to = layers[static_cast<std::size_t>(l.layer)];
    to.queries.append(l.queries), to.keys.append(l.keys), to.values.append(l.values), to.outputs.append(l.output);
  }

  std::shared_ptr<const Model> model_;
  std::unique_ptr<Engine> engine_;
  int slot_ = -1, fed_ = 0;
};

inline double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (std::size_t d = 0; d < a.size(); ++d) most = std::max(most, std::abs(a[d] - b[d]));
  return most;
}

}  // namespace kvlab::test
