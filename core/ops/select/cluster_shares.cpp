#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/select/clusters.hpp"

namespace kvlab::ops {
namespace {

// What one query gives each of `count` clusters, in shares[0 .. count).
void shares_of_query(const float* query, int dim, double scale, const KeyClusters& clusters, std::int64_t slot,
                     std::int64_t head, int count, std::vector<double>& shares) {
  double most = -INFINITY, sum = 0;
  for (int c = 0; c < count; ++c) {
    if (clusters.size(slot, head, c) <= 0) continue;
    const float* centroid = &clusters.centroid(slot, head, c, 0);
    double dot = 0;
    for (int d = 0; d < dim; ++d) dot += double{query[d]} * double{centroid[d]};
    shares[static_cast<std::size_t>(c)] = scale * dot;
    most = std::max(most, scale * dot);
  }
  for (int c = 0; c < count; ++c) {
    double& x = shares[static_cast<std::size_t>(c)];
    x = clusters.size(slot, head, c) > 0 ? std::exp(x - most) : 0;
    sum += clusters.size(slot, head, c) * x;
  }
  for (int c = 0; c < count; ++c)
    if (clusters.size(slot, head, c) > 0) shares[static_cast<std::size_t>(c)] /= sum;
}

}  // namespace

void cluster_shares(const PagedKv& kv, View<const float, 4> queries, float scale, const KeyClusters& clusters,
                    Scores out, Workspace& w, Stream s) {
  const char* op = "cluster_shares";
  check_kv(kv, op, s);
  check_clusters(kv, kv.kv_heads, clusters, op);
  if (queries.extent[0] < kv.rows || queries.extent[1] % kv.kv_heads || queries.extent[2] < 1 ||
      queries.extent[3] != kv.head_dim || queries.stride[3] != 1)
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, query, head_dim]");
  check_cluster_scores(kv, out, clusters, op);
  if (s.device() == Device::cuda) return on_cuda<cluster_shares>(kv, queries, scale, clusters, out, w, s);
  const std::int64_t group = queries.extent[1] / kv.kv_heads, count = queries.extent[2];
  std::vector<double> shares(static_cast<std::size_t>(clusters.size.extent[2])), sum(shares.size());
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int made = clusters.bound(kv.slots[r], h, 0);
      std::fill(sum.begin(), sum.end(), 0.);
      for (std::int64_t g = h * group; g < (h + 1) * group; ++g)
        for (std::int64_t i = 0; i < count; ++i) {
          shares_of_query(&queries(r, g, i, 0), kv.head_dim, double{scale}, clusters, kv.slots[r], h, made, shares);
          for (std::size_t c = 0; c < static_cast<std::size_t>(made); ++c) sum[c] += shares[c];
        }
      for (int c = 0; c < made; ++c)
        out(r, h, c) = static_cast<float>(sum[static_cast<std::size_t>(c)] / static_cast<double>(group * count));
    }
}

void share_quantile(const PagedKv& kv, View<const float, 3> shares, double q, const KeyClusters& clusters,
                    View<float, 1> out, Stream s) {
  const char* op = "share_quantile";
  check_kv(kv, op, s);
  const std::int64_t slots = clusters.bound.extent[0], heads = clusters.bound.extent[1];
  check_clusters(kv, heads, clusters, op);
  if (shares.extent != std::array{slots, heads, clusters.size.extent[2]} || shares.stride[2] != 1)
    fail(Errc::internal, op, "got shares of another shape, wanted [slot, head, cluster]");
  if (out.extent[0] < slots) fail(Errc::internal, op, "got too few thresholds, wanted one for each slot");
  if (!(q >= 0 && q <= 1)) fail(Errc::internal, op, "got q " + std::to_string(q) + ", wanted 0 to 1");
  if (s.device() == Device::cuda) return on_cuda<share_quantile>(kv, shares, q, clusters, out, s);
  for (int r = 0; r < kv.rows; ++r) {
    const int slot = kv.slots[r];
    std::vector<std::pair<float, std::int64_t>> tokens;  // of a share
    std::int64_t all = 0;
    for (std::int64_t h = 0; h < heads; ++h)
      for (int c = 0; c < clusters.bound(slot, h, 0); ++c) {
        const float share = shares(slot, h, c);
        tokens.emplace_back(share > 0 ? share : 0.f, clusters.size(slot, h, c));
        all += clusters.size(slot, h, c);
      }
    out(slot) = 0;
    if (all == 0) continue;
    std::sort(tokens.begin(), tokens.end());
    const auto at = [&](std::int64_t place) {
      std::size_t i = 0;
      for (; place >= tokens[i].second; ++i) place -= tokens[i].second;
      return double{tokens[i].first};
    };
    const double place = q * static_cast<double>(all - 1), below = std::floor(place);
    const auto first = static_cast<std::int64_t>(below);
    out(slot) = static_cast<float>(at(first) + (at(std::min(first + 1, all - 1)) - at(first)) * (place - below));
  }
}

void cluster_tokens_above(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                          const KeyClusters& clusters, TokenList list, Stream s) {
  const char* op = "cluster_tokens_above";
  check_kv(kv, op, s);
  check_clusters(kv, kv.kv_heads, clusters, op);
  check_list(kv, list, op);
  check_cluster_scores(kv, shares, clusters, op);
  if (threshold.extent[0] < clusters.bound.extent[0])
    fail(Errc::internal, op, "got too few thresholds, wanted one for each slot");
  if (s.device() == Device::cuda) return on_cuda<cluster_tokens_above>(kv, shares, threshold, clusters, list, s);
  check_room(kv, list, op);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const std::int64_t slot = kv.slots[r];
      const int end = clusters.bound(slot, h, 1), n = kv.tokens(r, h);
      std::vector<bool> read(static_cast<std::size_t>(n));
      for (int t = end; t < n; ++t) read[static_cast<std::size_t>(t)] = true;
      for (int c = 0, i = 0; c < clusters.bound(slot, h, 0); ++c)
        for (const int next = i + clusters.size(slot, h, c); i < next; ++i) {
          const int t = clusters.token(slot, h, i);
          if (t < n && shares(r, h, c) > threshold(slot)) read[static_cast<std::size_t>(t)] = true;
        }
      int kept = 0;
      for (int t = 0; t < n; ++t)
        if (read[static_cast<std::size_t>(t)]) list.index(list.at(r), h, kept++) = t;
      list.count(list.at(r), h) = kept;
    }
}

}  // namespace kvlab::ops
