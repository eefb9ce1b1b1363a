// Budgets that divide over all layers of a prompt.
#include "compose/over_layers.hpp"

#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>
#include <memory>
#include <utility>
#include <vector>

#include "compose/compose.hpp"
#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;

namespace {

using Ints = std::vector<std::int32_t>;

template <class Role, class T>
Instance<Role> instance(T* object) {
  return Instance<Role>(object, PluginDeleter{nullptr, [](void* p) { delete static_cast<Role*>(p); }});
}

// Older tokens are better. Notes how many window queries it gets.
class Oldest final : public Scorer {
 public:
  Oldest(int window, int every, Ints& windows) : window_(window), every_(every), windows_(windows) {}
  Needs needs() const override { return Needs{}.window_queries(window_); }
  Pins pins(int) const override { return {.last = 2}; }
  int every() const override { return every_; }
  void score(const LayerKv& kv, Scores out, Stream s) override {
    if (kv.chunk_queries)
      windows_.push_back(static_cast<int>(kv.window_queries ? kv.window_queries.f32().extent[2] : 0));
    ops::recency(kv.pages, out, s);
    ops::negate(out, s);
  }

 private:
  int window_, every_;
  Ints& windows_;
};

// Head h of layer l keeps all layers' mean and what `more` adds. It measures layer, head and the scores' sum.
class Gives final : public Budget {
 public:
  Gives(std::vector<int> more, int window, Division& told, Ints& windows)
      : more_(std::move(more)), window_(window), told_(told), windows_(windows) {}
  int numbers() const override { return 2; }
  int window_queries() const override { return window_; }
  void measure(const LayerKv& kv, Scores scores, Pins pins, View<float, 3> out, Stream s) override {
    windows_.push_back(static_cast<int>(kv.window_queries ? kv.window_queries.f32().extent[2] : 0));
    CHECK(pins.last == 2);
    const View<float, 2> sums{out.data + 1, {1, out.extent[1]}, {out.stride[0], out.stride[1]}};
    ops::head_sum(kv.pages, scores, pins, sums, s);
    for (int h = 0; h < kv.kv_heads(); ++h) out(0, h, 0) = static_cast<float>(10 * kv.layer + h);
  }
  Ints divide(const Division& d) const override {
    told_ = d;
    Ints keep;
    for (std::size_t i = 0; i < d.length.size(); ++i) keep.push_back(d.tokens + more_[i]);
    return keep;
  }

 private:
  std::vector<int> more_;
  int window_;
  Division& told_;
  Ints& windows_;
};

std::shared_ptr<const Model> tiny() {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return model;
}

struct Run {
  Division told;
  Ints of_scorer, of_budget;
  std::vector<int> more;
  std::unique_ptr<Engine> engine;

  Run(int window, int budgets_window, int every, const EngineOptions& o) {
    const int heads = tiny()->config.layers * tiny()->config.kv_heads;
    for (int i = 0; i < heads; ++i) more.push_back(i + 1 == heads ? -3 : i % 2 ? 1 : -1);
    Composition parts;
    parts.scorer = instance<Scorer>(new Oldest(window, every, of_scorer));
    parts.split = instance<Budget>(new Gives(more, budgets_window, told, of_budget));
    engine = std::make_unique<Engine>(tiny(), compose(std::move(parts)), o);
  }
};

EngineOptions options(BudgetAmount budget, int chunk = 0) {
  EngineOptions o;
  o.slots = 2;
  o.max_tokens = 64;
  o.page_size = 8;
  o.prefill_chunk = chunk;
  o.budget = budget;
  return o;
}

const std::vector<int> text(40, 3);

}  // namespace

TEST_CASE("a budget divides over the layers after the last one") {
  const int layers = tiny()->config.layers, heads = tiny()->config.kv_heads;
  for (const int chunk : {0, 16}) {
    CAPTURE(chunk);
    Run run(3, 5, 0, options({BudgetAmount::tokens, 12}, chunk));
    Engine& e = *run.engine;
    REQUIRE(e.open() == 0);
    REQUIRE(e.prefill(0, std::span(text).first(30), true, {}) == Fit::ok);
    // Each part sees as many queries as it asked for.
    CHECK(run.of_scorer == Ints(static_cast<std::size_t>(layers), 3));
    CHECK(run.of_budget == Ints(static_cast<std::size_t>(layers), 5));
    CHECK(run.told.layers == layers);
    CHECK(run.told.kv_heads == heads);
    CHECK(run.told.tokens == 12);
    CHECK(run.told.pinned == 2);
    CHECK(run.told.length == Ints(static_cast<std::size_t>(layers * heads), 30));
    for (int i = 0; i < layers * heads; ++i) {
      const auto at = static_cast<std::size_t>(i);
      CAPTURE(i);
      CHECK(run.told.measured[2 * at] == static_cast<float>(i / heads * 10 + i % heads));
      CHECK(run.told.measured[2 * at + 1] == -27 * 28 / 2);  // text positions 0 .. 27, negated
      const auto kept = e.store().positions(i / heads, 0, i % heads);
      CHECK(std::ssize(kept) == 12 + run.more[at]);
      CHECK(kept[kept.size() - 3] == std::ssize(kept) - 3);  // the oldest and the two newest
      CHECK(kept[kept.size() - 2] == 28);
    }
    e.store().check_invariants();
  }
}

TEST_CASE("decode steps that evict hold each head at its number, also after a restore into another slot") {
  const int layers = tiny()->config.layers, heads = tiny()->config.kv_heads;
  Run run(0, 0, 1, options({BudgetAmount::tokens, 12}));
  Engine& e = *run.engine;
  const int token = 3;
  REQUIRE(e.open() == 0);
  REQUIRE(e.prefill(0, std::span(text).first(30), true, {}) == Fit::ok);
  const auto check = [&](int slot) {
    for (int i = 0; i < layers * heads; ++i)
      CHECK(e.store().length(i / heads, slot, i % heads) == 12 + run.more[static_cast<std::size_t>(i)]);
  };
  for (int step = 0; step < 3; ++step) {
    REQUIRE(e.step({0}, {&token, 1}, {}) == Fit::ok);
    check(0);
  }
  const SavedSequence saved = e.save(0);
  REQUIRE(e.open() == 1);
  REQUIRE(e.restore(1, saved) == Fit::ok);
  e.close(0);
  REQUIRE(e.open() == 0);  // a prompt that fits is not divided: every head may hold the mean
  REQUIRE(e.prefill(0, std::span(text).first(9), true, {}) == Fit::ok);
  const std::vector<int> tokens{3, 3};
  for (int step = 0; step < 6; ++step) {
    REQUIRE(e.step({1, 0}, tokens, StepResult{}) == Fit::ok);
    check(1);
    for (int i = 0; i < layers * heads; ++i)
      CHECK(e.store().length(i / heads, 0, i % heads) == std::min(12, 10 + step));
  }
}

TEST_CASE("a budget in bytes that is divided over layers gives whole pages") {
  const int layers = tiny()->config.layers, heads = tiny()->config.kv_heads;
  Run probe(0, 0, 0, options({BudgetAmount::tokens, 16}));
  const double bytes = 1.0 * static_cast<double>(probe.engine->full_bytes(16)) + 64 * layers * heads;
  Run run(0, 0, 0, options({BudgetAmount::bytes, bytes}));
  Engine& e = *run.engine;
  REQUIRE(e.open() == 0);
  REQUIRE(e.prefill(0, text, true, {}) == Fit::ok);
  CHECK(run.told.tokens == 16);
  for (int i = 0; i < layers * heads; ++i) {
    const int wanted = 16 + run.more[static_cast<std::size_t>(i)];
    CHECK(e.store().length(i / heads, 0, i % heads) == wanted - wanted % 8);
  }
  CHECK(static_cast<double>(e.store().page_bytes(Tier::device)) <= bytes);
}

TEST_CASE("a budget that neither allots nor measures is told so") {
  struct Neither final : Budget {};
  Ints windows;
  Composition parts;
  parts.scorer = instance<Scorer>(new Oldest(0, 0, windows));
  parts.split = instance<Budget>(new Neither);
  Engine engine(tiny(), compose(std::move(parts)), options({BudgetAmount::tokens, 12}));
  CHECK_THROWS_WITH(engine.prefill(engine.open(), text, true, {}), Catch::Contains("got a budget without allot()"));
}
