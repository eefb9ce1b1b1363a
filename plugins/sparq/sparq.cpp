// SparQ: a few components of the query, the largest of its group, score all keys. Attention reads the best tokens.
// The mean of all values takes the place of what it leaves out. Ribar et al., ICML 2024.
#include <kvlab/keeps_tokens.hpp>
#include <kvlab/key_copies.hpp>
#include <kvlab/left_out.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace {

using kvlab::BudgetAmount;
using kvlab::Scores;

class SparQ final : public kvlab::Policy, public kvlab::KeepsTokens, public kvlab::PreparesSteps {
 public:
  explicit SparQ(const kvlab::Params& p)
      : rank_(p.get<int>("rank")),
        local_(p.get<double>("local")),
        dense_(p.get<int>("dense_layers")),
        norm_scale_(p.get<bool>("norm_scale")),
        mean_value_(p.get<bool>("mean_value")),
        of_groups_(p.get<bool>("mean_value_of_groups")),
        key_copy_(p.get<bool>("key_copy")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.dense_layers(dense_).capturable(true); }

  void attach(const kvlab::Shape& shape, const BudgetAmount& budget, kvlab::Workspace& w) override {
    if (budget.kind == BudgetAmount::bytes)
      throw kvlab::Error(kvlab::Errc::config, "got a budget in bytes, wanted tokens or a ratio: nothing leaves");
    budget.require(1, "the step's own");
    if (rank_ == 0) rank_ = std::max(1, shape.head_dim / 4);
    if (rank_ > shape.head_dim)
      throw kvlab::Error(kvlab::Errc::config, "got rank " + std::to_string(rank_) + ", wanted at most head_dim, " +
                                                  std::to_string(shape.head_dim));
    limited_ = budget.kind != BudgetAmount::unlimited, steady_ = budget.kind != BudgetAmount::ratio;
    tokens_ = limited_ && steady_ ? static_cast<int>(budget.value) : 1;
    kv_heads_ = shape.kv_heads;
    keep_ = {"tokens to read", std::int64_t{shape.max_slots} * shape.kv_heads, w};
    pins_ = {"pins", shape.max_slots, w};
    mean_value_ = mean_value_ && limited_ && (of_groups_ || shape.query_heads == shape.kv_heads);
    if (mean_value_) means_ = {"mean values", shape, shape.head_dim, w};
    key_copy_ = key_copy_ && limited_ && dense_ < shape.layers;
    if (key_copy_) copy_ = kvlab::KeptKeyChannels("keys by channel", shape, kvlab::layers_from(dense_, shape), w);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits&, kvlab::Stream s) override {
    if (kv.layer >= dense_) take(kv, static_cast<int>(kv.chunk_queries.extent[2]), s);
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    std::vector<std::int32_t>& keep = keep_.fresh();
    std::vector<kvlab::Pins>& pins = pins_.fresh();
    for (int row = 0; row < c.rows; ++row) {
      const int tokens = steady_ ? tokens_ : std::max(1, c.budget[row]);
      keep.insert(keep.end(), static_cast<std::size_t>(kv_heads_), tokens);
      pins.push_back({.last = newest(tokens)});
    }
    keep_.put(c), pins_.put(c);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!limited_ || step.layer < dense_) return;
    take(step, 1, s);
    // Heads begin at multiples of 16 bytes.
    const std::int64_t room = (step.max_length + 3) / 4 * 4;
    const Scores scores = step.scratch<float>("scores", {step.rows(), step.kv_heads(), room});
    const Scores each =
        mean_value_ ? step.scratch<float>("each head's", {step.rows(), step.shape->query_heads, room}) : Scores{};
    const Scores query = each ? step.query_head_vectors("queries") : step.kv_head_vectors("query");
    const auto largest = step.list<kvlab::TokenList>("largest", rank_);
    kvlab::ops::large_channels(step.pages, step.queries.f32(), rank_, norm_scale_, largest, query, s);
    // Nothing is evicted, so the newest tokens are those of the last places.
    const bool pinned = key_copy_ && steady_;
    if (key_copy_) {
      kvlab::ops::channel_dot(step.pages, query, largest, copy_.of(step), pinned ? newest(tokens_) : 0, scores, s,
                              each);
    } else {
      kvlab::ops::row_dot(step.keys, query, each ? each : scores, s);
      if (each) kvlab::ops::group_reduce(step.pages, each, kvlab::GroupRule::sum, scores, s);
    }
    const auto best = step.list<kvlab::TokenList>("best", step.max_length);
    const auto keep = kvlab::View<const std::int32_t, 2>::dense(keep_.data(), {step.rows(), step.kv_heads()});
    kvlab::ops::top_tokens(step.pages, scores, keep, pinned ? nullptr : pins_.data(), best, s);
    edits.attend(best);
    if (!mean_value_) return;
    if (!norm_scale_) kvlab::ops::scale(each, 1 / std::sqrt(static_cast<float>(step.pages.head_dim)), s);
    const auto share = step.scratch<float>("share", {step.rows(), step.shape->query_heads});
    kvlab::ops::listed_share(step.pages, each, best, share, s);
    edits.fill_left_out({share, means_.of(step)});
  }

 private:
  // Of the newest tokens.
  void take(const kvlab::LayerKv& kv, int newest, kvlab::Stream s) const {
    if (key_copy_) kvlab::ops::copy_channels(kv.pages, newest, copy_.of(kv), s);
    if (mean_value_) kvlab::ops::add_mean_value(kv.pages, newest, means_.of(kv), s);
  }
  // Tokens that are read in any case.
  int newest(int tokens) const { return 1 + static_cast<int>(local_ * (tokens - 1)); }

  int rank_;
  double local_;
  int dense_, tokens_ = 1;
  bool norm_scale_, mean_value_, of_groups_, key_copy_, limited_ = false, steady_ = true;
  int kv_heads_ = 0;
  kvlab::StepNumbers<std::int32_t> keep_;  // [row, kv_head]
  kvlab::StepNumbers<kvlab::Pins> pins_;   // [row]
  kvlab::KeptKeyChannels copy_;
  kvlab::KeptSeries means_;  // of values
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<SparQ>("sparq", "the query's largest components choose a step's tokens (Ribar et al. 2024)")
                 .param("rank", 0, 0, 256, "components of a query that score keys; 0 = a quarter of head_dim")
                 .param("local", 0.25, 0, 1, "newest tokens that are read in any case, as a share of the budget")
                 .param("dense_layers", 0, 0, kvlab::any, "first layers that attend to everything")
                 .param("key_copy", true,
                        "keeps the keys by channel, too, and reads a query's channels of them alone. The copy takes as "
                        "many bytes as the keys. false = the choice reads whole keys")
                 .param("mean_value_of_groups", false,
                        "mean_value also where query heads share a KV head. The paper leaves it out there")
                 .component("norm_scale",
                            "a query's scores are divided by the root of its components' share; off = not")
                 .component("mean_value",
                            "the mean of all values counts for the tokens that are not read, by their share of the "
                            "scores; off = what is read counts for all"))
