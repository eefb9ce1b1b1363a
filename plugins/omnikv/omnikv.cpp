// OmniKV: a few filter layers look at the whole prompt and choose its best tokens, one set for all heads. The layers up
// to the next filter layer attend to these and to what was generated. Their other pages lie on the host. Hao et al.,
// ICLR 2025.
#include <kvlab/layer_list.hpp>
#include <kvlab/partial_keys.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/query_shares.hpp>
#include <kvlab/rings.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include "layers.hpp"

namespace {

enum class ScoreBy : std::uint8_t { last, softmax_before_last, uniform, exp };

}  // namespace

template <>
struct kvlab::Choices<ScoreBy> {
  static constexpr std::pair<ScoreBy, const char*> all[] = {{ScoreBy::last, "last"},
                                                            {ScoreBy::softmax_before_last, "softmax_before_last"},
                                                            {ScoreBy::uniform, "uniform"},
                                                            {ScoreBy::exp, "exp"}};
};

namespace {

using kvlab::BudgetAmount;

class OmniKv final : public kvlab::Policy, public kvlab::PreparesSteps {
 public:
  explicit OmniKv(const kvlab::Params& p)
      : filters_(kvlab::layer_list(p, "filter_layers")),
        wait_(p.get<int>("wait_layers")),
        by_(p.get<ScoreBy>("score_by")),
        window_(p.get<int>("queries")),
        shares_(p.get<bool>("shared_choice")),
        offloads_(p.get<bool>("offload")) {
    if (by_ != ScoreBy::uniform && by_ != ScoreBy::exp) window_ = 0;
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.host_pages(offloads_).window_queries(window_).scratch_numbers(8).capturable(
        window_ == 0);  // the host weighs queries by their age
  }

  // Each chosen token may have a page of its own. A further prompt's end still holds those of the last step.
  kvlab::Demand demand(int prompt, int max_new) const override {
    if (!places_) return {};
    return tiers_.of(prompt, max_new, [&](int n, bool decodes) {
      return std::max(tiers_.budget(n), window_ > 0 ? window_ + 1 : 0) + (decodes ? tiers_.pages_of_run(max_new) : 0) +
             1;
    });
  }

  void attach(const kvlab::Shape& shape, const BudgetAmount& budget, kvlab::Workspace& w) override {
    if (budget.kind == BudgetAmount::bytes)
      throw kvlab::Error(
          kvlab::Errc::config,
          "got a budget in bytes, wanted tokens or a ratio of the prompt: every token stays where it is");
    budget.require(std::max(1, window_), window_ > 1 ? "the prompt's tokens among the last `queries`, and one more"
                                                     : "of the prompt, in each layer that chooses none");
    budget_ = budget;
    roles_ = omnikv::roles_of(filters_, wait_, shape.layers, shares_);
    const auto sparse = std::count(roles_.begin(), roles_.end(), omnikv::Role::sparse);
    tiers_ = kvlab::TierDemand(shape, budget, 1 - static_cast<double>(sparse) / shape.layers);
    places_ = offloads_ && tiers_.budget(shape.max_tokens) != tiers_.everything;
    if (places_) pages_ = kvlab::KeptPages("pages to read", shape, shape.max_pages(), w);
    prompt_ = kvlab::KeptOfHeads<std::int32_t>("prompt", shape, w);
    const std::int64_t rows = shape.max_slots, heads = shape.kv_heads, capacity = shape.max_tokens;
    auto* data = static_cast<std::int32_t*>(
        w.room("chosen tokens", static_cast<std::size_t>(rows * heads * (capacity + 1)) * sizeof(std::int32_t)));
    index_ = data + rows * heads;
    count_ = data;
    capacity_ = capacity;
    kv_heads_ = shape.kv_heads;
    keep_ = {"tokens to read", rows * heads, w};
    queries_ = nullptr;
    if (window_ == 0 || budget.kind == BudgetAmount::unlimited) return;
    ring_of_.assign(roles_.size(), -1);
    int rings = 0;
    for (std::size_t l = 0; l < roles_.size(); ++l)
      if (roles_[l] == omnikv::Role::filter || roles_[l] == omnikv::Role::own) ring_of_[l] = rings++;
    layer_ = std::int64_t{shape.query_heads} * window_ * shape.head_dim, rings_ = rings;
    queries_ = static_cast<float*>(
        w.state("newest queries", static_cast<std::size_t>(layer_ * rings) * sizeof(float), shape.max_slots));
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    std::vector<std::int32_t>& keep = keep_.fresh();
    for (int row = 0; row < c.rows; ++row)
      keep.insert(keep.end(), static_cast<std::size_t>(kv_heads_), tokens(c.step[row] + 1, c.position[row]));
    keep_.put(c);
  }

  // The prompt of a sparse layer goes to the host. The first step brings what is chosen.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!kv.last[0]) return;
    kvlab::ops::lengths(kv.pages, prompt_.of_row(kv), s);
    if (window_ > 0 && queries_ && chooses(kv.layer)) keep_queries(kv, s);
    if (places_ && role(kv.layer) == omnikv::Role::sparse) edits.place(pages_.of(kv), {});
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    using omnikv::Role;
    if (budget_.kind == BudgetAmount::unlimited) return;
    const Role here = role(step.layer);
    const kvlab::TokenList list = chosen(step);
    if (chooses(step.layer)) choose(step, list, s);
    if (here == Role::sparse || here == Role::own) edits.attend(list);
    // Pages of the layer behind come while this one runs. It holds the same tokens but for the step's own.
    if (!places_ || step.layer + 1 == step.shape->layers || role(step.layer + 1) != Role::sparse) return;
    kvlab::LayerKv next = step;
    ++next.layer;
    kvlab::ops::token_pages(step.pages, list, 1, pages_.of(next), s);
    edits.for_layer(next.layer);
    edits.place(pages_.of(next), {});
  }

 private:
  omnikv::Role role(int layer) const { return roles_[static_cast<std::size_t>(layer)]; }
  bool chooses(int layer) const { return role(layer) == omnikv::Role::filter || role(layer) == omnikv::Role::own; }

  // Written by a filter layer and read by the layers behind it, in the same step.
  kvlab::TokenList chosen(const kvlab::LayerKv& kv) const {
    kvlab::TokenList list;
    list.index = kvlab::View<std::int32_t, 3>::dense(index_, {kv.rows(), kv.kv_heads(), capacity_});
    list.count = kvlab::View<std::int32_t, 2>::dense(count_, {kv.rows(), kv.kv_heads()});
    return list;
  }

  void choose(const kvlab::LayerStep& step, const kvlab::TokenList& list, kvlab::Stream s) {
    // The prompt comes first, and nothing leaves.
    kvlab::PagedKv prompt = step.pages;
    prompt.length = prompt_.of(step);
    const kvlab::Scores scores = step.kv_head_scores("scores");
    const auto shares = window_ > 0 ? shares_of_window(step, prompt, s) : step.query_head_scores("logits");
    if (window_ == 0) kvlab::ops::row_dot({&prompt, kvlab::KvSide::key}, step.queries.f32(), shares, s);
    if (by_ == ScoreBy::softmax_before_last) {
      kvlab::ops::scale(shares, 1 / std::sqrt(static_cast<float>(step.pages.head_dim)), s);
      kvlab::ops::softmax(prompt, shares, 1, s);
    }
    kvlab::ops::set_pinned(step.pages, {.last = step.max_length}, INFINITY, scores, s);  // generated tokens keep it
    kvlab::ops::layer_reduce(prompt, shares, kvlab::GroupRule::max, scores, s);
    if (window_ > 0) kvlab::ops::set_pinned(step.pages, {.last = window_}, INFINITY, scores, s);
    const auto keep = kvlab::View<const std::int32_t, 2>::dense(keep_.data(), {step.rows(), step.kv_heads()});
    kvlab::ops::top_tokens(step.pages, scores, keep, nullptr, list, s);
  }

  // [row, KV head, token] the sum over the newest queries of the greatest share that a query head gives a token of the
  // prompt before them. With `exp` each older query counts half as much as the one behind it.
  kvlab::Scores shares_of_window(const kvlab::LayerStep& step, const kvlab::PagedKv& prompt, kvlab::Stream s) {
    const kvlab::View<float, 4> rings = rings_of(step.layer, step.shape->max_slots, step.pages.head_dim);
    std::vector<std::int32_t> place, before;
    for (int row = 0; row < step.rows(); ++row) {
      place.push_back((step.position[row] - 1) % window_);
      before.push_back(std::max(0, step.position[row] - window_));
    }
    kvlab::ops::put_in_rings(step.pages, step.queries.f32(), step.upload("places of queries", place.data()), rings, s);
    kvlab::QueryShares how;
    how.rule = kvlab::ShareRule::max;
    how.seen = step.upload("tokens before the window", before.data());
    how.of_slots = true;
    const kvlab::Scores sum = step.kv_head_scores("sum of shares"), of_heads = step.kv_head_scores("shares"),
                        greatest = step.kv_head_scores("greatest shares");
    kvlab::ops::set_pinned(prompt, {.last = step.max_length}, 0, sum, s);
    for (int i = 0; i < window_; ++i) {
      kvlab::View<float, 4> one = rings;
      one.data += i * one.stride[2], one.extent[2] = 1;
      kvlab::ops::query_shares(kvlab::View<const float, 4>(one), prompt, how, of_heads, s);
      kvlab::ops::layer_reduce(prompt, of_heads, kvlab::GroupRule::max, greatest, s);
      for (std::int64_t row = 0; row < step.rows(); ++row) {
        const int seen = step.position[row], age = ((seen - 1 - i) % window_ + window_) % window_;
        if (age >= seen) continue;  // there is no such query yet
        const float weight = by_ == ScoreBy::exp ? std::ldexp(1.f, -age) : 1.f;
        const auto of_row = [&](const kvlab::Scores& x) {
          return kvlab::Scores{&x(row, 0, 0), {1, x.extent[1], x.extent[2]}, x.stride};
        };
        kvlab::ops::add(of_row(sum), of_row(greatest), weight, s);
      }
    }
    return sum;
  }

  // At the prompt's end its last queries go to their places.
  void keep_queries(const kvlab::LayerPrefill& kv, kvlab::Stream s) const {
    const kvlab::View<float, 4> rings = rings_of(kv.layer, kv.shape->max_slots, kv.pages.head_dim);
    const kvlab::View<const float, 4> q = kv.window_queries.f32();
    const int n = static_cast<int>(q.extent[2]), from = kv.position[0] - n;
    for (int i = 0; i < n; ++i)
      kvlab::ops::copy({&rings(kv.slots[0], 0, (from + i) % window_, 0),
                        {1, q.extent[1], q.extent[3]},
                        {rings.stride[0], rings.stride[1], 1}},
                       {&q(0, 0, i, 0), {1, q.extent[1], q.extent[3]}, {q.stride[0], q.stride[1], 1}}, s);
  }

  // [slot, query head, text position % window, head_dim] of a layer that chooses.
  kvlab::View<float, 4> rings_of(int layer, std::int64_t slots, std::int64_t dim) const {
    const std::int64_t of_head = window_ * dim;
    return {queries_ + ring_of_[static_cast<std::size_t>(layer)] * layer_,
            {slots, layer_ / of_head, window_, dim},
            {rings_ * layer_, of_head, dim, 1}};
  }

  // Tokens of the prompt among those of the newest queries. All of them are read.
  int of_prompt(int generated, int seen) const { return std::clamp(window_ - generated, 0, seen - generated); }

  // Those of the prompt, and all that came after it. seen: tokens of the text.
  int tokens(int generated, int seen) const {
    const int prompt = seen - generated, sure = of_prompt(generated, seen);
    const double wanted = budget_.kind == BudgetAmount::ratio ? budget_.value * prompt : budget_.value;
    return generated + std::clamp(static_cast<int>(std::min(wanted, 1e9)), std::min(prompt, sure + 1), prompt);
  }

  std::vector<int> filters_;
  int wait_;
  ScoreBy by_;
  int window_;  // newest queries that score tokens; 0 = the step's own does
  bool shares_, offloads_;
  bool places_ = false;  // there is something to leave out
  BudgetAmount budget_;
  kvlab::TierDemand tiers_;
  kvlab::KeptPages pages_;
  std::vector<omnikv::Role> roles_;
  kvlab::KeptOfHeads<std::int32_t> prompt_;
  std::int32_t *index_ = nullptr, *count_ = nullptr;
  std::int64_t capacity_ = 0;
  int kv_heads_ = 0;
  std::vector<int> ring_of_;               // [layer] -1 = it chooses nothing
  std::int64_t layer_ = 0;                 // numbers of a layer's queries
  std::int64_t rings_ = 0;                 // layers that choose
  float* queries_ = nullptr;               // [slot, layer that chooses, query head, place, head_dim]
  kvlab::StepNumbers<std::int32_t> keep_;  // [row, kv_head]
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<OmniKv>("omnikv",
                                   "filter layers choose tokens of the prompt for the layers behind them, whose pages "
                                   "may come from the host (Hao et al. 2025)")
                 .param("filter_layers", std::string("2,8,18"), "layers that choose, in order, from 0 on")
                 .param("wait_layers", 1, 0, kvlab::any, "layers behind a filter layer that attend to everything")
                 .param("score_by", ScoreBy::last,
                        "a token's score: the greatest logit of the step's query over all heads, or the greatest "
                        "share of attention; uniform and exp add up such shares of the newest queries, exp with half "
                        "the weight for each step back")
                 .param("queries", 16, 1, 4096,
                        "newest queries that count with uniform and exp. Tokens of the prompt among theirs are read in "
                        "any case, as part of the budget")
                 .param("offload", false,
                        "pages of the layers that take a choice lie on the host but for those that a step reads")
                 .component("shared_choice", "off = every layer that would take a choice makes its own"))
