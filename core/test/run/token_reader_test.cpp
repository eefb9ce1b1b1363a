// Traces and fidelity of a policy that attends to tokens.
#include "support/token_reader.hpp"

#include <catch2/catch.hpp>
#include <memory>
#include <utility>

#include "ops/attend/attend.hpp"
#include "run/shadow.hpp"
#include "run/trace.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// KV head `narrow` attends to its newest 4 tokens and its two oldest. The others attend to every token.
class OneNarrowHead final : public Policy {
 public:
  explicit OneNarrowHead(int narrow) : narrow_(narrow) {}
  Needs needs() const override { return {}; }
  void select(const LayerStep& step, Edits& edits, Stream s) override {
    const Scores score = step.kv_head_scores("recency");
    ops::recency(step.pages, score, s);
    const auto keep = step.scratch<std::int32_t>("newest", {step.rows(), step.kv_heads()});
    for (int h = 0; h < step.kv_heads(); ++h) keep(0, h) = h == narrow_ ? 4 : 64;
    const auto list = step.list<TokenList>("tokens", 64);
    ops::top_tokens(step.pages, score, keep, nullptr, list, s);
    edits.attend(list, {.first = 2});
  }

 private:
  int narrow_;
};

// The shadow, and the mass of the tokens that each layer attends to. The reference computes it on the engine's cache.
struct Compared final : EngineObserver {
  Compared(Shadow& s, const ModelConfig& c, int narrow_head) : shadow(s), config(c), narrow(narrow_head) {}
  Prompt reads_of_prompt() const override { return shadow.reads_of_prompt(); }
  void prompt(const PromptLayer& l, const Store& store) override { shadow.prompt(l, store); }
  void attended(const DecodeLayer& l, const Store& store) override {
    const int newest = store.position(0), total = newest + 1;
    std::vector<float> out(static_cast<std::size_t>(config.heads * config.head_dim)),
        mass(static_cast<std::size_t>(config.heads * total));
    ops::AttendArgs a;
    a.kv = store.view(l.layer, *l.slots);
    a.queries = l.queries;
    a.last = &newest;
    a.out = View<float, 3>::dense(out.data(), {1, config.heads, config.head_dim});
    a.mass = View<float, 3>::dense(mass.data(), {1, config.heads, total});
    ops::attend_reference(a);
    double missed = 0;
    for (int head = narrow * config.group(); head < (narrow + 1) * config.group(); ++head)
      for (int t = 2; t < total - 4; ++t) missed += a.mass(0, head, t);
    wanted.push_back(1 - missed / config.heads);
    shadow.attended(l, store);
  }
  Shadow& shadow;
  const ModelConfig& config;
  int narrow;
  std::vector<double> wanted;
};

// 20 tokens in pages of 8, then one step.
void run(EngineObserver& observer, std::shared_ptr<Policy> policy) {
  const auto model = tiny_model("llama-gqa3");
  EngineOptions o;
  o.slots = 1;
  o.max_tokens = 64;
  o.page_size = 8;
  o.device = model->cuda ? Device::cuda : Device::cpu;
  Engine engine(model, std::move(policy), o);
  engine.observe(&observer);
  const int slot = engine.open(), token = 3;
  REQUIRE(engine.prefill(slot, test_text(20, model->config.vocab), true, {}) == Fit::ok);
  REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
}

void run(EngineObserver& observer, int newest) { run(observer, std::make_shared<TokenReader>(newest)); }

}  // namespace

TEST_CASE("a trace has the pages that listed tokens lie in") {
  const auto model = tiny_model("llama-gqa3");
  results::Trace trace;
  TraceRecorder recorder({Item{}}, trace);
  recorder.rows({{0, 0}});
  run(recorder, 4);  // tokens 0, 1 and 17 to 20
  REQUIRE(trace.events.size() == static_cast<std::size_t>(model->config.layers * model->config.kv_heads));
  for (const results::TraceEvent& e : trace.events) {
    REQUIRE(e.count == 2);
    CHECK(trace.selected[static_cast<std::size_t>(e.begin)] == 0);
    CHECK(trace.selected[static_cast<std::size_t>(e.begin) + 1] == 2);
  }
}

TEST_CASE("fidelity counts the mass of listed tokens alone") {
  const auto model = tiny_model("llama-gqa3");
  std::vector<float> last;
  for (const int newest : {1, 4, 12, 19, 64}) {
    CAPTURE(newest);
    Shadow shadow(*model, 8, 64);
    run(shadow, newest);
    const Shadow::Rows rows = shadow.take();
    REQUIRE(rows.mass.size() == static_cast<std::size_t>(model->config.layers));
    for (std::size_t i = 0; i < rows.mass.size(); ++i) {
      if (!last.empty()) CHECK(rows.mass[i] > last[i]);
      CHECK((rows.mass[i] > 0.9999f) == (newest >= 19));
      if (newest >= 19) CHECK(rows.output_error[i] < 0.02f);
      if (newest >= 12) CHECK(rows.page_recall[i] == 1.f);
    }
    last = newest == 19 ? std::vector<float>{} : rows.mass;
  }
}

TEST_CASE("what a KV head misses is the mass of its own query heads") {
  const auto model = tiny_model("llama-gqa3");
  const ModelConfig& c = model->config;
  REQUIRE((c.kv_heads > 1 && c.group() > 1 && c.group() != c.kv_heads));
  for (int narrow = 0; narrow < c.kv_heads; ++narrow) {
    CAPTURE(narrow);
    Shadow shadow(*model, 8, 64);
    Compared checked(shadow, c, narrow);
    run(checked, std::make_shared<OneNarrowHead>(narrow));
    const Shadow::Rows rows = shadow.take();
    REQUIRE(rows.mass.size() == checked.wanted.size());
    for (std::size_t i = 0; i < rows.mass.size(); ++i) CHECK(rows.mass[i] == Approx(checked.wanted[i]).margin(1e-5));
  }
}
