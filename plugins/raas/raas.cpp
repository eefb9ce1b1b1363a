// RaaS: a page that mattered gets the time as its stamp, and the oldest stamps leave. A prompt stays. Hu et al. 2025.
// raas_tokens does so with single tokens, by their true attention.
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/takes_no_pruner.hpp>
#include <kvlab/whole_pages.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace {

using kvlab::Scores;

constexpr float far = 1e30f;  // beyond all ages

// A stamp is 0 in the step that gives it and falls by 1 a step, so no op needs the time. Stamps are whole numbers. Text
// positions add less than 1, so that of equal stamps the oldest token leaves.
class Stamps {
 public:
  explicit Stamps(bool renewed) : renewed_(renewed) {}

  void attach(const kvlab::Shape& shape) {
    newer_ = 1;
    for (int n = shape.max_tokens; n > 0; n /= 2) newer_ /= 2;
  }
  static void begin(const kvlab::LayerKv& kv, bool stays, kvlab::Stream s) {
    kvlab::ops::blend_state(kv.state("stamp"), 0, {}, stays ? far : 0, s);
  }
  // pairs: [row, 2 * kv_heads, token] scratch. Its odd heads have 1 for what mattered, and 0.
  static Scores mattered(Scores pairs) {
    pairs.data += pairs.stride[1];
    return before(pairs);
  }
  // value = the greater of the stamp less 1, and of 0 for what mattered or a number below all stamps.
  void renew(const kvlab::LayerKv& kv, Scores pairs, Scores fixed, Scores value, kvlab::Stream s) const {
    const kvlab::Pins all{.last = kv.max_length};
    const Scores one = before(pairs), other = mattered(pairs);
    kvlab::ops::set_pinned(kv.pages, all, 1, fixed, s);
    kvlab::ops::add(other, fixed, -1, s);
    kvlab::ops::scale(other, far, s);
    if (!renewed_) kvlab::ops::set_pinned(kv.pages, all, -far, pairs, s);
    kvlab::ops::read_state(kv.state("stamp"), one, s);
    kvlab::ops::add(one, fixed, -1, s);
    kvlab::ops::group_reduce(kv.pages, pairs, kvlab::GroupRule::max, value, s);
    kvlab::ops::set_pinned(kv.pages, {.last = 1}, 0, value, s);  // the step's own token
  }
  void rank(const kvlab::LayerKv& kv, Scores out, kvlab::Stream s) const {
    const Scores position = kv.kv_head_scores("position");
    kvlab::ops::read_state(kv.state("stamp"), out, s);
    kvlab::ops::recency(kv.pages, position, s);
    kvlab::ops::add(out, position, newer_, s);
  }

 private:
  static Scores before(Scores pairs) {
    pairs.extent[1] /= 2, pairs.stride[1] *= 2;
    return pairs;
  }

  bool renewed_;
  float newer_ = 0;  // a text position's part of a score
};

// What the prompt's last query attends to.
void last_attention(const kvlab::LayerKv& kv, kvlab::GroupRule group, Scores out, kvlab::Stream s) {
  const Scores votes = kv.query_head_scores("last query's attention");
  kvlab::ops::window_votes(kv.window_queries, kv.upload("seen", kv.position), kv.pages, votes, s);
  kvlab::ops::group_reduce(kv.pages, votes, group, out, s);
}

class Raas final : public kvlab::Policy, public kvlab::PreparesSteps, public kvlab::TakesNoPruner {
 public:
  explicit Raas(const kvlab::Params& p)
      : threshold_(p.get<float>("threshold")),
        sinks_(p.get<int>("sinks")),
        window_(p.get<int>("window")),
        dense_(p.get<int>("dense_layers")),
        scaled_(p.get<bool>("scaled")),
        keeps_prompt_(p.get<bool>("keep_prompt")),
        stamps_(p.get<bool>("stamps")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .token_state("stamp")
        .window_queries(1)
        .page_summary(kvlab::Summary::min_max)
        .dense_layers(dense_)
        .scratch_numbers(10)
        .capturable(true);
  }
  const char* takes_no_pruner() const override { return "evicts tokens"; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount& budget, kvlab::Workspace& w) override {
    stamps_.attach(shape);
    page_ = shape.page_size;
    pins_.first = whole(sinks_), pins_.last = whole(window_);
    limited_ = budget.kind != kvlab::BudgetAmount::unlimited;
    budget.require(pins_.first + pins_.last + 2 * page_, "sinks and window in whole pages, and two pages");
    most_ = {"most tokens", shape.max_slots, w};
    const std::vector<kvlab::Pins> pins(static_cast<std::size_t>(shape.max_slots), pins_);
    pins_of_rows_ = static_cast<const kvlab::Pins*>(w.constant("pins", pins.data(), pins.size() * sizeof(kvlab::Pins)));
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    std::vector<std::int32_t>& most = most_.fresh();
    for (int row = 0; row < c.rows; ++row) most.push_back(at_least(c.budget[row]));
    most_.put(c);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!kv.last[0] || kv.layer < dense_) return;
    const int most = at_least(kv.budget_tokens(0));
    stamps_.begin(kv, keeps_prompt_ && kv.position[0] <= most / page_ * page_ - page_, s);
    if (!limited_) return;
    const Scores scores = kv.kv_head_scores("attention");
    last_attention(kv, kvlab::GroupRule::mean, scores, s);
    evict(kv, kv.upload("most tokens", &most), scores, edits, s);
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!limited_ || step.layer < dense_) return;
    const int pages = (step.max_length + page_ - 1) / page_;
    const Scores of_pages = step.scratch<float>("page shares", {step.rows(), step.kv_heads(), pages});
    const float scale = scaled_ ? 1 / std::sqrt(static_cast<float>(step.pages.head_dim)) : 1;
    kvlab::ops::page_score(step.queries, step.pages, step.summaries, kvlab::GroupRule::softmax_mean, scale, of_pages,
                           s);
    kvlab::ops::above(of_pages, threshold_, s);
    const Scores pairs = step.scratch<float>("pairs", {step.rows(), 2 * step.kv_heads(), step.max_length});
    const Scores fixed = step.kv_head_scores("fixed"), value = step.kv_head_scores("value");
    kvlab::ops::spread_pages(step.pages, of_pages, stamps_.mattered(pairs), s);
    stamps_.renew(step, pairs, fixed, value, s);
    kvlab::ops::blend_state(step.state("stamp"), 0, value, 1, s);
    stamps_.rank(step, value, s);
    // A page has the stamp of its newest token, or of the prompt that ends in it.
    kvlab::ops::page_greatest(step.pages, value, fixed, s);
    evict(step, most_.data(), fixed, edits, s);
  }

 private:
  int whole(int tokens) const { return (tokens + page_ - 1) / page_ * page_; }
  int at_least(int tokens) const { return std::max(tokens, pins_.first + pins_.last + 2 * page_); }
  // Tokens move only between full pages, so a page keeps its tokens.
  void evict(const kvlab::LayerKv& kv, const std::int32_t* most, Scores scores, kvlab::Edits& edits,
             kvlab::Stream s) const {
    const auto keep = kv.scratch<std::int32_t>("tokens to keep", {kv.rows(), kv.kv_heads()});
    kvlab::ops::room_for_page(kv.pages, most, keep, s);
    edits.evict_surplus({.keep = keep, .pins = pins_of_rows_, .scores = scores});
  }

  float threshold_;
  int sinks_, window_, dense_;
  bool scaled_, keeps_prompt_, limited_ = false;
  Stamps stamps_;
  int page_ = 1;
  kvlab::Pins pins_;
  const kvlab::Pins* pins_of_rows_ = nullptr;
  kvlab::StepNumbers<std::int32_t> most_;  // [row] tokens of the budget
};

class RaasTokens final : public kvlab::Scorer {
 public:
  explicit RaasTokens(const kvlab::Params& p)
      : threshold_(p.get<float>("threshold")),
        sinks_(p.get<int>("sinks")),
        window_(p.get<int>("window")),
        every_(p.get<int>("every")),
        group_(p.get<kvlab::GroupRule>("group")),
        keeps_prompt_(p.get<bool>("keep_prompt")),
        stamps_(p.get<bool>("stamps")) {
    if (group_ != kvlab::GroupRule::mean && group_ != kvlab::GroupRule::max)
      throw kvlab::Error(kvlab::Errc::config, std::string("got group ") +
                                                  (group_ == kvlab::GroupRule::sum ? "sum" : "softmax_mean") +
                                                  ", wanted mean or max: the threshold is one of a share of attention");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .token_state("stamp")
        .window_queries(1)
        .mass(kvlab::Mass::decode)
        .scratch_numbers(8)
        .capturable(true);
  }
  kvlab::Pins pins(int) const override { return {.first = sinks_, .last = window_}; }
  bool steady_score() const override { return true; }
  int every() const override { return every_; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace&) override {
    stamps_.attach(shape);
  }

  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    if (kv.window_queries) stamps_.begin(kv, keeps_prompt_ && kv.position[0] <= kv.budget_tokens(0), s);
    if (!kv.mass) return;
    const Scores pairs = kv.scratch<float>("pairs", {kv.rows(), 2 * kv.kv_heads(), kv.max_length});
    const Scores value = kv.kv_head_scores("value"), other = stamps_.mattered(pairs);
    kvlab::ops::group_reduce(kv.pages, kv.mass, group_, other, s);
    kvlab::ops::above(other, threshold_, s);
    stamps_.renew(kv, pairs, kv.kv_head_scores("fixed"), value, s);
    kvlab::ops::blend_state(kv.state("stamp"), 0, value, 1, s);
  }

  void score(const kvlab::LayerKv& kv, Scores out, kvlab::Stream s) override {
    kv.window_queries ? last_attention(kv, group_, out, s) : stamps_.rank(kv, out, s);
  }

 private:
  float threshold_;
  int sinks_, window_, every_;
  kvlab::GroupRule group_;
  bool keeps_prompt_;
  Stamps stamps_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<Raas>("raas",
                        "drops the pages that have not mattered for the longest time; prompts stay (Hu et al. "
                        "2025)")
        .param("threshold", 1e-4, 0, 1, "a page matters in a step that gives it a greater share of attention")
        .param("sinks", 0, 0, kvlab::any, "first tokens that are always kept, in whole pages of the budget")
        .param("window", 0, 0, kvlab::any, "newest tokens that are always kept, in whole pages of the budget")
        .param("dense_layers", 0, 0, kvlab::any, "first layers that keep everything")
        .param("scaled", false, "the bounds of a page's logits are divided by the root of head_dim")
        .component("keep_prompt", "a prompt that fits in the budget is never evicted; off = it is as other pages")
        .component("stamps", "a page that matters gets a new stamp; off = the first in is the first out"),
    kvlab::scorer<RaasTokens>("raas_tokens", "raas with single tokens, by their true attention (Hu et al. 2025)")
        .param("threshold", 1e-4, 0, 1, "a token matters in a step that gives it a greater share of attention")
        .param("group", kvlab::GroupRule::mean, "how a GQA group's attention becomes one: mean or max")
        .param("sinks", 0, 0, kvlab::any, "first tokens that are always kept, part of the budget")
        .param("window", 0, 0, kvlab::any, "newest tokens that are always kept, part of the budget")
        .param("every", 1, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only")
        .component("keep_prompt", "a prompt that fits in the budget is never evicted; off = it is as other tokens")
        .component("stamps", "a token that matters gets a new stamp; off = the first in is the first out"))
