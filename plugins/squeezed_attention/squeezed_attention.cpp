// Squeezed Attention: keys of the prompt are clustered. Each step reads the clusters whose centroids get enough
// attention of its query. One threshold serves all layers and heads. The prompt's last queries give it, so heads whose
// attention is spread read fewer tokens. Coarse clusters may rule out finer ones, with a threshold of their own. Hooper
// et al. 2024. Nothing is evicted.
#include <kvlab/clusters.hpp>
#include <kvlab/partial_keys.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <cmath>
#include <string>

namespace {

class SqueezedAttention final : public kvlab::Policy {
 public:
  explicit SqueezedAttention(const kvlab::Params& p)
      : percent_(p.get<double>("percent_clusters")),
        percentile_(p.get<double>("percentile")),
        percent_coarse_(p.get<double>("percent_coarse")),
        percentile_coarse_(p.get<double>("percentile_coarse")),
        window_(p.get<int>("window")),
        offloads_(p.get<bool>("offload")),
        rule_{p.get<int>("iterations"), static_cast<std::uint64_t>(p.get<int>("seed")) << 16} {
    if (percent_coarse_ >= percent_)
      throw kvlab::Error(kvlab::Errc::config, "got percent_coarse " + std::to_string(percent_coarse_) +
                                                  ", wanted less than percent_clusters, " + std::to_string(percent_) +
                                                  "; 0 = one level");
  }

  kvlab::Needs needs() const override {
    const int shares = static_cast<int>(std::ceil(2 * window_ * (percent_ + percent_coarse_) / 100));  // in f64
    return kvlab::Needs{}
        .own_amount(true)
        .window_queries(window_)
        .finish_prompt(true)
        .host_pages(offloads_)
        .scratch_numbers(8 + shares)
        .capturable(true);
  }

  // How much a step reads is not known before. All full pages have a copy on the host.
  kvlab::Demand demand(int prompt, int max_new) const override {
    if (!offloads_) return {};
    const auto all = [](int, bool) { return kvlab::TierDemand::everything; };
    return {.host = tiers_.of(prompt, max_new, all).host};
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    tiers_ = kvlab::TierDemand(shape, {}, 0);
    if (offloads_) pages_ = kvlab::KeptPages("pages to read", shape, shape.max_pages(), w);
    room_ = clusters_of(shape.max_tokens);
    kept_ = kvlab::KeptClusters("clusters", shape, room_, w);
    shares_ = kvlab::KeptShares("shares of clusters", shape, room_, w);
    if (!two_levels()) return;
    room_coarse_ = coarse_of(shape.max_tokens);
    coarse_ = kvlab::KeptClusters("coarse clusters", shape, room_coarse_, w, room_);
    shares_coarse_ = kvlab::KeptShares("shares of coarse clusters", shape, room_coarse_, w);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!kv.last[0]) return;
    // The threshold is still to come. The first step brings what it reads beside the window.
    if (offloads_) edits.place(pages_.of(kv), {.pins = {.last = window_}});
    const int n = std::max(0, kv.position[0] - window_);
    const kvlab::ClusterRule rule{rule_.iterations, rule_.seed + static_cast<std::uint64_t>(kv.layer)};
    kvlab::ops::cluster_keys(kv.pages, {{.tokens = n, .clusters = clusters_of(n)}}, rule, kept_.of(kv), *kv.workspace,
                             s);
    if (n > 0) share(kv, kv.window_queries.f32(), kept_.of(kv), shares_.of_row(kv), s);
    if (!two_levels()) return;
    // The draws of layers end below that bit.
    const kvlab::ClusterRule of_coarse{rule.iterations, rule.seed | 1u << 15};
    kvlab::ops::cluster_centroids(kv.pages, kept_.of(kv), {{.tokens = clusters_of(n), .clusters = coarse_of(n)}},
                                  of_coarse, coarse_.of(kv), *kv.workspace, s);
    if (n > 0) share(kv, kv.window_queries.f32(), coarse_.of(kv), shares_coarse_.of_row(kv), s);
  }

  void finish_prompt(const kvlab::LayerKv& kv, kvlab::Edits&, kvlab::Stream s) override {
    if (kv.layer + 1 < kv.shape->layers) return;
    kvlab::ops::share_quantile(kv.pages, shares_.all(), percentile_, kept_.all(), shares_.threshold(), s);
    if (two_levels())
      kvlab::ops::share_quantile(kv.pages, shares_coarse_.all(), percentile_coarse_, coarse_.all(),
                                 shares_coarse_.threshold(), s);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    const auto x = step.queries.f32();
    const kvlab::View<const float, 4> q{
        x.data, {x.extent[0], x.extent[1], 1, x.extent[2]}, {x.stride[0], x.stride[1], x.stride[1], x.stride[2]}};
    const auto shares = step.scratch<float>("shares", {step.rows(), step.kv_heads(), room_});
    kvlab::KeyClusters here = kept_.of(step);
    if (two_levels()) {  // clusters of coarse ones with little attention count for nothing
      const auto coarse = step.scratch<float>("coarse shares", {step.rows(), step.kv_heads(), room_coarse_});
      share(step, q, coarse_.of(step), coarse, s);
      here.size = step.scratch<std::int32_t>("sizes", {step.shape->max_slots, step.kv_heads(), room_});
      kvlab::ops::sizes_within(step.pages, coarse, shares_coarse_.threshold(), coarse_.of(step), kept_.of(step),
                               here.size, s);
    }
    share(step, q, here, shares, s);
    const auto list = step.list<kvlab::TokenList>("tokens to read", step.max_length);
    kvlab::ops::cluster_tokens_above(step.pages, shares, shares_.threshold(), kept_.of(step), list, s);
    if (offloads_) {
      kvlab::ops::token_pages(step.pages, list, 0, pages_.of(step), s);
      edits.place(pages_.of(step), {.when = {kvlab::Deadline::this_attention}});
    }
    edits.attend(list);
  }

 private:
  bool two_levels() const { return percent_coarse_ > 0; }
  static int part_of(int tokens, double percent) {
    return std::min(tokens, std::max(1, static_cast<int>(percent * tokens / 100)));
  }
  int clusters_of(int tokens) const { return part_of(tokens, percent_); }
  int coarse_of(int tokens) const { return part_of(tokens, percent_coarse_); }
  static void share(const kvlab::LayerKv& kv, const kvlab::View<const float, 4>& queries,
                    const kvlab::KeyClusters& clusters, kvlab::Scores out, kvlab::Stream s) {
    const float scale = 1 / std::sqrt(static_cast<float>(kv.pages.head_dim));
    kvlab::ops::cluster_shares(kv.pages, queries, scale, clusters, out, *kv.workspace, s);
  }

  double percent_, percentile_, percent_coarse_, percentile_coarse_;
  int window_;
  bool offloads_;
  kvlab::TierDemand tiers_;
  kvlab::KeptPages pages_;
  kvlab::ClusterRule rule_;
  int room_ = 0, room_coarse_ = 0;
  kvlab::KeptClusters kept_, coarse_;
  kvlab::KeptShares shares_, shares_coarse_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<SqueezedAttention>(
                 "squeezed_attention",
                 "clusters of the prompt's keys that get more attention than a threshold are read (Hooper et al. "
                 "2024). The prompt is the document")
                 .param("percent_clusters", 5., 0.01, 100,
                        "clusters, in percent of the prompt's tokens before the window; at least one")
                 .param("percentile", 0.9, 0, 1,
                        "share of the clustered tokens, over all layers and heads, that the prompt's last queries "
                        "would not read")
                 .param("percent_coarse", 0., 0, 100,
                        "coarse clusters of the clusters' centroids, in percent of the same tokens; 0 = one level")
                 .param("percentile_coarse", 0.5, 0, 1,
                        "the same share of tokens, of which coarse clusters rule out as many")
                 .param("window", 100, 1, 4096,
                        "last tokens of the prompt. Their queries give the threshold; they are read in any case")
                 .param("offload", false, "pages lie on the host but for those that a step reads")
                 .param("iterations", 20, 0, kvlab::any, "of k-means")
                 .param("seed", 0, 0, kvlab::any, "of the keys that are the first centroids"))
