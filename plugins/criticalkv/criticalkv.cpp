// CriticalKV: half of the budget goes to the tokens of most attention, the other half to those whose attention times
// the size of their projected value is greatest. Feng et al. 2025.
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <limits>

namespace {

constexpr float sure = 1e30f;  // what a token of the first stage has for a norm: it stays, and its attention ranks it

// scores = (scores + epsilon) * ||W_o v||, where those of the first stage are large.
void multiply(const kvlab::LayerKv& kv, const kvlab::TokenList& first, float epsilon, kvlab::Scores scores,
              kvlab::Stream s) {
  namespace ops = kvlab::ops;
  const kvlab::Pins all{.last = kv.max_length};
  const kvlab::Scores factor = kv.kv_head_scores("factor"), more = kv.kv_head_scores("epsilon");
  ops::set_pinned(kv.pages, all, epsilon, more, s);
  ops::add(scores, more, 1, s);
  kv.projected_norms(factor, s);
  ops::set_listed(first, sure, factor, s);
  ops::multiply(scores, factor, s);
}

class CriticalKv final : public kvlab::Scorer {
 public:
  explicit CriticalKv(const kvlab::Params& p)
      : window_(p.get<int>("window")),
        kernel_(p.get<int>("kernel")),
        pooling_(p.get<bool>("clustering") ? p.get<kvlab::Pooling>("pooling") : kvlab::Pooling::none),
        group_(p.get<kvlab::GroupRule>("group")),
        first_stage_(p.get<double>("first_stage")),
        epsilon_(p.get<float>("epsilon")),
        counts_window_(p.get<bool>("window_in_first_stage")),
        values_(p.get<bool>("values")) {
    if (kernel_ % 2 == 0)
      throw kvlab::Error(kvlab::Errc::config, "got kernel " + std::to_string(kernel_) + ", wanted an odd number");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.window_queries(window_).output_projection(values_).scratch_numbers(8).capturable(true);
  }
  kvlab::Pins pins(int) const override { return {.last = window_}; }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    namespace ops = kvlab::ops;
    const kvlab::Scores votes = kv.query_head_scores("votes");
    ops::window_votes(kv.window_queries, kv.upload("seen", kv.position), kv.pages, votes, s);
    ops::pool(kv.pages, votes, pooling_, kernel_, window_, *kv.workspace, s);
    ops::group_reduce(kv.pages, votes, group_, out, s);
    if (!values_) return;
    // The window has its own part of the budget, or comes first in the first stage.
    ops::set_pinned(kv.pages, {.last = window_}, -1, out, s);
    const int budget = kv.budget_tokens(0);
    const auto count = counts_window_ ? std::max(0, static_cast<int>(budget * first_stage_) - window_)
                                      : static_cast<int>(std::max(0, budget - window_) * first_stage_);
    const std::vector<std::int32_t> counts(static_cast<std::size_t>(kv.kv_heads()), count);
    const auto first = kv.list<kvlab::TokenList>("first stage", count);
    ops::top_tokens(kv.pages, out, kv.upload_heads("first stage", counts.data()), nullptr, first, s);
    multiply(kv, first, epsilon_, out, s);
  }

 private:
  int window_, kernel_;
  kvlab::Pooling pooling_;
  kvlab::GroupRule group_;
  double first_stage_;
  float epsilon_;
  bool counts_window_, values_;
};

// The second stage of any scorer.
class SecondStage final : public kvlab::Rescorer {
 public:
  explicit SecondStage(const kvlab::Params& p)
      : first_stage_(p.get<double>("first_stage")), epsilon_(p.get<float>("epsilon")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.output_projection(true); }

  void rescore(const kvlab::LayerKv& kv, kvlab::Pins pins, kvlab::View<const std::int32_t, 2> keep,
               kvlab::Scores scores, kvlab::Stream s) override {
    namespace ops = kvlab::ops;
    const auto counts = kv.scratch<std::int32_t>("numbers of the first stage", {kv.rows(), kv.kv_heads()});
    ops::share_of_keep(keep, pins.first + pins.last, first_stage_, counts, s);
    ops::set_pinned(kv.pages, pins, -sure, scores, s);
    const auto first = kv.list<kvlab::TokenList>("first stage", kv.max_length);
    ops::top_tokens(kv.pages, scores, counts, nullptr, first, s);
    multiply(kv, first, epsilon_, scores, s);
    ops::set_listed(first, std::numeric_limits<float>::infinity(), scores, s);  // whatever the scorer's sign
  }

 private:
  double first_stage_;
  float epsilon_;
};

constexpr const char* first_stage_help = "share of the budget that attention alone gives";
constexpr const char* epsilon_help = "added to the votes before they are multiplied";

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<CriticalKv>("criticalkv",
                                       "half of the budget by attention, half by attention times the size of the "
                                       "projected value (Feng et al. 2025)")
                 .param("window", 32, 1, 4096, "prompt's last queries that vote; always kept, part of the budget")
                 .param("kernel", 7, 1, 255, "width of the pooling, odd")
                 .param("pooling", kvlab::Pooling::max, "how votes of neighbours are joined")
                 .param("group", kvlab::GroupRule::mean, "how a GQA group's votes become one")
                 .param("first_stage", 0.5, 0, 1, first_stage_help)
                 .param("epsilon", 1e-4, 0, 1, epsilon_help)
                 .param("window_in_first_stage", false,
                        "the first stage is that share of the whole budget, and the window comes first in it; false: "
                        "both stages divide the budget without the window")
                 .component("values", "sizes of projected values; off = votes alone, as snapkv")
                 .component("clustering", "pooling of the votes; off = every token for itself"),
             kvlab::rescorer<SecondStage>("criticalkv",
                                          "half of each head's budget by a scorer of attention, half by its scores "
                                          "times the size of the projected value (Feng et al. 2025)")
                 .param("first_stage", 0.5, 0, 1, first_stage_help)
                 .param("epsilon", 1e-4, 0, 1, epsilon_help))
