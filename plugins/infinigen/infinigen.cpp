// InfiniGen: a layer's input guesses the next layer's attention scores, by a few channels of its queries and keys. The
// next layer reads the tokens near the greatest guess. Lee et al., OSDI 2024. Nothing is evicted, and nothing leaves
// the device.
#include <kvlab/plugin.hpp>
#include <kvlab/speculation.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using kvlab::Scores;
using kvlab::View;

class InfiniGen final : public kvlab::Policy {
 public:
  explicit InfiniGen(const kvlab::Params& p)
      : ratio_(p.get<double>("partial_ratio")), dense_(std::max(1, p.get<int>("dense_layers"))) {
    rule_.within = p.get<float>("alpha");
    rule_.most = p.get<int>("cap") > 0 ? p.get<int>("cap") : std::numeric_limits<int>::max();
    rule_.most_share = p.get<float>("cap_share");
    rule_.newest = 1;  // the step's own token
  }

  kvlab::Needs needs() const override { return kvlab::Needs{}.own_amount(true).next_queries(true).capturable(true); }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    const auto heads = static_cast<std::size_t>(shape.max_slots * shape.kv_heads);
    const auto numbers = [&](const char* tag, int value) {
      const std::vector<std::int32_t> all(heads, value);
      return View<const std::int32_t, 2>::dense(
          static_cast<const std::int32_t*>(w.constant(tag, all.data(), all.size() * sizeof(all[0]))),
          {shape.max_slots, shape.kv_heads});
    };
    all_channels_ = numbers("channels", shape.head_dim);
    few_channels_ = numbers("channels that guess", std::max(1, static_cast<int>(ratio_ * shape.head_dim)));
    const std::vector<kvlab::Pins> pins(static_cast<std::size_t>(shape.max_slots), {.last = 1});
    pins_ = static_cast<const kvlab::Pins*>(w.constant("pins", pins.data(), pins.size() * sizeof(pins[0])));
    sums_ = kvlab::KeptSeries("magnitudes of queries", shape, shape.head_dim, w);
    channels_ = kvlab::KeptTokens("channels of layers", shape, shape.head_dim, w);
    const std::int64_t vectors = std::int64_t{shape.max_slots} * shape.query_heads * shape.head_dim;
    guessed_ = static_cast<float*>(w.room("guessed queries", static_cast<std::size_t>(vectors) * sizeof(float)));
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits&, kvlab::Stream s) override {
    if (kv.layer < dense_) return;
    kvlab::ops::add_magnitudes(kv.pages, kv.chunk_queries, sums_.of(kv), s);
    if (!kv.last[0]) return;
    View<const float, 3> of_row = sums_.of(kv);
    of_row.data += kv.slots[0] * of_row.stride[0], of_row.extent[0] = 1;
    kvlab::PagedKv channels = kv.pages;  // a head has a "token" for each channel
    channels.length = all_channels_;
    channels.page_size = 256;
    kvlab::TokenChoice few;
    few.keep = few_channels_;
    kvlab::ops::top_tokens(channels, of_row, few, channels_.of(kv), s);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (step.layer >= dense_) {
      const Scores logits = step.query_head_scores("logits"), scores = step.kv_head_scores("scores");
      guess(step, logits, s);
      kvlab::ops::group_reduce(step.pages, logits, kvlab::GroupRule::max, scores, s);
      const auto keep = step.scratch<std::int32_t>("tokens to read", {step.rows(), step.kv_heads()});
      kvlab::ops::near_greatest(step.pages, scores, rule_, keep, s);
      const auto list = step.list<kvlab::TokenList>("list", step.max_length);
      kvlab::ops::top_tokens(step.pages, scores, keep, pins_, list, s);
      edits.attend(list);
    }
    if (step.layer + 1 >= dense_ && step.layer + 1 < step.shape->layers) step.next_queries(guessed(step), s);
  }

 private:
  // Written by a layer and read by the next one, in the same step.
  View<float, 3> guessed(const kvlab::LayerStep& step) const {
    return View<float, 3>::dense(guessed_, {step.rows(), step.shape->query_heads, step.pages.head_dim});
  }
  void guess(const kvlab::LayerStep& step, const Scores& logits, kvlab::Stream s) const {
    const View<float, 3> queries = guessed(step);
    const Scores mask = step.kv_head_vectors("channels that guess");
    kvlab::ops::above(mask, std::numeric_limits<float>::infinity(), s);  // zeros
    kvlab::ops::set_listed(channels_.of(step), 1, mask, s);
    kvlab::ops::multiply(queries, mask, s);
    kvlab::ops::row_dot(step.keys, queries, logits, s);
    kvlab::ops::scale(logits, 1 / std::sqrt(static_cast<float>(step.pages.head_dim)), s);
  }

  double ratio_;
  int dense_;
  kvlab::NearGreatest rule_;
  View<const std::int32_t, 2> all_channels_, few_channels_;
  const kvlab::Pins* pins_ = nullptr;
  kvlab::KeptSeries sums_;
  kvlab::KeptTokens channels_;
  float* guessed_ = nullptr;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<InfiniGen>("infinigen",
                                      "a layer's input guesses which tokens the next layer reads (Lee et al. 2024). "
                                      "Queries and keys are not skewed, and every token stays on the device")
                 .param("alpha", 4., 0.001, kvlab::any,
                        "a token counts if its guessed logit is above the head's greatest less so much")
                 .param("partial_ratio", 0.2, 0.001, 1, "share of a head's channels that guess, at least one")
                 .param("cap", 400, 0, kvlab::any, "most tokens that a head reads beside the step's own; 0 = no limit")
                 .param("cap_share", 1., 0.001, 1, "the same, as a share of the tokens so far; 1 = no limit")
                 .param("dense_layers", 2, 0, kvlab::any,
                        "first layers that attend to everything; layer 0 always does"))
