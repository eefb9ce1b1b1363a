// The ops of kvlab/clusters.hpp that work with shares of attention, in plain loops.
#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "ops/page/paged.hpp"
#include "ops/select/clusters.hpp"

namespace kvlab::ops {

void cluster_shares_reference(const PagedKv& kv, View<const float, 4> queries, float scale, const KeyClusters& clusters,
                              Scores out) {
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads, count = static_cast<int>(queries.extent[2]);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r], made = clusters.bound(slot, h, 0);
      std::vector<double> mean(static_cast<std::size_t>(made));
      for (int g = 0; g < group; ++g)
        for (int i = 0; i < count; ++i) {
          // Every token of a cluster lies at its centroid: an ordinary softmax over tokens.
          std::vector<double> logit, of_token;
          for (int c = 0; c < made; ++c) {
            double dot = 0;
            for (int d = 0; d < kv.head_dim; ++d)
              dot += double{queries(r, h * group + g, i, d)} * double{clusters.centroid(slot, h, c, d)};
            logit.push_back(dot * double{scale});
            of_token.insert(of_token.end(), static_cast<std::size_t>(clusters.size(slot, h, c)), logit.back());
          }
          double most = -INFINITY, sum = 0;
          for (const double x : of_token) most = std::max(most, x);
          for (const double x : of_token) sum += std::exp(x - most);
          for (int c = 0; c < made; ++c)
            if (clusters.size(slot, h, c) > 0)
              mean[static_cast<std::size_t>(c)] +=
                  std::exp(logit[static_cast<std::size_t>(c)] - most) / sum / group / count;
        }
      for (int c = 0; c < made; ++c) out(r, h, c) = static_cast<float>(mean[static_cast<std::size_t>(c)]);
    }
}

void share_quantile_reference(const PagedKv& kv, View<const float, 3> shares, double q, const KeyClusters& clusters,
                              View<float, 1> out) {
  for (int r = 0; r < kv.rows; ++r) {
    const int slot = kv.slots[r];
    std::vector<double> tokens;
    for (std::int64_t h = 0; h < clusters.bound.extent[1]; ++h)
      for (int c = 0; c < clusters.bound(slot, h, 0); ++c)
        for (int i = 0; i < clusters.size(slot, h, c); ++i)
          tokens.push_back(shares(slot, h, c) > 0 ? shares(slot, h, c) : 0.);
    std::sort(tokens.begin(), tokens.end());
    out(slot) = 0;
    if (tokens.empty()) continue;
    const double place = q * (static_cast<double>(tokens.size()) - 1);
    const auto below = static_cast<std::size_t>(place), above = std::min(below + 1, tokens.size() - 1);
    const double part = place - static_cast<double>(below);
    out(slot) = static_cast<float>(tokens[below] * (1 - part) + tokens[above] * part);
  }
}

void cluster_tokens_above_reference(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                                    const KeyClusters& clusters, TokenList list) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int slot = kv.slots[r];
      std::set<int> read;
      for (int t = clusters.bound(slot, h, 1); t < kv.tokens(r, h); ++t) read.insert(t);
      int at = 0;
      for (int c = 0; c < clusters.bound(slot, h, 0); ++c)
        for (int i = 0; i < clusters.size(slot, h, c); ++i, ++at)
          if (shares(r, h, c) > threshold(slot)) read.insert(clusters.token(slot, h, at));
      int count = 0;
      for (const int t : read) list.index(list.at(r), h, count++) = t;
      list.count(list.at(r), h) = count;
    }
}

}  // namespace kvlab::ops
