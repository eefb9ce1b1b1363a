#include "compose/second_stage.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <utility>
#include <vector>

#include "compose/compose.hpp"
#include "compose/forwarding.hpp"
#include "compose/pruning.hpp"
#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;

namespace {

template <class Role, class T>
Instance<Role> instance(T* object) {
  return Instance<Role>(object, PluginDeleter{nullptr, [](void* p) { delete static_cast<Role*>(p); }});
}

std::shared_ptr<const Model> tiny() {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return model;
}

EngineOptions options(BudgetAmount budget = {}) {
  EngineOptions o;
  o.max_tokens = 64;
  o.page_size = 8;
  o.budget = budget;
  return o;
}

struct Told {
  std::vector<int> appended;  // of layer 1
  int layer_0 = 0, pages = 0, tokens = 0, entries = 0;
};

// Reads the first of the candidates and the newest token.
class Ends final : public Pruner {
 public:
  explicit Ends(Told& told) : told_(told) {}
  Needs needs() const override { return Needs{}.dense_layers(1); }
  void appended(const LayerKv& kv, int newest, Stream) override {
    told_.layer_0 += kv.layer == 0;
    if (kv.layer == 1) told_.appended.push_back(newest);
  }
  void prune(const LayerStep& step, const PageList& candidates, TokenList out, Stream) override {
    told_.pages += step.layer == 1;
    take(step, candidates, step.pages.page_size, out);
  }
  void prune(const LayerStep& step, const TokenList& candidates, TokenList out, Stream) override {
    told_.tokens += step.layer == 1;
    take(step, candidates, 1, out);
  }

 private:
  void take(const LayerStep& step, const IndexList& candidates, int unit, TokenList out) {
    told_.layer_0 += step.layer == 0;
    for (int h = 0; h < step.kv_heads(); ++h) {
      told_.entries = candidates.count(0, h);
      out.count(0, h) = 2;
      out.index(0, h, 0) = candidates.index(0, h, 0) * unit;
      out.index(0, h, 1) = step.pages.tokens(0, h) - 1;
    }
  }
  Told& told_;
};

// Lists page or token 1 and 2, and does what `more` says.
class Lister final : public Policy {
 public:
  using More = void (*)(const LayerStep&, Edits&, const PageList&);
  Lister(bool tokens, Pins pins, More more) : tokens_(tokens), pins_(pins), more_(more) {}
  Needs needs() const override { return Needs{}.host_pages(true); }
  void select(const LayerStep& step, Edits& edits, Stream) override {
    const PageList list = step.list<PageList>("listed", 2);
    for (int h = 0; h < step.kv_heads(); ++h) list.count(0, h) = 2, list.index(0, h, 0) = 1, list.index(0, h, 1) = 2;
    if (more_) more_(step, edits, list);
    if (tokens_)
      edits.attend(TokenList{list}, pins_);
    else
      edits.attend(list, pins_);
  }

 private:
  bool tokens_;
  Pins pins_;
  More more_;
};

// What the steps of a run read.
struct Reads final : EngineObserver {
  std::vector<int> pages, tokens;  // of layers 0 and 1, KV head 0
  std::int64_t to_host = 0;        // bytes
  int filled = 0;                  // layers of steps for which what is not read counts
  void prompt(const PromptLayer&, const Store&) override {}
  void attended(const DecodeLayer& l, const Store& store) override {
    to_host = store.ledger().moved_total(Tier::host);
    filled += l.read.left_out ? 1 : 0;
    const auto take = [](const IndexList& list, std::vector<int>& to) {
      to.clear();
      for (int i = 0; i < list.count(0, 0); ++i) to.push_back(list.index(0, 0, i));
    };
    if (l.layer == 0 && l.read.pages) take(*l.read.pages, pages);
    if (l.layer == 1 && l.read.tokens) take(*l.read.tokens, tokens);
  }
};

Reads run(std::shared_ptr<Policy> first, Told& told, bool whole = false) {
  Engine engine(tiny(), pruned(std::move(first), instance<Pruner>(new Ends(told)), {.whole = whole, .name = "two"}),
                options());
  Reads reads;
  engine.observe(&reads);
  const int slot = engine.open(), token = 3;
  bool fits = engine.prefill(slot, std::vector<int>(28, token), true, {}) == Fit::ok;
  for (int i = 0; i < 2; ++i) fits = engine.step({slot}, {&token, 1}, {}) == Fit::ok && fits;
  REQUIRE(fits);
  return reads;
}

std::shared_ptr<Policy> lister(bool tokens, Pins pins = {}, Lister::More more = nullptr) {
  return std::make_shared<Lister>(tokens, pins, more);
}

// Prefers old tokens, then young ones.
class Old final : public Scorer {
 public:
  void score(const LayerKv& kv, Scores out, Stream s) override { ops::recency(kv.pages, out, s), ops::negate(out, s); }
  Pins pins(int) const override { return {.last = 2}; }
  int every() const override { return 1; }
};
class Young final : public Rescorer {
 public:
  explicit Young(std::vector<int>& kept) : kept_(kept) {}
  void rescore(const LayerKv& kv, Pins pins, View<const std::int32_t, 2> keep, Scores scores, Stream s) override {
    CHECK(pins.last == 2);
    CHECK((!kv.window_queries && !kv.chunk_queries && !kv.mass));
    CHECK(scores(0, 0, 1) == -1);  // as the scorer left it
    kept_.push_back(keep(0, 0));
    ops::negate(scores, s);
  }

 private:
  std::vector<int>& kept_;
};

}  // namespace

TEST_CASE("a pruner gets pages or tokens, and its list takes their place") {
  Told told;
  const Reads pages = run(lister(false), told);
  CHECK(pages.pages == std::vector<int>{1, 2});  // layer 0 is the first method's alone
  CHECK(pages.tokens == std::vector<int>{8, 29});
  CHECK(told.appended == std::vector<int>{28, 1, 1});
  CHECK((told.layer_0 == 0 && told.pages == 2 && told.tokens == 0 && told.entries == 2));

  told = {};
  CHECK(run(lister(true, {.first = 1, .last = 2}), told).tokens == std::vector<int>{0, 1, 28, 29});  // pins stay
  CHECK((told.pages == 0 && told.tokens == 2));

  told = {};
  CHECK(run(compose({}), told, true).tokens == std::vector<int>{0, 29});
  CHECK(told.entries == 4);  // every page
  told = {};
  CHECK(run(compose({}), told).tokens.empty());
  CHECK((told.pages == 0 && told.appended.size() == 3));
}

TEST_CASE("a pruner leaves the first method's other edits as they are") {
  Told told;
  const Reads reads = run(lister(false, {},
                                 [](const LayerStep&, Edits& edits, const PageList& list) {
                                   edits.place(list, {.room = 2, .when = {Deadline::this_attention}});
                                 }),
                          told);
  CHECK(told.pages == 2);
  CHECK(reads.to_host > 0);
  CHECK(reads.filled == 0);
  const auto fills = [](const LayerStep& step, Edits& edits, const PageList&) {
    const auto share = step.scratch<float>("share", {1, step.shape->query_heads});
    std::fill_n(share.data, share.extent[1], 1.f);
    const auto mean = step.scratch<float>("mean", {1, step.kv_heads(), step.shape->head_dim});
    std::fill_n(mean.data, mean.extent[1] * mean.extent[2], 0.f);
    edits.fill_left_out({share, mean});
  };
  CHECK(run(lister(false, {}, fills), told).filled == 2 * tiny()->config.layers);
}

TEST_CASE("a pruner is refused beside what moves tokens or changes attention") {
  Told told;
  const auto refused = [&](Lister::More more) {
    Told none;
    run(lister(false, {}, more), none);
  };
  CHECK_THROWS_WITH(refused([](const LayerStep& s, Edits& e, const PageList& list) {
                      e.for_layer(s.layer), e.evict(TokenList{list}, Deadline::in_steps(1));
                    }),
                    Catch::Contains("got a pruner beside a method that evicts tokens"));
  CHECK_THROWS_WITH(refused([](const LayerStep&, Edits& e, const PageList& list) { e.encode(list, 0); }),
                    Catch::Contains("moves pages to another codec"));
  CHECK_THROWS_WITH(refused([](const LayerStep&, Edits& e, const PageList&) { e.clamp_distance(9); }),
                    Catch::Contains("changes what attention computes"));
  for (const auto& [needs, why] : {std::pair{Needs{}.functional(true), "rewrites keys or values"},
                                   {Needs{}.archive(true), "fetches tokens"},
                                   {Needs{}.rope(RopeRegime::re_rotate), "turns its keys by their places"}}) {
    struct Needy final : Policy {
      explicit Needy(const Needs& n) : needs_(n) {}
      Needs needs() const override { return needs_; }
      Needs needs_;
    };
    CHECK_THROWS_WITH(pruned(std::make_shared<Needy>(needs), instance<Pruner>(new Ends(told)), {.name = "two"}),
                      Catch::Contains(why));
  }
  struct Says final : Policy, TakesNoPruner {
    explicit Says(const char* why) : why_(why) {}
    Needs needs() const override { return {}; }
    const char* takes_no_pruner() const override { return why_; }
    const char* why_;
  };
  struct TwoCodecs final : Policy {
    Needs needs() const override { return {}; }
    std::vector<CodecSpec> codecs() const override { return {{}, {{8}, {8}}}; }
  };
  const auto beside = [&](const std::shared_ptr<Policy>& first, bool encodes = false) {
    pruned(std::make_shared<ForwardingPolicy>(first), instance<Pruner>(new Ends(told)),
           {.encodes = encodes, .name = "two"});
  };
  CHECK_THROWS_WITH(beside(std::make_shared<Says>("is older than its pruner")),
                    Catch::StartsWith("two: got a pruner beside a method that is older than its pruner, wanted"));
  CHECK_NOTHROW(beside(std::make_shared<Says>(nullptr)));
  CHECK_THROWS_WITH(beside(std::make_shared<TwoCodecs>()), Catch::Contains("moves tokens to pages of another codec"));
  CHECK_NOTHROW(beside(std::make_shared<TwoCodecs>(), true));
  Composition parts;
  parts.scorer = instance<Scorer>(new Old);
  std::shared_ptr<Policy> evicts = compose(std::move(parts));
  Engine engine(tiny(), pruned(std::move(evicts), instance<Pruner>(new Ends(told)), {.name = "two"}),
                options({BudgetAmount::tokens, 16}));
  const int slot = engine.open();
  CHECK_THROWS_WITH(engine.prefill(slot, std::vector<int>(28, 3), true, {}), Catch::Contains("evicts tokens"));
}

TEST_CASE("a rescorer acts when a prompt ends, and knows what each head keeps") {
  std::vector<int> kept;
  Composition parts;
  parts.scorer = instance<Scorer>(new Old);
  parts.rescorer = instance<Rescorer>(new Young(kept));
  Engine engine(tiny(), compose(std::move(parts)), options({BudgetAmount::tokens, 16}));
  const int slot = engine.open(), token = 3;
  REQUIRE(engine.prefill(slot, std::vector<int>(28, token), true, {}) == Fit::ok);
  CHECK(kept == std::vector<int>(static_cast<std::size_t>(tiny()->config.layers), 16));
  CHECK(engine.store().positions(0, slot, 0).front() == 12);
  REQUIRE(engine.step({slot}, {&token, 1}, {}) == Fit::ok);
  CHECK(kept.size() == static_cast<std::size_t>(tiny()->config.layers));
  CHECK(engine.store().positions(0, slot, 0).front() == 12);  // the scorer drops the youngest that is not pinned
}

TEST_CASE("what two methods need together") {
  const auto both = [](const Needs& first, const Needs& second, Role role = Role::pruner) {
    return with_second_stage(first, second, role, "two");
  };
  const Needs n = both(Needs{}.capturable(true).dense_layers(2).devices({Device::cpu, Device::cuda}),
                       Needs{}.capturable(true).dense_layers(1).scratch_numbers(3).devices({Device::cpu}));
  CHECK(n.capturable());
  CHECK(n.dense_layers() == 2);
  CHECK(n.scratch_numbers() == 7);
  CHECK(n.devices() == std::vector<Device>{Device::cpu});
  CHECK_FALSE(both(Needs{}.capturable(true), {}).capturable());
  CHECK(both(Needs{}.capturable(true), {}, Role::rescorer).capturable());
  CHECK(both({}, Needs{}.output_projection(true), Role::rescorer).output_projection());
  CHECK_THROWS_WITH(both(Needs{}.devices({Device::cpu}), Needs{}.devices({Device::cuda})),
                    Catch::Contains("got two methods that have no device in common"));
  CHECK_THROWS_WITH(both(Needs{}.output_projection(true), Needs{}.output_projection(true), Role::rescorer),
                    Catch::Contains("got a scorer and a rescorer that both ask for the output projection"));
  CHECK_THROWS_WITH(both({}, Needs{}.mass(Mass::decode)), Catch::Contains("got a pruner that needs mass"));
  CHECK_THROWS_WITH(both({}, Needs{}.output_projection(true)),
                    Catch::Contains("got a pruner that needs output_projection"));
  CHECK_THROWS_WITH(both({}, Needs{}.dense_layers(1), Role::rescorer),
                    Catch::Contains("got a rescorer that needs dense_layers"));
}
