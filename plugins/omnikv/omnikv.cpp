// OmniKV: a few filter layers look at the whole prompt and choose its best tokens, one set for all heads. The layers up
// to the next filter layer attend to these and to what was generated. Their other pages lie on the host. Hao et al.,
// ICLR 2025.
#include <kvlab/layer_list.hpp>
#include <kvlab/partial_keys.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include "layers.hpp"

namespace {

enum class ScoreBy : std::uint8_t { last, softmax_before_last };

}  // namespace

template <>
struct kvlab::Choices<ScoreBy> {
  static constexpr std::pair<ScoreBy, const char*> all[] = {{ScoreBy::last, "last"},
                                                            {ScoreBy::softmax_before_last, "softmax_before_last"}};
};

namespace {

using kvlab::BudgetAmount;

class OmniKv final : public kvlab::Policy, public kvlab::PreparesSteps {
 public:
  explicit OmniKv(const kvlab::Params& p)
      : filters_(kvlab::layer_list(p, "filter_layers")),
        wait_(p.get<int>("wait_layers")),
        softmax_(p.get<ScoreBy>("score_by") == ScoreBy::softmax_before_last),
        shares_(p.get<bool>("shared_choice")),
        offloads_(p.get<bool>("offload")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.host_pages(offloads_).scratch_numbers(8).capturable(true);
  }

  // Each chosen token may have a page of its own. A further prompt's end still holds those of the last step.
  kvlab::Demand demand(int prompt, int max_new) const override {
    if (!places_) return {};
    return tiers_.of(prompt, max_new, [&](int n, bool decodes) {
      return tiers_.budget(n) + (decodes ? tiers_.pages_of_run(max_new) : 0) + 1;
    });
  }

  void attach(const kvlab::Shape& shape, const BudgetAmount& budget, kvlab::Workspace& w) override {
    if (budget.kind == BudgetAmount::bytes)
      throw kvlab::Error(
          kvlab::Errc::config,
          "got a budget in bytes, wanted tokens or a ratio of the prompt: every token stays where it is");
    budget.require(1, "of the prompt, in each layer that chooses none");
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
    if (places_ && role(kv.layer) == omnikv::Role::sparse) edits.place(pages_.of(kv), {});
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    using omnikv::Role;
    if (budget_.kind == BudgetAmount::unlimited) return;
    const Role here = role(step.layer);
    const kvlab::TokenList list = chosen(step);
    if (here == Role::filter || here == Role::own) choose(step, list, s);
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
    const kvlab::Scores logits = step.query_head_scores("logits"), scores = step.kv_head_scores("scores");
    kvlab::ops::row_dot({&prompt, kvlab::KvSide::key}, step.queries.f32(), logits, s);
    if (softmax_) {
      kvlab::ops::scale(logits, 1 / std::sqrt(static_cast<float>(step.pages.head_dim)), s);
      kvlab::ops::softmax(prompt, logits, 1, s);
    }
    kvlab::ops::set_pinned(step.pages, {.last = step.max_length}, INFINITY, scores, s);  // generated tokens keep it
    kvlab::ops::layer_reduce(prompt, logits, kvlab::GroupRule::max, scores, s);
    const auto keep = kvlab::View<const std::int32_t, 2>::dense(keep_.data(), {step.rows(), step.kv_heads()});
    kvlab::ops::top_tokens(step.pages, scores, keep, nullptr, list, s);
  }

  // Those of the prompt, and all that came after it. seen: tokens of the text.
  int tokens(int generated, int seen) const {
    const int prompt = seen - generated;
    const double wanted = budget_.kind == BudgetAmount::ratio ? budget_.value * prompt : budget_.value;
    return generated + std::clamp(static_cast<int>(std::min(wanted, 1e9)), 1, prompt);
  }

  std::vector<int> filters_;
  int wait_;
  bool softmax_, shares_, offloads_;
  bool places_ = false;  // there is something to leave out
  BudgetAmount budget_;
  kvlab::TierDemand tiers_;
  kvlab::KeptPages pages_;
  std::vector<omnikv::Role> roles_;
  kvlab::KeptOfHeads<std::int32_t> prompt_;
  std::int32_t *index_ = nullptr, *count_ = nullptr;
  std::int64_t capacity_ = 0;
  int kv_heads_ = 0;
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
                        "share of attention")
                 .param("offload", false,
                        "pages of the layers that take a choice lie on the host but for those that a step reads")
                 .component("shared_choice", "off = every layer that would take a choice makes its own"))
