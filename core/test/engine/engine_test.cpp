// The engine's promises to a policy, tested with policies made for the purpose.
#include "engine/engine.hpp"

#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>

#include "model/checkpoint.hpp"
#include "ops/page/paged.hpp"
#include "support/golden.hpp"
#include "support/page_editor.hpp"
#include "support/token_reader.hpp"

using namespace kvlab;

namespace {

std::shared_ptr<const Model> tiny() {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return model;
}

enum class Callback { prefill, select, observe, finish_step };

// Sums attention mass in token state, or has core do it, and notes the sums after each attention.
class Sums final : public Policy {
 public:
  Sums(bool by_core, GroupRule rule, Mass when) : by_core_(by_core), rule_(rule), when_(when) {}
  Needs needs() const override {
    return by_core_ ? Needs{}.mass_into("sum", rule_, when_) : Needs{}.mass(when_).token_state("sum");
  }
  void prefill(const LayerPrefill& kv, Edits&, Stream s) override { note(kv, s); }
  void observe(const LayerStep& kv, Edits&, Stream s) override { note(kv, s); }
  std::vector<float> seen;

 private:
  void note(const LayerKv& kv, Stream s) {
    if (by_core_) CHECK(!kv.mass);
    if (kv.mass) ops::add_mass(kv.mass, rule_, kv.state("sum"), s);
    const Scores now = kv.kv_head_scores("now");
    ops::read_state(kv.state("sum"), now, s);
    for (int h = 0; h < kv.kv_heads(); ++h)
      for (int t = 0; t < kv.pages.tokens(0, h); ++t) seen.push_back(now(0, h, t));
  }
  bool by_core_;
  GroupRule rule_;
  Mass when_;
};

// From one callback, of the prompt or of step 1, evicts the first token of every head of layer 0.
class Evictor : public Policy {
 public:
  Evictor(Callback from, Deadline when) : from_(from), when_(when) {}
  Needs needs() const override { return Needs{}.mass(Mass::decode); }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream) override { of_layer(Callback::prefill, kv, edits, 0); }
  void select(const LayerStep& step, Edits& edits, Stream) override { of_layer(Callback::select, step, edits, 1); }
  void observe(const LayerStep& step, Edits& edits, Stream) override { of_layer(Callback::observe, step, edits, 1); }
  void finish_step(const Step& step, Edits& edits, Stream) override {
    if (from_ == Callback::finish_step && step.step[0] == 1) evict(*step.shape, *step.workspace, edits);
  }

 private:
  void evict(const Shape& shape, Workspace& w, Edits& edits) const {
    TokenList l;
    l.index = take_scratch<std::int32_t>(w, "first", {1, shape.kv_heads, 1});
    l.count = take_scratch<std::int32_t>(w, "first", {1, shape.kv_heads});
    for (int h = 0; h < shape.kv_heads; ++h) l.index(0, h, 0) = 0, l.count(0, h) = 1;
    edits.for_layer(0);
    edits.evict(l, when_);
  }
  void of_layer(Callback callback, const LayerKv& kv, Edits& edits, int step) const {
    if (from_ == callback && kv.layer == 0 && kv.step[0] == step) evict(*kv.shape, *kv.workspace, edits);
  }
  Callback from_;
  Deadline when_;
};

// The same; notes the tokens of layer 0 as the callbacks of a step find them.
class Watched final : public Evictor {
 public:
  using Evictor::Evictor;
  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override { note(kv), Evictor::prefill(kv, edits, s); }
  void select(const LayerStep& kv, Edits& edits, Stream s) override { note(kv), Evictor::select(kv, edits, s); }
  void observe(const LayerStep& kv, Edits& edits, Stream s) override {
    note(kv);
    double sum = 0;
    for (int t = 0; t < kv.pages.tokens(0, 0); ++t) sum += kv.mass(0, 0, t);
    if (kv.layer == 0) mass.push_back(sum);
    Evictor::observe(kv, edits, s);
  }
  void finish_step(const Step& step, Edits& edits, Stream s) override {
    tokens.push_back(engine->store().length(0, step.slots[0], 0));
    Evictor::finish_step(step, edits, s);
  }
  const Engine* engine = nullptr;
  std::vector<int> tokens;   // found by select and observe of layer 0 and 1, by finish_step
  std::vector<double> mass;  // of query head 0 of layer 0, over these tokens

 private:
  void note(const LayerKv& kv) {
    if (kv.layer < 2) tokens.push_back(engine->store().length(0, kv.slots[0], 0));
  }
};

// Notes what each callback of layer 0 learns about its rows.
class Listener final : public Policy {
 public:
  struct Told {
    std::vector<std::int32_t> slots, position, step;
    std::vector<std::uint32_t> sequence, question;
    std::int64_t window = 0;  // queries
    std::vector<float> window_queries;
    bool operator==(const Told&) const = default;
  };
  explicit Listener(int window = 0) : window_(window) {}
  Needs needs() const override { return Needs{}.window_queries(window_); }
  void prefill(const LayerPrefill& kv, Edits&, Stream) override { note(kv, prompts); }
  void observe(const LayerStep& step, Edits&, Stream) override { note(step, steps); }
  std::vector<Told> prompts, steps;

 private:
  static void note(const LayerKv& kv, std::vector<Told>& to) {
    if (kv.layer > 0) return;
    Told told;
    for (int r = 0; r < kv.rows(); ++r) {
      told.slots.push_back(kv.slots[r]);
      told.position.push_back(kv.position[r]);
      told.step.push_back(kv.step[r]);
      told.sequence.push_back(kv.sequence[r]);
      told.question.push_back(kv.question[kv.slots[r]]);
    }
    if (kv.window_queries.data) {
      const auto q = kv.window_queries.f32();
      told.window = q.extent[2];
      for (std::int64_t head = 0; head < q.extent[1]; ++head)
        for (std::int64_t i = 0; i < q.extent[2]; ++i)
          for (std::int64_t d = 0; d < q.extent[3]; ++d) told.window_queries.push_back(q(0, head, i, d));
    }
    to.push_back(std::move(told));
  }
  int window_;
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
  for (const Callback from : {Callback::select, Callback::observe, Callback::finish_step}) {
    CAPTURE(static_cast<int>(from));
    Engine engine(tiny(), std::make_shared<Evictor>(from, Deadline::in_steps(2)), options(1));
    const int slot = engine.open(), token = 3;
    const std::vector<int> prompt{1, 2, 3, 4, 5};
    REQUIRE(engine.prefill(slot, prompt, true, {}) == Fit::ok);
    for (int step = 0; step < 5; ++step) {
      // Step 1 asks for the eviction, so step 3 is the first without the token.
      CHECK(engine.store().positions(0, slot, 0).front() == (step < 3 ? 0 : 1));
      CHECK(engine.fired() == (step < 3 ? 0 : 1));
      REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    }
    CHECK(engine.store().positions(1, slot, 0).front() == 0);
    engine.store().check_invariants();
  }
}

TEST_CASE("each deadline is kept to the callback") {
  struct Case {
    Callback from;
    Deadline when;
    std::vector<int> tokens;  // in step 1: select and observe of layers 0 and 1, finish_step, its end
  };
  const Deadline here{Deadline::this_attention}, next{}, step{Deadline::next_step};
  const Case cases[] = {
      {Callback::select, here, {7, 6, 6, 6, 6, 6}},
      {Callback::select, next, {7, 6, 6, 6, 6, 6}},
      {Callback::select, step, {7, 7, 7, 7, 7, 6}},
      {Callback::select, Deadline::in_steps(1), {7, 7, 7, 7, 7, 6}},
      {Callback::select, Deadline::in_steps(2), {7, 7, 7, 7, 7, 7}},
      {Callback::observe, next, {7, 7, 6, 6, 6, 6}},
      {Callback::observe, Deadline::in_steps(0), {7, 7, 6, 6, 6, 6}},
      {Callback::observe, step, {7, 7, 7, 7, 7, 6}},
      {Callback::finish_step, next, {7, 7, 7, 7, 7, 6}},
      {Callback::finish_step, step, {7, 7, 7, 7, 7, 6}},
      {Callback::finish_step, Deadline::in_steps(2), {7, 7, 7, 7, 7, 7}},
  };
  const int token = 3;
  const std::vector<int> prompt{1, 2, 3, 4, 5};
  for (const Case& c : cases) {
    CAPTURE(static_cast<int>(c.from), static_cast<int>(c.when.kind), c.when.steps);
    const auto policy = std::make_shared<Watched>(c.from, c.when);
    Engine engine(tiny(), policy, options(1));
    policy->engine = &engine;
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, prompt, true, {}) == Fit::ok);
    REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    policy->tokens.clear();
    REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    policy->tokens.push_back(engine.store().length(0, slot, 0));
    CHECK(policy->tokens == c.tokens);
    if (c.from == Callback::select)  // attention has read the token, or has not
      CHECK((policy->mass.back() < 0.999) == (c.when.kind == Deadline::next_attention));
    policy->tokens.clear();
    REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    CHECK(policy->tokens.front() == c.tokens.back() + 1);
    CHECK(engine.store().length(0, slot, 0) == 7);  // in two steps at the latest, and once
    engine.store().check_invariants();
  }
  for (const Deadline when : {next, step}) {
    const auto policy = std::make_shared<Watched>(Callback::prefill, when);
    Engine engine(tiny(), policy, options(1));
    policy->engine = &engine;
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, prompt, true, {}) == Fit::ok);
    CHECK(policy->tokens == std::vector<int>{5, when.kind == Deadline::next_step ? 5 : 4});
    CHECK(engine.store().length(0, slot, 0) == 4);
  }
}

TEST_CASE("edits of pages come neither earlier nor later than their deadline") {
  test::check_page_deadlines([](Edit::Verb verb, test::PageEditor::From from, Deadline when) {
    const auto policy = std::make_shared<test::PageEditor>(verb, from, when);
    Engine engine(tiny(), policy, options(1));
    const int slot = engine.open(), vocab = engine.model().config.vocab;
    std::vector<int> prompt;
    for (int i = 0; i < 50; ++i) prompt.push_back(2 + i * 37 % 300);
    REQUIRE(engine.prefill(slot, prompt, true, {}) == Fit::ok);
    std::vector<std::vector<int>> found;
    std::vector<std::vector<float>> all;
    for (int i = 0; i < 5; ++i) {
      const int token = 3 + i;
      auto& logits = all.emplace_back(static_cast<std::size_t>(vocab));
      REQUIRE(engine.step({slot}, {&token, 1}, View<float, 2>::dense(logits.data(), {1, vocab})) == Fit::ok);
      found.push_back(policy->found(Stream::cpu()));
    }
    if (from != test::PageEditor::From::nowhere) test::check_deadline(verb, from, when, found);
    engine.store().check_invariants();
    return all;
  });
}

TEST_CASE("a policy archives heads at the prompt's end, and fetches their tokens behind a step's attention") {
  // The newest 8 of 20 tokens stay. Each step fetches three places over the first of them.
  struct Archiver final : Policy {
    bool fetches;
    explicit Archiver(bool f) : fetches(f) {}
    Needs needs() const override { return Needs{}.archive(true); }
    static TokenList places(const LayerKv& kv, const std::vector<std::int32_t>& of) {
      const auto list = kv.list<TokenList>("places", std::ssize(of));
      for (int h = 0; h < kv.kv_heads(); ++h) {
        for (std::size_t i = 0; i < of.size(); ++i) list.index(0, h, static_cast<std::int64_t>(i)) = of[i];
        list.count(0, h) = static_cast<std::int32_t>(of.size());
      }
      return list;
    }
    void prefill(const LayerPrefill& kv, Edits& edits, Stream) override {
      edits.archive({});
      edits.evict_rest(places(kv, {12, 13, 14, 15, 16, 17, 18, 19}));
    }
    void select(const LayerStep& step, Edits& edits, Stream) override {
      if (fetches) edits.fetch(places(step, {0, 3, 5 + step.step[0]}), {});
    }
  };
  EngineOptions o = options(2);
  o.protect_host = true;  // attention reads no archive
  Engine engine(tiny(), std::make_shared<Archiver>(true), o), plain(tiny(), std::make_shared<Archiver>(false), o);
  std::vector<int> prompt;
  for (int i = 0; i < 20; ++i) prompt.push_back(3 * i + 1);
  const std::vector<std::int32_t> slots{0};
  std::vector<float> logits[2];
  for (Engine* e : {&engine, &plain}) {
    REQUIRE(e->open() == 0);
    REQUIRE(e->prefill(0, prompt, true, {}) == Fit::ok);
  }
  const auto step = [&] {
    const std::vector<int> token{7};
    for (int i = 0; i < 2; ++i) {
      logits[i].resize(static_cast<std::size_t>(tiny()->config.vocab));
      REQUIRE((i ? plain : engine)
                  .step(slots, token, View<float, 2>::dense(logits[i].data(), {1, std::ssize(logits[i])})) == Fit::ok);
    }
  };
  using Positions = std::vector<std::int32_t>;
  CHECK(engine.host_used_bytes() == engine.full_bytes(20));
  step();
  CHECK(logits[0] == logits[1]);  // this attention came before
  CHECK(engine.store().positions_by_place(1, 0, 1) == Positions{0, 3, 5, 15, 16, 17, 18, 19, 20});
  step();
  CHECK(logits[0] != logits[1]);
  CHECK(engine.store().positions_by_place(0, 0, 0) == Positions{0, 3, 6, 15, 16, 17, 18, 19, 20, 21});
  const SavedSequence saved = engine.save(0);
  REQUIRE(engine.open() == 1);
  REQUIRE(engine.restore(1, saved) == Fit::ok);
  engine.close(0);
  const std::vector<int> token{7};
  REQUIRE(engine.step({1}, token, StepResult{}) == Fit::ok);
  CHECK(engine.store().positions_by_place(0, 1, 0) == Positions{0, 3, 7, 15, 16, 17, 18, 19, 20, 21, 22});
  engine.close(1);
  CHECK(engine.host_used_bytes() == 0);
}

TEST_CASE("after a prompt's last layer a policy sees all layers once more") {
  // Layer l keeps the newest l + 2 tokens.
  struct Divider final : Policy {
    bool asks;
    explicit Divider(bool a) : asks(a) {}
    Needs needs() const override { return Needs{}.finish_prompt(asks).window_queries(2); }
    void prefill(const LayerPrefill& kv, Edits&, Stream) override { told.push_back(100 + kv.layer); }
    void finish_prompt(const LayerKv& kv, Edits& edits, Stream) override {
      told.push_back(kv.layer);
      CHECK(kv.position[0] == 20);
      CHECK(kv.pages.tokens(0, 0) == 20);
      CHECK_FALSE(static_cast<bool>(kv.window_queries));
      CHECK_FALSE(static_cast<bool>(kv.queries));
      const auto list = kv.list<TokenList>("newest", kv.layer + 2);
      for (int h = 0; h < kv.kv_heads(); ++h) {
        list.count(0, h) = kv.layer + 2;
        for (int i = 0; i < kv.layer + 2; ++i) list.index(0, h, i) = 20 - (kv.layer + 2) + i;
      }
      edits.evict_rest(list);
    }
    std::vector<int> told;
  };
  std::vector<int> prompt;
  for (int i = 0; i < 20; ++i) prompt.push_back(3 * i + 1);
  const int layers = tiny()->config.layers;
  for (const int chunk : {0, 8}) {
    EngineOptions o = options(2);
    o.prefill_chunk = chunk;
    const auto policy = std::make_shared<Divider>(true);
    Engine engine(tiny(), policy, o);
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, std::span(prompt).first(5), false, {}) == Fit::ok);
    REQUIRE(engine.prefill(slot, std::span(prompt).subspan(5), true, {}) == Fit::ok);
    std::vector<int> wanted;
    for (int chunks = chunk ? 3 : 2; chunks > 0; --chunks)
      for (int l = 0; l < layers; ++l) wanted.push_back(100 + l);
    for (int l = 0; l < layers; ++l) wanted.push_back(l);
    CHECK(policy->told == wanted);
    for (int l = 0; l < layers; ++l) CHECK(engine.store().length(l, slot, 1) == l + 2);
    engine.store().check_invariants();
  }
  const auto silent = std::make_shared<Divider>(false);
  Engine engine(tiny(), silent, options(1));
  REQUIRE(engine.prefill(engine.open(), prompt, true, {}) == Fit::ok);
  CHECK(std::ssize(silent->told) == layers);
}

TEST_CASE("projected norms are those of the output projection's columns, in prompts and in steps") {
  struct Asks final : Policy {
    Needs needs() const override { return Needs{}.output_projection(true); }
    void prefill(const LayerPrefill& kv, Edits&, Stream s) override { ask(kv, s); }
    void observe(const LayerStep& step, Edits&, Stream s) override { ask(step, s); }
    void ask(const LayerKv& kv, Stream s) {
      const Scores out = kv.kv_head_scores("norms");
      kv.projected_norms(out, s);
      const int group = kv.shape->group(), dim = kv.pages.head_dim;
      const auto values = kv.scratch<float>("values", {kv.rows(), kv.kv_heads(), kv.max_length, dim});
      ops::read_rows(kv.values, values, s);
      const ops::Linear& w = tiny()->layers[static_cast<std::size_t>(kv.layer)].output;
      std::vector<float> row(static_cast<std::size_t>(w.k()));
      for (int r = 0; r < kv.rows(); ++r)
        for (int head = 0; head < kv.kv_heads(); ++head) {
          std::vector<double> wanted(static_cast<std::size_t>(kv.pages.tokens(r, head)));
          for (std::int64_t n = 0; n < w.n(); ++n) {
            w.row(n, row.data());
            for (int g = 0; g < group; ++g)
              for (std::size_t t = 0; t < wanted.size(); ++t) {
                double sum = 0;
                for (int d = 0; d < dim; ++d)
                  sum += double{values(r, head, static_cast<std::int64_t>(t), d)} *
                         double{row[static_cast<std::size_t>((head * group + g) * dim + d)]};
                wanted[t] += std::abs(sum) / group;
              }
          }
          for (std::size_t t = 0; t < wanted.size(); ++t, ++seen)
            CHECK(out(r, head, static_cast<std::int64_t>(t)) == Approx(wanted[t]).epsilon(1e-4));
        }
    }
    int seen = 0;
  };
  const auto policy = std::make_shared<Asks>();
  EngineOptions o = options(2);
  o.max_tokens = 2100;
  const auto model = std::const_pointer_cast<Model>(
      load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny of a longer context"));
  model->config.context = o.max_tokens;
  Engine engine(model, policy, o);
  std::vector<int> prompt(2060);  // more than one product takes
  for (int i = 0; i < 2060; ++i) prompt[static_cast<std::size_t>(i)] = 3 + i % 60;
  REQUIRE(engine.open() == 0);
  REQUIRE(engine.open() == 1);
  REQUIRE(engine.prefill(0, prompt, true, {}) == Fit::ok);
  REQUIRE(engine.prefill(1, std::span(prompt).first(7), true, {}) == Fit::ok);
  const int heads = tiny()->config.layers * tiny()->config.kv_heads;
  CHECK(policy->seen == heads * 2067);
  const std::vector<int> tokens{5, 6};
  REQUIRE(engine.step({1, 0}, tokens, StepResult{}) == Fit::ok);
  CHECK(policy->seen == heads * (2067 + 2069));
}

TEST_CASE("a callback that did not ask for projected norms gets none") {
  struct Asks final : Policy {
    Needs needs() const override { return {}; }
    void prefill(const LayerPrefill& kv, Edits&, Stream s) override {
      kv.projected_norms(kv.kv_head_scores("norms"), s);
    }
  };
  Engine engine(tiny(), std::make_shared<Asks>(), options(1));
  const std::vector<int> prompt{1, 2, 3};
  CHECK_THROWS_WITH(engine.prefill(engine.open(), prompt, true, {}),
                    Catch::Contains("got projected_norms() in a callback, wanted needs() to ask for it"));
}

TEST_CASE("an edit for an attention that is over is refused") {
  const int token = 3;
  const std::vector<int> prompt{1, 2, 3, 4, 5};
  for (const Callback from : {Callback::prefill, Callback::observe, Callback::finish_step}) {
    Engine engine(tiny(), std::make_shared<Evictor>(from, Deadline{Deadline::this_attention}), options(1));
    const int slot = engine.open();
    const auto run = [&] {
      engine.prefill(slot, prompt, true, {});
      for (int step = 0; step < 2; ++step) engine.step({slot}, {&token, 1}, {});
    };
    CHECK_THROWS_WITH(run(), Catch::Matchers::Contains("got an edit for this attention, wanted it in select()"));
  }
}

TEST_CASE("select names one list, and no token leaves before the attention that reads it") {
  class Twice final : public Policy {
   public:
    explicit Twice(bool evicts) : evicts_(evicts) {}
    Needs needs() const override { return {}; }
    void select(const LayerStep& step, Edits& edits, Stream) override {
      TokenList l = step.list<TokenList>("first", 1);
      for (int h = 0; h < step.kv_heads(); ++h) l.index(0, h, 0) = 0, l.count(0, h) = 1;
      edits.attend(l);
      evicts_ ? edits.evict(l, {Deadline::this_attention}) : edits.attend(l);
    }
    bool evicts_;
  };
  const int token = 3;
  const std::vector<int> prompt{1, 2, 3, 4, 5};
  for (const bool evicts : {false, true}) {
    Engine engine(tiny(), std::make_shared<Twice>(evicts), options(1));
    const int slot = engine.open();
    REQUIRE(engine.prefill(slot, prompt, true, {}) == Fit::ok);
    CHECK_THROWS_WITH(engine.step({slot}, {&token, 1}, {}),
                      Catch::Contains(evicts ? "wanted them after it" : "got a second list to attend to"));
  }
}

TEST_CASE("what a policy is told about a row is of the row's own sequence, in whatever slot") {
  const auto told = std::make_shared<Listener>();
  Engine engine(tiny(), told, options(3));
  const std::vector<int> a{1, 2, 3, 4, 5}, b{6, 7, 8};
  const int first = engine.open(), second = engine.open(4), third = engine.open(5);
  engine.close(first);
  REQUIRE(engine.prefill(third, a, true, {}) == Fit::ok);
  REQUIRE(engine.prefill(second, b, true, {}) == Fit::ok);
  engine.ask(second, 9);
  const int token = 3;
  const std::vector<int> two{3, 3};
  REQUIRE(engine.step({second}, {&token, 1}, {}) == Fit::ok);
  REQUIRE(engine.step({third, second}, two, {}) == Fit::ok);
  // A step's position counts its own token, its step number only the steps before it.
  REQUIRE(told->prompts.size() == 2);
  CHECK(told->prompts[0] == Listener::Told{{third}, {5}, {0}, {5}, {0}, 0, {}});
  CHECK(told->prompts[1] == Listener::Told{{second}, {3}, {0}, {4}, {0}, 0, {}});
  REQUIRE(told->steps.size() == 2);
  CHECK(told->steps[0] == Listener::Told{{second}, {4}, {0}, {4}, {9}, 0, {}});
  CHECK(told->steps[1] == Listener::Told{{third, second}, {6, 5}, {0, 1}, {5, 4}, {0, 9}, 0, {}});
}

TEST_CASE("a new sequence has no question of the one that had its slot before") {
  const auto told = std::make_shared<Listener>();
  Engine engine(tiny(), told, options(1));
  const std::vector<int> text{1, 2, 3};
  for (const std::uint32_t question : {7u, 0u}) {
    const int slot = engine.open();
    if (question) engine.ask(slot, question);
    REQUIRE(engine.prefill(slot, text, true, {}) == Fit::ok);
    CHECK(told->prompts.back().question == std::vector<std::uint32_t>{question});
    engine.close(slot);
  }
}

TEST_CASE("window queries are the last ones of the slot's own prompt, in chunks or whole") {
  constexpr int window = 6;
  const std::vector<int> text{9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4, 5}, other{11, 12, 13, 14, 15};
  const auto of = [&](std::size_t tokens, int chunk, auto before) {
    const auto told = std::make_shared<Listener>(window);
    EngineOptions o = options(1);
    o.prefill_chunk = chunk;
    Engine engine(tiny(), told, o);
    const int slot = engine.open();
    before(engine, slot);
    REQUIRE(engine.prefill(slot, std::span(text).first(tokens), true, {}) == Fit::ok);
    return told->prompts.back();
  };
  const auto nothing = [](Engine&, int) {};
  const auto another = [&](Engine& engine, int slot) { REQUIRE(engine.prefill(slot, other, false, {}) == Fit::ok); };
  for (const std::size_t tokens : {std::size_t{4}, std::size_t{6}, std::size_t{13}}) {
    const auto wanted = of(tokens, 0, nothing);
    REQUIRE(wanted.window == std::min<std::int64_t>(window, static_cast<std::int64_t>(tokens)));
    for (const int chunk : {1, 3, 4, 8}) {
      CAPTURE(tokens, chunk);
      CHECK(of(tokens, chunk, nothing) == wanted);
    }
    CAPTURE(tokens);
    CHECK(of(tokens, 0, [&](Engine& engine, int slot) {
            another(engine, slot);
            engine.close(slot);
            engine.open();
          }) == wanted);
    CHECK(of(tokens, 0, [&](Engine& engine, int slot) {
            const auto empty = engine.save(slot);
            another(engine, slot);
            REQUIRE(engine.restore(slot, empty) == Fit::ok);
          }) == wanted);
  }
}

TEST_CASE("window queries of a second prompt are its own, whether the first one came in chunks or whole") {
  constexpr int window = 6;
  const std::vector<int> first{11, 12, 13, 14, 15, 16, 17, 18}, second{9, 8, 7, 6, 5, 4, 3, 2};
  const auto of = [&](std::size_t tokens, std::size_t part) {
    const auto told = std::make_shared<Listener>(window);
    Engine engine(tiny(), told, options(1));
    const int slot = engine.open(), answer = 3;
    for (std::size_t at = 0; at < first.size(); at += part)
      REQUIRE(engine.prefill(slot, std::span(first).subspan(at, part), at + part == first.size(), {}) == Fit::ok);
    REQUIRE(engine.step({slot}, {&answer, 1}, {}) == Fit::ok);
    REQUIRE(engine.prefill(slot, std::span(second).first(tokens), true, {}) == Fit::ok);
    return told->prompts.back();
  };
  for (const std::size_t tokens : {std::size_t{1}, std::size_t{4}, std::size_t{8}}) {
    CAPTURE(tokens);
    const auto after_whole = of(tokens, first.size());
    CHECK(after_whole.window == std::min<std::int64_t>(window, static_cast<std::int64_t>(tokens)));
    CHECK(of(tokens, 4) == after_whole);
  }
}

TEST_CASE("the likeliest token of each row is that of its logits, wherever the rows lie") {
  Engine engine(tiny(), std::make_shared<Nothing>(), options(3));
  const std::int64_t vocab = tiny()->config.vocab, stride = vocab + 5;
  std::vector<std::int32_t> slots;
  std::vector<int> tokens;
  for (int r = 0; r < 3; ++r) {
    slots.push_back(engine.open());
    tokens.push_back(5 * r + 1);
    REQUIRE(engine.prefill(slots.back(), std::vector<int>{r + 1, 2 * r + 3, 4}, true, {}) == Fit::ok);
  }
  std::vector<float> logits(static_cast<std::size_t>(3 * stride), 1e30f);
  std::vector<std::int32_t> likeliest(3, -1);
  StepResult out(View<float, 2>{logits.data(), {3, vocab}, {stride, 1}});
  out.likeliest = likeliest;
  REQUIRE(engine.step(slots, tokens, out) == Fit::ok);
  for (std::int64_t r = 0; r < 3; ++r) {
    const float* row = logits.data() + r * stride;
    CHECK(likeliest[static_cast<std::size_t>(r)] == std::max_element(row, row + vocab) - row);
    CHECK(*std::max_element(row, row + vocab) < 1e30f);
    CHECK(row[vocab] == 1e30f);
  }
  CHECK(std::set<std::int32_t>(likeliest.begin(), likeliest.end()).size() > 1);
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

TEST_CASE("mass_into sums what mass gives, in prompts and steps") {
  const auto [rule, when] = GENERATE(std::pair{GroupRule::mean, Mass::all}, std::pair{GroupRule::max, Mass::decode});
  std::vector<float> of[2];
  for (const bool by_core : {false, true}) {
    const auto policy = std::make_shared<Sums>(by_core, rule, when);
    Engine engine(tiny(), policy, options(1));
    const int slot = engine.open();
    const std::vector<int> text{1, 2, 3, 4, 5, 6, 7};
    REQUIRE(engine.prefill(slot, std::span(text).first(4), false, {}) == Fit::ok);
    REQUIRE(engine.prefill(slot, std::span(text).subspan(4), true, {}) == Fit::ok);
    for (const int token : {8, 9}) REQUIRE(engine.step({slot}, std::array{token}, {}) == Fit::ok);
    of[by_core] = policy->seen;
  }
  CHECK(of[0] == of[1]);
  CHECK(*std::ranges::max_element(of[1]) > 0);

  struct Both final : Policy {
    Needs needs() const override { return Needs{}.mass(Mass::decode).mass_into("sum", GroupRule::mean, Mass::decode); }
  };
  CHECK_THROWS_WITH(Engine(tiny(), std::make_shared<Both>(), options(1)), Catch::Contains("got mass and mass_into"));
}

TEST_CASE("attention leaves the logits that select asks for, and refuses them beside mass or twice") {
  struct Keeper final : Policy {
    explicit Keeper(int times = 1, Mass m = Mass::none) : times_(times), mass_(m) {}
    Needs needs() const override { return Needs{}.mass(mass_); }
    void attach(const Shape& shape, const BudgetAmount&, Workspace& w) override {
      const std::int64_t numbers = std::int64_t{shape.max_slots} * shape.max_tokens * shape.group();
      auto* room = static_cast<float*>(w.room("logits", static_cast<std::size_t>(numbers) * sizeof(float)));
      std::vector<std::int32_t> index(static_cast<std::size_t>(shape.layers * shape.kv_heads), -1);
      for (int l = 0; l < shape.layers; ++l) index[static_cast<std::size_t>((l + 1) * shape.kv_heads - 1)] = 0;
      index_ = HeadOfHead("last head", shape, index, w);
      logits_.out = View<float, 4>::dense(room, {shape.max_slots, 1, shape.max_tokens, shape.group()});
    }
    void select(const LayerStep& step, Edits& edits, Stream) override {
      logits_.index = index_.of(step);
      for (int i = 0; i < times_; ++i) edits.keep_logits(logits_);
    }
    void observe(const LayerStep& step, Edits&, Stream s) override {
      const Scores got = step.kv_head_scores("got"), wanted = step.kv_head_scores("wanted");
      ops::pooled_logits(step.pages, logits_, {}, got, s);
      const View<const float, 3> q = step.queries.f32();
      const View<const float, 4> window{
          q.data, {q.extent[0], q.extent[1], 1, q.extent[2]}, {q.stride[0], q.stride[1], 0, q.stride[2]}};
      ops::pooled_votes(window, step.pages, {}, wanted, *step.workspace, s);
      const int head = step.kv_heads() - 1;
      for (int t = 0; t < step.pages.tokens(0, head); ++t, ++seen)
        CHECK(got(0, head, t) == Approx(wanted(0, head, t)).epsilon(1e-4));
    }
    int seen = 0;

   private:
    int times_;
    Mass mass_;
    HeadOfHead index_;
    HeadLogits logits_;
  };
  const auto run = [](const std::shared_ptr<Keeper>& policy) {
    Engine engine(tiny(), policy, options(1));
    const int slot = engine.open(), token = 8;
    REQUIRE(engine.prefill(slot, std::vector<int>{1, 2, 3, 4, 5}, true, {}) == Fit::ok);
    for (int i = 0; i < 2; ++i) {
      const Fit fit = engine.step({slot}, {&token, 1}, {});  // it may throw
      REQUIRE(fit == Fit::ok);
    }
  };
  const auto once = std::make_shared<Keeper>();
  run(once);
  CHECK(once->seen == 13 * tiny()->config.layers);
  CHECK_THROWS_WITH(run(std::make_shared<Keeper>(2)), Catch::Contains("got logits to keep twice"));
  CHECK_THROWS_WITH(run(std::make_shared<Keeper>(1, Mass::decode)), Catch::Contains("with mass"));
}

TEST_CASE("a second prompt's mass covers what each head still holds") {
  // After the first prompt head h keeps its first h + 1 tokens. Each query's probabilities sum to 1.
  struct Uneven final : Policy {
    Needs needs() const override { return Needs{}.mass(Mass::all); }
    void prefill(const LayerPrefill& kv, Edits& edits, Stream) override {
      for (int head = 0; head < kv.shape->query_heads; ++head) {
        const int kv_head = head / (kv.shape->query_heads / kv.kv_heads());
        double sum = 0;
        for (int t = 0; t < kv.pages.tokens(0, kv_head); ++t) sum += kv.mass(0, head, t);
        sums.push_back(sum);
        held.push_back(kv.pages.tokens(0, kv_head));
      }
      const auto list = kv.list<TokenList>("kept", kv.max_length);
      for (int h = 0; h < kv.kv_heads(); ++h) {
        list.count(0, h) = h + 1;
        for (int t = 0; t <= h; ++t) list.index(0, h, t) = t;
      }
      edits.evict_rest(list);
    }
    std::vector<double> sums;
    std::vector<int> held;
  };
  const auto policy = std::make_shared<Uneven>();
  Engine engine(tiny(), policy, options(1));
  const int slot = engine.open();
  const std::vector<int> text{1, 2, 3, 4, 5, 6, 7};
  for (const int queries : {7, 3}) {
    CAPTURE(queries);
    policy->sums.clear(), policy->held.clear();
    REQUIRE(engine.prefill(slot, std::span(text).first(static_cast<std::size_t>(queries)), true, {}) == Fit::ok);
    for (const double sum : policy->sums) CHECK(sum == Approx(queries).epsilon(1e-4));
    REQUIRE(policy->held.size() == static_cast<std::size_t>(tiny()->config.layers * tiny()->config.heads));
    CHECK(policy->held.back() == (queries == 7 ? 7 : tiny()->config.kv_heads + 3));
  }
}

TEST_CASE("keys by their place turn a new token by what its own head holds") {
  // Keeps the first h + 1 prompt tokens of KV head h, or all; notes the first layer's queries of the latest step.
  struct Turning final : Policy {
    explicit Turning(bool uneven) : uneven_(uneven) {}
    Needs needs() const override { return Needs{}.rope(RopeRegime::cache_relative); }
    void prefill(const LayerPrefill& kv, Edits& edits, Stream) override {
      if (!uneven_) return;
      const auto list = kv.list<TokenList>("kept", kv.max_length);
      for (int h = 0; h < kv.kv_heads(); ++h) {
        list.count(0, h) = h + 1;
        for (int t = 0; t <= h; ++t) list.index(0, h, t) = t;
      }
      edits.evict_rest(list);
    }
    void observe(const LayerStep& step, Edits&, Stream) override {
      if (step.layer > 0) return;
      const auto q = step.queries.f32();
      queries.clear();
      for (std::int64_t head = 0; head < q.extent[1]; ++head)
        queries.emplace_back(&q(0, head, 0), &q(0, head, 0) + q.extent[2]);
    }
    std::vector<std::vector<float>> queries;
    bool uneven_;
  };
  const auto queries_after = [&](int tokens, bool uneven) {
    const auto policy = std::make_shared<Turning>(uneven);
    Engine engine(tiny(), policy, options(1));
    const int slot = engine.open(), token = 3;
    REQUIRE(engine.prefill(slot, std::vector<int>(static_cast<std::size_t>(tokens), 5), true, {}) == Fit::ok);
    REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    return policy->queries;
  };
  const auto got = queries_after(9, true);
  const int kv_heads = tiny()->config.kv_heads, group = tiny()->config.group();
  REQUIRE(kv_heads > 1);
  for (int h = 0; h < kv_heads; ++h) {
    const auto wanted = queries_after(h + 1, false);  // a first layer's query depends on its token and place alone
    for (int head = h * group; head < (h + 1) * group; ++head) {
      CAPTURE(head);
      CHECK(got[static_cast<std::size_t>(head)] == wanted[static_cast<std::size_t>(head)]);
      if (h > 0) CHECK(got[static_cast<std::size_t>(head)] != queries_after(1, false)[static_cast<std::size_t>(head)]);
    }
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
    o.device_limit = (2 * heads + spare) * frame;  // two short prompts, but not every head's next page
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

TEST_CASE("a policy is told its budget in tokens, the dense layers' as unlimited, in prompts and in steps") {
  struct Asks final : Policy {
    explicit Asks(int dense) : dense_(dense) {}
    Needs needs() const override { return Needs{}.dense_layers(dense_); }
    void prefill(const LayerPrefill& kv, Edits&, Stream) override { note(kv); }
    void select(const LayerStep& step, Edits&, Stream) override {
      note(step);
      CHECK(!step.page_budgets);
    }
    void observe(const LayerStep& step, Edits&, Stream) override { note(step); }
    void note(const LayerKv& kv) {
      for (int r = 0; r < kv.rows(); ++r) told[{kv.layer, kv.position[r]}] = kv.budget_tokens(r);
    }
    std::map<std::pair<int, int>, int> told;  // by layer and text position
    int dense_;
  };
  const int all = std::numeric_limits<int>::max();
  const auto told = [&](BudgetAmount amount, int dense) {
    const auto policy = std::make_shared<Asks>(dense);
    EngineOptions o = options(2);
    o.budget = amount;
    Engine engine(tiny(), policy, o);
    const int a = engine.open(), b = engine.open();
    const std::vector<int> tokens{3, 4};
    REQUIRE(engine.prefill(a, std::vector<int>(10, 1), true, {}) == Fit::ok);
    REQUIRE(engine.prefill(b, std::vector<int>(20, 1), true, {}) == Fit::ok);
    REQUIRE(engine.step({a, b}, tokens, {}) == Fit::ok);
    return policy->told;
  };
  auto t = told({BudgetAmount::tokens, 12}, 1);
  for (const int seen : {10, 20, 11, 21}) {
    CHECK(t[{0, seen}] == all);
    CHECK(t[{1, seen}] == 12);
  }
  t = told({BudgetAmount::ratio, 0.5}, 0);
  CHECK(t[{0, 10}] == 5);
  CHECK(t[{0, 20}] == 10);
  CHECK(t[{2, 21}] == 10);
  CHECK(told({}, 0)[{0, 20}] == all);
  // Four pages for each of 3 layers and 2 KV heads, two of which the dense layer's 11 tokens take.
  const PageLayout page = ops::make_layout(DType::f32, {}, 8, 16, 0);
  t = told({BudgetAmount::bytes, static_cast<double>(3 * 2 * 4 * page.bytes)}, 1);
  CHECK(t[{1, 11}] == 5 * 8);
  CHECK(t[{0, 11}] == all);
}

TEST_CASE("chunk queries are the window queries of the whole chunk, and empty while decoding") {
  struct Sees final : Policy {
    Needs needs() const override { return Needs{}.window_queries(5); }
    void prefill(const LayerPrefill& kv, Edits&, Stream) override {
      const auto all = kv.chunk_queries.f32();
      sizes.push_back(all.extent[2]);
      if (!kv.last[0]) return;
      const auto window = kv.window_queries.f32();
      for (std::int64_t head = 0; head < all.extent[1]; ++head)
        for (std::int64_t i = 0; i < 5; ++i)
          for (std::int64_t d = 0; d < all.extent[3]; ++d)
            REQUIRE(all(0, head, all.extent[2] - 5 + i, d) == window(0, head, i, d));
    }
    void observe(const LayerStep& step, Edits&, Stream) override { CHECK(!step.chunk_queries); }
    std::vector<std::int64_t> sizes;
  };
  const auto policy = std::make_shared<Sees>();
  EngineOptions o = options(1);
  o.prefill_chunk = 9;
  Engine engine(tiny(), policy, o);
  const int slot = engine.open(), token = 3;
  REQUIRE(engine.prefill(slot, std::vector<int>(16, 1), true, {}) == Fit::ok);
  REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
  const std::size_t layers = policy->sizes.size() / 2;
  CHECK(policy->sizes.front() == 9);
  CHECK(policy->sizes[layers] == 7);
}
