#include "compose/compose.hpp"

#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "plugin/budget_tokens.hpp"
#include "plugin/takes_mass_late.hpp"
#include "support/golden.hpp"

using namespace kvlab;

namespace {

class Recency : public Scorer {
 public:
  explicit Recency(int every) : every_(every) {}
  void score(const LayerKv& kv, Scores out, Stream s) override { ops::recency(kv.pages, out, s); }
  int every() const override { return every_; }

 private:
  int every_;
};

// Tokens of each KV head after a prompt of 16, and after each of 7 steps, with a budget of 16.
std::vector<int> lengths(int scorers_own, std::optional<int> every) {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  Composition parts;
  parts.scorer = Instance<Scorer>(new Recency(scorers_own),
                                  PluginDeleter{nullptr, [](void* p) { delete static_cast<Scorer*>(p); }});
  parts.every = every;
  EngineOptions o;
  o.max_tokens = 64;
  o.page_size = 8;
  o.budget = {BudgetAmount::tokens, 16};
  Engine engine(model, compose(std::move(parts)), o);
  const int slot = engine.open(), token = 3;
  REQUIRE(engine.prefill(slot, std::vector<int>(16, token), true, {}) == Fit::ok);
  std::vector<int> out{engine.store().length(0, slot, 0)};
  for (int i = 0; i < 7; ++i) {
    REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    out.push_back(engine.store().length(0, slot, 0));
  }
  return out;
}

template <class Role, class T>
Instance<Role> instance(T* object) {
  return Instance<Role>(object, PluginDeleter{nullptr, [](void* p) { delete static_cast<Role*>(p); }});
}

// Records the arguments of the callbacks of a scorer or selector.
struct Told {
  int attached = 0, prompts = 0, steps = 0, released = -1, select_with_mass = 0;
  double budget = 0, read = 0, unread = 0;  // mass of tokens on pages that were read and of the others
};

// Reads its first page and the last one, and adds up the mass that each token was given.
class Rememberer final : public Selector {
 public:
  explicit Rememberer(Told& told) : told_(told) {}
  Needs needs() const override { return Needs{}.mass(Mass::decode).token_state("mass"); }
  void attach(const Shape& shape, const BudgetAmount& amount, Workspace& w) override {
    ++told_.attached;
    told_.budget = amount.value;
    steps_ = static_cast<float*>(w.state("steps", sizeof(float), shape.max_slots));
  }
  void prefill(const LayerPrefill& kv, Stream) override { told_.prompts += kv.layer == 0; }
  void select(const LayerStep& step, PageList out, Stream) override {
    told_.select_with_mass += step.mass ? 1 : 0;
    for (int h = 0; h < step.kv_heads(); ++h) {
      out.count(0, h) = 2;
      out.index(0, h, 0) = 0, out.index(0, h, 1) = step.pages.pages(0, h) - 1;
    }
  }
  void observe(const LayerStep& step, Stream s) override {
    ops::add_mass(step.mass, GroupRule::mean, step.state("mass"), s);
    if (step.layer > 0) return;
    ++told_.steps;
    steps_[step.slots[0]] += 1;
    told_.read = told_.unread = 0;
    const Scores sum = step.kv_head_scores("sum");
    ops::read_state(step.state("mass"), sum, s);
    for (int t = 0; t < step.pages.tokens(0, 0); ++t) (t < 8 || t >= 24 ? told_.read : told_.unread) += sum(0, 0, t);
  }
  void release(int slot) override { told_.released = slot; }
  float steps_of(int slot) const { return steps_[slot]; }

 private:
  Told& told_;
  float* steps_ = nullptr;
};

class Keeper final : public Recency {
 public:
  explicit Keeper(Told& told) : Recency(1), told_(told) {}
  void attach(const Shape&, const BudgetAmount& amount, Workspace&) override {
    ++told_.attached;
    told_.budget = amount.value;
  }
  void release(int slot) override { told_.released = slot; }

 private:
  Told& told_;
};

std::shared_ptr<const Model> tiny() {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return model;
}

}  // namespace

TEST_CASE("a selector has attach, prefill, observe with the step's mass, state and release") {
  Told told;
  auto* selector = new Rememberer(told);
  Composition parts;
  parts.selector = instance<Selector>(selector);
  EngineOptions o;
  o.max_tokens = 64;
  o.page_size = 8;
  o.budget = {BudgetAmount::tokens, 16};
  Engine engine(tiny(), compose(std::move(parts)), o);
  CHECK(told.attached == 1);
  CHECK(told.budget == 16);
  const int slot = engine.open(), token = 3;
  REQUIRE(engine.prefill(slot, std::vector<int>(24, token), true, {}) == Fit::ok);
  CHECK(told.prompts == 1);
  for (int i = 1; i <= 3; ++i) {
    REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
    CHECK(told.steps == i);
    CHECK(told.read == Approx(i).epsilon(1e-5));  // a step's mass sums to 1
    CHECK(told.unread == 0);
    CHECK(selector->steps_of(slot) == static_cast<float>(i));
  }
  CHECK(told.select_with_mass == 0);
  engine.close(slot);
  CHECK(told.released == slot);
  CHECK(selector->steps_of(slot) == 0);
}

TEST_CASE("a scorer has attach and release") {
  Told told;
  Composition parts;
  parts.scorer = instance<Scorer>(new Keeper(told));
  EngineOptions o;
  o.max_tokens = 64;
  o.budget = {BudgetAmount::tokens, 16};
  Engine engine(tiny(), compose(std::move(parts)), o);
  CHECK(told.attached == 1);
  CHECK(told.budget == 16);
  const int slot = engine.open();
  engine.close(slot);
  CHECK(told.released == slot);
}

TEST_CASE("a split that makes heads differ is refused for a scorer that needs uniform heads") {
  struct Uniform final : Recency {
    Uniform() : Recency(0) {}
    Needs needs() const override { return Needs{}.uniform_heads(true); }
  };
  struct Split final : Budget {
    explicit Split(bool uniform) : uniform_(uniform) {}
    void allot(const Allotment&, Stream) override {}
    bool uniform_heads() const override { return uniform_; }
    bool uniform_;
  };
  const auto composed = [](bool needs, bool gives) {
    Composition parts;
    parts.name = "mine";
    parts.scorer = instance<Scorer>(needs ? static_cast<Scorer*>(new Uniform) : new Recency(0));
    parts.split = instance<Budget>(new Split(gives));
    return compose(std::move(parts));
  };
  CHECK_NOTHROW(composed(true, true));
  CHECK_NOTHROW(composed(false, false));
  CHECK_THROWS_WITH(composed(true, false),
                    Catch::StartsWith("mine: got a budget split that gives the KV heads of a layer different numbers"));
}

TEST_CASE("a split that reads a profile gets it before attach, and sees the model's shape") {
  struct Reader final : Budget {
    explicit Reader(std::vector<int>& told) : told_(told) {}
    void allot(const Allotment& a, Stream s) override { ops::allot_uniform(a, s); }
    bool reads_profile() const override { return true; }
    void load_profile(const Profile& p) override { told_.push_back(static_cast<int>(p.at("votes").values.size())); }
    void attach(const Shape& s) override { told_.insert(told_.end(), {s.layers, s.kv_heads}); }
    std::vector<int>& told_;
  };
  std::vector<int> told;
  Composition parts;
  parts.scorer = instance<Scorer>(new Recency(0));
  parts.split = instance<Budget>(new Reader(told));
  auto policy = compose(std::move(parts));
  CHECK(policy->needs().profile());
  policy->load_profile({{"votes", {{1}, {7}, ""}}});
  EngineOptions o;
  o.max_tokens = 64;
  o.page_size = 8;
  o.budget = {BudgetAmount::tokens, 16};
  const Engine engine(tiny(), std::move(policy), o);
  CHECK(told == std::vector<int>{1, 3, 2});  // llama-gqa3
}

TEST_CASE("a schedule evicts after every n-th decode step, the scorer's own where none is given") {
  using Ints = std::vector<int>;
  CHECK(lengths(0, 3) == Ints{16, 17, 18, 16, 17, 18, 16, 17});
  CHECK(lengths(1, 3) == Ints{16, 17, 18, 16, 17, 18, 16, 17});
  CHECK(lengths(2, std::nullopt) == Ints{16, 17, 16, 17, 16, 17, 16, 17});
  CHECK(lengths(1, std::nullopt) == Ints(8, 16));
  CHECK(lengths(1, 0) == Ints{16, 17, 18, 19, 20, 21, 22, 23});
}

TEST_CASE("a budget that cannot be obeyed is refused: below what is always kept, below the least pages") {
  struct Pinned final : Recency {
    Pinned() : Recency(1) {}
    Pins pins(int) const override { return {.first = 2, .last = 10}; }
  };
  struct Least final : Selector {
    Needs needs() const override { return Needs{}.min_pages(3); }
    void select(const LayerStep&, PageList, Stream) override {}
  };
  const auto said = [](auto make, const BudgetAmount& amount) {
    EngineOptions o;
    o.max_tokens = 64;
    o.page_size = 8;
    o.budget = amount;
    const log::Collected all;
    Composition parts;
    make(parts);
    parts.name = "some";
    const Engine engine(tiny(), compose(std::move(parts)), o);
    return all.warnings();
  };
  const auto pinned = [](Composition& parts) { parts.scorer = instance<Scorer>(new Pinned); };
  const auto least = [](Composition& parts) { parts.selector = instance<Selector>(new Least); };
  using Lines = std::vector<std::string>;
  const std::string kept = "wanted at least the 12 that are always kept (2 first, 10 last)";
  CHECK_THROWS_WITH(said(pinned, {BudgetAmount::tokens, 11}), Catch::Contains("got a budget of 11 tokens, " + kept));
  CHECK(said(pinned, {BudgetAmount::tokens, 12}).empty());
  CHECK_THROWS_WITH(said(pinned, {BudgetAmount::ratio, 0.125}),
                    Catch::Contains("got a budget of 8 tokens per KV head in the longest sequence, of 64, " + kept));
  CHECK(said(pinned, {BudgetAmount::ratio, 0.25}).empty());
  // A shorter sequence gets less. That is said, and its pins stay.
  const auto said_of = [](auto make, double ratio, std::vector<int> lengths, int stay) {
    EngineOptions o;
    o.max_tokens = 64, o.page_size = 8, o.slots = 2;
    o.budget = {BudgetAmount::ratio, ratio};
    Composition parts;
    make(parts);
    parts.name = "some";
    const log::Collected all;
    Engine engine(tiny(), compose(std::move(parts)), o);
    for (const int length : lengths) {
      const int slot = engine.open();
      REQUIRE(engine.prefill(slot, std::vector<int>(static_cast<std::size_t>(length), 3), true, {}) == Fit::ok);
      CHECK(engine.store().length(0, slot, 0) == (stay > 0 ? stay : length));
      engine.close(slot);
    }
    return all.warnings();
  };
  const std::string short_of = "got a ratio that gives a sequence less than the ";
  CHECK(said_of(pinned, 0.25, {48, 40, 40}, 12) == Lines{short_of + "12 tokens that 'some' always keeps"});
  CHECK(said_of(least, 0.375, {64, 20}, 0).empty());  // what it reads of 20 tokens is all of them
  CHECK(said_of(least, 0.375, {40, 40}, 0) == Lines{short_of + "24 tokens that 'some' always reads"});
  const std::string read = "wanted at least the 24 that are always read, 3 pages of 8";
  CHECK_THROWS_WITH(said(least, {BudgetAmount::tokens, 23}), Catch::Contains("got a budget of 23 tokens, " + read));
  CHECK(said(least, {BudgetAmount::tokens, 24}).empty());
  CHECK_THROWS_WITH(said(least, {BudgetAmount::ratio, 0.25}),
                    Catch::Contains("got a budget of 16 tokens per KV head in the longest sequence, of 64, " + read));
  CHECK(said(least, {BudgetAmount::ratio, 0.375}).empty());
  CHECK(said(least, {BudgetAmount::unlimited, 0}).empty());
}

TEST_CASE("a budget in bytes pays for every KV head of the dense layers before it buys pages of the others") {
  Shape s;
  s.layers = 4, s.kv_heads = 2, s.page_size = 8;
  const auto tokens = [&](double bytes, int dense_layers) {
    return budget_tokens({BudgetAmount::bytes, bytes}, 20, s, 100, dense_layers);  // 20 tokens take 3 pages
  };
  CHECK(tokens(8 * 200, 0) == 16);
  CHECK(tokens(8 * 200 - 1, 0) == 8);
  CHECK(tokens(2 * 300 + 6 * 200, 1) == 16);
  CHECK(tokens(2 * 300 + 6 * 200 - 1, 1) == 8);
  CHECK(tokens(6 * 300 + 2 * 100, 3) == 8);
  CHECK(tokens(6 * 300, 3) == 8);  // a page at least
  CHECK(amount_for_pages({BudgetAmount::bytes, 1000}, 300).value == 700);
  CHECK(amount_for_pages({BudgetAmount::bytes, 100}, 300).value == 0);
  CHECK(amount_for_pages({BudgetAmount::tokens, 100}, 300).value == 100);
  CHECK(tokens(1, 4) == std::numeric_limits<int>::max());  // nothing is ever evicted
}

TEST_CASE("a profile reaches the scorer or the selector") {
  struct Reads final : Recency {
    explicit Reads(std::size_t& count) : Recency(0), arrays(count) {}
    Needs needs() const override { return Needs{}.profile(true); }
    void load_profile(const Profile& p) override { arrays = p.size(); }
    std::size_t& arrays;
  };
  struct ReadsToo final : Selector {
    explicit ReadsToo(std::size_t& count) : arrays(count) {}
    Needs needs() const override { return Needs{}.profile(true); }
    void load_profile(const Profile& p) override { arrays = p.size(); }
    void select(const LayerStep&, PageList, Stream) override {}
    std::size_t& arrays;
  };
  std::size_t of_scorer = 0, of_selector = 0;
  Composition scores, selects;
  scores.scorer = instance<Scorer>(new Reads(of_scorer));
  selects.selector = instance<Selector>(new ReadsToo(of_selector));
  for (Composition* parts : {&scores, &selects}) {
    const auto policy = compose(std::move(*parts));
    CHECK(policy->needs().profile());
    policy->load_profile({{"votes", {}}, {"windows", {}}});
  }
  CHECK(of_scorer == 2);
  CHECK(of_selector == 2);
}

TEST_CASE("mass may come at a step's end where evictions by its column alone look at it there") {
  struct Ranks final : Recency {
    const char *sums, *ranks;
    RopeRegime rope;
    Ranks(const char* s, const char* r, int every, RopeRegime regime)
        : Recency(every), sums(s), ranks(r), rope(regime) {}
    Needs needs() const override {
      return Needs{}.mass_into(sums, GroupRule::mean, Mass::all).token_state("other").rope(rope);
    }
    const char* column() const override { return ranks; }
    bool steady_score() const override { return true; }
  };
  struct Even final : Budget {
    void allot(const Allotment& a, Stream s) override { ops::allot_uniform(a, s); }
  };
  const auto late = [](const char* sums, const char* ranks, int every = 1, bool split = false,
                       RopeRegime rope = RopeRegime::original, double tokens = 16) {
    Composition parts;
    parts.scorer = instance<Scorer>(new Ranks(sums, ranks, every, rope));
    if (split) parts.split = instance<Budget>(new Even);
    const std::shared_ptr<Policy> policy = compose(std::move(parts));
    EngineOptions o;
    o.max_tokens = 64;
    if (tokens > 0) o.budget = {BudgetAmount::tokens, tokens};
    const Engine engine(tiny(), policy, o);
    return takes_mass_late(*policy);
  };
  CHECK(late("sum", "sum"));
  CHECK(late("sum", "sum", 4));
  CHECK_FALSE(late("sum", "other"));
  CHECK_FALSE(late("sum", nullptr));
  CHECK_FALSE(late("sum", "sum", 0));
  CHECK_FALSE(late("sum", "sum", 1, true));
  CHECK_FALSE(late("sum", "sum", 1, false, RopeRegime::re_rotate));
  CHECK_FALSE(late("sum", "sum", 1, false, RopeRegime::original, 0));
  Composition parts;
  parts.scorer = instance<Scorer>(new Recency(1));
  CHECK_FALSE(takes_mass_late(*compose(std::move(parts))));
  CHECK_FALSE(takes_mass_late(*compose({})));
}
