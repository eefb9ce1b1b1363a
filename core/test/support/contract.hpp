// The conformance suite runs every built plugin as a policy on the tiny golden models. With KVLAB_CONTRACT_DEVICE=cuda
// they are bf16 models on the GPU; test cases tagged [cpu] read host memory and do not run there.
#pragma once
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cases/quick.hpp"
#include "compose/compose.hpp"
#include "compose/forwarding.hpp"
#include "compose/row_coded.hpp"
#include "engine/engine.hpp"
#include "experiment/build_policy.hpp"
#include "model/checkpoint.hpp"
#include "plugin/parameters.hpp"
#include "support/golden.hpp"
#include "support/library_under_test.hpp"
#include "support/made_up_future.hpp"
#include "support/profiled.hpp"

// CHECK of the conformance suite. A failure also names its usual cause.
#define CHECK_CAUSE(cause, ...)  \
  do {                           \
    INFO("usual cause: " cause); \
    CHECK(__VA_ARGS__);          \
  } while (false)

namespace kvlab::test {

using namespace cases;

inline Device contract_device() {
  const char* name = std::getenv("KVLAB_CONTRACT_DEVICE");
  return name && std::string(name) == "cuda" ? Device::cuda : Device::cpu;
}
inline DType contract_dtype() { return contract_device() == Device::cuda ? DType::bf16 : DType::f32; }
inline bool on_cuda() { return contract_device() == Device::cuda; }
inline bool every_pair() {
  const char* pairs = std::getenv("KVLAB_CONTRACT_PAIRS");
  return pairs && std::string(pairs) == "all";
}

// Why the running case does not apply; empty if it does. It continues "9 promises ..." in the report, which groups
// cases by it. The reporter clears it.
inline std::string& skipped() {
  static std::string reason;
  return reason;
}
inline bool skip(std::string reason) {
  skipped() = std::move(reason);
  return true;
}
// For a case that reads host memory: skips it on a GPU.
inline bool skip_on_cuda() { return on_cuda() && skip("that read memory of the host: the suite on the CPU asks them"); }

inline std::shared_ptr<Model> fresh_tiny_model(const std::string& name, DType dtype,
                                               Device device = contract_device()) {
  if (device == Device::cuda) dtype = DType::bf16;
  return std::const_pointer_cast<Model>(load_model(*open_checkpoint(golden("tiny/" + name)), dtype, name, device));
}
inline std::shared_ptr<const Model> tiny_model(const std::string& name, DType dtype = DType::f32) {
  // Nobody frees the models: the device may be gone before statics are.
  static auto& known = *new std::map<std::pair<std::string, DType>, std::shared_ptr<const Model>>;
  auto& m = known[{name, dtype}];
  if (!m) m = fresh_tiny_model(name, dtype);
  return m;
}
inline std::vector<std::string> group_models() {  // GQA groups 1, 3, 4, 7
  if (quick()) return {"llama-gqa3"};
  return {"llama-mha", "llama-gqa3", "llama-gqa4-rope3", "llama-mqa7"};
}

struct Subject {
  std::string label;
  Role role = Role::scorer;   // of the plugin under test
  PolicySpec spec;            // without a budget
  std::vector<DType> dtypes;  // Needs::dtypes
  bool own_amount = false;    // Needs::own_amount
  bool keeps_tokens = false;  // codes do, so core refuses later evictions and most pages on the host
  bool composed() const {
    return role == Role::budget || role == Role::codec || role == Role::pruner || role == Role::rescorer;
  }
  bool evicts() const { return spec.scorer.has_value(); }
  bool runs_with(DType dtype) const { return dtypes.empty() || std::count(dtypes.begin(), dtypes.end(), dtype) > 0; }
};

// The policies under test.
class Subjects {
 public:
  Subjects() : registry_(library_under_test()), catalog_(registry_) {
    const auto scorers = all(Role::scorer), selectors = all(Role::selector), codecs = all(Role::codec);
    for (const PluginInfo* p : scorers) {
      if (under_test(*p)) add(*p, p->name, [&](PolicySpec& s) { s.scorer = use(*p); });
      for (const auto& one : other_ways(*p))
        add(*p, p->name + ", " + one.first, [&](PolicySpec& s) { s.scorer = use_with(*p, {one}); });
    }
    // Summaries of pages in 16 bits and, where a parameter says so, in 8.
    const std::map<std::string, ParamValue> codes{{"summary_bits", std::int64_t{8}}};
    const auto in_codes = [](const PluginInfo& p) { return under_test(p) && find_param(p, "summary_bits"); };
    for (const PluginInfo* p : selectors) {
      if (under_test(*p)) add(*p, p->name, [&](PolicySpec& s) { s.selector = use(*p); });
      if (in_codes(*p))
        add(*p, p->name + ", summary_bits: 8", [&](PolicySpec& s) { s.selector = use_with(*p, codes); });
    }
    for (const PluginInfo* p : all(Role::policy)) {
      if (under_test(*p)) add(*p, p->name, [&](PolicySpec& s) { s.policy = use(*p); });
      if (in_codes(*p)) add(*p, p->name + ", summary_bits: 8", [&](PolicySpec& s) { s.policy = use_with(*p, codes); });
      for (const auto& one : other_ways(*p))
        add(*p, p->name + ", " + one.first, [&](PolicySpec& s) { s.policy = use_with(*p, {one}); });
    }
    // In this tree adakv, which divides by the scores, meets all scorers. Each other budget meets snapkv and three
    // more, in turn. KVLAB_CONTRACT_PAIRS=all asks every pair.
    std::size_t next = 0;
    for (const PluginInfo* p : all(Role::budget)) {
      if (!under_test(*p)) continue;
      for (const auto& one : other_ways(*p))
        add(*p, "snapkv+" + p->name + ", " + one.first, [&](PolicySpec& s) {
          s.scorer = use(registry_.require(Role::scorer, "snapkv")), s.split = use_with(*p, {one});
        });
      const bool all_pairs = p->name == "adakv" || !of_the_tree() || every_pair();
      for (std::size_t i = 0; i < scorers.size(); ++i) {
        const bool in_turn = (i + scorers.size() - next % scorers.size()) % scorers.size() < 3;
        if (const PluginInfo* scorer = scorers[i]; all_pairs || in_turn || scorer->name == "snapkv")
          add(*p, scorer->name + "+" + p->name, [&](PolicySpec& s) { s.scorer = use(*scorer), s.split = use(*p); });
      }
      if (!all_pairs) next += 3;
    }
    // A pruner meets all selectors and the whole cache. A rescorer meets snapkv and three more scorers, in turn.
    for (const PluginInfo* p : all(Role::pruner)) {
      if (!under_test(*p)) continue;
      add(*p, "full+" + p->name, [&](PolicySpec& s) { s.pruner = use(*p); });
      for (const PluginInfo* selector : selectors)
        add(*p, selector->name + "+" + p->name,
            [&](PolicySpec& s) { s.selector = use(*selector), s.pruner = use(*p); });
    }
    next = 0;
    for (const PluginInfo* p : all(Role::rescorer)) {
      if (!under_test(*p)) continue;
      for (std::size_t i = 0; i < scorers.size(); ++i)
        if ((i + scorers.size() - next % scorers.size()) % scorers.size() < 3 || scorers[i]->name == "snapkv" ||
            !of_the_tree() || every_pair())
          add(*p, scorers[i]->name + "+" + p->name,
              [&](PolicySpec& s) { s.scorer = use(*scorers[i]), s.rescorer = use(*p); });
      next += 3;
    }
    // int8 meets all scorers and selectors. Each other codec meets one of both, in turn: they differ in formats alone.
    int turn = 0;
    for (const PluginInfo* p : codecs) {
      if (under_test(*p)) add(*p, "full+" + p->name, [&](PolicySpec& s) { s.codec = use(*p); });
      const bool all_pairs = p->name == "int8" || !of_the_tree() || every_pair();
      const auto meets = [&](const PluginInfo* other, const std::vector<const PluginInfo*>& of) {
        return (under_test(*p) || under_test(*other)) &&
               (all_pairs || of[static_cast<std::size_t>(turn) % of.size()] == other);
      };
      for (const PluginInfo* scorer : scorers)
        if (meets(scorer, scorers))
          add(*p, scorer->name + "+" + p->name, [&](PolicySpec& s) {
            s.scorer = use(*scorer), s.codec = use(*p);
            if (keeps_tokens(s)) s.schedule.every = 0;
          });
      for (const PluginInfo* selector : selectors)
        if (meets(selector, selectors))
          add(*p, selector->name + "+" + p->name,
              [&](PolicySpec& s) { s.selector = use(*selector), s.codec = use(*p); });
      turn += !all_pairs;
    }
  }

  const std::vector<Subject>& list() const { return subjects_; }
  // A text for each subject that is left out because it needs another device, dtype or split.
  const std::vector<std::string>& skipped() const { return skipped_; }
  // Not to run: without its profile.
  std::shared_ptr<Policy> policy(const PolicySpec& spec) const { return build_policy(spec, catalog_); }
  std::shared_ptr<Policy> policy(const PolicySpec& spec, const Model& model) {
    return build_policy(spec, catalog_, profile_of(spec, model));
  }
  std::optional<PluginUse> any_pruner() {
    const auto pruners = all(Role::pruner);
    return pruners.empty() ? std::nullopt : std::optional(use(*pruners.front()));
  }
  PluginUse codec(const std::string& name) const { return use(registry_.require(Role::codec, name)); }
  CodecSpec codec_of(const PluginUse& use) const {
    return create<Codec>(registry_.require(Role::codec, use.name), use.params)->spec();
  }
  const PluginCatalog& catalog() const { return catalog_; }
  Instance<Scorer> scorer(const PolicySpec& spec) {
    return create<Scorer>(registry_.require(Role::scorer, spec.scorer->name), spec.scorer->params);
  }
  Instance<Scorer> scorer(const PolicySpec& spec, const Model& model) {
    auto created = scorer(spec);
    if (const Profile* profile = profile_of(spec, model)) created->load_profile(*profile);
    return created;
  }

  // Whether the scorer of one spec may have the split of another.
  bool go_together(const PolicySpec& scored, const PolicySpec& divided) {
    return !scorer(scored)->needs().uniform_heads() || split(divided)->uniform_heads();
  }
  // Why the split refuses the scorer's scores; "" = it takes them. A division over layers sees them first at a prompt's
  // end.
  std::string refused_scores(const PolicySpec& spec);
  // Whether core runs it with placement on the host. An oracle reads all pages in each step.
  bool on_either_tier(PolicySpec spec) {
    spec.placement = {};
    return !spec.policy && !keeps_tokens(spec) && !policy(spec)->needs().oracle();
  }
  // Subject::keeps_tokens
  bool keeps_tokens(const PolicySpec& spec) {
    if (!spec.codec) return false;
    const auto codec = create<Codec>(registry_.require(Role::codec, spec.codec->name), spec.codec->params);
    return pages_age(*codec) || codes_rows(*codec);
  }

  // The spec, whose policy attends as full does to what it keeps. With a parameter `p` it reads the whole share. With
  // `positions` tokens have those of the text.
  PolicySpec as_full(PolicySpec spec) {
    if (spec.pruner)
      if (const PluginInfo& info = registry_.require(Role::pruner, spec.pruner->name); find_param(info, "p"))
        spec.pruner = use_with(info, {{"p", 1.}});
    if (!spec.policy) return spec;
    const PluginInfo& info = registry_.require(Role::policy, spec.policy->name);
    std::map<std::string, ParamValue> given;
    if (find_param(info, "p")) given["p"] = 1.;
    if (find_param(info, "positions")) given["positions"] = std::string("original");
    if (find_param(info, "prompt_retrieval")) given["prompt_retrieval"] = false;
    if (!given.empty()) spec.policy = use_with(info, given);
    return spec;
  }

  // The spec with parameter `name` of its scorer set to `word`; nullopt if the scorer has no such choice.
  std::optional<PolicySpec> with(PolicySpec spec, const std::string& name, const std::string& word) {
    if (!spec.scorer) return std::nullopt;
    const PluginInfo& info = registry_.require(Role::scorer, spec.scorer->name);
    const ParamSpec* param = find_param(info, name);
    if (!param || std::count(param->choices.begin(), param->choices.end(), word) == 0) return std::nullopt;
    spec.scorer->params = resolve(info, {{name, word}});
    return spec;
  }

  // The defaults, but without dense layers, which could be all layers of a tiny model, and with layers by number that
  // it has. Sinks and window of a policy, and of a scorer that pins many tokens, must leave room in the suite's
  // budgets. So must outliers and local chunks, and the rank of keys must be less than a tiny model's. A codec's
  // residual must leave pages to encode. A policy of an amount of its own may keep nothing but sinks and window. These
  // then cover the suite's short prompts, or it leaves them whole. One that reads pages of an amount of its own leaves
  // some out, and its groups of pages are small, as clusters of tokens are.
  static PluginUse use_with(const PluginInfo& p, std::map<std::string, ParamValue> given) {
    if (find_param(p, "dense_layers")) given["dense_layers"] = std::int64_t{0};
    if (find_param(p, "full_layers")) given["full_layers"] = std::string();
    if (p.role == Role::policy || (p.role == Role::scorer && pins_many(p)))
      for (const char* name : {"sinks", "window"})
        if (find_param(p, name)) given[name] = std::int64_t{6};
    if (find_param(p, "rank") && find_param(p, "outliers"))
      for (const auto& [name, value] : {std::pair{"rank", 8}, {"outliers", 1}, {"local_chunks", 1}})
        if (find_param(p, name)) given[name] = std::int64_t{value};
    if (find_param(p, "weights")) given["weights"] = std::string("votes");  // numbers that differ widely
    if (find_param(p, "filter_layers")) given["filter_layers"] = std::string("0");
    if (find_param(p, "wait_layers")) given["wait_layers"] = std::int64_t{0};
    if (find_param(p, "block")) given["block"] = std::int64_t{8};
    if (find_param(p, "prompt_chunk")) given["prompt_chunk"] = std::int64_t{16};
    if (find_param(p, "tokens_per_cluster")) given["tokens_per_cluster"] = std::int64_t{5};
    if (find_param(p, "window_clusters")) given["window_clusters"] = std::int64_t{2};
    if (p.role == Role::policy && create<Policy>(p, resolve(p, given))->needs().own_amount())
      for (const auto& [name, value] :
           {std::pair{"window", 32}, {"tokens", 40}, {"parts", 2}, {"whole", 40}, {"cap", 40}})
        if (find_param(p, name)) given[name] = std::int64_t{value};
    if (p.role == Role::codec && find_param(p, "residual")) given["residual"] = std::int64_t{8};
    return {p.role, p.name, resolve(p, given)};
  }
  static PluginUse use(const PluginInfo& p) { return use_with(p, {}); }

 private:
  // Parameters by which a plugin under test takes another way than by default, each with that way.
  std::vector<std::pair<const std::string, ParamValue>> other_ways(const PluginInfo& p) const {
    std::vector<std::pair<const std::string, ParamValue>> ways;
    for (const auto& [name, value] :
         std::vector<std::pair<const std::string, ParamValue>>{{"fresh_noise", false},
                                                               {"generated", true},
                                                               {"group", std::string("min")},
                                                               {"mean_value_of_groups", true},
                                                               {"score_by", std::string("exp")},
                                                               {"window_counts", true}})
      if (const ParamSpec* param = find_param(p, name);
          under_test(p) && param &&
          (param->choices.empty() ||
           std::count(param->choices.begin(), param->choices.end(), std::get<std::string>(value)) > 0))
        ways.emplace_back(name, value);
    return ways;
  }
  std::vector<const PluginInfo*> all(Role role) { return registry_.list(role); }
  static bool pins_many(const PluginInfo& scorer) {
    const Pins pins = create<Scorer>(scorer, resolve(scorer, {}))->pins(48);
    return pins.first + pins.last > 40;
  }
  void add(const PluginInfo& p, const std::string& label, const std::function<void(PolicySpec&)>& fill) {
    Subject s;
    s.label = s.spec.name = label;
    s.role = p.role;
    s.spec.page_size = 8;
    fill(s.spec);
    if (reads<Policy>(s.spec.policy) || reads<Scorer>(s.spec.scorer) || reads<Selector>(s.spec.selector) ||
        (s.spec.split && split(s.spec)->reads_profile()))
      s.spec.profile = "of all profilers";
    if (s.spec.scorer && s.spec.split && !go_together(s.spec, s.spec)) {
      skipped_.push_back(label + ": the scorer needs heads that hold the same tokens");
      return;
    }
    std::shared_ptr<Policy> made;
    try {
      made = policy(s.spec);
    } catch (const Error& e) {  // some codecs and rescorers go with some parts alone
      if ((!s.spec.codec && !s.spec.rescorer) || e.code() != Errc::config) throw;
      skipped_.push_back(label + ": refused, " + e.what());
      return;
    }
    if (const std::string why = refused_scores(s.spec); !why.empty()) {
      skipped_.push_back(label + ": refused, " + why);
      return;
    }
    const Needs needs = made->needs();
    const auto& devices = needs.devices();
    s.dtypes = needs.dtypes();
    s.own_amount = needs.own_amount();
    s.keeps_tokens = keeps_tokens(s.spec);
    if (!devices.empty() && std::count(devices.begin(), devices.end(), contract_device()) == 0)
      skipped_.push_back(label + ": it does not run on " + name_of(contract_device()));
    else if (!s.runs_with(contract_dtype()))
      skipped_.push_back(label + ": it does not run with " + name_of(contract_dtype()));
    else
      subjects_.push_back(std::move(s));
  }
  template <class Interface>
  bool reads(const std::optional<PluginUse>& use) {
    return use && create<Interface>(registry_.require(use->role, use->name), use->params)->needs().profile();
  }
  // The arrays of all profilers; null if the spec reads none. A tiny model has so few pages that 64 would be all of
  // them. Its text is so short that sinks and a window would be all of it.
  const Profile* profile_of(const PolicySpec& spec, const Model& model) {
    if (spec.profile.empty()) return nullptr;
    const auto [it, fresh] = profiles_.try_emplace(model.name);
    if (!fresh) return &it->second;
    for (const PluginInfo* p : all(Role::profiler))
      it->second.merge(
          profiled("{" + p->name + ": {" + small(*p) + "}}", model.name, "prefix: 150, forced: 40", contract_device()));
    return &it->second;
  }
  static std::string small(const PluginInfo& p) {
    std::string given = find_param(p, "top_pages") ? "top_pages: 4" : "";
    if (find_param(p, "sinks") && find_param(p, "window"))
      given += (given.empty() ? "" : ", ") + std::string("sinks: 6, window: 6");
    return given;
  }
  Instance<Budget> split(const PolicySpec& spec) {
    return create<Budget>(registry_.require(Role::budget, spec.split->name), spec.split->params);
  }

  mutable Registry registry_;
  RegistryCatalog catalog_;
  std::vector<Subject> subjects_;
  std::map<std::string, Profile> profiles_;  // by the model's name
  std::vector<std::string> skipped_;
};

inline Subjects& subjects() {
  static Subjects all;
  return all;
}

inline bool always(const Subject&) { return true; }

// The subjects that a promise applies to. Without any, the case is skipped.
inline std::vector<Subject> about(const std::string& what, bool (*applies)(const Subject&) = always) {
  std::vector<Subject> list;
  for (const Subject& s : subjects().list())
    if (applies(s)) list.push_back(s);
  if (list.empty()) skip("about " + what + ": the library has none");
  return list;
}
inline std::vector<Subject> about_all() { return about("policies, scorers, selectors, budgets and codecs"); }

// Keeps all tokens as the inner policy does, with keys of another regime.
class KeepsAll final : public ForwardingPolicy {
 public:
  KeepsAll(std::shared_ptr<Policy> inner, RopeRegime regime) : ForwardingPolicy(std::move(inner)), regime_(regime) {}
  Needs needs() const override { return inner().needs().rope(regime_); }

 private:
  RopeRegime regime_;
};

inline PolicySpec full_spec() {
  PolicySpec s;
  s.name = "full";
  s.page_size = 8;
  return s;
}
// A policy that decides by itself how much it keeps stays without a budget.
inline PolicySpec with_budget(PolicySpec s, BudgetAmount::Kind kind, double value) {
  if (!s.policy || !subjects().policy(s)->needs().own_amount()) s.budget = {kind, value};
  return s;
}

// Token ids that repeat themselves here and there, from a fixed recurrence.
inline std::vector<int> test_text(int tokens, int vocab, unsigned seed = 1) {
  std::vector<int> out;
  unsigned x = seed * 2654435761u + 12345u;
  for (int i = 0; i < tokens; ++i) {
    x = x * 1664525u + 1013904223u;
    out.push_back(i > 20 && (x >> 28) < 5 ? out[static_cast<std::size_t>(i - 17)]
                                          : static_cast<int>((x >> 8) % static_cast<unsigned>(vocab)));
  }
  return out;
}

inline std::string Subjects::refused_scores(const PolicySpec& spec) {
  if (!spec.scorer || !spec.split || split(spec)->numbers() == 0) return {};
  const auto model = tiny_model("llama-gqa3");
  EngineOptions o;
  o.device = contract_device();
  o.page_size = spec.page_size, o.max_tokens = 192;
  o.budget = {BudgetAmount::tokens, 48};
  o.recorded = made_up_future();
  Engine engine(model, policy(spec, *model), o);
  const std::int32_t slot = engine.open();
  try {
    for (const int prompt : {70, 30}) engine.prefill(slot, test_text(prompt, model->config.vocab), true, {});
  } catch (const Error& e) {  // other errors are the test cases'
    if (e.code() == Errc::config) return e.what();
  }
  return {};
}

using Logits = std::vector<std::vector<float>>;       // after the prompt and after every step
using Kept = std::vector<std::vector<std::int32_t>>;  // [layer * kv_heads + head] text positions

inline Kept kept_of(const Store& store, int slot) {
  Kept out;
  for (int layer = 0; layer < store.shape().layers; ++layer)
    for (int head = 0; head < store.shape().kv_heads; ++head) out.push_back(store.positions(layer, slot, head));
  return out;
}
inline std::size_t count_of(const Kept& kept) {
  std::size_t n = 0;
  for (const auto& k : kept) n += k.size();
  return n;
}

// Share of the tokens that both have.
inline double overlap(const Kept& a, const Kept& b) {
  std::size_t same = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    std::vector<std::int32_t> both;
    std::set_intersection(a[i].begin(), a[i].end(), b[i].begin(), b[i].end(), std::back_inserter(both));
    same += both.size();
  }
  const std::size_t most = std::max({std::size_t{1}, count_of(a), count_of(b)});
  return a.size() == b.size() ? static_cast<double>(same) / static_cast<double>(most) : 0;
}

// An engine under a policy. Every call checks the store's invariants.
class Play {
 public:
  Play(std::shared_ptr<const Model> of, const PolicySpec& spec, EngineOptions given = {})
      : model(std::move(of)), vocab(model->config.vocab), options_(std::move(given)) {
    options_.page_size = spec.page_size;
    options_.budget = spec.budget;
    options_.recorded = made_up_future();
    options_.device = model->cuda ? Device::cuda : Device::cpu;
    if (options_.max_tokens == 0) options_.max_tokens = 192;
    replace(subjects().policy(spec, *model));
  }
  // Takes another policy, before the first run.
  void replace(std::shared_ptr<Policy> by) {
    engine.reset();
    policy = std::move(by);
    engine = std::make_unique<Engine>(model, policy, options_);
  }
  std::vector<float> prompt(int to, const std::vector<int>& text) {
    return explained([&] {
      std::vector<float> out(static_cast<std::size_t>(vocab));
      if (engine->prefill(to, text, true, View<float, 2>::dense(out.data(), {1, vocab})) != Fit::ok)
        throw Error(Errc::internal, "out of memory");
      engine->store().check_invariants();
      return out;
    });
  }
  Logits step(const std::vector<std::int32_t>& slots, const std::vector<int>& tokens) {
    return explained([&] {
      std::vector<float> out(slots.size() * static_cast<std::size_t>(vocab));
      const auto rows = static_cast<std::int64_t>(slots.size());
      if (engine->step(slots, tokens, View<float, 2>::dense(out.data(), {rows, vocab})) != Fit::ok)
        throw Error(Errc::internal, "out of memory");
      engine->store().check_invariants();
      Logits all;
      for (std::int64_t r = 0; r < rows; ++r) all.emplace_back(out.begin() + r * vocab, out.begin() + (r + 1) * vocab);
      return all;
    });
  }
  // Runs a whole sequence in a fresh slot and leaves the slot open.
  Logits run(const std::vector<int>& text, const std::vector<int>& answer) {
    slot = engine->open();
    Logits all{prompt(slot, text)};
    kept = kept_of(engine->store(), slot);
    for (int token : answer) all.push_back(step({slot}, {token})[0]);
    return all;
  }

  std::shared_ptr<const Model> model;
  std::shared_ptr<Policy> policy;
  std::unique_ptr<Engine> engine;
  int vocab = 0, slot = -1;
  Kept kept;  // after the prompt of run()

 private:
  EngineOptions options_;

  // Returns call(). If the store refuses a list, the failure also names its usual cause.
  template <class Call>
  static auto explained(const Call& call) -> decltype(call()) {
    try {
      return call();
    } catch (const Error& e) {
      if (e.message().starts_with("edit"))
        UNSCOPED_INFO(
            "usual cause: the list's entries are in the order of their scores. Lists that evict_rest, evict and attend "
            "take are ascending, each entry once, below the head's length: sort what a top-k left.");
      throw;
    }
  }
};

// Largest max |a - b| / max |b| over the rows.
inline double worst(const Logits& a, const Logits& b) {
  double all = a.size() == b.size() ? 0 : INFINITY;
  for (std::size_t r = 0; r < std::min(a.size(), b.size()); ++r) {
    double error = 0, scale = 1e-9;
    for (std::size_t i = 0; i < a[r].size(); ++i) {
      error = std::max(error, std::abs(static_cast<double>(a[r][i]) - b[r][i]));
      scale = std::max(scale, std::abs(static_cast<double>(b[r][i])));
    }
    if (!(error <= all * scale)) all = error / scale;
  }
  return all;
}
inline bool finite(const Logits& l) {
  for (const auto& row : l)
    for (float x : row)
      if (!std::isfinite(x)) return false;
  return true;
}

}  // namespace kvlab::test
