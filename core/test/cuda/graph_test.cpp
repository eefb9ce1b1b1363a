// Decode steps as graphs: their logits equal those of eager steps, bit for bit.
#include <catch2/catch.hpp>

#include <functional>
#include <map>

#include "base/backend.hpp"
#include "cases/quick.hpp"
#include "compose/compose.hpp"
#include "engine/engine.hpp"
#include "model/bundled.hpp"
#include "ops/page/paged.hpp"
#include "plugin/takes_mass_late.hpp"
#include "support/cell_fixture.hpp"
#include "support/evict_and_recall.hpp"
#include "support/joined_launches.hpp"
#include "support/page_editor.hpp"
#include "support/store_fixture.hpp"
#include "support/token_reader.hpp"

using namespace kvlab;

namespace {

// Each head's oldest token.
TokenList oldest_token(const LayerStep& step, Stream s) {
  const Scores age = step.kv_head_scores("age");
  ops::recency(step.pages, age, s);
  ops::negate(age, s);
  const auto keep = step.scratch<std::int32_t>("keep", {step.rows(), step.kv_heads()});
  ops::fill_heads(keep, 1, s);
  const auto list = step.list<TokenList>("list", 1);
  ops::top_tokens(step.pages, age, keep, nullptr, list, s);
  return list;
}

std::shared_ptr<const Model> model_named(const std::string& name) {
  static auto& known = *new std::map<std::string, std::shared_ptr<const Model>>;
  auto& model = known[name];
  if (!model) model = load_model(*open_model(name, "", "."), DType::bf16, name, Device::cuda);
  return model;
}

// Two engines over one model. The observer of the second one prevents graphs.
struct Pair {
  std::shared_ptr<const Model> model;
  EngineObserver nobody;
  Engine graphs, eager;
  int vocab = model->config.vocab;
  std::vector<float> last;  // logits of the latest prompt or step

  // frames: of the device, for sequences that spill under pressure; 0 = enough for all, and they spill at once.
  static EngineOptions options(const PolicySpec& spec, int max_tokens, std::int64_t frames = 0) {
    EngineOptions o;
    o.device = Device::cuda;
    o.slots = 3;
    o.max_tokens = max_tokens;
    o.page_size = spec.page_size;
    o.budget = spec.budget;
    o.recorded = test::made_up_future();
    if (frames == 0) return o;
    o.spill = Spill::pressure;
    o.device_limit =
        frames * ops::make_layout(DType::bf16, CodecSpec{}, spec.page_size, 16, 0).bytes;  // head_dim of the model
    return o;
  }
  using Change = std::function<void(EngineOptions& o, bool graphs)>;  // of an engine's options
  static EngineOptions changed(EngineOptions o, bool graphs, const Change& change) {
    if (change) change(o, graphs);
    return o;
  }
  template <class Make>
  Pair(const PolicySpec& spec, const Make& policy, int max_tokens = 96, std::int64_t frames = 0,
       const char* name = "synthetic/tiny", const Change& change = {})
      : model(model_named(name)),
        graphs(model, policy(), changed(options(spec, max_tokens, frames), true, change)),
        eager(model, policy(), changed(options(spec, max_tokens), false, change)) {
    eager.observe(&nobody);
  }
  explicit Pair(const PolicySpec& spec = test::full_spec(), std::int64_t frames = 0,
                const char* name = "synthetic/tiny", int max_tokens = 96, const Change& change = {})
      : Pair(
            spec,
            [&] {
              auto policy = test::subjects().policy(spec);
              if (policy->needs().profile()) policy->load_profile(profile());
              return policy;
            },
            max_tokens, frames, name, change) {}

  int open(int tokens, unsigned seed) {
    const int slot = graphs.open();
    REQUIRE(eager.open() == slot);
    const std::vector<int> prompt = test::test_text(tokens, vocab, seed);
    run([&](Engine& e, View<float, 2> logits) { return e.prefill(slot, prompt, true, logits); }, 1);
    return slot;
  }
  // The same, with a long prompt that one engine computes for both.
  int open_once(int tokens, unsigned seed) {
    const int slot = graphs.open();
    REQUIRE(eager.open() == slot);
    REQUIRE(eager.prefill(slot, test::test_text(tokens, vocab, seed), true, {}) == Fit::ok);
    REQUIRE(graphs.restore(slot, eager.save(slot)) == Fit::ok);
    return slot;
  }
  void close(int slot) { graphs.close(slot), eager.close(slot); }
  // One step of both engines, with tokens by a rule.
  void step(const std::vector<std::int32_t>& slots) {
    std::vector<int> tokens;
    for (const int slot : slots) tokens.push_back((37 * ++count_ + slot) % vocab);
    run([&](Engine& e, View<float, 2> logits) { return e.step(slots, tokens, logits); }, slots.size());
  }

 private:
  // Every other head is unstable. The first head of a layer leads its second one, and the others are anchors.
  Profile profile() const {
    ProfileArray unstable, role, leader, stable;
    unstable.extent = role.extent = leader.extent = stable.extent = {model->config.layers, model->config.kv_heads};
    const int heads = model->config.kv_heads;
    for (int i = 0; i < model->config.layers * heads; ++i) {
      unstable.values.push_back(static_cast<float>(i % 2));
      role.values.push_back(i % heads == 0 ? 2.f : i % heads == 1 ? 3.f : 0.f);
      leader.values.push_back(i % heads < 2 ? 0.f : -1.f);
      stable.values.push_back(0.8f);
    }
    // Thresholds of channels, and codebooks of 32 entries a layer.
    ProfileArray lower, upper, codebook, share;
    lower.extent = upper.extent = {model->config.layers, heads, model->config.head_dim};
    lower.values.assign(static_cast<std::size_t>(model->config.layers * heads * model->config.head_dim), -1);
    upper.values.assign(lower.values.size(), 1);
    codebook.extent = {model->config.layers * 32};
    codebook.values.assign(static_cast<std::size_t>(model->config.layers * 32), 0);
    share.extent = {1}, share.values = {0.01f};
    // A skew that leaves channels as they are.
    ProfileArray skew;
    const int dim = model->config.head_dim;
    skew.extent = {model->config.layers, heads, dim, dim};
    for (int i = 0; i < model->config.layers * heads * dim * dim; ++i)
      skew.values.push_back(i / dim % dim == i % dim ? 1.f : 0.f);
    // What other profilers measure is in the shape of `unstable`.
    return {{"unstable", unstable},
            {"role", role},
            {"pivot_of", leader},
            {"stable", stable},
            {"gate", unstable},
            {"echo", unstable},
            {"induction", unstable},
            {"key_lower", lower},
            {"key_upper", upper},
            {"key_codebook", codebook},
            {"value_codebook", codebook},
            {"outlier_share", share},
            {"skew", skew}};
  }
  template <class Call>
  void run(const Call& call, std::size_t rows) {
    std::vector<float> logits[2];
    Engine* engines[] = {&graphs, &eager};
    for (int i = 0; i < 2; ++i) {
      logits[i].resize(rows * static_cast<std::size_t>(vocab));
      REQUIRE(call(*engines[i], View<float, 2>::dense(logits[i].data(), {static_cast<std::int64_t>(rows), vocab})) ==
              Fit::ok);
    }
    CHECK(logits[0] == logits[1]);
    last = logits[0];
  }
  int count_ = 0;
};

// Whether each page of a slot's heads is on the device.
std::vector<bool> pages_there(const Engine& engine, int layer, int slot) {
  const Store::Aside copy = engine.store().set_aside(slot);
  std::vector<bool> out;
  for (int head = 0; head < copy->shape().kv_heads; ++head)
    for (int page = 0; page * copy->shape().page_size < copy->length(layer, 0, head); ++page)
      out.push_back(test::on(*copy, Tier::device, layer, 0, head, page));
  return out;
}

}  // namespace

TEST_CASE("cuda engine: replayed steps equal eager ones, whatever slots and batches") {
  Pair p;
  const int a = p.open(5, 1), b = p.open(20, 2);
  for (int i = 0; i < 5; ++i) p.step({a, b});
  CHECK(p.graphs.replays() == 4);
  CHECK(p.eager.replays() == 0);
  for (int i = 0; i < 3; ++i) p.step({b});
  for (int i = 0; i < 2; ++i) p.step({a});  // other slots, the same graph
  p.step({b, a});
  const auto before = p.graphs.replays();
  CHECK(before == 4 + 2 + 2 + 1);
  const int c = p.open(60, 3);  // buffers grow: graphs are stale
  p.step({b, a});
  CHECK(p.graphs.replays() == before);
  for (int i = 0; i < 3; ++i) p.step({c, a});
  CHECK(p.graphs.replays() == before + 3);
  p.close(a);
  const int d = p.open(9, 4);
  for (int i = 0; i < 3; ++i) p.step({b, c, d});
  CHECK(p.graphs.store().length(0, c, 0) == p.eager.store().length(0, c, 0));
  CHECK(p.graphs.store().positions(1, d, 1) == p.eager.store().positions(1, d, 1));
  CHECK(p.graphs.ledger().total(Tier::device) == p.eager.ledger().total(Tier::device));
  p.graphs.store().check_invariants();
}

TEST_CASE("cuda engine: steps that attend to tokens are replayed") {
  Pair p(test::full_spec(), [] { return std::make_shared<test::TokenReader>(9); });
  const int a = p.open(5, 1), b = p.open(40, 2);
  for (int i = 0; i < 9; ++i) p.step({a, b});
  for (int i = 0; i < 3; ++i) p.step({b});
  CHECK(p.graphs.replays() == 8 + 2);
  CHECK(p.graphs.fired() == p.eager.fired());
  CHECK(p.graphs.fired() > 0);
}

TEST_CASE("cuda engine: attention mass of replayed steps reaches tokens that the capture did not know") {
  // Each step attends to the tokens with the most mass so far, so wrong mass changes the logits.
  class Heavy final : public Policy {
   public:
    Needs needs() const override { return Needs{}.mass(Mass::decode).token_state("mass").capturable(true); }
    void select(const LayerStep& step, Edits& edits, Stream s) override {
      const Scores score = step.kv_head_scores("mass");
      ops::read_state(step.state("mass"), score, s);
      const auto keep = step.scratch<std::int32_t>("heavy", {step.rows(), step.kv_heads()});
      ops::fill_heads(keep, 10, s);
      const auto list = step.list<TokenList>("heavy", 10);
      ops::top_tokens(step.pages, score, keep, nullptr, list, s);
      edits.attend(list, {.last = 3});
    }
    void observe(const LayerStep& step, Edits&, Stream s) override {
      ops::add_mass(step.mass, GroupRule::sum, step.state("mass"), s);
    }
  };
  for (const int max_tokens : {96, 2100}) {
    CAPTURE(max_tokens);
    Pair p(
        test::full_spec(), [] { return std::make_shared<Heavy>(); }, max_tokens);
    const int a = p.open(5, 1), b = p.open(30, 2), steps = cases::quick() ? 14 : 40;
    for (int i = 0; i < steps; ++i) p.step({a, b});
    CHECK(p.graphs.replays() == steps - 1);
  }
}

TEST_CASE("cuda engine: steps of a selecting policy and of one that is done with the prompt are replayed") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "quest" && s.label != "snapkv" && s.label != "quest+int8" && s.label != "snapkv+adakv") continue;
    CAPTURE(s.label);
    ++known;
    Pair p(test::with_budget(s.spec, BudgetAmount::tokens, 40));
    const int a = p.open(50, 1), b = p.open(70, 2);
    for (int i = 0; i < 9; ++i) p.step({a, b});  // past a page's end
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == 8 + 2);
    CHECK(p.graphs.fired() == p.eager.fired());
    CHECK(p.graphs.fired() > 0);
    p.graphs.store().check_invariants();
  }
  CHECK(known == 4);
}

TEST_CASE("cuda engine: every launch of a graph counts what its edits change") {
  const char* name = GENERATE("synthetic/tiny", "synthetic/tiny-wide");  // kernels that choose take the wide heads
  CAPTURE(name);
  test::Subject quest;
  for (const test::Subject& s : test::subjects().list())
    if (s.label == "quest") quest = s;
  REQUIRE(quest.spec.selector);
  auto values = quest.spec.selector->params.values();
  values["dense_layers"] = std::int64_t{1};  // one layer is left
  quest.spec.selector->params = Params(values);
  Pair p(test::with_budget(quest.spec, BudgetAmount::tokens, 40), 0, name);
  const int a = p.open(70, 1);
  for (int i = 0; i < 6; ++i) p.step({a});
  CHECK(p.graphs.replays() == 5);
  CHECK(p.graphs.fired() == 6);
  CHECK(p.eager.fired() == 6);
}

namespace {

// The subject of this label.
test::Subject subject(const std::string& label) {
  for (const test::Subject& s : test::subjects().list())
    if (s.label == label) return s;
  FAIL("no subject " + label);
  return {};
}

PluginUse with(PluginUse use, const std::string& name, const ParamValue& value) {
  auto values = use.params.values();
  values[name] = value;
  use.params = Params(values);
  return use;
}

}  // namespace

TEST_CASE("cuda engine: steps of a schedule, and of a split, are replayed") {
  struct Way {
    const char *scorer, *split;  // split: "" = none
    int every;
    bool minimum = false;  // of adakv
  };
  std::vector<Way> ways{{"h2o", "", 3},        {"tova", "", 3},     {"keydiff", "", 2},        {"scissorhands", "", 4},
                        {"h2o", "adakv", 1},   {"h2o", "adakv", 3}, {"h2o", "adakv", 3, true}, {"h2o", "pyramid", 3},
                        {"h2o", "zigzagkv", 2}};
  if (!cases::quick())
    ways.insert(ways.end(), {{"knorm", "", 5},
                             {"cake", "", 3},
                             {"streaming_llm", "adakv", 1},
                             {"streaming_llm", "pyramid", 1},
                             {"keydiff", "adakv", 2},
                             {"h2o", "cake_layers", 3},
                             {"h2o", "uniform", 1}});
  for (const Way& way : ways)
    for (const auto kind : {BudgetAmount::tokens, BudgetAmount::ratio, BudgetAmount::bytes}) {
      const std::string scorer = way.scorer, split = way.split;
      if (cases::quick() && kind != BudgetAmount::tokens && scorer + split != "h2oadakv") continue;
      CAPTURE(scorer, split, way.every, way.minimum, static_cast<int>(kind));
      PolicySpec spec = test::with_budget(subject(scorer).spec, kind,
                                          kind == BudgetAmount::tokens  ? 40
                                          : kind == BudgetAmount::ratio ? 0.6
                                                                        : 4 * 6 * 768);
      if (scorer == "scissorhands")
        spec.scorer = with(with(*spec.scorer, "window", std::int64_t{4}), "drop", std::int64_t{4});
      spec.schedule.every = way.every;
      if (!split.empty()) spec.split = subject("snapkv+" + split).spec.split;
      if (way.minimum) spec.split = with(*spec.split, "floor_is", std::string("minimum"));
      Pair p(spec);
      REQUIRE(p.graphs.replays() == 0);
      const int a = p.open(33, 1);
      p.step({a});
      const int b = p.open(70, 2);  // its steps are not those of a
      const int steps = cases::quick() ? 15 : 20;
      for (int i = 0; i < steps; ++i) p.step({a, b});
      for (int i = 0; i < 3; ++i) p.step({b});
      // A kind of step runs once without a graph, and once more where the other kind's scratch has moved.
      CHECK(p.graphs.replays() >= steps - 3);
      CHECK(p.graphs.fired() == p.eager.fired());
      CHECK(p.graphs.fired() > 0);
      for (const int slot : {a, b})
        for (const int layer : {0, 1})
          for (const int head : {0, 1})
            CHECK(p.graphs.store().positions_by_place(layer, slot, head) ==
                  p.eager.store().positions_by_place(layer, slot, head));
      CHECK(p.graphs.ledger().total(Tier::device) == p.eager.ledger().total(Tier::device));
      p.graphs.store().check_invariants();
    }
}

TEST_CASE("cuda engine: a row that is not due keeps its tokens, whatever the others do") {
  PolicySpec spec = test::with_budget(subject("h2o").spec, BudgetAmount::tokens, 24);
  spec.schedule.every = 4;
  Pair p(spec);
  const int a = p.open(40, 1);
  p.step({a});
  p.step({a});
  const int b = p.open(50, 2);
  int of_a = 26, of_b = 24;
  for (int i = 0; i < 16; ++i) {
    p.step({a, b});
    of_a = (i + 3) % 4 == 0 ? 24 : of_a + 1;
    of_b = (i + 1) % 4 == 0 ? 24 : of_b + 1;
    CAPTURE(i);
    CHECK(p.graphs.store().length(1, a, 0) == of_a);
    CHECK(p.graphs.store().length(1, b, 1) == of_b);
  }
  CHECK(p.graphs.replays() > 10);
}

TEST_CASE("cuda engine: a selector's pages on the host are replayed under a budget that grows with the text") {
  PolicySpec spec = test::with_budget(subject("quest").spec, BudgetAmount::ratio, 0.6);
  spec.placement = {.tier = Tier::host, .resident = 24};  // the room on the device grows
  Pair p(spec);
  const int a = p.open(30, 1), b = p.open(70, 2);
  for (int i = 0; i < 12; ++i) p.step({a, b});
  for (int i = 0; i < 3; ++i) p.step({b});
  CHECK(p.graphs.replays() == 11 + 2);
  CHECK(p.graphs.fired() == p.eager.fired());
  CHECK(p.graphs.fired() > 0);
  for (const Tier tier : {Tier::device, Tier::host})
    CHECK(p.graphs.store().page_bytes(tier) == p.eager.store().page_bytes(tier));
  p.graphs.store().check_invariants();
}

TEST_CASE("cuda engine: steps whose numbers the host prepares are replayed") {
  PolicySpec mean = subject("h2o").spec;
  mean.scorer = with(*mean.scorer, "mean", true);
  std::vector<PolicySpec> specs;
  for (const char* label : {"arkvale", "flexicache", "freekv"})
    for (const auto kind : {BudgetAmount::ratio, BudgetAmount::bytes})
      specs.push_back(test::with_budget(subject(label).spec, kind, kind == BudgetAmount::ratio ? 0.6 : 4 * 6 * 900));
  for (const char* label : {"sparq", "omnikv", "keyformer", "morphkv", "expected_attention"})
    for (const auto kind : {BudgetAmount::ratio, BudgetAmount::tokens})
      specs.push_back(test::with_budget(subject(label).spec, kind, kind == BudgetAmount::ratio ? 0.6 : 40));
  specs.push_back(test::with_budget(mean, BudgetAmount::tokens, 40));
  for (const char* label : {"twilight", "fastgen"}) specs.push_back(subject(label).spec);
  PolicySpec growing = subject("razor_attention").spec;
  growing.policy = with(with(*growing.policy, "window", std::int64_t{8}), "window_share", 0.3);
  specs.push_back(growing);
  for (const PolicySpec& spec : specs) {
    CAPTURE(spec.name, static_cast<int>(spec.budget.kind));
    PolicySpec each = spec;
    if (spec.name == "expected_attention") each.schedule.every = 1;
    if (spec.name == "twilight") each.policy = with(*spec.policy, "tokens", std::int64_t{0});
    Pair p(each);
    const int a = p.open(30, 1), b = p.open(70, 2);
    const int steps = cases::quick() ? 12 : 20;
    for (int i = 0; i < steps; ++i) p.step({a, b});
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == steps - 1 + 2);
    CHECK(p.graphs.fired() == p.eager.fired());
    CHECK(p.graphs.fired() > 0);
    for (const int slot : {a, b})
      for (const int layer : {0, 1})
        CHECK(p.graphs.store().positions_by_place(layer, slot, 1) ==
              p.eager.store().positions_by_place(layer, slot, 1));
    for (const Tier tier : {Tier::device, Tier::host})
      CHECK(p.graphs.store().page_bytes(tier) == p.eager.store().page_bytes(tier));
    p.graphs.store().check_invariants();
  }
}

TEST_CASE("cuda engine: policies that act on the host at decode steps are not replayed") {
  PolicySpec recalled = subject("h2o").spec;
  recalled.placement = {.tier = Tier::host, .resident = 24};
  for (const PolicySpec& spec : {recalled, subject("clusterkv").spec}) {
    CAPTURE(spec.name);
    Pair p(test::with_budget(spec, BudgetAmount::ratio, 0.6));
    const int a = p.open(50, 1);
    for (int i = 0; i < 3; ++i) p.step({a});
    CHECK(p.graphs.replays() == 0);
  }
}

TEST_CASE("cuda engine: steps under a budget that grows with the text are replayed") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    const bool evicts = s.label == "h2o" || s.label == "window" || s.label == "streaming_llm" || s.label == "tova";
    if (!evicts && s.label != "quest" && s.label != "quest+int8") continue;
    for (const auto kind : {BudgetAmount::ratio, BudgetAmount::bytes}) {
      if (cases::quick() && kind == BudgetAmount::bytes && evicts && s.label != "h2o") continue;
      CAPTURE(s.label, static_cast<int>(kind));
      ++known;
      // synthetic/tiny has 2 layers of 2 KV heads, and a page of 8 tokens takes up to 768 bytes.
      Pair p(test::with_budget(s.spec, kind, kind == BudgetAmount::ratio ? 0.6 : 4 * 6 * 768));
      const int a = p.open(33, 1), b = p.open(70, 2), steps = cases::quick() ? 8 : 14;
      for (int i = 0; i < steps; ++i) p.step({a, b});
      for (int i = 0; i < 3; ++i) p.step({b});
      CHECK(p.graphs.replays() == steps - 1 + 2);
      CHECK(p.graphs.fired() == p.eager.fired());
      CHECK(p.graphs.fired() > 0);
      if (evicts && kind == BudgetAmount::ratio) {
        CHECK(p.graphs.store().length(1, a, 0) == (33 + steps) * 6 / 10);
        CHECK(p.graphs.store().length(1, b, 0) == (70 + steps + 3) * 6 / 10);
      }
      for (const int slot : {a, b})
        for (const int layer : {0, 1})
          CHECK(p.graphs.store().positions_by_place(layer, slot, 1) ==
                p.eager.store().positions_by_place(layer, slot, 1));
      CHECK(p.graphs.ledger().total(Tier::device) == p.eager.ledger().total(Tier::device));
      p.graphs.store().check_invariants();
    }
  }
  CHECK(known == (cases::quick() ? 6 + 3 : 2 * 6));
}

TEST_CASE("cuda engine: a sequence that spills in its steps gives what one gives that spilled at once") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "freekv" && s.label != "flexicache") continue;
    CAPTURE(s.label);
    ++known;
    const PolicySpec spec = test::with_budget(s.spec, BudgetAmount::tokens, 40);
    const std::int64_t heads = 2 * 2, pages = (70 + spec.page_size - 1) / spec.page_size;
    Pair p(spec, heads * (2 * pages + 1));  // a graph's engine has a page left for each head
    const int a = p.open(70, 1), b = p.open(70, 2);
    p.step({a, b});
    p.step({a, b});
    CHECK(p.graphs.store().page_bytes(Tier::host) == 0);
    CHECK(p.graphs.store().spare_bytes() > 0);
    for (int i = 0; i < 16; ++i) p.step({a, b});
    CHECK(p.graphs.store().page_bytes(Tier::host) > 0);
    CHECK(p.graphs.replays() == 18 - 2);  // each kind of step runs once without a graph
    for (int i = 0; i < 3; ++i) p.step({b});
    p.graphs.store().check_invariants();
  }
  CHECK(known == 2);
}

// The 32nd, 64th and 96th steps rank pages anew. A graph holds the last two. Then a third sequence takes all frames.
TEST_CASE("cuda engine: steps that rank pages anew are replayed, and the same pages leave") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "freekv" && s.label != "flexicache") continue;
    CAPTURE(s.label);
    ++known;
    const PolicySpec spec = test::with_budget(s.spec, BudgetAmount::tokens, 40);
    const int tokens = 60, steps = 100, heads = 2 * 2, pages = (tokens + steps) / spec.page_size + 4;
    Pair p(spec, 0, "synthetic/tiny", tokens + steps + 8, [&](EngineOptions& o, bool) {
      o.spill = Spill::pressure;
      o.device_limit = heads * pages * ops::make_layout(DType::bf16, CodecSpec{}, spec.page_size, 16, 0).bytes;
    });
    const int a = p.open(tokens, 1);
    for (int i = 0; i < steps; ++i) p.step({a});
    CHECK(p.graphs.store().spill_rounds() == 0);
    CHECK(p.graphs.replays() == steps - 2);  // each kind of step runs once without a graph
    p.open(5 * spec.page_size, 2);
    CHECK(p.graphs.store().spill_rounds() > 0);
    CHECK(p.graphs.store().spill_rounds() == p.eager.store().spill_rounds());
    for (int layer = 0; layer < 2; ++layer) CHECK(pages_there(p.graphs, layer, a) == pages_there(p.eager, layer, a));
    p.graphs.store().check_invariants();
  }
  CHECK(known == 2);
}

TEST_CASE("cuda engine: layers that share launches of their observe give what each gives alone") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "freekv" && s.label != "flexicache") continue;
    CAPTURE(s.label);
    ++known;
    PolicySpec spec = test::with_budget(s.spec, BudgetAmount::tokens, 200);
    spec.page_size = 16;  // attention makes the choice then
    struct Way {
      int layers;
      Spill spill;
      bool capped;
    };
    // Groups of one layer, of two, of three at most, and of as many as the scratch memory holds.
    std::vector<Way> ways{{2, Spill::always, false}, {8, Spill::always, false}, {8, Spill::pressure, true}};
    if (!cases::quick())
      ways.insert(ways.end(), {{1, Spill::always, false}, {8, Spill::always, true}, {8, Spill::pressure, false}});
    const int steps = cases::quick() ? 6 : 20;
    const int longer = cases::quick() ? 300 : 700, shorter = cases::quick() ? 270 : 450;  // more pages than a tile has
    for (const auto& [layers, spill, capped] : ways) {
      CAPTURE(layers, spill == Spill::always, capped);
      Pair p(spec, 0, "synthetic/tiny-deep", 800,
             [&, layers = layers, spill = spill, capped = capped](EngineOptions& o, bool) {
               o.layers_beside = layers, o.spill = spill;
               if (capped) o.scratch_limit = 1 << 20;
             });
      const auto open = [&, spill = spill](int tokens, unsigned seed) {  // a cache comes back spilled
        return spill == Spill::always ? p.open_once(tokens, seed) : p.open(tokens, seed);
      };
      const int a = open(longer, 1), b = open(shorter, 2);
      const auto moved = [](Engine& e) { return e.ledger().moved_total(Tier::device); };
      const auto before = std::pair(moved(p.eager), p.eager.fired()),
                 before_graphs = std::pair(moved(p.graphs), p.graphs.fired());
      for (int i = 0; i < steps; ++i) p.step({a, b});
      CHECK(p.graphs.replays() == steps - 1);
      const auto fired = p.eager.fired() - before.second;
      CHECK(moved(p.graphs) - before_graphs.first == moved(p.eager) - before.first);
      CHECK(p.graphs.fired() - before_graphs.second == fired);
      if (spill == Spill::always) CHECK(fired > 0);
      CHECK(fired <= 2 * 8 * steps);  // an edit counts once for all its heads, and a layer has two at most
      p.graphs.store().check_invariants();
    }
  }
  CHECK(known == 2);
}

TEST_CASE("cuda engine: layers whose checks for drift share launches fetch what each fetches alone") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "heterocache") continue;
    ++known;
    PolicySpec spec = test::with_budget(s.spec, BudgetAmount::ratio, 0.6);
    auto values = spec.policy->params.values();
    values["threshold"] = 1.0;
    values["check_every"] = values["window"] = std::int64_t{2};
    spec.policy->params = Params(values);
    for (const int layers : {1, 2}) {
      CAPTURE(layers);
      Pair p(spec, 0, "synthetic/tiny", 96, [&](EngineOptions& o, bool) { o.layers_beside = layers; });
      const int a = p.open(70, 1), b = p.open(45, 2);
      for (int i = 0; i < 12; ++i) p.step({a, b});
      CHECK(p.graphs.replays() == 11);
      CHECK(p.graphs.ledger().moved_total(Tier::device) == p.eager.ledger().moved_total(Tier::device));
      CHECK(p.graphs.ledger().moved_total(Tier::device) > 0);
      for (int layer = 0; layer < p.model->config.layers; ++layer)
        for (const int slot : {a, b})
          CHECK(p.graphs.store().positions_by_place(layer, slot, 1) ==
                p.eager.store().positions_by_place(layer, slot, 1));
      p.graphs.store().check_invariants();
    }
  }
  CHECK(known == 1);
}

TEST_CASE("cuda engine: pages that the host copies give what kernels give") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "quest" && s.label != "freekv" && s.label != "flexicache") continue;
    CAPTURE(s.label);
    ++known;
    PolicySpec spec = test::with_budget(s.spec, BudgetAmount::tokens, 40);
    if (s.label == "quest") spec.placement = {.tier = Tier::host, .resident = 24};
    Pair p(spec, 0, "synthetic/tiny", 96, [](EngineOptions& o, bool graphs) { o.copy_by_host = !graphs; });
    const int a = p.open(70, 1), b = p.open(45, 2);
    for (int i = 0; i < 6; ++i) p.step({a, b});
    CHECK(p.eager.store().page_bytes(Tier::host) > 0);
    CHECK(p.eager.store().page_bytes(Tier::host) == p.graphs.store().page_bytes(Tier::host));
    p.eager.store().check_invariants();
  }
  CHECK(known == 3);
}

TEST_CASE("cuda engine: steps that evict are replayed") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "h2o" && s.label != "window" && s.label != "streaming_llm" && s.label != "tova" &&
        s.label != "cake" && s.label != "raas_tokens")
      continue;
    CAPTURE(s.label);
    ++known;
    Pair p(test::with_budget(s.spec, BudgetAmount::tokens, 40));
    const int a = p.open(30, 1), b = p.open(70, 2);  // a reaches the budget in its steps
    const int steps = cases::quick() ? 13 : 18;
    for (int i = 0; i < steps; ++i) p.step({a, b});
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == steps - 1 + 2);
    CHECK(p.graphs.fired() == p.eager.fired());
    CHECK(p.graphs.store().length(1, a, 0) == 40);
    for (const int slot : {a, b})
      for (const int layer : {0, 1})
        CHECK(p.graphs.store().positions_by_place(layer, slot, 1) ==
              p.eager.store().positions_by_place(layer, slot, 1));
    CHECK(p.graphs.ledger().total(Tier::device) == p.eager.ledger().total(Tier::device));
    p.graphs.store().check_invariants();
  }
  CHECK(known == 6);
}

TEST_CASE("cuda engine: all layers of a graph's step evict in one launch") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    const bool streams = s.label == "duo_attention";
    if (!streams && s.label != "h2o" && s.label != "window" && s.label != "streaming_llm" && s.label != "keyformer")
      continue;
    CAPTURE(s.label);
    ++known;
    PolicySpec spec = streams ? s.spec : test::with_budget(s.spec, BudgetAmount::tokens, 40);
    spec.page_size = 16;
    Pair p(spec, 0, "synthetic/tiny-deep", 120);
    const int a = p.open(30, 1), b = p.open(70, 2), steps = cases::quick() ? 12 : 18;
    const int layers = p.model->config.layers;
    {
      const test::JoinedLaunches launches;
      for (int i = 0; i < steps; ++i) p.step({a, b});
      // Those of the step in front of the graph, of the graph's capture, and of the other engine, which has none.
      const auto count = [](const std::vector<int>& all, int n) { return std::count(all.begin(), all.end(), n); };
      CHECK(count(launches.evictions(), layers) == 2);
      CHECK(count(launches.evictions(), 1) == steps * layers);
      CHECK(std::ssize(launches.evictions()) == 2 + steps * layers);
    }
    CHECK(p.graphs.replays() == steps - 1);
    CHECK(p.graphs.fired() == p.eager.fired());
    for (int layer = 0; layer < layers; ++layer)
      for (const int slot : {a, b}) {
        CHECK(p.graphs.store().positions_by_place(layer, slot, 1) ==
              p.eager.store().positions_by_place(layer, slot, 1));
        CHECK(test::stored_tokens(*p.graphs.store().set_aside(slot), layer, 0, 1) ==
              test::stored_tokens(*p.eager.store().set_aside(slot), layer, 0, 1));
      }
    p.graphs.store().check_invariants();
  }
  CHECK(known == 5);
}

namespace {

// Every token's state, keys and values, of all heads of these slots, in both engines.
void check_tokens(const Pair& p, const std::vector<int>& slots) {
  for (const int slot : slots) {
    const Store::Aside graphs = p.graphs.store().set_aside(slot), eager = p.eager.store().set_aside(slot);
    for (int layer = 0; layer < p.model->config.layers; ++layer)
      for (int head = 0; head < p.model->config.kv_heads; ++head) {
        CAPTURE(slot, layer, head);
        CHECK(test::stored_tokens(*graphs, layer, 0, head) == test::stored_tokens(*eager, layer, 0, head));
      }
  }
}

// Ranks by mass that core sums in token state. With `reads`, observe() copies these sums to a second column.
class ByMass final : public Scorer {
 public:
  explicit ByMass(bool reads) : reads_(reads) {}
  Needs needs() const override {
    return Needs{}.mass_into("sum", GroupRule::mean, Mass::all).token_state("seen").capturable(true);
  }
  const char* column() const override { return "sum"; }
  bool steady_score() const override { return true; }
  int every() const override { return 1; }
  void score(const LayerKv& kv, Scores out, Stream s) override { ops::read_state(kv.state("sum"), out, s); }
  void observe(const LayerKv& kv, Stream s) override {
    if (!reads_) return;
    const Scores sums = kv.kv_head_scores("sums");
    ops::read_state(kv.state("sum"), sums, s);
    ops::blend_state(kv.state("seen"), 0, sums, 1, s);
  }

 private:
  bool reads_;
};

std::unique_ptr<Policy> by_mass(bool reads) {
  Composition parts;
  parts.scorer =
      Instance<Scorer>(new ByMass(reads), PluginDeleter{nullptr, [](void* p) { delete static_cast<Scorer*>(p); }});
  return compose(std::move(parts));
}

}  // namespace

TEST_CASE("cuda engine: mass of all layers of a graph's step comes in one launch, in front of the evictions") {
  const bool reads = GENERATE(false, true);
  CAPTURE(reads);
  PolicySpec spec = test::with_budget(test::full_spec(), BudgetAmount::tokens, 40);
  spec.page_size = 16;
  Pair p(
      spec, [&] { return by_mass(reads); }, 120, 0, "synthetic/tiny-deep");
  const int layers = p.model->config.layers, steps = cases::quick() ? 12 : 18;
  const int a = p.open(30, 1), b = p.open(70, 2);
  {
    const test::JoinedLaunches launches;
    for (int i = 0; i < steps; ++i) p.step({a, b});
    // Those of the step in front of the graph, and of the graph's capture. The other engine's attention adds the mass.
    const std::vector<int> all =
        reads ? std::vector<int>(static_cast<std::size_t>(2 * layers), 1) : std::vector<int>(2, layers);
    CHECK(launches.masses() == all);
    const std::string step = reads ? std::string(static_cast<std::size_t>(layers), 'm') + 'e' : "me",
                      eager(static_cast<std::size_t>(layers), 'e');
    CHECK(launches.order().starts_with(step + eager + step + eager));
  }
  CHECK(p.graphs.replays() == steps - 1);
  check_tokens(p, {a, b});
  for (int i = 0; i < 3; ++i) p.step({b});
  const int c = p.open(50, 3);
  for (int i = 0; i < 4; ++i) p.step({c, b, a});
  CHECK(p.graphs.replays() == steps - 1 + 2 + 3);
  CHECK(p.graphs.fired() == p.eager.fired());
  check_tokens(p, {a, b, c});
  p.graphs.store().check_invariants();
}

TEST_CASE("cuda engine: mass that may wait comes before the tokens of its layer move, and before finish_step") {
  // Says that its mass may wait. Then observe() evicts the oldest token by a list, or finish_step copies the sums.
  struct Hasty final : Policy, TakesMassLate {
    bool evicts;
    explicit Hasty(bool e) : evicts(e) {}
    bool takes_mass_late() const override { return true; }
    Needs needs() const override {
      return Needs{}
          .mass_into("sum", GroupRule::max, Mass::decode)
          .token_state("seen")
          .capturable(true)
          .all_layers(true);
    }
    void observe(const LayerStep& step, Edits& edits, Stream s) override {
      if (!evicts) return;
      edits.evict(oldest_token(step, s));
    }
    void finish_step(const Step& step, Edits&, Stream s) override {
      const Scores sums =
          take_scratch<float>(*step.workspace, "sums", {step.pages.rows, step.pages.kv_heads, step.max_length});
      ops::read_state(step.state("sum"), sums, s);
      ops::blend_state(step.state("seen"), 0, sums, 1, s);
    }
  };
  const bool evicts = GENERATE(false, true);
  CAPTURE(evicts);
  PolicySpec spec = test::full_spec();
  spec.page_size = 16;
  Pair p(
      spec, [&] { return std::make_shared<Hasty>(evicts); }, 120, 0, "synthetic/tiny-deep");
  const int layers = p.model->config.layers, steps = cases::quick() ? 6 : 12;
  const int a = p.open(30, 1), b = p.open(70, 2);
  const test::JoinedLaunches launches;
  for (int i = 0; i < steps; ++i) p.step({a, b});
  CHECK(launches.masses() ==
        (evicts ? std::vector<int>(static_cast<std::size_t>(2 * layers), 1) : std::vector<int>(2, layers)));
  CHECK(p.graphs.replays() == steps - 1);
  check_tokens(p, {a, b});
}

TEST_CASE("cuda engine: steps that read lists of an amount of their own, or chunks, are replayed") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    const bool takes_budget = s.label == "shadowkv" || s.label == "quest+twilight";
    if (!takes_budget && s.label != "twilight" && s.label != "lserve" && s.label != "magicpig" &&
        s.label != "infinigen")
      continue;
    CAPTURE(s.label);
    ++known;
    Pair p(takes_budget ? test::with_budget(s.spec, BudgetAmount::tokens, 48) : s.spec);
    const int a = p.open(30, 1), b = p.open(70, 2);  // a outgrows the amounts of two in its steps
    for (int i = 0; i < 18; ++i) p.step({a, b});
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == 17 + 2);
    CHECK(p.graphs.fired() == p.eager.fired());
    CHECK(p.graphs.fired() > 0);
    p.graphs.store().check_invariants();
  }
  CHECK(known == 6);
}

TEST_CASE("cuda engine: steps that read made-up tokens, and let tokens join them, are replayed") {
  // Attention reads the mean of all that left. With `listed` it reads few of the other tokens.
  class Folding final : public Policy {
   public:
    explicit Folding(bool listed) : listed_(listed) {}
    Needs needs() const override { return Needs{}.own_amount(true).capturable(true); }
    void attach(const Shape& s, const BudgetAmount&, Workspace& w) override {
      made_ = KeptMadeUp("mean", s, 1, w);
      keep_ = HeadConstants<std::int32_t>(
          "keep", s, std::vector<std::int32_t>(static_cast<std::size_t>(s.layers * s.kv_heads), 20), w);
      const std::vector<Pins> pins(static_cast<std::size_t>(s.max_slots), {.first = 3});
      pins_ = static_cast<const Pins*>(w.constant("pins", pins.data(), pins.size() * sizeof(Pins)));
    }
    void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override { fold(kv, edits, s); }
    void select(const LayerStep& step, Edits& edits, Stream s) override {
      edits.read_made_up(made_.of(step));
      if (!listed_) return;
      const Scores score = step.kv_head_scores("recency");
      ops::recency(step.pages, score, s);
      const auto keep = step.scratch<std::int32_t>("newest", {step.rows(), step.kv_heads()});
      ops::fill_heads(keep, 8, s);
      const auto list = step.list<TokenList>("newest", 8);
      ops::top_tokens(step.pages, score, keep, nullptr, list, s);
      edits.attend(list);
    }
    void observe(const LayerStep& step, Edits& edits, Stream s) override { fold(step, edits, s); }

   private:
    void fold(const LayerKv& kv, Edits& edits, Stream s) const {
      const Surplus surplus{.keep = {keep_.of(kv), {kv.rows(), kv.kv_heads()}, {0, 1}}, .pins = pins_};
      ops::fold_surplus(kv.pages, surplus, 0, made_.of(kv), s);
      edits.evict_surplus(surplus);
    }
    bool listed_;
    KeptMadeUp made_;
    HeadConstants<std::int32_t> keep_;
    const Pins* pins_ = nullptr;
  };
  for (const bool listed : {false, true}) {
    CAPTURE(listed);
    Pair p(test::full_spec(), [&] { return std::make_shared<Folding>(listed); });
    const int a = p.open(12, 1), b = p.open(40, 2);  // a starts to lose tokens in its steps
    for (int i = 0; i < 14; ++i) p.step({a, b});
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == 13 + 2);
    CHECK(p.graphs.store().length(1, a, 0) == 20);
  }
}

TEST_CASE("cuda engine: steps that place pages are replayed") {
  int known = 0;
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "freekv" && s.label != "flexicache" && s.label != "arkvale" && s.label != "infllm") continue;
    CAPTURE(s.label);
    ++known;
    Pair p(test::with_budget(s.spec, BudgetAmount::tokens, 40));
    const int a = p.open(30, 1), b = p.open(70, 2);  // a outgrows the budget in its steps
    for (int i = 0; i < 18; ++i) p.step({a, b});
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == 17 + 2);
    CHECK(p.graphs.fired() == p.eager.fired());
    CHECK(p.graphs.fired() > 0);
    for (const Tier tier : {Tier::device, Tier::host}) {
      CHECK(p.graphs.store().page_bytes(tier) == p.eager.store().page_bytes(tier));
      CHECK(p.graphs.ledger().moved_total(tier) == p.eager.ledger().moved_total(tier));
    }
    CHECK(p.graphs.store().page_bytes(Tier::host) > 0);
    p.graphs.store().check_invariants();
  }
  CHECK(known == 4);
}

TEST_CASE("cuda engine: a host tier that fills up is out of memory, with graphs or without") {
  for (const test::Subject& s : test::subjects().list()) {
    if (s.label != "freekv") continue;
    const PolicySpec spec = test::with_budget(s.spec, BudgetAmount::tokens, 40);
    for (const bool graphs : {true, false}) {
      CAPTURE(graphs);
      Pair p(spec);
      EngineOptions o = Pair::options(spec, 200);
      o.graphs = graphs;
      // The frames of a prompt of 64 tokens and three pages more of every head.
      const Shape& shape = p.graphs.store().shape();
      const std::int64_t heads = std::int64_t{shape.layers} * shape.kv_heads;
      o.host_limit = heads * (64 / shape.page_size + 3) * p.graphs.full_bytes(shape.page_size) / heads;
      Engine engine(p.model, test::subjects().policy(spec), o);
      const int slot = engine.open();
      std::vector<float> logits(static_cast<std::size_t>(p.vocab));
      const auto out = View<float, 2>::dense(logits.data(), {1, p.vocab});
      const std::vector<int> prompt = test::test_text(64, p.vocab, 3);
      REQUIRE(engine.prefill(slot, prompt, true, out) == Fit::ok);
      int steps = 0;
      const std::vector<int> token{5};
      while (steps < 120 && engine.step({slot}, token, out) == Fit::ok) ++steps;
      CHECK(steps == 4 * shape.page_size - 1);  // the step that fills a fourth page finds no frame for its copy
      CHECK((engine.replays() > 0) == graphs);
    }
  }
}

TEST_CASE("cuda engine: the first pages that a spilled head fills count against the host until they are due") {
  const int page = 8, period = 16;  // steps between two place edits of a head
  const PolicySpec spec =
      test::policy_of("{flexicache: {unstable_heads: false, rerank_every: 16, budget: {tokens: 40}}}", page);
  for (const bool graphs : {true, false}) {
    CAPTURE(graphs);
    Pair p(spec);
    const auto run = [&](std::int64_t pages_of_host) {
      EngineOptions o = Pair::options(spec, 200);
      o.graphs = graphs;
      o.host_limit = p.graphs.full_bytes(page) * pages_of_host;
      return Engine(p.model, test::subjects().policy(spec), o);
    };
    const std::vector<int> prompt = test::test_text(64, p.vocab, 3), token{5};
    std::vector<std::int32_t> likeliest(1);
    {
      Engine engine = run(1);
      const int slot = engine.open();
      REQUIRE(engine.prefill(slot, {prompt.data(), 4}, true, {}) == Fit::ok);
      int steps = 0;
      while (steps < 40 && engine.step({slot}, token, StepResult(likeliest)) == Fit::ok) ++steps;
      CHECK(steps == period);  // the edit that is due then finds frames for half of the pages
    }
    Engine engine = run(64 / page);
    const int slot = engine.open(), other = engine.open();
    REQUIRE(engine.prefill(slot, {prompt.data(), 4}, true, {}) == Fit::ok);
    for (int i = 0; i < period / 2; ++i) REQUIRE(engine.step({slot}, token, StepResult(likeliest)) == Fit::ok);
    CHECK(engine.host_used_bytes() == 0);
    CHECK(engine.host_room_bytes() == engine.full_bytes(64) - engine.full_bytes(page));
    CHECK(engine.prefill(other, prompt, true, {}) == Fit::out_of_memory);
    engine.close(other);
    for (int i = 0; i < period; ++i) REQUIRE(engine.step({slot}, token, StepResult(likeliest)) == Fit::ok);
    CHECK(engine.host_used_bytes() == engine.full_bytes(2 * page));
    engine.store().check_invariants();
    engine.close(slot);
    CHECK(engine.host_room_bytes() == engine.full_bytes(64));
  }
}

TEST_CASE("cuda engine: a graph is captured anew for sequences that it has no room for") {
  Pair p(
      test::full_spec(), [] { return test::subjects().policy(test::full_spec()); }, 2100);
  const int a = p.open(30, 1);
  for (int i = 0; i < 3; ++i) p.step({a});
  CHECK(p.graphs.replays() == 2);
  const int b = p.open_once(1030, 2);  // the graph of 30 tokens has room for 1024
  for (int i = 0; i < 3; ++i) p.step({b});
  for (int i = 0; i < 2; ++i) p.step({a});  // it has room for shorter ones
  CHECK(p.graphs.replays() == 2 + 2 + 2);
}

TEST_CASE("cuda engine: steps that move pages by single edits are replayed") {
  // All pages but two live on the host. A step brings its best pages, and lets them leave again.
  struct Fetcher final : Policy {
    Deadline after;
    explicit Fetcher(Deadline when) : after(when) {}
    Needs needs() const override { return Needs{}.page_summary(Summary::min_max).capturable(true); }
    void leave(const LayerKv& kv, Edits& edits, Deadline when, Stream s) {
      const auto tokens = kv.scratch<std::int32_t>("tokens", {kv.rows(), kv.kv_heads()});
      ops::lengths(kv.pages, tokens, s);
      const int pages = kv.shape->max_pages();
      const auto down = kv.list<PageList>("down", pages), out = kv.list<PageList>("out", pages);
      ops::older_pages(tokens, nullptr, kv.shape->page_size, 1, down, s);
      ops::older_pages(tokens, nullptr, kv.shape->page_size, 2, out, s);
      edits.offload(down, when);
      edits.drop(Tier::device, out, when);
    }
    void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
      if (kv.last[0]) leave(kv, edits, {}, s);
    }
    void select(const LayerStep& step, Edits& edits, Stream s) override {
      const auto best = step.list<PageList>("best", 4);
      ops::choose_pages(step, step.queries, PageChoice{}, ops::PageCounts{.same = 4}, best, s);
      edits.recall(best, {Deadline::this_attention});
      edits.attend(best, {.last = 9});
    }
    void observe(const LayerStep& step, Edits& edits, Stream s) override { leave(step, edits, after, s); }
  };
  for (const Deadline::Kind kind : {Deadline::next_attention, Deadline::next_step}) {
    CAPTURE(static_cast<int>(kind));
    Pair p(test::full_spec(), [&] { return std::make_shared<Fetcher>(Deadline{kind}); });
    const int a = p.open(30, 1), b = p.open(70, 2);
    for (int i = 0; i < 18; ++i) p.step({a, b});
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == 17 + 2);
    for (const Tier tier : {Tier::device, Tier::host}) {
      CHECK(p.graphs.store().page_bytes(tier) == p.eager.store().page_bytes(tier));
      CHECK(p.graphs.ledger().moved_total(tier) == p.eager.ledger().moved_total(tier));
      CHECK(p.graphs.ledger().moved_total(tier) > 0);
    }
    p.graphs.store().check_invariants();
  }
}

TEST_CASE("cuda engine: steps that fetch tokens of archives are replayed") {
  // Of each head the newest tokens stay. In every second step of a sequence its even heads fetch some tokens of their
  // archives, in every third all heads fetch others. One list is scratch, the other lasts. early > 0: select() of so
  // many layers fetches by the list that lasts, so that layers share launches, and nobody fetches by the other one.
  struct Fetcher final : Policy {
    Deadline when;
    TokenList lasting;
    HeadClass odd;
    bool beside;
    int early;
    Fetcher(Deadline w, bool b, int e) : when(w), beside(b), early(e) {}
    Needs needs() const override { return Needs{}.archive(true).steps(true).observe_beside(beside).capturable(true); }
    void attach(const Shape& s, const BudgetAmount&, Workspace& w) override {
      std::vector<std::uint8_t> marks;
      for (int i = 0; i < s.layers * s.kv_heads; ++i) marks.push_back(i % s.kv_heads % 2);
      odd = HeadClass("odd", s, marks, w);
      std::vector<std::int32_t> places, counts(static_cast<std::size_t>(s.max_slots * s.kv_heads), 3);
      for (std::size_t i = 0; i < counts.size(); ++i) places.insert(places.end(), {0, 2, 5 + static_cast<int>(i)});
      const auto constant = [&](const std::vector<std::int32_t>& of) {
        return static_cast<std::int32_t*>(
            const_cast<void*>(w.constant("list", of.data(), of.size() * sizeof(std::int32_t))));
      };
      lasting.index = View<std::int32_t, 3>::dense(constant(places), {s.max_slots, s.kv_heads, 3});
      lasting.count = View<std::int32_t, 2>::dense(constant(counts), {s.max_slots, s.kv_heads});
    }
    static TokenList newest(const LayerKv& kv, int many, Stream s) {
      const Scores age = kv.kv_head_scores("age");
      ops::recency(kv.pages, age, s);
      const auto keep = kv.scratch<std::int32_t>("keep", {kv.rows(), kv.kv_heads()});
      ops::fill_heads(keep, many, s);
      const TokenList list = kv.list<TokenList>("list", many);
      ops::top_tokens(kv.pages, age, keep, nullptr, list, s);
      return list;
    }
    void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
      if (!kv.last[0]) return;
      edits.archive({});
      edits.evict_rest(newest(kv, 9, s));
    }
    void fetch_lasting(const LayerStep& step, Edits& edits) const {
      TokenList list = lasting;
      list.slots = step.pages.slots;
      edits.fetch(list, {Heads::every(step.steps, 3), when});
    }
    void select(const LayerStep& step, Edits& edits, Stream) override {
      if (step.layer < early) fetch_lasting(step, edits);
    }
    void observe(const LayerStep& step, Edits& edits, Stream s) override {
      if (early > 0) return;
      edits.fetch(newest(step, 3, s), {Heads::every(step.steps, 2).except(odd.of(step)), when});
      fetch_lasting(step, edits);
    }
  };
  struct Way {
    Deadline::Kind kind;
    bool beside;
    int layers = 8, early = 0;
  };
  for (const auto& [kind, beside, layers, early] :
       {Way{Deadline::next_attention, false}, Way{Deadline::next_step, false}, Way{Deadline::next_attention, true},
        Way{Deadline::next_attention, true, 1}, Way{Deadline::next_attention, true, 8, 6},
        Way{Deadline::next_attention, true, 8, 2}}) {
    CAPTURE(static_cast<int>(kind), beside, layers, early);
    Pair p(
        test::full_spec(),
        [&, kind = kind, beside = beside, early = early] {
          return std::make_shared<Fetcher>(Deadline{kind}, beside, early);
        },
        96, 0, early > 0 ? "synthetic/tiny-deep" : "synthetic/tiny",
        [layers = layers](EngineOptions& o, bool) { o.layers_beside = layers; });
    const int a = p.open(30, 1), b = p.open(70, 2);
    for (int i = 0; i < 12; ++i) p.step({a, b});
    for (int i = 0; i < 5; ++i) p.step({b});
    CHECK(p.graphs.replays() == 11 + 4);
    // An edit for the end of a step counts once for each row, or once for all rows of a graph's step.
    CHECK(p.graphs.fired() > 0);
    if (kind == Deadline::next_attention) CHECK(p.graphs.fired() == p.eager.fired());
    for (const Tier tier : {Tier::device, Tier::host}) {
      CHECK(p.graphs.store().page_bytes(tier) == p.eager.store().page_bytes(tier));
      CHECK(p.graphs.ledger().moved_total(tier) == p.eager.ledger().moved_total(tier));
      CHECK(p.graphs.ledger().moved_total(tier) > 0);
    }
    for (const int slot : {a, b})
      for (int head = 0; head < p.model->config.kv_heads; ++head) {
        CHECK(p.graphs.store().archived(1, slot, head) == (slot == a ? 30 : 70));
        for (int layer = 0; layer < p.model->config.layers; ++layer)
          CHECK(p.graphs.store().positions_by_place(layer, slot, head) ==
                p.eager.store().positions_by_place(layer, slot, head));
      }
    p.graphs.store().check_invariants();
    p.close(a);
    p.close(b);
    CHECK(p.graphs.store().page_bytes(Tier::host) == 0);
  }
}

TEST_CASE("cuda engine: edits of tokens for the end of a step are replayed") {
  // The two oldest tokens change places, or leave, or all but the newest ones leave.
  struct Editor final : Policy {
    Edit::Verb verb;
    Deadline when;
    Editor(Edit::Verb v, Deadline d) : verb(v), when(d) {}
    Needs needs() const override { return Needs{}.capturable(true); }
    void observe(const LayerStep& step, Edits& edits, Stream s) override {
      const Scores age = step.kv_head_scores("age");
      ops::recency(step.pages, age, s);
      if (verb != Edit::evict_rest) ops::negate(age, s);
      const int many = verb == Edit::evict_rest ? 40 : 2;
      const auto keep = step.scratch<std::int32_t>("keep", {step.rows(), step.kv_heads()});
      ops::fill_heads(keep, many, s);
      const auto list = step.list<TokenList>("list", many);
      ops::top_tokens(step.pages, age, keep, nullptr, list, s);
      if (verb == Edit::evict) edits.evict(list, when);
      if (verb == Edit::evict_rest) edits.evict_rest(list, when);
      if (verb == Edit::move) edits.move(list, when);
    }
  };
  for (const Edit::Verb verb : {Edit::evict, Edit::evict_rest, Edit::move})
    for (const Deadline::Kind kind : {Deadline::next_attention, Deadline::next_step}) {
      CAPTURE(static_cast<int>(verb), static_cast<int>(kind));
      Pair p(test::full_spec(), [&] { return std::make_shared<Editor>(verb, Deadline{kind}); });
      const int a = p.open(50, 1), b = p.open(70, 2);
      for (int i = 0; i < 9; ++i) p.step({a, b});
      for (int i = 0; i < 3; ++i) p.step({b});
      CHECK(p.graphs.replays() == 8 + 2);
      CHECK(p.graphs.fired() > 0);
      for (const int layer : {0, 1})
        CHECK(p.graphs.store().positions_by_place(layer, b, 1) == p.eager.store().positions_by_place(layer, b, 1));
      p.graphs.store().check_invariants();
    }
}

TEST_CASE("cuda engine: an edit for the end of a step comes neither earlier nor later") {
  // select evicts the oldest token, and observe notes how many there are.
  struct Watcher final : Policy {
    Deadline when;
    std::int32_t* noted = nullptr;  // [layer, row, kv_head]
    explicit Watcher(Deadline d) : when(d) {}
    Needs needs() const override { return Needs{}.capturable(true); }
    void attach(const Shape& s, const BudgetAmount&, Workspace& w) override {
      const std::vector<std::int32_t> zeros(static_cast<std::size_t>(s.layers * s.max_slots * s.kv_heads));
      noted = const_cast<std::int32_t*>(
          static_cast<const std::int32_t*>(w.constant("noted", zeros.data(), zeros.size() * sizeof(std::int32_t))));
    }
    void select(const LayerStep& step, Edits& edits, Stream s) override { edits.evict(oldest_token(step, s), when); }
    void observe(const LayerStep& step, Edits&, Stream s) override {
      std::int32_t* of_layer = noted + step.layer * step.shape->max_slots * step.kv_heads();
      ops::lengths(step.pages, View<std::int32_t, 2>::dense(of_layer, {step.rows(), step.kv_heads()}), s);
    }
  };
  for (const Deadline::Kind kind : {Deadline::next_attention, Deadline::next_step}) {
    CAPTURE(static_cast<int>(kind));
    std::vector<std::shared_ptr<Watcher>> made;
    Pair p(test::full_spec(), [&] { return made.emplace_back(std::make_shared<Watcher>(Deadline{kind})); });
    const int a = p.open(30, 1), before = p.graphs.store().length(0, a, 0);
    for (int i = 0; i < 5; ++i) {
      p.step({a});
      CHECK(p.graphs.store().length(1, a, 1) == before);  // one came, one left
      for (const auto& policy : made) {
        std::int32_t there = 0;
        copy_memory(&there, policy->noted, sizeof there, p.graphs.store().stream());
        synchronize(p.graphs.store().stream());
        CHECK(there == before + (kind == Deadline::next_step));
      }
    }
    CHECK(p.graphs.replays() == 4);
  }
}

TEST_CASE("cuda engine: edits of select take effect before this attention, or right behind it") {
  // The token in place 0 leaves, or all but 20 do, or places 0 and 10 change. Attention reads all tokens, or under
  // `move` what lies in places 0 and 5, and the newest.
  struct Editor final : Policy {
    Edit::Verb verb;
    bool edits_at_all, in_observe;
    Deadline when;
    TokenList list, read;
    Editor(Edit::Verb v, bool all, bool observe, Deadline d)
        : verb(v), edits_at_all(all), in_observe(observe), when(d) {}
    Needs needs() const override { return Needs{}.capturable(true); }
    static TokenList constant(const char* name, const std::vector<std::int32_t>& places, const Shape& s, Workspace& w) {
      std::vector<std::int32_t> all;
      for (int h = 0; h < s.kv_heads; ++h) all.insert(all.end(), places.begin(), places.end());
      const std::vector<std::int32_t> counts(static_cast<std::size_t>(s.kv_heads), std::ssize(places));
      const auto lasts = [&](const std::string& what, const std::vector<std::int32_t>& of) {
        return static_cast<std::int32_t*>(
            const_cast<void*>(w.constant(what.c_str(), of.data(), of.size() * sizeof of[0])));
      };
      TokenList out;
      out.index = View<std::int32_t, 3>::dense(lasts(name, all), {1, s.kv_heads, std::ssize(places)});
      out.count = View<std::int32_t, 2>::dense(lasts(std::string(name) + " counts", counts), {1, s.kv_heads});
      return out;
    }
    void attach(const Shape& s, const BudgetAmount&, Workspace& w) override {
      std::vector<std::int32_t> kept;
      for (int place = 1; place <= 20; ++place) kept.push_back(place);
      list = constant("list",
                      verb == Edit::evict  ? std::vector{0}
                      : verb == Edit::move ? std::vector{0, 10}
                                           : kept,
                      s, w);
      read = constant("read", {0, 5}, s, w);
    }
    void edit(Edits& edits) const {
      if (verb == Edit::evict) edits.evict(list, when);
      if (verb == Edit::evict_rest) edits.evict_rest(list, when);
      if (verb == Edit::move) edits.move(list, when);
    }
    void select(const LayerStep&, Edits& edits, Stream) override {
      if (edits_at_all && !in_observe) edit(edits);
      if (verb == Edit::move) edits.attend(read, {.last = 3});
    }
    void observe(const LayerStep&, Edits& edits, Stream) override {
      if (edits_at_all && in_observe) edit(edits);
    }
  };
  for (const Edit::Verb verb : {Edit::evict, Edit::evict_rest, Edit::move}) {
    CAPTURE(static_cast<int>(verb));
    const auto logits = [&](bool edits, bool in_observe, Deadline when) {
      Pair p(test::full_spec(), [&] { return std::make_shared<Editor>(verb, edits, in_observe, when); });
      const int a = p.open(30, 1);
      test::Logits all;
      for (int i = 0; i < 5; ++i) p.step({a}), all.push_back(p.last);
      CHECK(p.graphs.replays() == 4);
      return all;
    };
    const auto none = logits(false, false, {}), next = logits(true, false, {Deadline::next_attention}),
               behind = logits(true, true, {Deadline::next_attention});
    // A list of places does not go with tokens that change places before it is read, which the engine refuses.
    if (verb != Edit::move) CHECK(logits(true, false, {Deadline::this_attention})[0] != none[0]);  // not later
    CHECK(next[0] == none[0]);                                                                     // not earlier
    CHECK(next[1] != none[1]);
    CHECK(next == behind);
  }
}

TEST_CASE("cuda engine: edits of pages come neither earlier nor later than their deadline") {
  test::check_page_deadlines([](Edit::Verb verb, test::PageEditor::From from, Deadline when) {
    std::vector<std::shared_ptr<test::PageEditor>> made;
    Pair p(test::full_spec(), [&] { return made.emplace_back(std::make_shared<test::PageEditor>(verb, from, when)); });
    const int a = p.open(70, 1);
    const Engine* engines[] = {&p.graphs, &p.eager};
    std::vector<std::vector<int>> found[2];
    test::Logits all;
    for (int i = 0; i < 5; ++i) {
      p.step({a}), all.push_back(p.last);
      for (std::size_t e = 0; e < 2; ++e) found[e].push_back(made[e]->found(engines[e]->store().stream()));
    }
    CHECK(p.graphs.replays() == 4);
    if (from != test::PageEditor::From::nowhere)
      for (const auto& of_engine : found) test::check_deadline(verb, from, when, of_engine);
    p.graphs.store().check_invariants();
    return all;
  });
}

TEST_CASE("cuda engine: steps that encode pages are replayed") {
  struct Encoder final : Policy {
    Deadline when;
    explicit Encoder(Deadline d) : when(d) {}
    Needs needs() const override { return Needs{}.capturable(true); }
    std::vector<CodecSpec> codecs() const override { return {CodecSpec{}, CodecSpec{{8}, {4}}}; }
    void observe(const LayerStep& step, Edits& edits, Stream s) override {
      const auto tokens = step.scratch<std::int32_t>("tokens", {step.rows(), step.kv_heads()});
      ops::lengths(step.pages, tokens, s);
      const auto old = step.list<PageList>("old", step.shape->max_pages());
      ops::older_pages(tokens, nullptr, step.shape->page_size, 2, old, s);
      edits.encode(old, 1, when);
    }
  };
  for (const Deadline::Kind kind : {Deadline::next_attention, Deadline::next_step}) {
    CAPTURE(static_cast<int>(kind));
    Pair p(test::full_spec(), [&] { return std::make_shared<Encoder>(Deadline{kind}); });
    const int a = p.open(30, 1), b = p.open(50, 2);
    const std::int64_t plain = p.graphs.ledger().held(Tier::device)[static_cast<std::size_t>(Tag::codec_metadata)];
    for (int i = 0; i < 20; ++i) p.step({a, b});  // past the ends of pages
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == 19 + 2);
    CHECK(p.graphs.fired() > 0);
    for (int t = 0; t < tag_count; ++t)
      if (static_cast<Tag>(t) != Tag::workspace && static_cast<Tag>(t) != Tag::tables)
        CHECK(p.graphs.ledger().held(Tier::device)[static_cast<std::size_t>(t)] ==
              p.eager.ledger().held(Tier::device)[static_cast<std::size_t>(t)]);
    CHECK(p.graphs.ledger().held(Tier::device)[static_cast<std::size_t>(Tag::codec_metadata)] > plain);
    p.graphs.store().check_invariants();
  }
}

TEST_CASE("cuda engine: steps of policies that edit all layers at once, and of one that waits for its pages") {
  for (const char* text :
       {"{leankv: {window: 8, high_from: 1.2, low_from: 0.3}}",
        "{name: kivi, policy: full, codec: {kivi4_pages: {group: 8, residual: 8}}}",
        "{flexicache: {unstable_heads: false, overlap: false, rerank_every: 4, budget: {tokens: 40}}}",
        "{freekv: {sinks: 8, window: 8, dense_layers: 0, correction: false, budget: {tokens: 32}}}",
        "{freekv: {sinks: 8, window: 8, dense_layers: 0, threshold: -0.2, budget: {tokens: 32}}}",
        "{freekv: {sinks: 8, window: 8, dense_layers: 0, summary: centre_radius, group: mean, budget: {tokens: 32}}}",
        "{flexicache: {unstable_heads: false, overlap: false, rerank_every: 1, frame_reuse: false, "
        "budget: {tokens: 40}}}"}) {
    CAPTURE(text);
    Pair p(test::policy_of(text, 8));
    const int a = p.open(50, 1), b = p.open(70, 2);
    for (int i = 0; i < 20; ++i) p.step({a, b});
    for (int i = 0; i < 3; ++i) p.step({b});
    CHECK(p.graphs.replays() == 19 + 2);
    CHECK(p.eager.replays() == 0);
    CHECK(p.graphs.fired() > 0);
    for (const Tier tier : {Tier::device, Tier::host})
      CHECK(p.graphs.store().page_bytes(tier) == p.eager.store().page_bytes(tier));
    for (const int slot : {a, b})
      for (const int layer : {0, 1})
        CHECK(p.graphs.store().positions_by_place(layer, slot, 1) ==
              p.eager.store().positions_by_place(layer, slot, 1));
    p.graphs.store().check_invariants();
  }
}

// Without speculation each step reads what its own query chooses. So does the first one with it.
TEST_CASE("cuda engine: freekv's first step chooses by its own query, whatever the threshold") {
  const auto logits = [](const std::string& more) {
    Pair p(test::policy_of("{freekv: {sinks: 8, window: 8, dense_layers: 0, budget: {tokens: 32}, " + more + "}}", 8));
    test::Logits all;
    for (const unsigned seed : {1, 2}) {  // the second sequence's first step is a graph's
      const int slot = p.open(70, seed);
      for (int i = 0; i < 2; ++i) p.step({slot}), all.push_back(p.last);
      p.close(slot);
    }
    CHECK(p.graphs.replays() == 3);
    return all;
  };
  const auto own = logits("speculation: false");
  for (const char* more : {"correction: false", "threshold: -1", "threshold: 0", "threshold: 0.9"}) {
    CAPTURE(more);
    const auto read = logits(more);
    for (const std::size_t first : {0, 2}) CHECK(read[first] == own[first]);
    if (std::string(more) == "correction: false")  // the second one reads the first one's choice
      for (const std::size_t second : {1, 3}) CHECK(read[second] != own[second]);
  }
}

TEST_CASE("cuda engine: the example that evicts and recalls in every step is replayed") {
  Pair p(test::full_spec(), [] { return std::make_shared<EvictAndRecall>(); });
  const int a = p.open(40, 1), b = p.open(70, 2);
  const std::int64_t read = p.graphs.ledger().moved_total(Tier::device);
  for (int i = 0; i < 18; ++i) p.step({a, b});
  for (int i = 0; i < 3; ++i) p.step({b});
  CHECK(p.graphs.replays() == 17 + 2);
  CHECK(p.graphs.fired() > 0);
  CHECK(p.graphs.store().length(1, a, 1) == 40 + 18);
  CHECK(p.graphs.store().length(1, b, 1) == 64);
  CHECK(p.graphs.store().positions(0, b, 0).front() == 70 + 21 - 64);  // the oldest have left
  for (const Tier tier : {Tier::device, Tier::host}) {
    CHECK(p.graphs.store().page_bytes(tier) == p.eager.store().page_bytes(tier));
    CHECK(p.graphs.ledger().moved_total(tier) == p.eager.ledger().moved_total(tier));
  }
  CHECK(p.graphs.ledger().moved_total(Tier::device) > read);
  for (const int layer : {0, 1})
    CHECK(p.graphs.store().positions_by_place(layer, b, 1) == p.eager.store().positions_by_place(layer, b, 1));
  p.graphs.store().check_invariants();
}

TEST_CASE("cuda engine: a step whose edits may take more frames than are free runs without its graph") {
  struct Offloader final : Policy {
    Needs needs() const override { return Needs{}.host_pages(true).capturable(true); }
    void observe(const LayerStep& step, Edits& edits, Stream s) override {
      const auto tokens = step.scratch<std::int32_t>("tokens", {step.rows(), step.kv_heads()});
      ops::lengths(step.pages, tokens, s);
      const auto down = step.list<PageList>("down", step.shape->max_pages());
      ops::older_pages(tokens, nullptr, step.shape->page_size, 1, down, s);
      edits.offload(down);
    }
  };
  const PolicySpec spec = test::full_spec();
  for (const int spare : {0, 4}) {  // pages of the host for each head beyond the prompt's
    CAPTURE(spare);
    Pair p(spec, [] { return std::make_shared<Offloader>(); });
    EngineOptions o = Pair::options(spec, 96);
    o.host_limit = p.graphs.full_bytes((3 + spare) * spec.page_size);
    Engine engine(p.model, std::make_shared<Offloader>(), o);
    const int slot = engine.open();
    const std::vector<int> prompt = test::test_text(3 * spec.page_size, p.vocab, 3), token{5};
    std::vector<std::int32_t> likeliest(1);
    REQUIRE(engine.prefill(slot, prompt, true, {}) == Fit::ok);
    int steps = 0;
    while (steps < 6 * spec.page_size && engine.step({slot}, token, StepResult(likeliest)) == Fit::ok) ++steps;
    CHECK(steps == (spare + 1) * spec.page_size);
  }
}

TEST_CASE("cuda engine: a policy that promises graphs may not edit later steps") {
  struct Editor final : Policy {
    Deadline when;
    bool beside;
    Editor(Deadline d, bool b) : when(d), beside(b) {}
    Needs needs() const override { return Needs{}.capturable(true).observe_beside(beside); }
    void observe(const LayerStep& step, Edits& edits, Stream s) override {
      const auto count = step.scratch<std::int32_t>("count", {step.rows(), step.kv_heads()});
      ops::fill_heads(count, 0, s);
      const auto index = step.scratch<std::int32_t>("index", {step.rows(), step.kv_heads(), 4});
      edits.evict(TokenList{{index, count}}, when);
    }
  };
  const auto step = [](Deadline when, bool beside = false) {
    Pair p(test::full_spec(), [=] { return std::make_shared<Editor>(when, beside); });
    const std::vector<std::int32_t> slots{p.open(5, 1)};
    const std::vector<int> tokens{3};
    return p.graphs.step(slots, tokens, StepResult{});
  };
  CHECK(step({}) == Fit::ok);
  CHECK(step({Deadline::next_step}) == Fit::ok);
  CHECK_THROWS_WITH(step(Deadline::in_steps(2)), Catch::Contains("later step") && Catch::Contains("capturable"));
  CHECK_THROWS_WITH(step({Deadline::sequence}), Catch::Contains("Needs::pauses"));
  CHECK_THROWS_WITH(step({}, true),
                    Catch::Contains("beside the step") && Catch::Contains("place and fetch edits alone"));
}

TEST_CASE("cuda engine: a policy that promises graphs may not upload in decode steps") {
  struct Uploader final : Policy {
    bool promises, in_finish, beside;
    Uploader(bool p, bool f, bool b) : promises(p), in_finish(f), beside(b) {}
    Needs needs() const override { return Needs{}.capturable(promises).observe_beside(beside); }
    void prefill(const LayerPrefill& kv, Edits&, Stream) override { kv.upload("seen", kv.position); }
    void observe(const LayerStep& step, Edits&, Stream) override {
      if (!in_finish) step.upload("seen", step.position);
    }
    void finish_step(const Step& step, Edits&, Stream) override {
      if (in_finish) upload(*step.workspace, "seen", step.position, {step.rows});
    }
  };
  const auto step = [](bool promises, bool in_finish, bool beside) {
    Pair p(test::full_spec(), [=] { return std::make_shared<Uploader>(promises, in_finish, beside); });
    const std::vector<std::int32_t> slots{p.open(5, 1)};
    const std::vector<int> tokens{3};
    REQUIRE(p.eager.step(slots, tokens, StepResult{}) == Fit::ok);
    return p.graphs.step(slots, tokens, StepResult{});
  };
  CHECK(step(false, false, false) == Fit::ok);
  for (const bool in_finish : {false, true})
    for (const bool beside : {false, true})
      CHECK_THROWS_WITH(step(true, in_finish, beside), Catch::Contains("'seen'") && Catch::Contains("capturable") &&
                                                           Catch::Contains("Workspace::constant") &&
                                                           Catch::Contains("LayerKv::steps"));
}

TEST_CASE("cuda engine: attention over pages that were dropped from the device ends the run with their cause") {
  // All pages but the newest leave the device at the prompt's end. Nothing brings them back.
  struct Forgets final : Policy {
    Needs needs() const override { return {}; }
    void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
      const auto count = kv.scratch<std::int32_t>("tokens", {1, kv.kv_heads()});
      ops::lengths(kv.pages, count, s);
      const PageList old = kv.list<PageList>("old", kv.shape->max_pages());
      ops::older_pages(count, nullptr, kv.shape->page_size, 1, old, s);
      edits.offload(old);
      edits.drop(Tier::device, old);
    }
  };
  Pair p;
  Engine engine(p.model, std::make_shared<Forgets>(), Pair::options(test::full_spec(), 96));
  const std::vector<std::int32_t> slots{engine.open()};
  REQUIRE(engine.prefill(slots[0], test::test_text(40, p.vocab, 1), true, {}) == Fit::ok);
  const auto steps = [&] {
    const std::vector<int> token{3};
    for (int i = 0; i < 40; ++i) engine.step(slots, token, StepResult{});
  };
  CHECK_THROWS_WITH(steps(), Catch::Contains("a page which is not on the device"));
}

TEST_CASE("cuda engine: the likeliest tokens are those of the logits") {
  Pair p;
  const int a = p.open(30, 1), b = p.open(11, 2);
  const std::vector<std::int32_t> slots{a, b};
  std::vector<int> tokens{3, 5};
  for (int i = 0; i < 4; ++i) {
    std::vector<std::int32_t> likeliest(2, -1);
    std::vector<float> logits(2 * static_cast<std::size_t>(p.vocab));
    REQUIRE(p.graphs.step(slots, tokens, StepResult(likeliest)) == Fit::ok);
    REQUIRE(p.eager.step(slots, tokens, View<float, 2>::dense(logits.data(), {2, p.vocab})) == Fit::ok);
    for (int r = 0; r < 2; ++r) {
      const auto row = logits.begin() + r * p.vocab;
      CHECK(likeliest[static_cast<std::size_t>(r)] == std::max_element(row, row + p.vocab) - row);
      tokens[static_cast<std::size_t>(r)] = likeliest[static_cast<std::size_t>(r)];
    }
  }
  CHECK(p.graphs.replays() == 3);
}

TEST_CASE("cuda engine: decode steps take no memory") {
  static int taken;
  static void* (*take)(std::size_t);
  for (const test::Subject& s : test::subjects().list()) {
    if (s.composed()) continue;
    CAPTURE(s.label);
    Pair p(test::with_budget(s.spec, BudgetAmount::tokens, 40));
    const std::vector<std::int32_t> slots{p.graphs.open(), p.graphs.open()};
    std::vector<float> logits(2 * static_cast<std::size_t>(p.vocab));
    for (const int slot : slots)
      REQUIRE(p.graphs.prefill(slot, test::test_text(50 + 10 * slot, p.vocab), true, {}) == Fit::ok);
    const auto steps = [&](int count) {
      const auto out = View<float, 2>::dense(logits.data(), {2, p.vocab});
      for (int i = 0; i < count; ++i) REQUIRE(p.graphs.step(slots, std::vector<int>{i, i + 1}, out) == Fit::ok);
    };
    steps(3);
    CudaBackend counting = require_cuda("test");
    take = counting.runtime.allocate;
    taken = 0;
    counting.runtime.allocate = [](std::size_t bytes) { return ++taken, take(bytes); };
    replace_cuda_backend(&counting);
    steps(5);
    replace_cuda_backend(nullptr);
    CHECK(taken == 0);
  }
}

TEST_CASE("cuda engine: an observer sees every step of what was a graph") {
  Pair p;
  const int a = p.open(5, 1);
  for (int i = 0; i < 3; ++i) p.step({a});
  struct Count final : EngineObserver {
    int layers = 0;
    void attended(const DecodeLayer&, const Store&) override { ++layers; }
  } count;
  p.graphs.observe(&count);
  p.step({a});
  CHECK(count.layers == p.model->config.layers);
  p.graphs.observe(nullptr);
  const auto before = p.graphs.replays();
  p.step({a});
  CHECK(p.graphs.replays() == before + 1);
}
