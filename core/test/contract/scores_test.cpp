// Scores must be numbers that have an order.
#include <catch2/catch.hpp>
#include <cmath>

#include "compose/compose.hpp"
#include "plugin/before_step.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// Checks every score of the scorer under test.
class Watched final : public Scorer, public BeforeStep {
 public:
  Watched(Instance<Scorer> inner, int& calls) : inner_(std::move(inner)), calls_(calls) {}
  Needs needs() const override { return inner_->needs(); }
  int before_step(const StepCounters& c) override { return tell_before_step(inner_.get(), c); }
  Pins pins(int tokens) const override { return inner_->pins(tokens); }
  void attach(const Shape& s, const BudgetAmount& b, Workspace& w) override { inner_->attach(s, b, w); }
  void observe(const LayerKv& kv, Stream s) override { inner_->observe(kv, s); }
  void release(int slot) override { inner_->release(slot); }
  int every() const override { return inner_->every(); }
  void score(const LayerKv& kv, Scores out, Stream s) override {
    ++calls_;
    for (int row = 0; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        for (int t = 0; t < kv.pages.tokens(row, head); ++t) out(row, head, t) = NAN;
    INFO(
        "usual cause: score() leaves tokens out, or divides by a sum or a norm that is zero. What is kept is an "
        "accident then.");
    inner_->score(kv, out, s);
    for (int row = 0; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        for (int t = 0; t < kv.pages.tokens(row, head); ++t) {
          CAPTURE(kv.layer, head, t);
          REQUIRE_FALSE(std::isnan(out(row, head, t)));
        }
  }

 private:
  Instance<Scorer> inner_;
  int& calls_;
};

}  // namespace

TEST_CASE("every token has a score, and none is NaN", "[cpu]") {
  if (skip_on_cuda()) return;
  for (const std::string& name : group_models()) {
    const auto model = tiny_model(name);
    for (const Subject& s : about("scorers", [](const Subject& s) { return s.evicts() && !s.composed(); })) {
      CAPTURE(name, s.label);
      int calls = 0;
      Composition parts;
      parts.scorer = Instance<Scorer>(new Watched(subjects().scorer(s.spec, *model), calls),
                                      {nullptr, [](void* p) { delete static_cast<Watched*>(p); }});
      if (parts.scorer->needs().window_queries() == 0) parts.every = 1;
      parts.name = s.label;
      Play p(model, with_budget(s.spec, BudgetAmount::tokens, 48));
      EngineOptions options;
      options.recorded = made_up_future();
      options.page_size = s.spec.page_size;
      options.budget = {BudgetAmount::tokens, 48};
      options.max_tokens = 192;
      p.policy = compose(std::move(parts));
      p.engine = std::make_unique<Engine>(model, p.policy, options);
      p.run(test_text(112, model->config.vocab), test_text(4, model->config.vocab, 5));
      INFO("usual cause: needs() names other dense_layers() at a second call, so that layers are never scored");
      CHECK(calls >= model->config.layers - p.policy->needs().dense_layers());
    }
  }
}
