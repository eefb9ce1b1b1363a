// Squeezed Attention: keys of the prompt are clustered. Each step reads the clusters whose centroids get enough
// attention of its query. One threshold serves all layers and heads. The prompt's last queries give it, so heads whose
// attention is spread read fewer tokens. Hooper et al. 2024. Nothing is evicted, and nothing leaves the device.
#include <kvlab/clusters.hpp>
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <cmath>

namespace {

class SqueezedAttention final : public kvlab::Policy {
 public:
  explicit SqueezedAttention(const kvlab::Params& p)
      : percent_(p.get<double>("percent_clusters")),
        percentile_(p.get<double>("percentile")),
        window_(p.get<int>("window")),
        rule_{p.get<int>("iterations"), static_cast<std::uint64_t>(p.get<int>("seed")) << 16} {}

  kvlab::Needs needs() const override {
    const int shares = static_cast<int>(std::ceil(2 * window_ * percent_ / 100));  // of all queries, in f64
    return kvlab::Needs{}
        .own_amount(true)
        .window_queries(window_)
        .finish_prompt(true)
        .scratch_numbers(8 + shares)
        .capturable(true);
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    room_ = clusters_of(shape.max_tokens);
    kept_ = kvlab::KeptClusters("clusters", shape, room_, w);
    shares_ = kvlab::KeptShares("shares of clusters", shape, room_, w);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits&, kvlab::Stream s) override {
    if (!kv.last[0]) return;
    const int n = std::max(0, kv.position[0] - window_);
    const kvlab::ClusterRule rule{rule_.iterations, rule_.seed + static_cast<std::uint64_t>(kv.layer)};
    kvlab::ops::cluster_keys(kv.pages, {{.tokens = n, .clusters = clusters_of(n)}}, rule, kept_.of(kv), *kv.workspace,
                             s);
    if (n > 0) share(kv, kv.window_queries.f32(), shares_.of_row(kv), s);
  }

  void finish_prompt(const kvlab::LayerKv& kv, kvlab::Edits&, kvlab::Stream s) override {
    if (kv.layer + 1 == kv.shape->layers)
      kvlab::ops::share_quantile(kv.pages, shares_.all(), percentile_, kept_.all(), shares_.threshold(), s);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    const auto q = step.queries.f32();
    const auto shares = step.scratch<float>("shares", {step.rows(), step.kv_heads(), room_});
    share(step,
          {q.data, {q.extent[0], q.extent[1], 1, q.extent[2]}, {q.stride[0], q.stride[1], q.stride[1], q.stride[2]}},
          shares, s);
    const auto list = step.list<kvlab::TokenList>("tokens to read", step.max_length);
    kvlab::ops::cluster_tokens_above(step.pages, shares, shares_.threshold(), kept_.of(step), list, s);
    edits.attend(list);
  }

 private:
  int clusters_of(int tokens) const { return std::min(tokens, std::max(1, static_cast<int>(percent_ * tokens / 100))); }
  void share(const kvlab::LayerKv& kv, const kvlab::View<const float, 4>& queries, kvlab::Scores out,
             kvlab::Stream s) const {
    const float scale = 1 / std::sqrt(static_cast<float>(kv.pages.head_dim));
    kvlab::ops::cluster_shares(kv.pages, queries, scale, kept_.of(kv), out, *kv.workspace, s);
  }

  double percent_, percentile_;
  int window_;
  kvlab::ClusterRule rule_;
  int room_ = 0;
  kvlab::KeptClusters kept_;
  kvlab::KeptShares shares_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<SqueezedAttention>(
                 "squeezed_attention",
                 "clusters of the prompt's keys that get more attention than a threshold are read (Hooper et al. "
                 "2024). The prompt is the document. Every token stays on the device")
                 .param("percent_clusters", 5., 0.01, 100,
                        "clusters, in percent of the prompt's tokens before the window; at least one")
                 .param("percentile", 0.9, 0, 1,
                        "share of the clustered tokens, over all layers and heads, that the prompt's last queries "
                        "would not read")
                 .param("window", 100, 1, 4096,
                        "last tokens of the prompt. Their queries give the threshold; they are read in any case")
                 .param("iterations", 20, 0, kvlab::any, "of k-means")
                 .param("seed", 0, 0, kvlab::any, "of the keys that are the first centroids"))
