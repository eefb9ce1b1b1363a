// FlexiCache: KV heads whose best pages change fast keep all their pages on the device and choose in every step. The
// others keep their best pages alone, and choose anew every R steps. FlexiCache, anonymous preprint 2025.
#include <kvlab/page_order.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/tier_demand.hpp>
#include <kvlab/turns.hpp>

#include <algorithm>
#include <limits>
#include <vector>

namespace {

// Which query makes a stable head's first choice.
enum class FirstQuery : std::uint8_t { prompt, step };

}  // namespace

namespace kvlab {

template <>
struct Choices<FirstQuery> {
  static constexpr std::pair<FirstQuery, const char*> all[] = {{FirstQuery::prompt, "prompt"},
                                                               {FirstQuery::step, "step"}};
};

}  // namespace kvlab

namespace {

using kvlab::Heads;

class FlexiCache final : public kvlab::Policy, public kvlab::PreparesSteps {
 public:
  explicit FlexiCache(const kvlab::Params& p)
      : dense_(p.get<int>("dense_layers")),
        bits_(p.get<int>("summary_bits")),
        period_(p.get<bool>("stability_aware") ? p.get<int>("rerank_every") : 1),
        reranks_(p.get<bool>("reranking")),
        unstable_heads_(p.get<bool>("unstable_heads")),
        reuses_(p.get<bool>("frame_reuse")),
        overlaps_(p.get<bool>("overlap")),
        pauses_(overlaps_ && p.get<bool>("pause")),
        staggers_(p.get<bool>("stagger")),
        by_prompt_(p.get<FirstQuery>("first_query") == FirstQuery::prompt),
        pins_{.last = p.get<bool>("keep_new") ? p.get<int>("rerank_every") : 0, .newest_page = true} {
    choice_.rule = p.get<kvlab::GroupRule>("group");
    choice_.scale = p.get<float>("scale");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .page_summary(kvlab::Summary::min_max, bits_)
        .dense_layers(dense_)
        .host_pages(true)
        .pauses(pauses_)
        .observe_beside(true)
        .steps(true)
        .profile(unstable_heads_)
        .capturable(by_prompt_);  // pages leave by an edit that the store has seen, and it sees none of a graph's
  }

  void load_profile(const kvlab::Profile& profile) override {
    for (const float x : profile.at("unstable").values) marks_.push_back(x != 0);
  }

  // Pages that filled up since a choice stay until the next one, so without reranking all of them do, and none of them
  // goes to the host. Before the first choice all pages are on the device.
  kvlab::Demand demand(int prompt, int max_new) const override {
    kvlab::Demand demand = tiers_.of(prompt, max_new, [&](int n, bool decodes) {
      const int budget = tiers_.budget(n), since = reranks_ ? std::min(period_, max_new) : max_new;
      if (budget < 0 || budget == tiers_.everything) return budget;
      if (!decodes && !by_prompt_) return tiers_.everything;
      return std::max(1, (budget - pins_.last) / page_) +
             tiers_.pages_of_run(std::max(1, pins_.last) + (decodes ? since : 0));
    });
    if (!reranks_) demand.host = tiers_.of(prompt + 1, 0, [](int, bool) { return kvlab::TierDemand::everything; }).host;
    return demand;
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount& budget, kvlab::Workspace& w) override {
    page_ = shape.page_size;
    const int dense = std::min(dense_, shape.layers) * shape.kv_heads, heads = shape.layers * shape.kv_heads;
    const auto whole = std::count(marks_.begin() + (unstable_heads_ ? dense : 0), marks_.end(), 1) + dense;
    tiers_ = kvlab::TierDemand(shape, budget, static_cast<double>(whole) / heads);
    budget.require(pins_.last + shape.page_size, "the newest ones and a page");
    to_choose_ = {"pages to choose", shape, budget, w};
    chosen_ = kvlab::KeptPages("chosen", shape, shape.max_pages(), w);
    if (by_prompt_) order_ = kvlab::KeptPageOrder("page order", shape, w), renewal_ = {shape, w};
    if (staggers_) turns_ = kvlab::Turns("turns", shape, period_, w);
    if (unstable_heads_) unstable_ = kvlab::HeadClass("unstable heads", shape, marks_, w);
    decoded_.assign(static_cast<std::size_t>(shape.max_slots), false);
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    to_choose_.prepare(c, [this](int tokens) { return unpaid(tokens); });
    for (int row = 0; row < c.rows; ++row) decoded_[static_cast<std::size_t>(c.slots[row])] = true;
    if (by_prompt_) renewal_.prepare(c);
  }
  int step_variant() const override { return renewal_.due(); }

  void release(int slot) override { decoded_[static_cast<std::size_t>(slot)] = false; }

  // Stable heads take their first pages by the prompt's last query. All their full pages are written down here. With
  // first_query: step both happen in the first decode step, before its attention; not in that of a later turn.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (staggers_ && kv.layer == 0 && kv.last[0]) turns_.begin(kv, s);
    if (kv.layer < dense_ || !kv.last[0] || (!by_prompt_ && !decoded_[static_cast<std::size_t>(kv.slots[0])])) return;
    const kvlab::Scores scores = choose(kv, kv.last_queries(), {}, s);
    if (by_prompt_) kvlab::ops::keep_page_scores(kv.pages, scores, {}, {}, order_.of(kv), s);
    place(kv, Heads{}, beside(), edits);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    // A first step that makes the first choice is due in any case.
    if (staggers_ && step.layer == 0) turns_.take(step, !by_prompt_ && !overlaps_, s);
    if (step.layer < dense_) return;
    const Heads now = overlaps_ || !reranks_ ? first(step) : due(step);
    const bool places = !overlaps_ || !by_prompt_;
    if (places || unstable_heads_) choose(step, step.queries, now.or_of(unstable_.of(step)), s);
    if (places) place(step, now, {kvlab::Deadline::this_attention}, edits);
    edits.attend(chosen_.of(step), pins_);
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (step.layer >= dense_) renewal_.renew(step, choice_, order_, s);
    if (step.layer < dense_ || !overlaps_) return;
    choose(step, step.queries, due(step).except(unstable_.of(step)), s);
    place(step, due(step), beside(), edits);
  }

 private:
  // The authors pause a sequence until its pages are there. Without `pause` they travel beside the rest of the step,
  // and attention reads them from the next step on.
  kvlab::Deadline beside() const { return {pauses_ ? kvlab::Deadline::sequence : kvlab::Deadline::next_attention}; }

  // The heads whose first choice this step makes.
  Heads first(const kvlab::LayerKv& kv) const {
    return Heads::every(kv.steps, by_prompt_ ? 0 : std::numeric_limits<int>::max());
  }

  Heads due(const kvlab::LayerKv& kv) const {
    return Heads::every(staggers_ ? turns_.steps() : kv.steps, reranks_ ? period_ : 0);
  }

  // Of a budget: without the tokens that are read in any case.
  int unpaid(int tokens) const { return tokens - pins_.last; }

  kvlab::Scores choose(const kvlab::LayerKv& kv, const kvlab::Tensor<3>& queries, const Heads& heads, kvlab::Stream s) {
    return kvlab::ops::choose_pages(kv, queries, choice_.among(heads),
                                    to_choose_.of(kv, [this](int tokens) { return unpaid(tokens); }), chosen_.of(kv),
                                    s);
  }

  void place(const kvlab::LayerKv& kv, const Heads& heads, kvlab::Deadline when, kvlab::Edits& edits) {
    edits.place(chosen_.of(kv), {.heads = heads.except(unstable_.of(kv)),
                                 .pins = pins_,
                                 .reuse = reuses_,
                                 .when = when,
                                 .order = by_prompt_ ? order_.of(kv) : kvlab::View<float, 3>{}});
  }

  int dense_, bits_, period_, page_ = 1;
  kvlab::TierDemand tiers_;
  bool reranks_, unstable_heads_, reuses_, overlaps_, pauses_, staggers_, by_prompt_;
  kvlab::Pins pins_;
  kvlab::PageChoice choice_;
  std::vector<std::uint8_t> marks_;  // [layer, kv_head]
  // [slot] whether its sequence has made a step. A saved cache does not have it: with first_query: step, a sequence
  // that comes back behind its first step makes no choice at its next prompt, and its heads keep theirs until they are
  // due.
  std::vector<bool> decoded_;
  kvlab::KeptPages chosen_;
  kvlab::KeptPageOrder order_;  // in which pages leave when device memory runs short
  kvlab::PageOrderRenewal renewal_;
  kvlab::BudgetPages to_choose_;
  kvlab::Turns turns_;
  kvlab::HeadClass unstable_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<FlexiCache>("flexicache", "stable heads on the host but for their best pages (preprint 2025)")
        .param("rerank_every", 16, 1, kvlab::any, "decode steps after which a stable head chooses anew")
        .param(
            "stagger", true,
            "sequences that begin together choose anew in different steps, by their numbers; false: all of them every "
            "rerank_every steps after their prompts")
        .param("keep_new", true, "pages of the last rerank_every tokens are attended to; false: the newest page alone")
        .param("group", kvlab::GroupRule::max, "how a GQA group's page scores become one")
        .param("scale", 1.0, 0, kvlab::any, "factor on page scores before the softmax of group: softmax_mean")
        .param("pause", false, "a sequence sits steps out until its pages are there; false: they come beside the step")
        .param("first_query", FirstQuery::prompt,
               "of stable heads' first choice: the prompt's last, or the first step's, which waits for its pages; "
               "steps are no CUDA graphs then, and the oldest pages leave first when memory runs short")
        .param("dense_layers", 0, 0, kvlab::any, "first layers that attend to everything")
        .param("summary_bits", 16, 8, 16, "of a number of a page's summary: 16, in the run's dtype, or 8, in codes")
        .component("reranking", "stable heads choose again while decoding; off = the prompt's choice stays")
        .component("unstable_heads", "the profile's unstable heads stay on the device; off = all heads are stable")
        .component("frame_reuse", "pages that come take the frames of pages that leave; off = frames of the pool")
        .component("overlap", "new pages come beside the step and are read by the next one; off = the step waits")
        .component("stability_aware", "stable heads choose every rerank_every steps; off = in every step"))
