// RazorAttention: retrieval heads, which look at earlier copies of the current token or behind them, keep every token.
// The others keep attention sinks, a local window and a compensation token: the mean key and value of all that the head
// dropped. It counts as so many tokens. Tang et al., ICLR 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/streaming_heads.hpp>

#include "retrieval_heads.hpp"

namespace {

class RazorAttention final : public kvlab::Policy {
 public:
  explicit RazorAttention(const kvlab::Params& p)
      : sinks_(p.get<int>("sinks")),
        window_(p.get<int>("window")),
        share_(p.get<double>("window_share")),
        induction_(p.get<double>("induction")),
        echo_(p.get<double>("echo")),
        decodes_(p.get<bool>("while_decoding")),
        retrieval_heads_(p.get<bool>("retrieval_heads")),
        compensation_(p.get<bool>("compensation")) {}

  // A window that grows with the text is another number in each step, which no graph can hold.
  kvlab::Needs needs() const override {
    return kvlab::Needs{}.own_amount(true).profile(retrieval_heads_).capturable(!decodes_ || share_ == 0);
  }

  void load_profile(const kvlab::Profile& profile) override {
    echo_scores_ = profile.at("echo").values, induction_scores_ = profile.at("induction").values;
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    if (compensation_) made_up_ = kvlab::KeptMadeUp("compensation tokens", shape, 1, w);
    const auto heads = static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads);
    marks_.assign(heads, false);
    if (retrieval_heads_) {
      razor_attention::mark(razor_attention::of_heads(induction_scores_, heads, "induction"), induction_, marks_);
      razor_attention::mark(razor_attention::of_heads(echo_scores_, heads, "echo"), echo_, marks_);
    }
    if (share_ > 0) return;
    streaming_ = kvlab::StreamingHeads(shape, marks_, {.first = sinks_, .last = window_}, w);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (kv.last[0]) evict(kv, edits, s);
  }
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    if (compensation_) edits.read_made_up(made_up_.of(step));
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
    std::vector<std::int32_t> keep;
    const auto first = marks_.begin() + std::ptrdiff_t{kv.layer} * kv.kv_heads();
    for (int row = 0; row < kv.rows(); ++row) {
      const std::int64_t window = std::max(window_, static_cast<int>(share_ * kv.position[row]));
      const std::int64_t streaming = std::min<std::int64_t>(kvlab::StreamingHeads::everything, sinks_ + window);
      for (int head = 0; head < kv.kv_heads(); ++head)
        keep.push_back(first[head] ? kvlab::StreamingHeads::everything : static_cast<std::int32_t>(streaming));
    }
    const std::vector<kvlab::Pins> pins(static_cast<std::size_t>(kv.rows()), {.first = sinks_});
    return {.keep = kv.upload_heads("tokens to keep", keep.data()), .pins = kv.upload("pins", pins.data())};
  }

  int sinks_, window_;
  double share_, induction_, echo_;
  bool decodes_, retrieval_heads_, compensation_;
  std::vector<float> echo_scores_, induction_scores_;  // [layer, kv_head], like marks_
  std::vector<bool> marks_;                            // of retrieval heads
  kvlab::StreamingHeads streaming_;
  kvlab::KeptMadeUp made_up_;  // one for each KV head
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
        .component("retrieval_heads", "the profile's scores decide; off = no head keeps everything")
        .component("compensation",
                   "a mean key and value stand for all dropped tokens and count as so many; off = nothing does"))
