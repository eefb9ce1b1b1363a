#include "ops/select/clusters.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {
namespace {

void check_ranges(const PagedKv& kv, const std::vector<ClusterRange>& ranges, const KeyClusters& c, bool of_tokens,
                  Stream s, const char* op) {
  if (ranges.size() != static_cast<std::size_t>(kv.rows))
    fail(Errc::internal, op,
         "got " + std::to_string(ranges.size()) + " ranges, wanted one for each of " + std::to_string(kv.rows) +
             " rows");
  for (int r = 0; r < kv.rows; ++r) {
    const ClusterRange& range = ranges[static_cast<std::size_t>(r)];
    if (range.clusters < 0) continue;
    if (range.from < 0 || range.tokens < 0 || range.from + range.tokens > c.token.extent[2])
      fail(Errc::internal, op,
           "got places " + std::to_string(range.from) + " to " + std::to_string(range.from + range.tokens) +
               ", wanted at most " + std::to_string(c.token.extent[2]));
    if (range.clusters > range.tokens || (range.clusters == 0 && range.tokens > 0))
      fail(Errc::internal, op,
           "got " + std::to_string(range.clusters) + " clusters of " + std::to_string(range.tokens) +
               " tokens, wanted at least one and no more than there are tokens");
    if (range.clusters > c.size.extent[2])
      fail(Errc::internal, op,
           "got " + std::to_string(range.clusters) + " clusters, wanted at most " + std::to_string(c.size.extent[2]) +
               ", for which there is room");
    if (s.device() == Device::cpu && !range.append && of_tokens)
      for (int h = 0; h < kv.kv_heads; ++h)
        if (range.from + range.tokens > kv.tokens(r, h))
          fail(Errc::internal, op,
               "got a range up to place " + std::to_string(range.from + range.tokens) + ", wanted at most " +
                   std::to_string(kv.tokens(r, h)) + ", the head's tokens");
  }
}

// The centroid of the greatest cosine for each of n keys. The norm of a key changes no order.
void nearest(const float* keys, int n, int dim, const float* centroids, int count, std::int32_t* label) {
  const auto room = static_cast<std::size_t>(count);
  std::vector<double> turned(room * static_cast<std::size_t>(dim)), norm(room);  // [d][centroid]: sums side by side
  for (int c = 0; c < count; ++c) {
    double squares = 0;
    for (int d = 0; d < dim; ++d) {
      const double x = centroids[std::int64_t{c} * dim + d];
      turned[static_cast<std::size_t>(d) * room + static_cast<std::size_t>(c)] = x;
      squares += x * x;
    }
    norm[static_cast<std::size_t>(c)] = std::sqrt(squares);
  }
  PerThread<double> dots(room);
#pragma omp parallel if (worth_threads(std::int64_t{n} * count))
  {
    const auto dot = dots.own();
#pragma omp for schedule(static)
    for (int t = 0; t < n; ++t) {
      std::fill(dot.begin(), dot.end(), 0.);
      for (int d = 0; d < dim; ++d) {
        const double x = keys[std::int64_t{t} * dim + d];
        const double* of_d = turned.data() + static_cast<std::size_t>(d) * room;
        for (std::size_t c = 0; c < room; ++c) dot[c] += x * of_d[c];
      }
      double most = -INFINITY;
      label[t] = 0;
      for (std::size_t c = 0; c < room; ++c) {
        const double cosine = norm[c] > 0 ? dot[c] / norm[c] : 0;
        if (cosine > most) most = cosine, label[t] = static_cast<std::int32_t>(c);
      }
    }
  }
}

void move_centroids(const float* keys, int n, int dim, const std::int32_t* label, float* centroids, int count) {
  std::vector<double> sum(static_cast<std::size_t>(count) * static_cast<std::size_t>(dim));
  std::vector<int> members(static_cast<std::size_t>(count));
  for (int t = 0; t < n; ++t) {
    ++members[static_cast<std::size_t>(label[t])];
    double* to = sum.data() + std::int64_t{label[t]} * dim;
    for (int d = 0; d < dim; ++d) to[d] += keys[std::int64_t{t} * dim + d];
  }
  for (int c = 0; c < count; ++c)
    for (int d = 0; members[static_cast<std::size_t>(c)] && d < dim; ++d)
      centroids[std::int64_t{c} * dim + d] =
          static_cast<float>(sum[static_cast<std::size_t>(c * dim + d)] / members[static_cast<std::size_t>(c)]);
}

// Clusters of n rows. label: [n].
void k_means(const float* rows, int n, int dim, const ClusterRange& range, const ClusterRule& rule, int head,
             float* centroids, std::int32_t* label) {
  const int count = range.clusters;
  std::vector<std::int32_t> drawn(static_cast<std::size_t>(count));
  draw_centroids(range, rule.seed, head, drawn.data());
  for (int c = 0; c < count; ++c)
    std::copy_n(rows + std::int64_t{drawn[static_cast<std::size_t>(c)]} * dim, dim, centroids + std::int64_t{c} * dim);
  for (int i = 0; i < rule.iterations && count > 0; ++i) {
    nearest(rows, n, dim, centroids, count, label);
    move_centroids(rows, n, dim, label, centroids, count);
  }
  if (count > 0) nearest(rows, n, dim, centroids, count, label);
}

void coarse_head(const PagedKv& kv, int row, int head, const KeyClusters& finer, const ClusterRange& range,
                 const ClusterRule& rule, const KeyClusters& out) {
  const std::int64_t slot = kv.slots[row], dim = kv.head_dim;
  std::int32_t* bound = &out.bound(slot, head, 0);
  const ClusterPlan plan = plan_of(range, finer.bound(slot, head, 0), bound, out.size.extent[2]);
  if (plan.clusters < 0) return;
  std::vector<float> rows(static_cast<std::size_t>(plan.to * dim));
  for (int c = 0; c < plan.to; ++c) std::copy_n(&finer.centroid(slot, head, c, 0), dim, rows.data() + c * dim);
  std::vector<float> centroids(static_cast<std::size_t>(plan.clusters * dim));
  std::int32_t *of = &out.token(slot, head, 0), *sizes = &out.size(slot, head, 0);
  k_means(rows.data(), plan.to, kv.head_dim, range, rule, head, centroids.data(), of);
  for (int c = 0; c < plan.clusters; ++c) {
    std::copy_n(centroids.data() + c * dim, dim, &out.centroid(slot, head, c, 0));
    sizes[c] = 0;
  }
  for (int c = 0; c < plan.to; ++c) sizes[of[c]] += finer.size(slot, head, c);
  bound[0] = plan.clusters, bound[1] = plan.to;
}

void cluster_head(const PagedKv& kv, int row, int head, const ClusterRange& range, const ClusterRule& rule,
                  const KeyClusters& out) {
  const std::int64_t slot = kv.slots[row], dim = kv.head_dim;
  std::int32_t* bound = &out.bound(slot, head, 0);
  const ClusterPlan plan = plan_of(range, kv.tokens(row, head), bound, out.size.extent[2]);
  if (plan.clusters < 0) return;
  const int n = plan.to - plan.from, count = plan.clusters;
  std::vector<float> keys(static_cast<std::size_t>(n * dim));
  for (int t = plan.from; t < plan.to; ++t) {
    const int page = t / kv.page_size;
    if (t == plan.from || t % kv.page_size == 0) check_page(kv, row, head, page, "cluster_keys");
    const PageEntry& e = kv.entry(row, head, page);
    read_row(kv.frame(e), kv.layout(e), KvSide::key, t % kv.page_size, keys.data() + (t - plan.from) * dim);
  }
  std::vector<std::int32_t> label(static_cast<std::size_t>(n));
  k_means(keys.data(), n, kv.head_dim, range, rule, head, &out.centroid(slot, head, plan.first, 0), label.data());
  std::int32_t* sizes = &out.size(slot, head, 0);
  std::vector<std::int32_t*> to;
  std::int32_t* next = &out.token(slot, head, 0);
  for (int c = 0; c < plan.first; ++c) next += sizes[c];
  for (int c = 0; c < count; ++c) {
    sizes[plan.first + c] = static_cast<std::int32_t>(std::count(label.begin(), label.end(), c));
    to.push_back(next);
    next += sizes[plan.first + c];
  }
  for (int t = 0; t < n; ++t) *to[static_cast<std::size_t>(label[static_cast<std::size_t>(t)])]++ = plan.from + t;
  bound[0] = plan.first + count, bound[1] = plan.to;
}

}  // namespace

void check_clusters(const PagedKv& kv, std::int64_t heads, const KeyClusters& c, const char* op) {
  const std::int64_t slots = c.bound.extent[0], room = c.size.extent[2];
  if (c.centroid.extent != std::array{slots, heads, room, std::int64_t{kv.head_dim}} || c.centroid.stride[3] != 1 ||
      c.size.extent != std::array{slots, heads, room} || c.token.extent[0] != slots || c.token.extent[1] != heads ||
      c.bound.extent != std::array{slots, heads, std::int64_t{2}} || c.size.stride[2] != 1 || c.token.stride[2] != 1 ||
      c.bound.stride[2] != 1)
    fail(Errc::internal, op, "got clusters of another shape, wanted those of this cache's KV heads");
}

void check_cluster_scores(const PagedKv& kv, const View<const float, 3>& scores, const KeyClusters& c, const char* op) {
  if (scores.extent[0] < kv.rows || scores.extent[1] != kv.kv_heads || scores.extent[2] < c.size.extent[2])
    fail(Errc::internal, op, "got too few scores, wanted [row, kv_head, cluster]");
}

void cluster_keys(const PagedKv& kv, const std::vector<ClusterRange>& ranges, const ClusterRule& rule,
                  const KeyClusters& clusters, Workspace& w, Stream s) {
  const char* op = "cluster_keys";
  check_kv(kv, op, s);
  check_clusters(kv, kv.kv_heads, clusters, op);
  check_ranges(kv, ranges, clusters, true, s, op);
  if (kv.rope == RopeRegime::cache_relative)
    fail(Errc::unsupported, op, "got keys before RoPE (cache_relative), wanted keys that are stored as rotated");
  if (rule.iterations < 0)
    fail(Errc::internal, op, "got " + std::to_string(rule.iterations) + " iterations, wanted at least 0");
  if (s.device() == Device::cuda) return on_cuda<cluster_keys>(kv, ranges, rule, clusters, w, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) cluster_head(kv, r, h, ranges[static_cast<std::size_t>(r)], rule, clusters);
}

void cluster_centroids(const PagedKv& kv, const KeyClusters& finer, const std::vector<ClusterRange>& ranges,
                       const ClusterRule& rule, const KeyClusters& coarse, Workspace& w, Stream s) {
  const char* op = "cluster_centroids";
  check_kv(kv, op, s);
  check_clusters(kv, kv.kv_heads, finer, op);
  check_clusters(kv, kv.kv_heads, coarse, op);
  check_ranges(kv, ranges, coarse, false, s, op);
  for (const ClusterRange& range : ranges)
    if (range.clusters >= 0 && (range.append || range.from != 0 || range.tokens > finer.size.extent[2]))
      fail(Errc::internal, op,
           "got clusters " + std::to_string(range.from) + " to " + std::to_string(range.from + range.tokens) +
               (range.append ? " to append" : "") + ", wanted them from 0 to at most " +
               std::to_string(finer.size.extent[2]) + ", to replace others");
  if (finer.bound.extent[0] != coarse.bound.extent[0])
    fail(Errc::internal, op, "got levels of different slots, wanted those of one cache");
  if (rule.iterations < 0)
    fail(Errc::internal, op, "got " + std::to_string(rule.iterations) + " iterations, wanted at least 0");
  if (s.device() == Device::cuda) return on_cuda<cluster_centroids>(kv, finer, ranges, rule, coarse, w, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      coarse_head(kv, r, h, finer, ranges[static_cast<std::size_t>(r)], rule, coarse);
}

void sizes_within(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                  const KeyClusters& coarse, const KeyClusters& finer, View<std::int32_t, 3> out, Stream s) {
  const char* op = "sizes_within";
  check_kv(kv, op, s);
  check_clusters(kv, kv.kv_heads, coarse, op);
  check_clusters(kv, kv.kv_heads, finer, op);
  check_cluster_scores(kv, shares, coarse, op);
  if (threshold.extent[0] < coarse.bound.extent[0])
    fail(Errc::internal, op, "got too few thresholds, wanted one for each slot");
  if (out.extent != finer.size.extent || finer.bound.extent[0] != coarse.bound.extent[0])
    fail(Errc::internal, op, "got sizes of another shape, wanted [slot, kv_head, cluster] of the finer level");
  if (s.device() == Device::cuda) return on_cuda<sizes_within>(kv, shares, threshold, coarse, finer, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int64_t slot = kv.slots[r];
      const int within = coarse.bound(slot, h, 1);
      for (int c = 0; c < finer.bound(slot, h, 0); ++c) {
        const bool stays = c >= within || shares(r, h, coarse.token(slot, h, c)) > threshold(slot);
        out(slot, h, c) = stays ? finer.size(slot, h, c) : 0;
      }
    }
}

void cluster_scores(const PagedKv& kv, View<const float, 3> queries, const KeyClusters& clusters, Scores out,
                    Stream s) {
  const char* op = "cluster_scores";
  check_kv(kv, op, s);
  check_clusters(kv, kv.kv_heads, clusters, op);
  if (queries.extent[0] < kv.rows || queries.extent[1] % kv.kv_heads || queries.extent[2] != kv.head_dim ||
      queries.stride[2] != 1)
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, head_dim]");
  check_cluster_scores(kv, out, clusters, op);
  if (s.device() == Device::cuda) return on_cuda<cluster_scores>(kv, queries, clusters, out, s);
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int c = 0; c < clusters.bound(kv.slots[r], h, 0); ++c) {
        const float* centroid = &clusters.centroid(kv.slots[r], h, c, 0);
        double sum = 0;
        for (std::int64_t g = h * group; g < (h + 1) * group; ++g) {
          double dot = 0;
          for (int d = 0; d < kv.head_dim; ++d) dot += double{queries(r, g, d)} * double{centroid[d]};
          sum += dot;
        }
        out(r, h, c) = static_cast<float>(sum / static_cast<double>(group));
      }
}

void cluster_tokens(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most, int first,
                    const KeyClusters& clusters, TokenList list, Stream s) {
  const char* op = "cluster_tokens";
  check_kv(kv, op, s);
  check_clusters(kv, kv.kv_heads, clusters, op);
  check_list(kv, list, op);
  check_cluster_scores(kv, scores, clusters, op);
  if (most.extent[0] < kv.rows || most.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got too few numbers of tokens, wanted [row, kv_head]");
  if (s.device() == Device::cuda) return on_cuda<cluster_tokens>(kv, scores, most, first, clusters, list, s);
  check_room(kv, list, op);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int64_t slot = kv.slots[r];
      const int count = clusters.bound(slot, h, 0), end = clusters.bound(slot, h, 1), n = kv.tokens(r, h);
      std::vector<int> order(static_cast<std::size_t>(count)), start(static_cast<std::size_t>(count));
      for (int c = 0, at = 0; c < count; at += clusters.size(slot, h, c), ++c)
        order[static_cast<std::size_t>(c)] = c, start[static_cast<std::size_t>(c)] = at;
      std::sort(order.begin(), order.end(),
                [&](int a, int b) { return comes_before(scores(r, h, a), a, scores(r, h, b), b); });
      std::vector<bool> read(static_cast<std::size_t>(n));
      for (int t = 0; t < n; ++t) read[static_cast<std::size_t>(t)] = t < first || t >= end;
      int left = std::max(0, most(r, h));
      for (const int c : order) {
        const int taken = std::min(left, clusters.size(slot, h, c));
        for (int i = 0; i < taken; ++i) {
          const int t = clusters.token(slot, h, start[static_cast<std::size_t>(c)] + i);
          if (t < n) read[static_cast<std::size_t>(t)] = true;
        }
        left -= taken;
      }
      int kept = 0;
      for (int t = 0; t < n; ++t)
        if (read[static_cast<std::size_t>(t)]) list.index(list.at(r), h, kept++) = t;
      list.count(list.at(r), h) = kept;
    }
}

}  // namespace kvlab::ops
