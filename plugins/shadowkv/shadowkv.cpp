// ShadowKV: keys of a prompt get a low rank, as they were before RoPE, and their factors stay on the device. A step
// reads the chunks whose landmarks fit its query best, and those that no landmark stands for. Their values come from
// the host, and their keys from the factors. Sun et al. 2024. Nothing is evicted.
#include <kvlab/chunks.hpp>
#include <kvlab/key_factors.hpp>
#include <kvlab/partial_keys.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/rewrite.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace {

using kvlab::BudgetAmount;

class ShadowKv final : public kvlab::Policy, public kvlab::PreparesSteps {
 public:
  explicit ShadowKv(const kvlab::Params& p)
      : rank_(p.get<int>("rank")),
        chunk_(p.get<int>("chunk")),
        outliers_(p.get<bool>("outlier_chunks") ? p.get<int>("outliers") : 0),
        local_(p.get<int>("local_chunks")),
        divisor_(p.get<int>("logit_dim")),
        group_(p.get<kvlab::GroupRule>("group")),
        factorises_(p.get<bool>("low_rank")),
        offloads_(p.get<bool>("offload")) {
    for (const auto& [rule, name] : kvlab::Choices<kvlab::GroupRule>::all)
      if (rule == group_ && rule != kvlab::GroupRule::max && rule != kvlab::GroupRule::mean)
        throw kvlab::Error(kvlab::Errc::config, std::string("got group ") + name + ", wanted max or mean");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .functional(!offloads_)
        .rebuilds_keys(offloads_ && factorises_)
        .host_pages(offloads_)
        .finish_prompt(factorises_ || offloads_)
        .capturable(true)
        .scratch_numbers(6);
  }

  // Outliers, and in steps the chosen chunks, have pages of their own. Local chunks, what fills no chunk, and new
  // tokens follow one another.
  kvlab::Demand demand(int prompt, int max_new) const override {
    if (!offloads_ || !limited_) return {};
    return tiers_.of(prompt, max_new, [&](int, bool decodes) {
      const int apart = decodes ? tokens_of(prompt) / chunk_ - local_ : outliers_, behind = decodes ? max_new : 0;
      return apart * tiers_.pages_of_run(chunk_) + tiers_.pages_of_run((local_ + 1) * chunk_ + behind);
    });
  }

  void attach(const kvlab::Shape& shape, const BudgetAmount& budget, kvlab::Workspace& w) override {
    tiers_ = kvlab::TierDemand(shape, budget, 0);
    const int width = shape.kv_heads * shape.head_dim;
    if (budget.kind == BudgetAmount::bytes)
      throw kvlab::Error(kvlab::Errc::config,
                         "got a budget in bytes, wanted tokens or a ratio of the prompt: nothing leaves");
    least_ = (outliers_ + local_ + 1) * chunk_;
    budget.require(least_, "the outliers, the local chunks, and one more chunk");
    budget_ = budget;
    limited_ = budget.kind == BudgetAmount::tokens || (budget.kind == BudgetAmount::ratio && budget.value < 1);
    if (!limited_) return;
    kept_ = kvlab::KeptChunks("chunks", shape, chunk_, w);
    if (factorises_) {
      factors_ = kvlab::KeptKeyFactors("factors of keys", shape, rank_, w);
      directions_ = kvlab::RankDirections::in(
          w.room("directions of keys", kvlab::RankDirections::bytes(shape.layers, width)), shape.layers, width);
    }
    if (offloads_) pages_ = kvlab::KeptPages("pages to read", shape, shape.max_pages(), w);
    kv_heads_ = shape.kv_heads;
    most_ = {"chunks to choose", std::int64_t{shape.max_slots} * kv_heads_, w};
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    if (!limited_) return;
    std::vector<std::int32_t>& most = most_.fresh();
    for (int row = 0; row < c.rows; ++row)
      most.insert(most.end(), static_cast<std::size_t>(kv_heads_),
                  tokens_of(c.position[row] - c.step[row] - 1) / chunk_ - outliers_ - local_);
    most_.put(c);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits&, kvlab::Stream s) override {
    if (!limited_ || !kv.last[0]) return;
    const kvlab::KeyChunks& chunks = kept_.of(kv);
    kvlab::ops::chunk_keys(kv.pages, local_, outliers_, chunks, s);
    if (rewrites(kv)) kvlab::ops::row_products(kv.pages, keys_before_rope(kv, s), directions_, kv.layer, s);
  }

  // A prompt has one row, and its callbacks of all layers come one after the other.
  void finish_prompt(const kvlab::LayerKv& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!limited_ || !cuts(kv)) return;
    const auto whole = kv.list<kvlab::TokenList>("tokens that stay exact", kv.max_length);
    kvlab::ops::chunk_tokens(kv.pages, {}, {}, kept_.of(kv), whole, s);
    if (factorises_) {
      if (kv.layer == 0) kvlab::ops::rank_directions(directions_, s);
      const auto exact = rows(kv, "exact keys");
      kvlab::ops::read_rows(kv.keys, exact, s);
      const auto keys = keys_before_rope(kv, s);
      kvlab::ops::factor_rows(kv.pages, directions_, kv.layer, keys, whole, factors_.of(kv), s);
      kvlab::ops::rebuild_rows(kv.pages, factors_.of(kv), keys, s);
      kvlab::ops::copy_rows(kv.pages, whole, exact, keys, s);
      edits.rewrite(kvlab::KvSide::key, keys);
    }
    place(kv, whole, {}, edits, s);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!limited_) return;
    const kvlab::KeyChunks& chunks = kept_.of(step);
    const auto scores = step.scratch<float>("scores", {step.rows(), step.kv_heads(), chunks.cosine.extent[2]});
    const auto scale = static_cast<float>(1 / std::sqrt(divisor_ > 0 ? divisor_ : step.pages.head_dim));
    kvlab::ops::chunk_scores(step.pages, step.queries.f32(), scale, group_, chunks, scores, *step.workspace, s);
    const auto list = step.list<kvlab::TokenList>("tokens to read", step.max_length);
    const auto most = kvlab::View<const std::int32_t, 2>::dense(most_.data(), {step.rows(), step.kv_heads()});
    kvlab::ops::chunk_tokens(step.pages, scores, most, chunks, list, s);
    place(step, list, {kvlab::Deadline::this_attention}, edits, s);
    edits.attend(list);
  }

 private:
  // Tokens of whole chunks that a step reads of a prompt, or of all prompts of a sequence.
  int tokens_of(int prompt) const {
    const double tokens = budget_.kind == BudgetAmount::tokens ? budget_.value : budget_.value * prompt;
    return std::max(least_, static_cast<int>(tokens) / chunk_ * chunk_);
  }
  // Else a step reads the prompt as a whole.
  bool cuts(const kvlab::LayerKv& kv) const { return tokens_of(kv.position[0]) < kv.position[0]; }
  bool rewrites(const kvlab::LayerKv& kv) const { return factorises_ && cuts(kv); }

  // The pages of these tokens are on the device, and no others.
  void place(const kvlab::LayerKv& kv, const kvlab::TokenList& tokens, kvlab::Deadline when, kvlab::Edits& edits,
             kvlab::Stream s) const {
    if (!offloads_) return;
    kvlab::ops::token_pages(kv.pages, tokens, 0, pages_.of(kv), s);
    edits.place(pages_.of(kv), {.when = when, .keys = factorises_ ? &factors_.of(kv) : nullptr});
  }
  static kvlab::View<float, 4> rows(const kvlab::LayerKv& kv, const char* tag) {
    return kv.scratch<float>(tag, {kv.rows(), kv.kv_heads(), kv.max_length, kv.pages.head_dim});
  }
  static kvlab::View<float, 4> keys_before_rope(const kvlab::LayerKv& kv, kvlab::Stream s) {
    const auto keys = rows(kv, "keys");
    kvlab::ops::read_rows(kv.keys, keys, s);
    kvlab::ops::turn_rows(kv.pages, kvlab::ops::RopeTurn::off, keys, s);
    return keys;
  }

  int rank_, chunk_, outliers_, local_, divisor_, least_ = 0, kv_heads_ = 0;
  BudgetAmount budget_;
  kvlab::TierDemand tiers_;
  kvlab::GroupRule group_;
  bool factorises_, offloads_, limited_ = false;
  kvlab::KeptChunks kept_;
  kvlab::RankDirections directions_;
  kvlab::KeptKeyFactors factors_;
  kvlab::KeptPages pages_;
  kvlab::StepNumbers<std::int32_t> most_;  // [row, kv_head]
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<ShadowKv>("shadowkv",
                                     "keys of a prompt get a low rank, and landmarks of chunks choose a step's tokens "
                                     "(Sun et al. 2024). Their values come from the host")
                 .param("rank", 160, 1, kvlab::any, "of the keys before RoPE, jointly over the KV heads")
                 .param("chunk", 8, 1, 4096, "neighbouring tokens that a step reads or leaves together")
                 .param("outliers", 48, 0, 65536,
                        "chunks of each KV head that are read in any case and stay exact: their keys differ most")
                 .param("local_chunks", 4, 0, 65536, "last chunks of a prompt that are read in any case")
                 .param("logit_dim", 0, 0, kvlab::any,
                        "landmarks' logits are divided by its root; 0 = by that of head_dim. The code has 128")
                 .param("group", kvlab::GroupRule::max,
                        "how the shares of a group's query heads become one: max or mean")
                 .component("low_rank", "keys of the prompt get the rank; off = they stay as they are")
                 .component("outlier_chunks", "off = there are no outliers")
                 .component("offload",
                            "pages of the prompt lie on the host but for those that a step reads; off = they "
                            "stay on the device, and the cells are functional"))
