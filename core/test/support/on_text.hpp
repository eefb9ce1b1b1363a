// Runs a policy over real text in f32 and records the queries, keys and values of its layers. Tests compare it with
// plain implementations.
#pragma once
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
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

// Quest's bound of page scores, from the keys that lie in it: [query head of the KV head][page]. With mean_radius, the
// box is ArkVale's.
inline std::vector<std::vector<double>> page_bounds(const SeenRows& queries, const SeenRows& keys, std::size_t position,
                                                    int head, int group, int page_size, bool mean_radius = false) {
  const std::size_t dim = keys.at[0][0].size(), p = static_cast<std::size_t>(page_size), n = position + 1;
  std::vector<std::vector<double>> out(static_cast<std::size_t>(group));
  for (std::size_t page = 0; page * p < n; ++page) {
    const std::size_t end = std::min(n, (page + 1) * p);
    const auto key = [&](std::size_t t, std::size_t d) { return keys.at[t][static_cast<std::size_t>(head)][d]; };
    std::vector<double> low(dim, INFINITY), high(dim, -INFINITY);
    for (std::size_t t = page * p; t < end; ++t)
      for (std::size_t d = 0; d < dim; ++d)
        low[d] = std::min(low[d], key(t, d)), high[d] = std::max(high[d], key(t, d));
    for (std::size_t d = 0; mean_radius && d < dim; ++d) {
      const double centre = (low[d] + high[d]) / 2;
      double radius = 0;
      for (std::size_t t = page * p; t < end; ++t)
        radius += std::abs(key(t, d) - centre) / static_cast<double>(end - page * p);
      low[d] = centre - radius, high[d] = centre + radius;
    }
    for (int g = 0; g < group; ++g) {
      const auto& q = queries.at[position][static_cast<std::size_t>(head * group + g)];
      double sum = 0;
      for (std::size_t d = 0; d < dim; ++d) sum += std::max(q[d] * low[d], q[d] * high[d]);
      out[static_cast<std::size_t>(g)].push_back(sum);
    }
  }
  return out;
}

class OnText final : public EngineObserver {
 public:
  struct Layer {
    SeenRows queries, keys, values;
    SeenRows outputs, prompt_outputs;                 // of attention in decode steps, and in prompts
    std::vector<std::vector<std::vector<int>>> read;  // [decode step][KV head] pages, or places of tokens
  };

  OnText(const std::string& scorer, const std::map<std::string, ParamValue>& params, int budget, int tokens)
      : OnText(Role::scorer, scorer, params, budget, tokens, 16) {}
  // marks(layer, KV head): the array `unstable` of a profile, for a policy that reads one.
  OnText(Role role, const std::string& name, const std::map<std::string, ParamValue>& params, int budget, int tokens,
         int page_size, const std::function<bool(int, int)>& marks = {})
      : OnText(role, name, params, budget, tokens, page_size, marks ? unstable(marks) : MakeProfile()) {}
  // make(layers, KV heads): the profile of a policy that reads one.
  using MakeProfile = std::function<Profile(int, int)>;
  // A division of a scorer's budget.
  struct Split {
    std::string name;
    std::map<std::string, ParamValue> params;
  };
  // A pruner or a rescorer beside `name`, which may be `full`.
  struct Second {
    Role role = Role::pruner;
    std::string name;
    std::map<std::string, ParamValue> params;
  };
  OnText(Role role, const std::string& name, const std::map<std::string, ParamValue>& params, int budget, int tokens,
         int page_size, const Second& second, const std::optional<Split>& split = {})
      : OnText(role, name, params, budget, tokens, page_size, MakeProfile(), split, second) {}
  OnText(Role role, const std::string& name, const std::map<std::string, ParamValue>& params, int budget, int tokens,
         int page_size, const MakeProfile& make, const std::optional<Split>& split = {},
         const std::optional<Second>& second = {})
      : model_(load_model(*open_model("bundled/recall", "", ""), DType::f32, "recall")) {
    static Registry registry;
    const RegistryCatalog catalog(registry);
    PolicySpec spec;
    spec.name = name;
    const auto use = [](Role of, const std::string& plugin, const std::map<std::string, ParamValue>& given) {
      return PluginUse{of, plugin, resolve(registry.require(of, plugin), given)};
    };
    if (name != "full")
      (role == Role::scorer     ? spec.scorer
       : role == Role::selector ? spec.selector
                                : spec.policy) = use(role, name, params);
    if (split) spec.split = use(Role::budget, split->name, split->params);
    if (second)
      (second->role == Role::pruner ? spec.pruner : spec.rescorer) = use(second->role, second->name, second->params);
    EngineOptions o;
    if (budget > 0) o.budget = {BudgetAmount::tokens, static_cast<double>(budget)};  // 0 = unlimited
    o.max_tokens = tokens;
    o.page_size = page_size;
    Profile profile;
    if (make) {
      profile = make(config().layers, config().kv_heads);
      spec.profile = "marks";
    }
    engine_ = std::make_unique<Engine>(model_, build_policy(spec, catalog, &profile), o);
    engine_->observe(this);
    std::ifstream in(golden("text/english.txt"), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    text_ = model_->tokenizer->encode(text, false, false);
    REQUIRE(static_cast<int>(text_.size()) >= tokens);
    layers_.resize(static_cast<std::size_t>(model_->config.layers));
    slot_ = engine_->open();
  }

  void prompt(const PromptLayer& l, const Store&) override {
    add(l.layer, l.queries, l.keys, l.values);
    if (l.output) layers_[static_cast<std::size_t>(l.layer)].prompt_outputs.append(l.output);
  }
  void attended(const DecodeLayer& l, const Store&) override {
    add(l.layer, l.queries, l.keys, l.values);
    layers_[static_cast<std::size_t>(l.layer)].outputs.append(l.output);
    auto& read = layers_[static_cast<std::size_t>(l.layer)].read.emplace_back();
    for (int h = 0; l.read.pages && h < config().kv_heads; ++h) {
      read.emplace_back();
      for (int i = 0; i < l.read.pages->count(0, h); ++i) read.back().push_back(l.read.pages->index(0, h, i));
    }
    for (int h = 0; l.read.tokens && h < config().kv_heads; ++h) {
      read.emplace_back();
      for (int i = 0; i < l.read.tokens->count(0, h); ++i) read.back().push_back(l.read.tokens->index(0, h, i));
    }
  }

  void prefill(int tokens) {  // feeds the text's next tokens as a prompt
    const Fit fit = engine_->prefill(
        slot_, std::span(text_).subspan(static_cast<std::size_t>(fed_), static_cast<std::size_t>(tokens)), true, {});
    REQUIRE(fit == Fit::ok);  // what it throws is the test's
    fed_ += tokens;
  }
  void step() {  // feeds the text's next token
    const Fit fit = engine_->step({slot_}, {&text_[static_cast<std::size_t>(fed_++)], 1}, {});
    REQUIRE(fit == Fit::ok);
  }
  // The text's ids. A test may replace some that were not fed yet.
  std::vector<int>& text() { return text_; }
  std::vector<int> kept(int layer, int head) const { return engine_->store().positions(layer, slot_, head); }
  // Keys or values of a head as the cache holds them, by place: [token][d].
  std::vector<std::vector<float>> stored(KvSide side, int layer, int head) const {
    const std::vector<std::int32_t> slots{slot_};
    const PagedKv kv = engine_->store().view(layer, slots);
    const auto n = static_cast<std::size_t>(kv.tokens(0, head)), dim = static_cast<std::size_t>(kv.head_dim);
    std::vector<float> rows(n * dim);
    ops::gather_rows(kv, 0, head, side, kv.tokens(0, head), rows.data());
    std::vector<std::vector<float>> out;
    for (std::size_t t = 0; t < n; ++t) out.emplace_back(&rows[t * dim], &rows[t * dim] + dim);
    return out;
  }
  std::vector<int> pages_on(Tier tier, int layer, int head) const {
    const std::vector<std::int32_t> slots{slot_};
    const PagedKv kv = engine_->store().view(layer, slots, tier);
    std::vector<int> out;
    for (int page = 0; page < kv.pages(0, head); ++page)
      if (kv.entry(0, head, page).frame != null_frame) out.push_back(page);
    return out;
  }
  const Ledger& ledger() const { return engine_->store().ledger(); }
  const Layer& layer(int l) const { return layers_[static_cast<std::size_t>(l)]; }
  const Model& model() const { return *model_; }
  const ModelConfig& config() const { return model_->config; }
  int group() const { return config().heads / config().kv_heads; }
  RopeTable rope() const { return model_->rope(); }

 private:
  static MakeProfile unstable(const std::function<bool(int, int)>& marks) {
    return [marks](int layers, int kv_heads) {
      Profile profile;
      ProfileArray& array = profile["unstable"];
      array.extent = {layers, kv_heads};
      for (int l = 0; l < layers; ++l)
        for (int h = 0; h < kv_heads; ++h) array.values.push_back(marks(l, h));
      return profile;
    };
  }
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

// Attention of the last `window` queries of a prompt of n tokens, each to the tokens that it sees: [query][token].
inline std::vector<std::vector<double>> window_shares(const OnText& run, int layer, int query_head, int n, int window) {
  const auto& seen = run.layer(layer);
  std::vector<std::vector<double>> out;
  for (int i = n - window; i < n; ++i) {
    const auto& q = seen.queries.at[static_cast<std::size_t>(i)][static_cast<std::size_t>(query_head)];
    std::vector<double> logits;
    for (int t = 0; t <= i; ++t)
      logits.push_back(
          dot(q, seen.keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(query_head / run.group())]) /
          std::sqrt(static_cast<double>(q.size())));
    out.push_back(softmax(logits));
    out.back().resize(static_cast<std::size_t>(n));
  }
  return out;
}

inline std::vector<int> positions_to(int n) {
  std::vector<int> all;
  for (int p = 0; p < n; ++p) all.push_back(p);
  return all;
}

}  // namespace kvlab::test
