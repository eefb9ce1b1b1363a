// RazorAttention: retrieval heads, which look at earlier copies of the current token or behind them, keep every token.
// The others keep attention sinks and a local window. Tang et al., ICLR 2025. The token that stands for what a head
// drops is not there: the cache has no made-up tokens.
#include <kvlab/plugin.hpp>

#include <limits>

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
        retrieval_heads_(p.get<bool>("retrieval_heads")) {}

  // A window that grows with the text is another number in each step, which no graph can hold.
  kvlab::Needs needs() const override {
    return kvlab::Needs{}.own_amount(true).profile(retrieval_heads_).capturable(!decodes_ || share_ == 0);
  }

  void load_profile(const kvlab::Profile& profile) override {
    echo_scores_ = profile.at("echo").values, induction_scores_ = profile.at("induction").values;
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    const auto heads = static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads);
    marks_.assign(heads, false);
    if (retrieval_heads_) {
      razor_attention::mark(razor_attention::of_heads(induction_scores_, heads, "induction"), induction_, marks_);
      razor_attention::mark(razor_attention::of_heads(echo_scores_, heads, "echo"), echo_, marks_);
    }
    if (share_ > 0) return;
    std::vector<std::int32_t> keep;
    for (const bool all : marks_) keep.push_back(all ? everything : sinks_ + window_);
    keep_ = kvlab::HeadConstants<std::int32_t>("tokens to keep", shape, keep, w);
    const std::vector<kvlab::Pins> pins(static_cast<std::size_t>(shape.max_slots), {.first = sinks_});
    pins_ = static_cast<const kvlab::Pins*>(w.constant("pins", pins.data(), pins.size() * sizeof(pins[0])));
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream) override {
    if (kv.last[0]) evict(kv, edits);
  }
  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    if (decodes_) evict(step, edits);
  }

 private:
  static constexpr std::int32_t everything = std::numeric_limits<std::int32_t>::max();

  void evict(const kvlab::LayerKv& kv, kvlab::Edits& edits) const {
    if (share_ == 0)
      return edits.evict_surplus({.keep = {keep_.of(kv), {kv.rows(), kv.kv_heads()}, {0, 1}}, .pins = pins_});
    std::vector<std::int32_t> keep;
    const auto first = marks_.begin() + std::ptrdiff_t{kv.layer} * kv.kv_heads();
    for (int row = 0; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        keep.push_back(first[head] ? everything
                                   : sinks_ + std::max(window_, static_cast<int>(share_ * kv.position[row])));
    const std::vector<kvlab::Pins> pins(static_cast<std::size_t>(kv.rows()), {.first = sinks_});
    edits.evict_surplus(
        {.keep = kv.upload_heads("tokens to keep", keep.data()), .pins = kv.upload("pins", pins.data())});
  }

  int sinks_, window_;
  double share_, induction_, echo_;
  bool decodes_, retrieval_heads_;
  std::vector<float> echo_scores_, induction_scores_;  // [layer, kv_head], like marks_
  std::vector<bool> marks_;                            // of retrieval heads
  kvlab::HeadConstants<std::int32_t> keep_;
  const kvlab::Pins* pins_ = nullptr;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<RazorAttention>("razor_attention",
                                  "echo and induction heads keep everything, the others sinks and a local window (Tang "
                                  "et al. 2025). The compensation token is not there")
        .param("induction", 0.14, 0, 1, "share of the KV heads that are retrieval heads by their induction score")
        .param("echo", 0.01, 0, 1, "the same by their echo score")
        .param("sinks", 4, 0, kvlab::any, "first tokens that the other heads keep")
        .param("window", 4000, 1, kvlab::any, "newest tokens that the other heads keep at least")
        .param("window_share", 0.2, 0, 1, "newest tokens that they keep at least, as a share of the text so far")
        .param("while_decoding", true, "they drop tokens in decode steps too; false: at the prompt's end alone")
        .component("retrieval_heads", "the profile's scores decide; off = no head keeps everything"))
