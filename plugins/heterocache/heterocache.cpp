// HeteroCache: a profile gives each KV head a role. Pivots and volatile heads keep the whole prompt on the device, and
// the others keep its best tokens. When a pivot's attention drifts, its satellites fetch other tokens from the host.
// Shi et al. 2026.
#include <kvlab/plugin.hpp>
#include <kvlab/spread.hpp>
#include <kvlab/takes_no_pruner.hpp>
#include <kvlab/tier_demand.hpp>

#include <cmath>
#include <sstream>

#include "division.hpp"

namespace {

using kvlab::Heads;
using kvlab::Scores;

// What a satellite fetches: its own best tokens by the pivot's scores. Or, as in the released code, the first by
// position of as many as the cluster's largest satellite takes.
enum class RecallOrder : std::uint8_t { score, position };

// Roles as a profile holds them.
constexpr float anchor = 0, shifting = 1, pivot = 2, satellite = 3;

}  // namespace

template <>
struct kvlab::Choices<RecallOrder> {
  static constexpr std::pair<RecallOrder, const char*> all[] = {{RecallOrder::score, "score"},
                                                                {RecallOrder::position, "position"}};
};

namespace {

class HeteroCache final : public kvlab::Policy, public kvlab::TakesNoPruner {
 public:
  explicit HeteroCache(const kvlab::Params& p)
      : threshold_(p.get<float>("threshold")),
        window_(p.get<int>("window")),
        period_(p.get<int>("check_every")),
        stagger_(p.get<bool>("stagger")),
        kernel_(p.get<int>("kernel")),
        least_(p.get<double>("least_stability")),
        fill_(p.get<bool>("fill")),
        allocates_(p.get<bool>("allocation")),
        clusters_(p.get<bool>("clustering")),
        recalls_(p.get<bool>("retrieval") && clusters_),
        order_(p.get<RecallOrder>("recall_order")),
        recall_steps_(p.get<int>("recall_steps")),
        rho_(p.get<double>("rho")),
        beside_(p.get<bool>("asynchrony")) {
    if (kernel_ % 2 == 0)
      throw kvlab::Error(kvlab::Errc::config, "got a kernel of " + std::to_string(kernel_) + ", wanted an odd one");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .window_queries(1)
        .archive(recalls_)
        .steps(true)
        .observe_beside(beside_)
        .profile(allocates_ || clusters_)
        .capturable(true);
  }
  const char* takes_no_pruner() const override { return "evicts tokens"; }

  void load_profile(const kvlab::Profile& profile) override {
    role_ = profile.at("role").values, pivot_of_ = profile.at("pivot_of").values;
    stable_ = profile.at("stable").values;
    for (const auto* of_heads : {&role_, &pivot_of_, &stable_})
      for (const float x : *of_heads)
        if (std::isnan(x))
          throw kvlab::Error(kvlab::Errc::data, "got a profile of heads without a role, wanted one with decode steps");
  }

  // The heads' tokens are the budget's in the mean, and at least one. Each head rounds its own up to a page. Satellites
  // have the prompt on the host too. Core asks for the longest prompt before a run, so a budget that is too small for
  // the roles is refused then.
  kvlab::Demand demand(int prompt, int max_new) const override {
    const int budget = budget_.budget(prompt), p = budget_.whole_pages(prompt);
    if (budget < 0 || base_of(prompt, budget) == 0) return {};
    const std::int64_t kept = std::int64_t{std::min(budget, prompt)} + page_;
    const double satellites = static_cast<double>(std::count(role_.begin(), role_.end(), satellite));
    const double below = recalls_ ? satellites / static_cast<double>(role_.size()) : 0;
    return {kept, kept + max_new, static_cast<std::int64_t>(std::ceil(below * p * page_ - 1e-6))};
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount& budget, kvlab::Workspace& w) override {
    const auto heads = static_cast<std::size_t>(shape.layers * shape.kv_heads);
    if (rho_ > 0 && budget.kind != kvlab::BudgetAmount::unlimited)
      throw kvlab::Error(kvlab::Errc::config, "got both rho and a budget, wanted one: rho is `budget: {ratio: RHO}`");
    const kvlab::BudgetAmount amount = rho_ > 0 ? kvlab::BudgetAmount{kvlab::BudgetAmount::ratio, rho_} : budget;
    heads_of_layer_ = static_cast<std::size_t>(shape.kv_heads), amount_ = amount;
    first_.assign(static_cast<std::size_t>(shape.max_slots), false);
    page_ = shape.page_size, budget_ = kvlab::TierDemand(shape, amount, 0);
    if (!clusters_) role_.assign(heads, anchor), pivot_of_.assign(heads, -1);
    if (!allocates_) stable_.assign(heads, 1);
    std::vector<std::int32_t> leader(heads, -1), widest(heads), of_logits(heads, -1), turn(heads);
    std::vector<std::int32_t> pivots(static_cast<std::size_t>(shape.layers)), satellites(pivots);
    std::vector<std::uint8_t> no_satellite;
    weights_.clear(), follows_.assign(static_cast<std::size_t>(shape.layers), false);
    for (std::size_t i = 0; i < heads; ++i) {
      const std::size_t own = i % heads_of_layer_, first = i - own;
      const bool full = role_[i] == shifting || role_[i] == pivot;
      weights_.push_back(full ? 0 : 1 / std::max(double{stable_[i]}, least_));
      no_satellite.push_back(role_[i] != satellite);
      widest[i] = static_cast<std::int32_t>(own);
      if (role_[i] == pivot) leader[i] = widest[i], of_logits[i] = pivots[i / heads_of_layer_]++;
      if (role_[i] != satellite) continue;
      leader[i] = static_cast<std::int32_t>(pivot_of_[i]), follows_[i / heads_of_layer_] = true;
      turn[i] = satellites[i / heads_of_layer_]++;
      for (std::size_t h = 0; h < heads_of_layer_; ++h)  // of a cluster, the least stable one keeps most
        if (role_[first + h] == satellite && pivot_of_[first + h] == pivot_of_[i] &&
            stable_[first + h] < stable_[first + static_cast<std::size_t>(widest[i])])
          widest[i] = static_cast<std::int32_t>(h);
    }
    full_ = static_cast<std::size_t>(std::count(weights_.begin(), weights_.end(), 0.));
    const double least = static_cast<double>(full_) / static_cast<double>(heads);
    if (amount.kind == kvlab::BudgetAmount::ratio && amount.value <= least) refuse("a ratio of ", amount.value, least);
    if (!recalls_) return;
    leader_ = kvlab::HeadOfHead("pivot of", shape, leader, w);
    widest_ = kvlab::HeadOfHead("widest of the cluster", shape, widest, w);
    no_satellite_ = kvlab::HeadClass("other than satellites", shape, no_satellite, w);
    of_logits_ = kvlab::HeadOfHead("pivots in order", shape, of_logits, w);
    turn_ = kvlab::HeadOfHead("satellites in order", shape, turn, w);
    waits_ = kvlab::KeptFlags("waits", shape, w);
    due_ = kvlab::KeptFlags("due", shape, w);
    logits_.clear();
    for (const std::int64_t count : pivots) {
      const std::int64_t numbers = count * shape.max_slots * shape.max_tokens * shape.group();
      auto* room = static_cast<float*>(w.room("logits", static_cast<std::size_t>(numbers) * sizeof(float)));
      logits_.push_back(kvlab::View<float, 4>::dense(room, {shape.max_slots, count, shape.max_tokens, shape.group()}));
    }
    missed_ = kvlab::KeptSeries("missed", shape, window_, w);
    rests_ = kvlab::KeptFlags("rests", shape, w);
    prompt_ = kvlab::KeptOfHeads<std::int32_t>("prompt", shape, w);
    best_ = kvlab::KeptTokens("best", shape, shape.max_tokens, w);
    drifted_ = kvlab::KeptFlags("drifted", shape, w);
  }

  void release(int slot) override { first_[static_cast<std::size_t>(slot)] = false; }

  // A budget that pays for all tokens evicts nothing. Of a second prompt nothing is evicted: satellites could no longer
  // be archived as a whole, and what pivots and archives hold stays that of the first.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    const auto slot = static_cast<std::size_t>(kv.slots[0]);
    const int n = kv.position[0];
    if (n == kv.chunk_queries.extent[2]) first_[slot] = true;
    if (!kv.last[0] || !first_[slot]) return;
    if (static_cast<std::size_t>(kv.layer) + 1 == follows_.size()) first_[slot] = false;
    const int base = base_of(n, kv.budget_tokens(0));
    if (watches(kv)) kvlab::ops::forget_waiting(kv.pages, due(kv), s);
    if (base == 0 || base == n) return;  // a ratio of a few tokens is none
    const auto first = static_cast<std::size_t>(kv.layer) * heads_of_layer_;
    const std::vector<std::int32_t> all = heterocache::divided(weights_, base, n, fill_);
    std::vector<std::int32_t> kept(all.begin() + static_cast<std::ptrdiff_t>(first),
                                   all.begin() + static_cast<std::ptrdiff_t>(first + heads_of_layer_));
    const Scores scores = kv.kv_head_scores("scores");
    kvlab::ops::pooled_votes(kv.window_queries, kv.pages, {.kernel = kernel_}, scores, *kv.workspace, s);
    const auto stay = kv.list<kvlab::TokenList>("kept", n);
    kvlab::ops::top_tokens(kv.pages, scores, kv.upload_heads("tokens to keep", kept.data()), nullptr, stay, s);
    if (watches(kv)) {
      for (std::size_t h = 0; h < heads_of_layer_; ++h)
        if (role_[first + h] == pivot) kept[h] = base;
      kvlab::ops::top_tokens(kv.pages, scores, {.keep = kv.upload_heads("tokens to note", kept.data())}, best_.of(kv),
                             s);
      kvlab::ops::lengths(kv.pages, prompt_.of_row(kv), s);
      kvlab::ops::forget_overlaps(kv.pages, watch(kv), s);
      kvlab::ops::forget_waiting(kv.pages, waits_.of(kv), s);
      edits.archive(Heads{}.except(no_satellite_.of(kv)));
    }
    edits.evict_rest(stay);
  }

  // A step's attention leaves the logits of pivots whose scores may still change a median. What the step before found
  // is fetched beside the layers behind this one.
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    if (!watches(step)) return;
    edits.keep_logits(logits(step));
    if (beside_) edits.fetch(best_.of(step), {.heads = satellites_due(step)});
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!watches(step)) return;
    kvlab::PagedKv prompt = step.pages;  // pivots keep it in text order
    prompt.length = prompt_.of(step);
    const Scores scores = step.kv_head_scores("scores");
    kvlab::ops::drifted_by_logits(
        prompt, logits(step), {.kernel = kernel_}, scores, best_.of(step),
        {.threshold = threshold_, .window = window_, .period = period_, .lead = lead(step), .steps = step.steps},
        leader_.of(step), watch(step), drifted_.of(step), s);
    const Heads drifted = Heads::flagged(drifted_.of(step));
    kvlab::ops::top_tokens(prompt, scores,
                           {.heads = drifted,
                            .by = leader_.of(step),
                            .among = order_ == RecallOrder::position ? widest_.of(step) : nullptr},
                           best_.of(step), s);
    if (recall_steps_ > 1)
      kvlab::ops::spread_heads(
          prompt, drifted_.of(step),
          {.steps = recall_steps_, .lead = lead(step), .places = turn_.of(step), .counts = step.steps}, waits_.of(step),
          due_.of(step), s);
    if (!beside_) edits.fetch(best_.of(step), {.heads = satellites_due(step), .when = {kvlab::Deadline::next_step}});
  }

 private:
  // L_base of a prompt of n tokens, where the budget gives a KV head `tokens`. Those of a ratio are no whole number,
  // and heterocache::base_of rounds once. attach has refused a ratio that is too small.
  int base_of(int n, int tokens) const {
    const bool ratio = amount_.kind == kvlab::BudgetAmount::ratio;
    const double budget = ratio ? std::max(1., n * amount_.value) : tokens;
    const int base = heterocache::base_of(weights_.size(), full_, n, budget);
    if (base == 0 && !ratio)
      refuse(("a prompt of " + std::to_string(n) + " tokens with a budget of ").c_str(), budget,
             static_cast<double>(full_) * n / static_cast<double>(weights_.size()));
    return base;
  }
  bool watches(const kvlab::LayerKv& kv) const { return recalls_ && follows_[static_cast<std::size_t>(kv.layer)]; }
  kvlab::HeadFlags due(const kvlab::LayerKv& kv) const { return recall_steps_ > 1 ? due_.of(kv) : drifted_.of(kv); }
  Heads satellites_due(const kvlab::LayerKv& kv) const { return Heads::flagged(due(kv)).except(no_satellite_.of(kv)); }
  int lead(const kvlab::LayerKv& kv) const { return 1 + stagger_ * kv.layer; }
  kvlab::ops::DriftWatch watch(const kvlab::LayerKv& kv) const { return {missed_.of(kv), rests_.of(kv)}; }
  kvlab::HeadLogits logits(const kvlab::LayerKv& kv) const {
    return {logits_[static_cast<std::size_t>(kv.layer)], of_logits_.of(kv), Heads::flagged(rests_.of(kv), false)};
  }

  [[noreturn]] static void refuse(const char* got, double amount, double least) {
    std::ostringstream text;
    text << "got " << got << amount << ", wanted more than " << least << ": pivots and volatile heads keep all tokens";
    throw kvlab::Error(kvlab::Errc::config, text.str());
  }

  float threshold_;
  int window_, period_, stagger_, kernel_;
  double least_;
  bool fill_, allocates_, clusters_, recalls_;
  RecallOrder order_;
  int recall_steps_;
  double rho_;
  bool beside_;  // fetches come beside the next step
  kvlab::BudgetAmount amount_;
  std::vector<float> role_, pivot_of_, stable_;  // [layer, kv_head], like weights_
  std::vector<double> weights_;                  // of the division; 0 = the head keeps all
  std::vector<bool> follows_;                    // [layer] a head of it is a satellite
  std::vector<bool> first_;                      // [slot] a sequence's first prompt is under way
  std::size_t heads_of_layer_ = 0, full_ = 0;
  int page_ = 1;
  kvlab::TierDemand budget_;
  kvlab::HeadOfHead leader_, widest_, of_logits_, turn_;
  kvlab::HeadClass no_satellite_;
  std::vector<kvlab::View<float, 4>> logits_;  // [layer] of its pivots' queries in this step
  kvlab::KeptSeries missed_;
  kvlab::KeptFlags rests_;
  kvlab::KeptOfHeads<std::int32_t> prompt_;
  kvlab::KeptTokens best_;  // a pivot's base set, and what a satellite holds
  kvlab::KeptFlags drifted_, waits_, due_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<HeteroCache>("heterocache", "roles of heads; satellites fetch when their pivot drifts (2026)")
        .param("rho", 0., 0, 1,
               "share of the prompt's tokens, in place of `budget: {ratio: RHO}`; 0 = the budget says it")
        .param("threshold", 0.5, 0, 1, "median overlap below which a pivot has drifted")
        .param("window", 5, 1, 64, "steps whose overlaps give the median")
        .param("check_every", 5, 1, kvlab::any, "steps from one check to the next; 1 = a sliding window")
        .param("stagger", true, "layers check in different steps, so that no step checks them all")
        .param("kernel", 5, 1, 1023, "tokens of which attention takes the average; odd")
        .param("least_stability", 0.05, 1e-6, 1, "lower stabilities count as this in the division")
        .param("fill", true, "what a head cannot keep goes to the others; false: it is lost, as in the released code")
        .param("recall_order", RecallOrder::score, "a satellite fetches its own best, or as the released code does")
        .param("recall_steps", 1, 1, 64, "steps over which the satellites of a layer fetch, in turn")
        .component("allocation", "shares by stability; off = all compressed heads keep as many tokens")
        .component("clustering", "roles of the profile; off = every head is an anchor, and none recalls")
        .component("retrieval", "satellites fetch from the host; off = they keep the prompt's choice")
        .component("asynchrony", "fetched tokens come beside the next step; off = a step's end waits for them"))
