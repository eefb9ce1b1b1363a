// A policy that changes stored keys: what it may say when, and what attention reads then.
#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>

#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "ops/page/paged.hpp"
#include "support/golden.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Negator final : Policy {
  enum When { in_prefill, in_finish_prompt, in_select, in_observe, in_finish_step, undeclared };
  explicit Negator(When w) : when(w) {}
  Needs needs() const override {
    return Needs{}.functional(when != undeclared).finish_prompt(true).capturable(when == in_observe);
  }
  // Keys of all tokens become their negatives.
  static void negate(const LayerKv& kv, Edits& edits, Stream s) {
    const auto rows = kv.scratch<float>("keys", {kv.rows(), kv.kv_heads(), kv.max_length, kv.pages.head_dim});
    ops::read_rows(kv.keys, rows, s);
    for (std::int64_t i = 0; i < kv.kv_heads() * rows.stride[1]; ++i) rows.data[i] = -rows.data[i];
    edits.rewrite(KvSide::key, rows);
  }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    if ((when == in_prefill || when == undeclared) && kv.last[0]) negate(kv, edits, s);
  }
  void finish_prompt(const LayerKv& kv, Edits& edits, Stream s) override {
    if (when == in_finish_prompt) negate(kv, edits, s);
  }
  void select(const LayerStep& step, Edits& edits, Stream s) override {
    if (when == in_select) negate(step, edits, s);
  }
  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    if (when == in_observe) negate(step, edits, s);
  }
  void finish_step(const Step&, Edits& edits, Stream) override {
    if (when == in_finish_step) edits.rewrite(KvSide::key, {});
  }
  When when;
};

// Keys of layer 1, head 1, after a prompt of 20 tokens. Logits of the prompt and of the step behind it.
struct Played {
  explicit Played(const std::shared_ptr<Policy>& policy, int chunk = 0) {
    static const std::shared_ptr<const Model> model =
        load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny");
    EngineOptions o;
    o.max_tokens = 64;
    o.prefill_chunk = chunk;
    Engine engine(model, policy, o);
    const int slot = engine.open(), token = 8;
    const std::vector<std::int32_t> slots{slot};
    std::vector<int> prompt;
    for (int i = 0; i < 20; ++i) prompt.push_back(1 + i % 7);
    logits.resize(static_cast<std::size_t>(model->config.vocab));
    const auto out = View<float, 2>::dense(logits.data(), {1, model->config.vocab});
    Fit fit = engine.prefill(slot, prompt, true, out);
    REQUIRE(fit == Fit::ok);
    keys.resize(20 * static_cast<std::size_t>(model->config.head_dim));
    ops::gather_rows(engine.store().view(1, slots), 0, 1, KvSide::key, 20, keys.data());
    fired = engine.fired();
    of_prompt = logits;
    fit = engine.step(slots, {&token, 1}, out);
    REQUIRE(fit == Fit::ok);
  }
  std::vector<float> keys, of_prompt, logits;
  std::int64_t fired = 0;
};

class Nothing final : public Policy {
  Needs needs() const override { return {}; }
};

}  // namespace

TEST_CASE("keys that a policy rewrites at the prompt's end are what the store holds and what steps read") {
  const Played plain(std::make_shared<Nothing>());
  for (const auto when : {Negator::in_prefill, Negator::in_finish_prompt})
    for (const int chunk : {0, 7}) {
      CAPTURE(static_cast<int>(when), chunk);
      const Played negated(std::make_shared<Negator>(when), chunk);
      REQUIRE(negated.keys.size() == plain.keys.size());
      for (std::size_t i = 0; i < plain.keys.size(); ++i) CHECK(negated.keys[i] == Approx(-plain.keys[i]).margin(1e-4));
      CHECK(negated.fired > 0);
      CHECK(negated.logits != plain.logits);
      if (chunk == 0) CHECK(negated.of_prompt == plain.of_prompt);
    }
}

TEST_CASE("a rewrite in a step that a graph may hold, or without the declaration, is an error of the policy") {
  const auto said = [](Negator::When when) {
    try {
      Played(std::make_shared<Negator>(when));
    } catch (const Error& e) {
      CHECK(e.code() == Errc::plugin);
      return std::string(e.what());
    }
    return std::string();
  };
  using Catch::Contains;
  CHECK_THAT(said(Negator::in_select), Contains("select: got a rewrite, wanted it in prefill() or finish_prompt()"));
  CHECK_THAT(said(Negator::in_observe), Contains("observe: got a rewrite"));
  CHECK_THAT(said(Negator::in_finish_step), Contains("finish_step: got a rewrite"));
  CHECK_THAT(said(Negator::undeclared), Contains("got a rewrite from a policy without Needs::functional"));
}
