// InfiniGen: a layer's input guesses the next layer's attention scores, by a few channels of its queries and keys. The
// next layer reads the tokens near the greatest guess, whose pages come from the host while this layer goes on. Lee et
// al., OSDI 2024. Nothing is evicted.
#include <kvlab/partial_keys.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/speculation.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace {

using kvlab::Scores;
using kvlab::View;

constexpr int most_tokens = 1 << 30;

class InfiniGen final : public kvlab::Policy {
 public:
  explicit InfiniGen(const kvlab::Params& p)
      : ratio_(p.get<double>("partial_ratio")),
        dense_(std::max(1, p.get<int>("dense_layers"))),
        skews_(p.get<bool>("skew")),
        offloads_(p.get<bool>("offload")),
        tokens_(offloads_ ? p.get<int>("tokens") : 0) {
    rule_.within = p.get<float>("alpha");
    rule_.most = p.get<int>("cap") > 0 ? p.get<int>("cap") : most_tokens;
    rule_.most_share = p.get<float>("cap_share");
    rule_.newest = 1;  // the step's own token
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.own_amount(true).next_queries(true).profile(skews_).host_pages(offloads_).capturable(true);
  }

  void load_profile(const kvlab::Profile& profile) override {
    skew_ = profile.at("skew").values;
    for (const float x : skew_)
      if (!std::isfinite(x))
        throw kvlab::Error(kvlab::Errc::data, "got " + std::to_string(x) + " in a skew, wanted finite numbers");
  }

  // A step reads its own token and those of the cap, each of which may have a page of its own.
  kvlab::Demand demand(int prompt, int max_new) const override {
    if (!offloads_) return {};
    return tiers_.of(prompt, max_new, [this](int n, bool decodes) {
      const int read = 1 + std::min(rule_.most, static_cast<int>(std::ceil(rule_.most_share * static_cast<float>(n))));
      return decodes ? std::max(room_, read) + 1 : room_;
    });
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    tiers_ = kvlab::TierDemand(shape, {}, std::min(1., static_cast<double>(dense_) / shape.layers));
    const auto heads = static_cast<std::size_t>(shape.max_slots * shape.kv_heads);
    const auto numbers = [&](const char* tag, int value) {
      const std::vector<std::int32_t> all(heads, value);
      return View<const std::int32_t, 2>::dense(
          static_cast<const std::int32_t*>(w.constant(tag, all.data(), all.size() * sizeof(all[0]))),
          {shape.max_slots, shape.kv_heads});
    };
    const int few = std::max(1, static_cast<int>(ratio_ * shape.head_dim));
    if (const std::size_t wanted = static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads) *
                                   static_cast<std::size_t>(shape.head_dim * shape.head_dim);
        skews_ && skew_.size() != wanted)
      throw kvlab::Error(kvlab::Errc::data, "got a skew of " + std::to_string(skew_.size()) + " numbers, wanted " +
                                                std::to_string(wanted) + ": that of infinigen_skew for this model");
    all_channels_ = numbers("channels", shape.head_dim);
    few_channels_ = numbers("channels that guess", few);
    sums_ = kvlab::KeptSeries("magnitudes of queries", shape, shape.head_dim, w);
    keys_ = kvlab::KeptPartialKeys("partial keys", shape, few, dense_, skew_, w);
    room_ = tokens_ > 0 ? std::max(1, tokens_ / shape.page_size) : std::min(rule_.most + 1, shape.max_pages());
    if (offloads_) pages_ = kvlab::KeptPages("pages that are read", shape, shape.max_pages(), w);
    const std::int64_t all = shape.max_slots * shape.kv_heads, room = shape.max_tokens;
    auto* data = static_cast<std::int32_t*>(w.room("tokens to read", static_cast<std::size_t>(8 * all * (room + 1))));
    for (kvlab::TokenList& list : read_) {
      list.index = View<std::int32_t, 3>::dense(data, {shape.max_slots, shape.kv_heads, room});
      list.count = View<std::int32_t, 2>::dense(data + all * room, {shape.max_slots, shape.kv_heads});
      data += all * (room + 1);
    }
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (kv.layer < dense_) return;
    if (skews_)
      kvlab::ops::add_channel_magnitudes(kv.pages, kv.chunk_queries, keys_.of(kv).directions, sums_.of(kv),
                                         *kv.workspace, s);
    else
      kvlab::ops::add_magnitudes(kv.pages, kv.chunk_queries, sums_.of(kv), s);
    if (!kv.last[0]) return;
    View<const float, 3> of_row = sums_.of(kv);
    of_row.data += kv.slots[0] * of_row.stride[0], of_row.extent[0] = 1;
    kvlab::PagedKv channels = kv.pages;  // a head has a "token" for each channel
    channels.length = all_channels_;
    channels.page_size = 256;
    kvlab::TokenChoice few;
    few.keep = few_channels_;
    kvlab::ops::top_tokens(channels, of_row, few, keys_.channels(kv), s);
    kvlab::ops::copy_partial_keys(kv.pages, kv.max_length, keys_.of(kv), s);
    if (offloads_) edits.place(pages_.of(kv), {.room = room_});
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (step.layer >= dense_) {
      kvlab::ops::copy_partial_keys(step.pages, 1, keys_.of(step), s);
      edits.attend(tokens_of(step.layer));
    }
    if (step.layer + 1 >= dense_ && step.layer + 1 < step.shape->layers) guess(step, edits, s);
  }

 private:
  // Of the layer behind the step's. It holds the same tokens but for the step's own, which it reads in any case.
  void guess(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) const {
    kvlab::LayerKv next = step;
    ++next.layer;
    const Scores queries = step.query_head_vectors("guessed queries"), scores = step.kv_head_scores("scores");
    step.next_queries(queries, s);
    kvlab::ops::partial_scores(step.pages, queries, keys_.of(next),
                               1 / std::sqrt(static_cast<float>(step.pages.head_dim)), rule_.newest, scores,
                               *step.workspace, s);
    const auto keep = step.scratch<std::int32_t>("tokens to read", {step.rows(), step.kv_heads()});
    kvlab::ops::near_greatest(step.pages, scores, rule_, keep, s);
    kvlab::ops::top_tokens(step.pages, scores, keep, nullptr, tokens_of(next.layer), s);
    if (!offloads_) return;
    kvlab::ops::token_pages(step.pages, tokens_of(next.layer), rule_.newest, pages_.of(next), s);
    edits.for_layer(next.layer);
    edits.place(pages_.of(next), {.room = room_});
  }
  // Written by a layer and read by the next one, in the same step.
  const kvlab::TokenList& tokens_of(int layer) const { return read_[layer % 2]; }

  double ratio_;
  int dense_;
  bool skews_, offloads_;
  int tokens_;
  int room_ = 0;  // pages of a head on the device, unless a step reads more
  kvlab::TierDemand tiers_;
  std::vector<float> skew_;  // [layer, kv_head, channel, head_dim] of the profile
  kvlab::NearGreatest rule_;
  View<const std::int32_t, 2> all_channels_, few_channels_;
  kvlab::KeptSeries sums_;
  kvlab::KeptPartialKeys keys_;
  kvlab::KeptPages pages_;
  kvlab::TokenList read_[2];  // of even and of odd layers
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<InfiniGen>("infinigen",
                             "a layer's input guesses which tokens the next layer reads, and their pages come from "
                             "the host (Lee et al. 2024)")
        .param("alpha", 4., 0.001, kvlab::any,
               "a token counts if its guessed logit is above the head's greatest less so much")
        .param("partial_ratio", 0.2, 0.001, 1, "share of a head's channels that guess, at least one")
        .param("cap", 400, 0, kvlab::any, "most tokens that a head reads beside the step's own; 0 = no limit")
        .param("cap_share", 1., 0.001, 1, "the same, as a share of the tokens so far; 1 = no limit")
        .param("tokens", 0, 0, kvlab::any,
               "of a head whose pages stay on the device while there is room; 0 = a page for each token of the cap")
        .param("dense_layers", 2, 0, kvlab::any, "first layers that attend to everything; layer 0 always does")
        .component("skew",
                   "a profile turns queries and keys, so that few channels hold most of a query; off = channels "
                   "are those of the model")
        .component("offload", "pages lie on the host but for those that a layer reads; off = they stay on the device"))
