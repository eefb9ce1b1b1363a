// ArkVale: a step fetches the best pages that are not on the device and attends to all that are there. The lowest of
// these leave. Chen et al., NeurIPS 2024.
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/takes_no_pruner.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>

namespace {

class ArkVale final : public kvlab::Policy, public kvlab::PreparesSteps, public kvlab::TakesNoPruner {
 public:
  explicit ArkVale(const kvlab::Params& p)
      : pins_{.first = p.get<int>("sinks"), .last = p.get<int>("window")},
        top_(p.get<int>("top")),
        dense_(p.get<int>("dense_layers")),
        keeps_best_(p.get<bool>("keep_best")),
        reads_resident_(p.get<bool>("resident")),
        summary_(p.get<bool>("mean_radius") ? kvlab::Summary::centre_radius : kvlab::Summary::min_max),
        bits_(p.get<int>("summary_bits")) {
    choice_.rule = p.get<kvlab::GroupRule>("group");
    choice_.scale = p.get<float>("scale");
    choice_.leave_out = pins_;
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.page_summary(summary_, bits_).dense_layers(dense_).host_pages(true).capturable(true);
  }
  const char* takes_no_pruner() const override {
    return reads_resident_ ? "reads all pages on the device, whatever it lists" : nullptr;
  }

  // A step may open a page before its lowest one leaves.
  kvlab::Demand demand(int prompt, int max_new) const override {
    return tiers_.of(prompt, max_new, [this](int n, bool decodes) {
      const int budget = tiers_.budget(n);
      if (budget < 0 || budget == tiers_.everything) return budget;
      return std::max(budget, pinned_ + page_) / page_ + decodes;
    });
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount& budget, kvlab::Workspace& w) override {
    page_ = shape.page_size;
    tiers_ = kvlab::TierDemand(shape, budget, std::min(1., static_cast<double>(dense_) / shape.layers));
    const int p = shape.page_size, window = (pins_.last + p - 2) / p + 1;  // most pages that the newest tokens lie in
    pinned_ = ((pins_.first + p - 1) / p + window) * p;
    budget.require(pinned_ + p, "the pages of sinks and window, and one more");
    best_ = {"pages to bring", shape, budget, w};
    room_ = {"room", shape, budget, w};
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    best_.prepare(c, [this](int tokens) { return best_of_step(tokens); });
    room_.prepare(c, [](int tokens) { return tokens; });
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (kv.layer < dense_ || !kv.last[0]) return;
    fetch(
        kv, kv.last_queries(), [this](int tokens) { return tokens - pinned_; }, {}, edits, s);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (step.layer < dense_) return;
    const auto top = [this](int tokens) { return best_of_step(tokens); };
    const kvlab::PageList best = fetch(step, step.queries, top, {kvlab::Deadline::this_attention}, edits, s);
    if (reads_resident_)
      edits.attend_resident(best, pins_);
    else
      edits.attend(best, pins_);
  }

 private:
  int best_of_step(int tokens) const { return std::min({top_, tokens / 2, tokens - pinned_}); }

  // of(tokens): tokens of the best pages, for a budget of so many.
  template <class Of>
  kvlab::PageList fetch(const kvlab::LayerKv& kv, const kvlab::Tensor<3>& queries, Of of, kvlab::Deadline when,
                        kvlab::Edits& edits, kvlab::Stream s) {
    const auto best = kv.list<kvlab::PageList>("best", kv.shape->max_pages());
    const auto scores = kvlab::ops::choose_pages(kv, queries, choice_, best_.of(kv, of), best, s);
    const auto room = room_.of(kv, [](int tokens) { return tokens; });
    kvlab::Placing how{.pins = pins_, .room = room.same, .when = when, .rooms = room.each};
    if (keeps_best_) how.order = scores;
    edits.place(best, how);
    return best;
  }

  kvlab::Pins pins_;
  int top_, dense_, pinned_ = 0, page_ = 1;
  kvlab::TierDemand tiers_;
  bool keeps_best_, reads_resident_;
  kvlab::Summary summary_;
  int bits_;
  kvlab::PageChoice choice_;
  kvlab::BudgetPages best_, room_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<ArkVale>("arkvale", "pages come back from the host when a step ranks them high (Chen et al. 2024)")
        .param("sinks", 64, 0, kvlab::any, "first tokens that stay on the device, in whole pages")
        .param("window", 33, 1, kvlab::any, "newest tokens that stay on the device, in whole pages")
        .param("top", 1280, 1, kvlab::any, "most tokens of a step's best pages; they take half of the budget at most")
        .param("group", kvlab::GroupRule::mean, "how a GQA group's page scores become one")
        .param("scale", 1.0, 0, kvlab::any, "factor on page scores before the softmax of group: softmax_mean")
        .param("dense_layers", 2, 0, kvlab::any, "first layers that attend to everything")
        .param("summary_bits", 16, 8, 16, "of a number of a page's summary: 16, in the run's dtype, or 8, in codes")
        .component("mean_radius", "boxes of the keys' mean distance from the centre; off = of their extremes")
        .component("keep_best", "the pages with the lowest scores leave; off = the oldest")
        .component("resident", "attention reads all pages on the device; off = the best, sinks and window"))
