// What the engine promises a policy, with policies made for the purpose.
#include "engine/engine.hpp"

#include <catch2/catch.hpp>

#include "model/checkpoint.hpp"
#include "support/golden.hpp"
#include "support/token_reader.hpp"

using namespace kvlab;

namespace {

std::shared_ptr<const Model> tiny() {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return model;
}

// Evicts the first token of every head of layer 0, two steps after step 1, from one callback or the other.
class Later final : public Policy {
 public:
  explicit Later(bool from_finish) : from_finish_(from_finish) {}
  Needs needs() const override { return {}; }
  void observe(const LayerStep& step, Edits& edits, Stream) override {
    if (!from_finish_ && step.layer == 0 && step.step[0] == 1) evict(*step.shape, *step.workspace, edits);
  }
  void finish_step(const Step& step, Edits& edits, Stream) override {
    if (from_finish_ && step.step[0] == 1) evict(*step.shape, *step.workspace, edits);
  }

 private:
  static void evict(const Shape& shape, Workspace& w, Edits& edits) {
    TokenList l;
    l.index = take_scratch<std::int32_t>(w, "later", {1, shape.kv_heads, 1});
    l.count = take_scratch<std::int32_t>(w, "later", {1, shape.kv_heads});
    for (int h = 0; h < shape.kv_heads; ++h) l.index(0, h, 0) = 0, l.count(0, h) = 1;
    edits.for_layer(0);
    edits.evict(l, Deadline::in_steps(2));
  }
  bool from_finish_;
};

class Nothing final : public Policy {
 public:
  Needs needs() const override { return {}; }
};

// Notes the mass that each callback sees: its sum per query head, or -1 for none.
class Seer final : public Policy {
 public:
  explicit Seer(Mass mass) : mass_(mass) {}
  Needs needs() const override { return Needs{}.mass(mass_); }
  void prefill(const LayerPrefill& kv, Edits&, Stream) override { note(kv, prompt); }
  void observe(const LayerStep& step, Edits&, Stream) override { note(step, decode); }
  std::vector<double> prompt, decode;

 private:
  static void note(const LayerKv& kv, std::vector<double>& sums) {
    for (int head = 0; head < kv.shape->query_heads; ++head) {
      double sum = kv.mass ? 0 : -1;
      for (int t = 0; kv.mass && t < kv.pages.tokens(0, 0); ++t) sum += kv.mass(0, head, t);
      sums.push_back(sum);
    }
  }
  Mass mass_;
};

EngineOptions options(int slots) {
  EngineOptions o;
  o.slots = slots;
  o.max_tokens = 64;
  o.page_size = 8;
  return o;
}

}  // namespace

TEST_CASE("n steps from now is the same moment from every callback of a step") {
  for (bool from_finish : {false, true}) {
    CAPTURE(from_finish);
    Engine engine(tiny(), std::make_shared<Later>(from_finish), options(1));
    const int slot = engine.open(), token = 3;
    const std::vector<int> prompt{1, 2, 3, 4, 5};
    REQUIRE(engine.prefill(slot, prompt, true, {}) == Fit::ok);
    for (int step = 0; step < 5; ++step) {
      // Asked for in step 1: step 3 is the first that does without it.
      CHECK(engine.store().positions(0, slot, 0).front() == (step < 3 ? 0 : 1));
      CHECK(engine.fired() == (step < 3 ? 0 : 1));
      REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    }
    CHECK(engine.store().positions(1, slot, 0).front() == 0);
    engine.store().check_invariants();
  }
}

TEST_CASE("a policy sees the attention mass that it asked for") {
  for (const Mass mass : {Mass::none, Mass::decode, Mass::all}) {
    CAPTURE(static_cast<int>(mass));
    const auto policy = std::make_shared<Seer>(mass);
    Engine engine(tiny(), policy, options(1));
    const int slot = engine.open(), token = 3;
    const std::vector<int> text{1, 2, 3, 4, 5};
    REQUIRE(engine.prefill(slot, text, true, {}) == Fit::ok);
    REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    REQUIRE(!policy->prompt.empty());
    REQUIRE(policy->decode.size() == policy->prompt.size());
    for (const double sum : policy->prompt) CHECK(sum == Approx(mass == Mass::all ? 5 : -1).epsilon(1e-4));
    for (const double sum : policy->decode) CHECK(sum == Approx(mass == Mass::none ? -1 : 1).epsilon(1e-4));
  }
}

TEST_CASE("attention over tokens: all of them are no list, few are all that is read") {
  const auto model = tiny();
  const std::vector<int> text{9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4, 5};
  std::int64_t fired = 0;
  const auto run = [&](const std::shared_ptr<Policy>& policy) {
    Engine engine(model, policy, options(1));
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, text, true, {}) == Fit::ok);
    std::vector<float> logits(static_cast<std::size_t>(model->config.vocab));
    for (const int token : {3, 1, 4})
      REQUIRE(engine.step({slot}, {&token, 1}, View<float, 2>::dense(logits.data(), {1, model->config.vocab})) ==
              Fit::ok);
    fired = engine.fired();
    return logits;
  };
  const std::vector<float> wanted = run(std::make_shared<Nothing>());
  const std::vector<float> all = run(std::make_shared<test::TokenReader>(64));
  CHECK(fired == 0);
  for (std::size_t i = 0; i < wanted.size(); ++i) REQUIRE(all[i] == Approx(wanted[i]).margin(1e-4));

  const auto reader = std::make_shared<test::TokenReader>(5, true);
  CHECK(run(reader) != wanted);
  CHECK(fired == 3 * model->config.layers);
  REQUIRE(reader->mass.size() == static_cast<std::size_t>(3 * model->config.layers));
  for (const auto& mass : reader->mass) {
    double sum = 0;
    for (std::size_t t = 0; t < mass.size(); ++t) {
      sum += mass[t];
      CHECK((mass[t] > 0) == (t < 2 || t + 5 >= mass.size()));
    }
    CHECK(sum == Approx(1));
  }
}

TEST_CASE("a policy that lists pages and tokens to attend to is refused") {
  struct Both final : Policy {
    Needs needs() const override { return {}; }
    void select(const LayerStep& step, Edits& edits, Stream) override {
      const auto list = step.list<TokenList>("none", 1);
      for (int h = 0; h < step.kv_heads(); ++h) list.count(0, h) = 0;
      edits.attend(list, {.last = 1});
      edits.attend(PageList{list}, {.last = 1});
    }
  };
  Engine engine(tiny(), std::make_shared<Both>(), options(1));
  const int slot = engine.open(), token = 3;
  REQUIRE(engine.prefill(slot, std::vector<int>{1, 2}, true, {}) == Fit::ok);
  CHECK_THROWS_WITH(engine.step({slot}, {&token, 1}, {}), Catch::Contains("wanted one of the two"));
}

TEST_CASE("running out of memory is a value; what is left goes on once the slot is closed") {
  const auto model = tiny();
  const std::vector<int> prompt{1, 2, 3, 4, 5, 6, 7};
  const std::int64_t frame = 8 * 2 * model->config.head_dim * 4 + 128;
  const std::int64_t heads = std::int64_t{model->config.layers} * model->config.kv_heads;
  std::vector<float> logits(static_cast<std::size_t>(model->config.vocab)), expected = logits;
  const auto view = [&](std::vector<float>& v) { return View<float, 2>::dense(v.data(), {1, model->config.vocab}); };
  for (std::int64_t spare = 0; spare < heads; ++spare) {
    CAPTURE(spare);
    EngineOptions o = options(2);
    o.device_limit = (2 * heads + spare) * frame;  // two short prompts, not the page after them
    Engine engine(model, std::make_shared<Nothing>(), o);
    const int a = engine.open(), b = engine.open(), token = 9;
    REQUIRE(engine.prefill(a, prompt, true, {}) == Fit::ok);
    REQUIRE(engine.prefill(b, prompt, true, {}) == Fit::ok);
    REQUIRE(engine.step({a}, {&token, 1}, view(expected)) == Fit::ok);
    CHECK(engine.step({a}, {&token, 1}, {}) == Fit::out_of_memory);
    engine.store().check_invariants();
    engine.close(a);
    engine.store().check_invariants();
    REQUIRE(engine.step({b}, {&token, 1}, view(logits)) == Fit::ok);
    CHECK(logits == expected);
    REQUIRE(engine.step({b}, {&token, 1}, {}) == Fit::ok);
    engine.close(b);
    engine.store().check_invariants();
  }
}
