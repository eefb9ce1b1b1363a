// RazorAttention: retrieval heads, which look at earlier copies of the current token or behind them, keep every token.
// The others keep attention sinks, a local window and a compensation token: the mean key and value of all that the head
// dropped. It counts as so many tokens. Tang et al., ICLR 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/streaming_heads.hpp>
#include <kvlab/takes_no_pruner.hpp>

#include "retrieval_heads.hpp"

namespace {

class RazorAttention final : public kvlab::Policy, public kvlab::PreparesSteps, public kvlab::TakesNoPruner {
 public:
  explicit RazorAttention(const kvlab::Params& p)
      : sinks_(p.get<int>("sinks")),
        window_(p.get<int>("window")),
        share_(p.get<double>("window_share")),
        induction_(p.get<double>("induction")),
        echo_(p.get<double>("echo")),
        decodes_(p.get<bool>("while_decoding")),
        retrieval_heads_(p.get<bool>("retrieval_heads")),
        counts_once_(p.get<bool>("counts_once")),
        compensation_(p.get<bool>("compensation")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.own_amount(true).profile(retrieval_heads_).capturable(true);
  }
  const char* takes_no_pruner() const override { return "evicts tokens"; }

  void load_profile(const kvlab::Profile& profile) override {
    echo_scores_ = profile.at("echo").values, induction_scores_ = profile.at("induction").values;
  }

  // A step appends its token before one leaves. Compensation tokens lie beside the pages.
  kvlab::Demand demand(int prompt, int max_new) const override {
    return tiers_.of_device(prompt, max_new, [&](int n, bool decodes) {
      return decodes && !decodes_ ? kept_of(prompt) + max_new : kept_of(n) + decodes;
    });
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    if (compensation_) made_up_ = kvlab::KeptMadeUp("compensation tokens", shape, 1, w);
    if (const std::int64_t numbers = std::int64_t{shape.max_slots} * shape.kv_heads; compensation_ && counts_once_)
      once_ = kvlab::Scores::dense(
          static_cast<float*>(w.room("weights of one", static_cast<std::size_t>(numbers) * sizeof(float))),
          {shape.max_slots, shape.kv_heads, 1});
    const auto heads = static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads);
    marks_.assign(heads, false);
    if (retrieval_heads_) {
      razor_attention::mark(razor_attention::of_heads(induction_scores_, heads, "induction"), induction_, marks_);
      razor_attention::mark(razor_attention::of_heads(echo_scores_, heads, "echo"), echo_, marks_);
    }
    tiers_ = kvlab::TierDemand(shape, {}, kvlab::StreamingHeads::share(marks_));
    if (share_ > 0) {
      kv_heads_ = shape.kv_heads;
      of_layer_ = std::int64_t{shape.max_slots} * kv_heads_;
      keep_ = {"tokens to keep", shape.layers * of_layer_, w};
      pins_ = {"pins", shape.max_slots, w};
      return;
    }
    streaming_ = kvlab::StreamingHeads(shape, marks_, {.first = sinks_, .last = window_}, w);
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    if (share_ == 0 || !decodes_) return;
    std::vector<std::int32_t>& all = keep_.fresh();
    for (std::int64_t at = 0; at < std::ssize(marks_); at += kv_heads_) {
      list_growing(at, c.position, c.rows, all);
      all.resize(static_cast<std::size_t>((at / kv_heads_ + 1) * of_layer_));
    }
    keep_.put(c);
    pins_.fresh().assign(static_cast<std::size_t>(c.rows), {.first = sinks_});
    pins_.put(c);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (kv.last[0]) evict(kv, edits, s);
  }
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!compensation_) return;
    kvlab::MadeUpTokens tokens = made_up_.of(step);
    if (counts_once_) {  // and not at all before a token left
      kvlab::ops::copy(once_, tokens.weights, s);
      kvlab::ops::above(once_, 0, s);
      tokens.weights = once_;
    }
    edits.read_made_up(tokens);
  }
  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (decodes_) evict(step, edits, s);
  }

 private:
  void evict(const kvlab::LayerKv& kv, kvlab::Edits& edits, kvlab::Stream s) const {
    const kvlab::Surplus surplus = share_ == 0 ? streaming_.surplus(kv) : growing(kv);
    if (compensation_) kvlab::ops::fold_surplus(kv.pages, surplus, 0, made_up_.of(kv), s);
    edits.evict_surplus(surplus);
  }
  kvlab::Surplus growing(const kvlab::LayerKv& kv) const {
    const std::array<std::int64_t, 2> extent{kv.rows(), kv.kv_heads()};
    if (!kv.chunk_queries)
      return {.keep = kvlab::View<const std::int32_t, 2>::dense(keep_.data() + kv.layer * of_layer_, extent),
              .pins = pins_.data()};
    std::vector<std::int32_t> keep;
    list_growing(std::int64_t{kv.layer} * kv.kv_heads(), kv.position, kv.rows(), keep);
    const std::vector<kvlab::Pins> pins(static_cast<std::size_t>(kv.rows()), {.first = sinks_});
    return {.keep = kv.upload_heads("tokens to keep", keep.data()), .pins = kv.upload("pins", pins.data())};
  }
  // Adds those of a layer, whose first head has this number: [row, kv_head].
  void list_growing(std::int64_t first_head, const std::int32_t* position, int rows,
                    std::vector<std::int32_t>& keep) const {
    for (int row = 0; row < rows; ++row) {
      const std::int64_t streaming = std::min<std::int64_t>(kvlab::StreamingHeads::everything, kept_of(position[row]));
      for (int head = 0; head < kv_heads_; ++head)
        keep.push_back(marks_[static_cast<std::size_t>(first_head + head)] ? kvlab::StreamingHeads::everything
                                                                           : static_cast<std::int32_t>(streaming));
    }
  }
  // The tokens that another head keeps of so many.
  std::int64_t kept_of(int tokens) const {
    return std::int64_t{sinks_} + std::max(window_, static_cast<int>(share_ * tokens));
  }

  int sinks_, window_;
  double share_, induction_, echo_;
  bool decodes_, retrieval_heads_, counts_once_, compensation_;
  std::vector<float> echo_scores_, induction_scores_;  // [layer, kv_head], like marks_
  std::vector<bool> marks_;                            // of retrieval heads
  kvlab::TierDemand tiers_;
  kvlab::StreamingHeads streaming_;  // of a window that does not grow
  int kv_heads_ = 0;
  std::int64_t of_layer_ = 0;              // of numbers of rows and KV heads, with those of a step's missing rows
  kvlab::StepNumbers<std::int32_t> keep_;  // [layer][row, kv_head]
  kvlab::StepNumbers<kvlab::Pins> pins_;   // [row]
  kvlab::KeptMadeUp made_up_;              // one for each KV head
  kvlab::Scores once_;                     // [slot, kv_head, 1] of the layer that runs
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<RazorAttention>("razor_attention",
                                  "echo and induction heads keep everything, the others sinks, a local window and the "
                                  "mean of what they dropped (Tang et al. 2025)")
        .param("induction", 0.14, 0, 1, "share of the KV heads that are retrieval heads by their induction score")
        .param("echo", 0.01, 0, 1, "the same by their echo score")
        .param("sinks", 4, 0, kvlab::any, "first tokens that the other heads keep")
        .param("window", 4000, 1, kvlab::any, "newest tokens that the other heads keep at least")
        .param("window_share", 0.2, 0, 1, "newest tokens that they keep at least, as a share of the text so far")
        .param("while_decoding", true, "they drop tokens in decode steps too; false: at the prompt's end alone")
        .param("counts_once", false, "the mean counts as one token, as in the code; false: as all that it stands for")
        .component("retrieval_heads", "the profile's scores decide; off = no head keeps everything")
        .component("compensation", "a mean key and value stand for all dropped tokens; off = nothing does"))
