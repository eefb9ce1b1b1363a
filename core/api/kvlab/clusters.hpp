// Clusters of keys as an index of a policy's own: ops that make them, score them and choose tokens by them. All of it
// stays on the stream's device. ops.hpp says what holds for every op.
#pragma once
#include <algorithm>
#include <vector>

#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// The clusters of a layer's keys, in state memory. A head has clusters 0 to clusters - 1. Their tokens are the places
// of the cache before `end` that were clustered. Places from `end` on belong to no cluster.
struct KeyClusters {
  View<float, 4> centroid;      // [slot, kv_head, cluster, head_dim]
  View<std::int32_t, 3> size;   // [slot, kv_head, cluster] tokens
  View<std::int32_t, 3> token;  // [slot, kv_head, i] places: those of cluster 0 first, ascending in each cluster
  View<std::int32_t, 3> bound;  // [slot, kv_head, 2] clusters, end
};

// Coarse clusters are clusters of a finer level's centroids, in the same form. Their sizes count tokens. Entry c of
// `token` is the coarse cluster of the finer level's cluster c. `bound` has the coarse clusters, and the clusters of
// the finer level that are in them, which are its first ones.

// Takes empty clusters in attach. Core saves, restores and clears them with the sequence.
class KeptClusters {
 public:
  KeptClusters() = default;
  // Room for so many clusters of a KV head, and for all tokens of a sequence or for `members` entries of `token`.
  KeptClusters(const char* tag, const Shape& s, std::int64_t clusters, Workspace& w, std::int64_t members = 0) {
    static_assert(sizeof(float) == sizeof(std::int32_t));
    const std::int64_t tokens = members > 0 ? members : s.max_tokens, dim = s.head_dim,
                       head = clusters * (dim + 1) + tokens + 2, layer = head * s.kv_heads, slot = layer * s.layers;
    auto* data = static_cast<float*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(float), s.max_slots));
    for (int l = 0; l < s.layers; ++l) {
      float* at = data + l * layer;
      auto* numbers = reinterpret_cast<std::int32_t*>(at + clusters * dim);
      const auto view = [&](std::int32_t* first, std::int64_t count) {
        return View<std::int32_t, 3>{first, {s.max_slots, s.kv_heads, count}, {slot, head, 1}};
      };
      KeyClusters c;
      c.centroid = {at, {s.max_slots, s.kv_heads, clusters, dim}, {slot, head, dim, 1}};
      c.size = view(numbers, clusters);
      c.token = view(numbers + clusters, tokens);
      c.bound = view(numbers + clusters + tokens, 2);
      layers_.push_back(c);
    }
    all_ = layers_.front();
    for (std::int64_t* heads :
         {&all_.centroid.extent[1], &all_.size.extent[1], &all_.token.extent[1], &all_.bound.extent[1]})
      *heads *= s.layers;
  }
  const KeyClusters& of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }
  // Those of all layers: head layer * kv_heads + kv_head.
  const KeyClusters& all() const { return all_; }

 private:
  std::vector<KeyClusters> layers_;
  KeyClusters all_;
};

// Shares that a prompt's last queries give each cluster (ops::cluster_shares), and one threshold of a sequence, in
// state memory.
class KeptShares {
 public:
  KeptShares() = default;
  KeptShares(const char* tag, const Shape& s, std::int64_t clusters, Workspace& w) {
    const std::int64_t layer = clusters * s.kv_heads, slot = layer * s.layers + 1;
    auto* data = static_cast<float*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(float), s.max_slots));
    all_ = {data, {s.max_slots, std::int64_t{s.layers} * s.kv_heads, clusters}, {slot, clusters, 1}};
    threshold_ = {data + layer * s.layers, {s.max_slots}, {slot}};
  }
  // [row, kv_head, cluster] of a prompt, which has one row.
  Scores of_row(const LayerPrefill& kv) const {
    Scores row = all_;
    row.data += kv.slots[0] * row.stride[0] + std::int64_t{kv.layer} * kv.kv_heads() * row.stride[1];
    row.extent[0] = 1, row.extent[1] = kv.kv_heads();
    return row;
  }
  View<float, 3> all() const { return all_; }              // [slot, layer * kv_heads + kv_head, cluster]
  View<float, 1> threshold() const { return threshold_; }  // [slot]

 private:
  View<float, 3> all_;
  View<float, 1> threshold_;
};

// What ops::cluster_keys does with a row: places [from, from + tokens) become so many clusters. They replace all that
// the row has. No clusters of no tokens make `from` the end. With `append` the places are those from the end on, and
// the clusters come behind the others. Heads that hold fewer places behind their end, or have no room, then stay as
// they are.
struct ClusterRange {
  int from = 0, tokens = 0;
  int clusters = -1;  // -1: the row stays as it is
  bool append = false;
};

struct ClusterRule {
  int iterations = 20;
  std::uint64_t seed = 0;
};

namespace ops {

// k-means of keys by cosine. The first centroids are keys of the range, drawn as below. Each iteration gives every key
// to the centroid of the greatest cosine. A centroid then becomes the mean of its keys as stored, or stays where it has
// none. After the last iteration the keys are given out once more, and the centroids stay. The cosine with a vector of
// zeros is 0. Sums are in f64, in the order of places and of elements, and centroids are f32: both devices find the
// same bits. The draw is Knuth's algorithm S over the places in order. Number h of the SplitMix64 sequence that starts
// at the seed starts the sequence of KV head h. Of n places, with `left` still to draw, place i is taken where the top
// 32 bits of number i, times n - i, are below left * 2^32. ranges: [row], host memory; so a graph cannot hold the call.
// More clusters than tokens are Errc::internal, and so are tokens without a cluster. Keys must be stored as rotated:
// RopeRegime::cache_relative is Errc::unsupported. Scratch: a number for each KV head and token of the longest range,
// and three for each cluster. Bytes: the range's keys, twice for each iteration.
void cluster_keys(const PagedKv& kv, const std::vector<ClusterRange>& ranges, const ClusterRule& rule,
                  const KeyClusters& clusters, Workspace& w, Stream s);

// Coarse clusters of the finer level's centroids. k-means, draws, bits and scratch are those of cluster_keys, and each
// centroid counts once, whatever its size. ranges: [row], host memory, from = 0 and no `append`: the first `tokens`
// clusters of the finer level become so many coarse ones. A head with fewer stays as it is. Bytes: the centroids, twice
// for each iteration.
void cluster_centroids(const PagedKv& kv, const KeyClusters& finer, const std::vector<ClusterRange>& ranges,
                       const ClusterRule& rule, const KeyClusters& coarse, Workspace& w, Stream s);

// out[slot, kv_head, cluster] = the size of the finer level's cluster where the share of its coarse cluster is above
// threshold(slot), else 0. NaN is above nothing. Clusters that are in no coarse one keep their sizes. So shares of
// finer clusters with these sizes are those of the tokens that the coarse level leaves. shares: [row, kv_head, coarse
// cluster]. It writes those of kv's rows. Bytes: shares and sizes.
void sizes_within(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                  const KeyClusters& coarse, const KeyClusters& finer, View<std::int32_t, 3> out, Stream s);

// out[row, kv_head, cluster] = mean over the group of query . centroid, summed in f64. queries: [row, query head,
// head_dim], contiguous along head_dim. Entries behind a head's clusters are left alone. Bytes: the centroids.
void cluster_scores(const PagedKv& kv, View<const float, 3> queries, const KeyClusters& clusters, Scores out, Stream s);

// list = the places below `first`, those from the end of the clusters on, and at most most(row, kv_head) tokens of
// clusters. Whole clusters are taken in the order of their scores. Of the first one that does not fit, the tokens that
// come first by place are taken, and that is the last. list needs room for every token of the head. Bytes: scores,
// sizes, and the list.
void cluster_tokens(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most, int first,
                    const KeyClusters& clusters, TokenList list, Stream s);

// out[row, kv_head, cluster] = the weight of one token at the centroid, if every token of a cluster lay there:
// exp(scale q . C_c) / sum_j N_j exp(scale q . C_j), with centroids C and sizes N. The weights of a head, each times
// its size, add up to 1. It is the mean over the queries and over the group, each query head with a softmax of its own.
// queries: [row, query head, query, head_dim], contiguous along head_dim, at least one query. All sums are in f64. An
// empty cluster gets 0. A NaN among the logits of a query makes all other shares of its KV head NaN. Entries behind a
// head's clusters are left alone. Scratch: an f64 for each query, query head and cluster. Bytes: the centroids, and the
// scratch three times.
void cluster_shares(const PagedKv& kv, View<const float, 4> queries, float scale, const KeyClusters& clusters,
                    Scores out, Workspace& w, Stream s);

// out(slot) = the q-quantile of the shares of tokens, for the slots of kv's rows. A token has the share of its cluster.
// All heads of `clusters` count. kv gives slots alone, so these may be the heads of all layers. The quantile of T
// tokens lies at q * (T - 1) in ascending order, counted from 0. Between two tokens it is interpolated, as
// numpy.quantile does. NaN and what is below 0 count as 0. No tokens give 0. 0 <= q <= 1. shares: [slot, head,
// cluster]. Bytes: shares and sizes, 33 times on a GPU.
void share_quantile(const PagedKv& kv, View<const float, 3> shares, double q, const KeyClusters& clusters,
                    View<float, 1> out, Stream s);

// list = the places from the end of the clusters on, and the tokens of clusters whose share is above threshold(slot).
// NaN is above nothing. shares: [row, kv_head, cluster]. list needs room for every token of the head. Bytes: shares,
// sizes, and the list.
void cluster_tokens_above(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                          const KeyClusters& clusters, TokenList list, Stream s);

}  // namespace ops
}  // namespace kvlab
