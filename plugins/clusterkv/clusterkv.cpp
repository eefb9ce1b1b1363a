// ClusterKV: keys of the prompt are clustered by cosine. Each step reads the clusters whose centroids fit its query
// best, whose pages come from the host. Liu et al. 2024. Nothing is evicted.
#include <kvlab/clusters.hpp>
#include <kvlab/partial_keys.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using kvlab::BudgetAmount;

class ClusterKv final : public kvlab::Policy {
 public:
  explicit ClusterKv(const kvlab::Params& p)
      : sinks_(p.get<int>("sinks")),
        clusters_(p.get<int>("clusters")),
        tokens_per_cluster_(p.get<int>("tokens_per_cluster")),
        window_(p.get<int>("window")),
        window_clusters_(p.get<int>("window_clusters")),
        dense_(p.get<int>("dense_layers")),
        offloads_(p.get<bool>("offload")),
        rule_{p.get<int>("iterations"), static_cast<std::uint64_t>(p.get<int>("seed")) << 16} {
    if (window_ > 0 && window_clusters_ > window_)
      throw kvlab::Error(kvlab::Errc::config, "got " + std::to_string(window_clusters_) +
                                                  " window_clusters, wanted at most " + std::to_string(window_) +
                                                  ", the tokens of a window: a cluster has a token at least");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.dense_layers(dense_).host_pages(offloads_).scratch_numbers(8);
  }

  // A token of a cluster may have a page of its own, and a step may open one more. What is in no cluster yet lies in a
  // row: up to two windows, since a step counts from the first one of its sequence.
  kvlab::Demand demand(int prompt, int max_new) const override {
    if (const int most = std::max(0, prompt - sinks_); limited_ && clusters_ > most)
      throw kvlab::Error(kvlab::Errc::config, "got " + std::to_string(clusters_) + " clusters for a prompt of " +
                                                  std::to_string(prompt) + " tokens, wanted at most " +
                                                  std::to_string(most) +
                                                  ", those behind the sinks: a cluster has a token at least");
    if (!offloads_ || !limited_) return {};
    return tiers_.of(prompt, max_new, [&](int n, bool decodes) {
      const int budget = tiers_.budget(n), recent = window_ > 0 ? std::min(max_new, 2 * window_) : max_new;
      if (budget == tiers_.everything) return budget;
      return tiers_.whole_pages(sinks_) + std::max(0, budget - sinks_) + (decodes ? tiers_.pages_of_run(recent) : 0) +
             1;
    });
  }

  void attach(const kvlab::Shape& shape, const BudgetAmount& budget, kvlab::Workspace& w) override {
    if (budget.kind == BudgetAmount::bytes)
      throw kvlab::Error(kvlab::Errc::config, "got a budget in bytes, wanted tokens or a ratio: nothing leaves");
    if (const int most = std::max(0, shape.max_tokens - sinks_); clusters_ > most)
      throw kvlab::Error(kvlab::Errc::config,
                         "got " + std::to_string(clusters_) + " clusters, wanted at most " + std::to_string(most) +
                             ", the longest sequence less the sinks: a cluster has a token at least");
    budget.require(sinks_ + 1, "the sinks, and one of a cluster");
    limited_ = budget.kind != BudgetAmount::unlimited;
    tiers_ = kvlab::TierDemand(shape, budget, std::min(1., static_cast<double>(dense_) / shape.layers));
    room_ = clusters_of(shape.max_tokens) + (window_ > 0 ? shape.max_tokens / window_ * window_clusters_ : 0);
    if (limited_) kept_ = kvlab::KeptClusters("clusters", shape, room_, w);
    if (limited_ && offloads_) pages_ = kvlab::KeptPages("pages to read", shape, shape.max_pages(), w);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!chooses(kv) || !kv.last[0]) return;
    const int n = kv.position[0], from = std::min(sinks_, n);
    kvlab::ops::cluster_keys(kv.pages, {{.from = from, .tokens = n - from, .clusters = clusters_of(n - from)}},
                             rule_of(kv), kept_.of(kv), *kv.workspace, s);
    if (offloads_) choose(kv, kv.last_queries(), {}, edits, s);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!chooses(step)) return;
    cluster_windows(step, kept_.of(step), s);
    edits.attend(choose(step, step.queries, {kvlab::Deadline::this_attention}, edits, s));
  }

 private:
  bool chooses(const kvlab::LayerKv& kv) const { return limited_ && kv.layer >= dense_; }
  int clusters_of(int tokens) const {
    return std::min(tokens, clusters_ > 0 ? clusters_ : std::max(1, tokens / tokens_per_cluster_));
  }
  kvlab::ClusterRule rule_of(const kvlab::LayerKv& kv) const {
    return {rule_.iterations, rule_.seed + static_cast<std::uint64_t>(kv.layer)};
  }

  // What these queries read. Its pages come to the device, and the others leave.
  kvlab::TokenList choose(const kvlab::LayerKv& kv, const kvlab::Tensor<3>& queries, kvlab::Deadline when,
                          kvlab::Edits& edits, kvlab::Stream s) const {
    const kvlab::KeyClusters& clusters = kept_.of(kv);
    const auto scores = kv.scratch<float>("scores", {kv.rows(), kv.kv_heads(), room_});
    kvlab::ops::cluster_scores(kv.pages, queries.f32(), clusters, scores, s);
    std::vector<std::int32_t> most;
    for (int row = 0; row < kv.rows(); ++row)
      most.insert(most.end(), static_cast<std::size_t>(kv.kv_heads()), std::max(0, kv.budget_tokens(row) - sinks_));
    const auto list = kv.list<kvlab::TokenList>("tokens to read", kv.max_length);
    kvlab::ops::cluster_tokens(kv.pages, scores, kv.upload_heads("tokens of clusters", most.data()), sinks_, clusters,
                               list, s);
    if (!offloads_) return list;
    kvlab::ops::token_pages(kv.pages, list, 0, pages_.of(kv), s);
    edits.place(pages_.of(kv), {.when = when});
    return list;
  }

  // Rows that generated a whole window before this step get its clusters. The step's own token stays out. Steps read
  // the window as a whole until then, so its pages are on the device.
  void cluster_windows(const kvlab::LayerStep& step, const kvlab::KeyClusters& clusters, kvlab::Stream s) const {
    std::vector<kvlab::ClusterRange> ranges(static_cast<std::size_t>(step.rows()));
    bool any = false;
    for (int row = 0; window_ > 0 && row < step.rows(); ++row) {
      if (step.step[row] == 0 || step.step[row] % window_ != 0) continue;
      ranges[static_cast<std::size_t>(row)] = {.tokens = window_, .clusters = window_clusters_, .append = true};
      any = true;
    }
    if (any) kvlab::ops::cluster_keys(step.pages, ranges, rule_of(step), clusters, *step.workspace, s);
  }

  int sinks_, clusters_, tokens_per_cluster_, window_, window_clusters_, dense_;
  bool offloads_;
  kvlab::ClusterRule rule_;
  bool limited_ = false;
  int room_ = 0;
  kvlab::TierDemand tiers_;
  kvlab::KeptClusters kept_;
  kvlab::KeptPages pages_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<ClusterKv>("clusterkv",
                                      "clusters of the prompt's keys choose a step's tokens, whose pages may come "
                                      "from the host (Liu et al. 2024)")
                 .param("sinks", 16, 0, kvlab::any, "first tokens, which are read in any case and belong to no cluster")
                 .param("clusters", 0, 0, kvlab::any, "clusters of a prompt, at most one a token; 0 = by its length")
                 .param("tokens_per_cluster", 80, 1, kvlab::any, "tokens of the prompt for each cluster, on average")
                 .param("iterations", 20, 0, kvlab::any, "of k-means")
                 .param("window", 320, 0, kvlab::any,
                        "generated tokens that become clusters once there are so many; 0 = none do")
                 .param("window_clusters", 8, 1, kvlab::any, "clusters of a window, at most one a token")
                 .param("dense_layers", 2, 0, kvlab::any, "first layers that attend to everything")
                 .param("seed", 0, 0, kvlab::any, "of the keys that are the first centroids")
                 .param("offload", false, "pages lie on the host but for those that a step reads"))
