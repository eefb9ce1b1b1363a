// What both devices and the references of kvlab/clusters.hpp share.
#pragma once
#include <kvlab/clusters.hpp>

#include <cstdint>

#include "ops/score/random_scores.hpp"

namespace kvlab::ops {

// Where the new clusters of a head go, and of which places they are.
struct ClusterPlan {
  int first = 0, clusters = -1;  // -1: the head stays as it is
  int from = 0, to = 0;
};

// tokens: of the head. bound: its KeyClusters::bound. room: for clusters.
constexpr ClusterPlan plan_of(const ClusterRange& range, int tokens, const std::int32_t* bound, std::int64_t room) {
  ClusterPlan p;
  if (range.clusters < 0) return p;
  p.first = range.append ? bound[0] : 0;
  p.from = range.append ? bound[1] : range.from;
  p.to = p.from + range.tokens;
  if (p.to <= tokens && p.first + range.clusters <= room) p.clusters = range.clusters;
  return p;
}

// Whether cluster b comes before cluster a in order of scores.
constexpr bool comes_before(float b, int index_b, float a, int index_a) {
  const bool none_a = a != a, none_b = b != b;  // NaN ranks below all others
  if (none_a || none_b) return none_a == none_b ? index_b < index_a : none_a;
  return b > a || (b == a && index_b < index_a);
}

// Offsets of the first centroids in the range, ascending: ClusterRange::clusters of them.
// Inline, because the GPU's library takes nothing of core's.
inline void draw_centroids(const ClusterRange& range, std::uint64_t seed, int kv_head, std::int32_t* out) {
  const std::uint64_t start = split_mix(seed, kv_head);
  int left = range.clusters;
  for (int i = 0; left > 0; ++i)
    if (static_cast<int>((split_mix(start, i) >> 32) * static_cast<std::uint64_t>(range.tokens - i) >> 32) < left)
      *out++ = i, --left;
}

// Refuses clusters that are not those of `heads` heads of this cache.
void check_clusters(const PagedKv& kv, std::int64_t heads, const KeyClusters& c, const char* op);
// Refuses scores that are not [row, kv_head, cluster].
void check_cluster_scores(const PagedKv& kv, const View<const float, 3>& scores, const KeyClusters& c, const char* op);

void cluster_keys_reference(const PagedKv& kv, const std::vector<ClusterRange>& ranges, const ClusterRule& rule,
                            const KeyClusters& clusters);
void cluster_centroids_reference(const PagedKv& kv, const KeyClusters& finer, const std::vector<ClusterRange>& ranges,
                                 const ClusterRule& rule, const KeyClusters& coarse);
void sizes_within_reference(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                            const KeyClusters& coarse, const KeyClusters& finer, View<std::int32_t, 3> out);
void cluster_scores_reference(const PagedKv& kv, View<const float, 3> queries, const KeyClusters& clusters, Scores out);
void cluster_tokens_reference(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most,
                              int first, const KeyClusters& clusters, TokenList list);
void cluster_shares_reference(const PagedKv& kv, View<const float, 4> queries, float scale, const KeyClusters& clusters,
                              Scores out);
void share_quantile_reference(const PagedKv& kv, View<const float, 3> shares, double q, const KeyClusters& clusters,
                              View<float, 1> out);
void cluster_tokens_above_reference(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                                    const KeyClusters& clusters, TokenList list);

}  // namespace kvlab::ops
