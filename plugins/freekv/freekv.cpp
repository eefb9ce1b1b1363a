// FreeKV: attention reads pages that the previous step's query chose and fetched while the model went on. Heads whose
// query turned too far choose again first. Liu et al. 2025.
#include <kvlab/page_order.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

// What a group's softmax is over: page scores as they are, or over sqrt(head_dim) as attention's logits.
enum class ScoreScale : std::uint8_t { raw, scaled };

}  // namespace

template <>
struct kvlab::Choices<ScoreScale> {
  static constexpr std::pair<ScoreScale, const char*> all[] = {{ScoreScale::raw, "raw"},
                                                               {ScoreScale::scaled, "scaled"}};
};
template <>
struct kvlab::Choices<kvlab::Summary> {
  static constexpr std::pair<Summary, const char*> all[] = {{Summary::min_max, "min_max"},
                                                            {Summary::centre_radius, "centre_radius"}};
};

namespace {

using kvlab::Heads;

class FreeKv final : public kvlab::Policy, public kvlab::PreparesSteps {
 public:
  explicit FreeKv(const kvlab::Params& p)
      : pins_{.first = p.get<int>("sinks"), .last = p.get<int>("window")},
        corrects_(p.get<bool>("correction")),
        threshold_(corrects_ ? p.get<float>("threshold") : -std::numeric_limits<float>::infinity()),
        dense_(p.get<int>("dense_layers")),
        summary_(p.get<kvlab::Summary>("summary")),
        bits_(p.get<int>("summary_bits")),
        speculation_(p.get<bool>("speculation")),
        scaled_(p.get<ScoreScale>("scores") == ScoreScale::scaled),
        scale_(p.get<float>("scale")) {
    choice_.rule = p.get<kvlab::GroupRule>("group");
    choice_.leave_out = pins_;
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .page_summary(summary_, bits_)
        .dense_layers(dense_)
        .host_pages(true)
        .observe_beside(true)
        .steps(first_apart())
        .capturable(true);
  }

  // Each step places the pages of each head anew. Its token may have opened one more before.
  kvlab::Demand demand(int prompt, int max_new) const override {
    return tiers_.of(prompt, max_new, [this](int n, bool decodes) {
      const int budget = tiers_.budget(n);
      if (budget < 0 || budget == tiers_.everything) return budget;
      return std::max(1, (budget - pins_.first - pins_.last) / page_) + tiers_.whole_pages(pins_.first) +
             tiers_.pages_of_run(pins_.last + decodes);
    });
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount& budget, kvlab::Workspace& w) override {
    page_ = shape.page_size;
    tiers_ = kvlab::TierDemand(shape, budget, std::min(1., static_cast<double>(dense_) / shape.layers));
    choice_.scale = scaled_ ? scale_ / std::sqrt(static_cast<float>(shape.head_dim)) : scale_;
    budget.require(pins_.first + pins_.last + shape.page_size, "sinks, window and a page");
    to_choose_ = {"pages to choose", shape, budget, w};
    chosen_ = kvlab::KeptPages("chosen", shape, shape.max_pages(), w);
    order_ = kvlab::KeptPageOrder("page order", shape, w), renewal_ = {shape, w};
    last_ = kvlab::KeptQueries("last query", shape, w);
    turned_ = kvlab::KeptFlags("turned", shape, w);
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    to_choose_.prepare(c, [this](int tokens) { return unpaid(tokens); });
    renewal_.prepare(c);
  }
  int step_variant() const override { return renewal_.due(); }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (kv.layer < dense_ || !kv.last[0]) return;
    const kvlab::Scores scores = choose(kv, kv.last_queries(), {}, {}, edits, s);
    kvlab::ops::keep_page_scores(kv.pages, scores, pins_, {}, order_.of(kv), s);
    // No query is the one before the first step, so that its cosine is 0.
    kvlab::View<float, 3> last = last_.of(kv);
    last.data += kv.slots[0] * last.stride[0];
    last.extent[0] = 1;
    kvlab::ops::scale(last, 0, s);
  }

  // The authors choose for all heads once one has turned, and fetch for the others later. The result is the same.
  // All heads choose before the attention of a sequence's first step.
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (step.layer < dense_) return;
    const auto choose_now = [&](const Heads& heads) {
      choose(step, step.queries, heads, {kvlab::Deadline::this_attention}, edits, s);
    };
    if (speculation_)
      kvlab::ops::turned_heads(step.queries, step.pages, last_.of(step), threshold_, turned_.of(step), s);
    if (first_apart()) choose_now(Heads::every(step.steps, std::numeric_limits<int>::max()));
    if (!speculation_)
      choose_now({});
    else if (corrects_)
      choose_now(Heads::flagged(turned_.of(step)));
    edits.attend(chosen_.of(step), pins_);
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (step.layer < dense_) return;
    renewal_.renew(step, choice_, order_, s);
    if (!speculation_) return;
    choose(step, step.queries, Heads::flagged(turned_.of(step), false), {}, edits, s);
  }

 private:
  // Whether the first step, whose cosine of 0 does not lie below the threshold, needs a choice of its own.
  bool first_apart() const { return speculation_ && threshold_ <= 0; }

  // Of a budget: without the tokens that are read in any case.
  int unpaid(int tokens) const { return tokens - (pins_.first + pins_.last); }

  kvlab::Scores choose(const kvlab::LayerKv& kv, const kvlab::Tensor<3>& queries, const Heads& heads,
                       kvlab::Deadline when, kvlab::Edits& edits, kvlab::Stream s) {
    const auto scores =
        kvlab::ops::choose_pages(kv, queries, choice_.among(heads),
                                 to_choose_.of(kv, [this](int tokens) { return unpaid(tokens); }), chosen_.of(kv), s);
    edits.place(chosen_.of(kv), {.heads = heads, .pins = pins_, .when = when, .order = order_.of(kv)});
    return scores;
  }

  kvlab::Pins pins_;
  bool corrects_;
  float threshold_;
  int dense_;
  kvlab::Summary summary_;
  int bits_;
  bool speculation_, scaled_;
  float scale_;
  int page_ = 1;
  kvlab::TierDemand tiers_;
  kvlab::PageChoice choice_;
  kvlab::KeptPages chosen_;
  kvlab::KeptPageOrder order_;  // in which pages leave when device memory runs short
  kvlab::PageOrderRenewal renewal_;
  kvlab::BudgetPages to_choose_;
  kvlab::KeptQueries last_;
  kvlab::KeptFlags turned_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<FreeKv>("freekv", "speculative retrieval from the host (Liu et al. 2025)")
                 .param("sinks", 512, 0, kvlab::any, "first tokens that are always attended to")
                 .param("window", 512, 1, kvlab::any, "newest tokens that are always attended to, in whole pages")
                 .param("threshold", 0.9, -1, 1, "cosine of consecutive queries below which a head chooses again first")
                 .param("group", kvlab::GroupRule::softmax_mean, "how a GQA group's page scores become one")
                 .param("scale", 1.0, 0, kvlab::any, "factor on page scores before the softmax of group: softmax_mean")
                 .param("scores", ScoreScale::raw,
                        "before that softmax: raw, or scaled by 1 / sqrt(head_dim), times scale")
                 .param("dense_layers", 1, 0, kvlab::any, "first layers that attend to everything")
                 .param("summary", kvlab::Summary::min_max,
                        "of a page: min_max, its keys' extremes, or centre_radius, their mean distance from the centre")
                 .param("summary_bits", 16, 8, 16,
                        "of a number of a page's summary: 16, in the run's dtype, or 8, in codes")
                 .component("speculation", "pages of the previous step's query; off = each step waits for its own")
                 .component("correction", "heads whose query turned choose again before attention"))
