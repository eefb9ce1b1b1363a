// The ops of kvlab/clusters.hpp in plain loops.
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "ops/page/paged.hpp"
#include "ops/select/clusters.hpp"

namespace kvlab::ops {
namespace {

std::uint64_t next(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

double cosine(const std::vector<double>& a, const std::vector<double>& b) {
  double dot = 0, aa = 0, bb = 0;
  for (std::size_t d = 0; d < a.size(); ++d) dot += a[d] * b[d], aa += a[d] * a[d], bb += b[d] * b[d];
  return aa > 0 && bb > 0 ? dot / std::sqrt(aa) / std::sqrt(bb) : 0;
}

std::vector<int> labels(const std::vector<std::vector<double>>& keys,
                        const std::vector<std::vector<double>>& centroids) {
  std::vector<int> label;
  for (const auto& key : keys) {
    int best = 0;
    for (std::size_t c = 1; c < centroids.size(); ++c)
      if (cosine(key, centroids[c]) > cosine(key, centroids[static_cast<std::size_t>(best)]) + 1e-14)
        best = static_cast<int>(c);
    label.push_back(best);
  }
  return label;
}

using Rows = std::vector<std::vector<double>>;

// Centroids and labels of rows, of the KV head whose draws these are.
std::pair<Rows, std::vector<int>> k_means(const Rows& rows, int count, int iterations, std::uint64_t draws) {
  Rows centroids;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double number = static_cast<double>(next(draws) >> 32);
    const int left = count - static_cast<int>(centroids.size());
    if (number * static_cast<double>(rows.size() - i) < std::ldexp(left, 32)) centroids.push_back(rows[i]);
  }
  for (int i = 0; i < iterations; ++i) {
    const std::vector<int> label = labels(rows, centroids);
    for (std::size_t c = 0; c < centroids.size(); ++c) {
      std::vector<double> sum(centroids[c].size());
      int members = 0;
      for (std::size_t t = 0; t < rows.size(); ++t)
        if (label[t] == static_cast<int>(c)) {
          ++members;
          for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += rows[t][d];
        }
      for (std::size_t d = 0; members && d < sum.size(); ++d)
        centroids[c][d] = static_cast<float>(sum[d] / members);  // centroids are f32
    }
  }
  return {centroids, labels(rows, centroids)};
}

}  // namespace

void cluster_keys_reference(const PagedKv& kv, const std::vector<ClusterRange>& ranges, const ClusterRule& rule,
                            const KeyClusters& out) {
  for (int r = 0; r < kv.rows; ++r) {
    const ClusterRange& range = ranges[static_cast<std::size_t>(r)];
    if (range.clusters < 0) continue;
    std::uint64_t heads = rule.seed;
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r];
      std::uint64_t draws = next(heads);
      const int from = range.append ? out.bound(slot, h, 1) : range.from,
                first = range.append ? out.bound(slot, h, 0) : 0;
      if (from + range.tokens > kv.tokens(r, h) || first + range.clusters > out.size.extent[2]) continue;
      Rows keys;
      for (int t = from; t < from + range.tokens; ++t) {
        const PageEntry& e = kv.entry(r, h, t / kv.page_size);
        std::vector<float> row(static_cast<std::size_t>(kv.head_dim));
        read_row(kv.frame(e), kv.layout(e), KvSide::key, t % kv.page_size, row.data());
        keys.emplace_back(row.begin(), row.end());
      }
      const auto [centroids, label] = k_means(keys, range.clusters, rule.iterations, draws);
      int at = 0;
      for (int c = 0; c < first; ++c) at += out.size(slot, h, c);
      for (int c = 0; c < range.clusters; ++c) {
        const int start = at;
        for (int t = 0; t < range.tokens; ++t)
          if (label[static_cast<std::size_t>(t)] == c) out.token(slot, h, at++) = from + t;
        out.size(slot, h, first + c) = at - start;
        for (int d = 0; d < kv.head_dim; ++d)
          out.centroid(slot, h, first + c, d) =
              static_cast<float>(centroids[static_cast<std::size_t>(c)][static_cast<std::size_t>(d)]);
      }
      out.bound(slot, h, 0) = first + range.clusters;
      out.bound(slot, h, 1) = from + range.tokens;
    }
  }
}

void cluster_centroids_reference(const PagedKv& kv, const KeyClusters& finer, const std::vector<ClusterRange>& ranges,
                                 const ClusterRule& rule, const KeyClusters& coarse) {
  for (int r = 0; r < kv.rows; ++r) {
    const ClusterRange& range = ranges[static_cast<std::size_t>(r)];
    std::uint64_t heads = rule.seed;
    for (int h = 0; h < kv.kv_heads && range.clusters >= 0; ++h) {
      const int slot = kv.slots[r];
      const std::uint64_t draws = next(heads);
      if (range.tokens > finer.bound(slot, h, 0)) continue;
      Rows rows;
      for (int c = 0; c < range.tokens; ++c) {
        const float* centroid = &finer.centroid(slot, h, c, 0);
        rows.emplace_back(centroid, centroid + kv.head_dim);
      }
      const auto [centroids, label] = k_means(rows, range.clusters, rule.iterations, draws);
      for (int c = 0; c < range.clusters; ++c) {
        coarse.size(slot, h, c) = 0;
        for (int d = 0; d < kv.head_dim; ++d)
          coarse.centroid(slot, h, c, d) =
              static_cast<float>(centroids[static_cast<std::size_t>(c)][static_cast<std::size_t>(d)]);
      }
      for (int c = 0; c < range.tokens; ++c) {
        const int of = coarse.token(slot, h, c) = label[static_cast<std::size_t>(c)];
        coarse.size(slot, h, of) += finer.size(slot, h, c);
      }
      coarse.bound(slot, h, 0) = range.clusters, coarse.bound(slot, h, 1) = range.tokens;
    }
  }
}

void sizes_within_reference(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                            const KeyClusters& coarse, const KeyClusters& finer, View<std::int32_t, 3> out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int slot = kv.slots[r], c = 0; c < finer.bound(slot, h, 0); ++c) {
        out(slot, h, c) = finer.size(slot, h, c);
        if (c < coarse.bound(slot, h, 1) && !(shares(r, h, coarse.token(slot, h, c)) > threshold(slot)))
          out(slot, h, c) = 0;
      }
}

void cluster_scores_reference(const PagedKv& kv, View<const float, 3> queries, const KeyClusters& clusters,
                              Scores out) {
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int c = 0; c < clusters.bound(kv.slots[r], h, 0); ++c) {
        double sum = 0;
        for (int d = 0; d < kv.head_dim; ++d) {
          double mean = 0;
          for (int g = 0; g < group; ++g) mean += double{queries(r, h * group + g, d)} / group;
          sum += mean * double{clusters.centroid(kv.slots[r], h, c, d)};
        }
        out(r, h, c) = static_cast<float>(sum);
      }
}

void cluster_tokens_reference(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most,
                              int first, const KeyClusters& clusters, TokenList list) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r];
      std::map<int, std::vector<int>> places;
      int at = 0;
      for (int c = 0; c < clusters.bound(slot, h, 0); ++c)
        for (int i = 0; i < clusters.size(slot, h, c); ++i) places[c].push_back(clusters.token(slot, h, at++));
      std::set<int> read;
      for (int t = 0; t < kv.tokens(r, h); ++t)
        if (t < first || t >= clusters.bound(slot, h, 1)) read.insert(t);
      std::set<int> waiting;
      for (int c = 0; c < clusters.bound(slot, h, 0); ++c) waiting.insert(c);
      for (int left = most(r, h); left > 0 && !waiting.empty();) {
        int best = -1;
        for (const int c : waiting)
          if (best < 0 || scores(r, h, c) > scores(r, h, best) ||
              (std::isnan(scores(r, h, best)) && !std::isnan(scores(r, h, c))))
            best = c;
        waiting.erase(best);
        for (const int t : places[best])
          if (left > 0) read.insert(t), --left;
      }
      int count = 0;
      for (const int t : read) list.index(list.at(r), h, count++) = t;
      list.count(list.at(r), h) = count;
    }
}

}  // namespace kvlab::ops
