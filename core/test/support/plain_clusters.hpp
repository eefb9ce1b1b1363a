// k-means of keys by cosine, as kvlab/clusters.hpp says it, in plain loops. Tests of plugins compare with it.
#pragma once
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support/on_text.hpp"

namespace kvlab::test {

struct PlainCluster {
  std::vector<double> centroid;
  std::vector<int> members;
};

// Vigna's form of SplitMix64.
struct SplitMix {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
};

inline void give_out(const std::vector<std::vector<double>>& keys, int from, std::vector<PlainCluster>& clusters) {
  for (PlainCluster& c : clusters) c.members.clear();
  for (std::size_t t = 0; t < keys.size(); ++t) {
    PlainCluster* best = nullptr;
    double most = -2;
    for (PlainCluster& c : clusters) {
      const double cosine = dot(keys[t], c.centroid) / std::sqrt(dot(keys[t], keys[t]) * dot(c.centroid, c.centroid));
      if (cosine > most) most = cosine, best = &c;
    }
    best->members.push_back(from + static_cast<int>(t));
  }
}

// `count` clusters of the keys of places from `from` on, for one KV head.
inline std::vector<PlainCluster> plain_clusters(const std::vector<std::vector<double>>& keys, int from, int count,
                                                int iterations, std::uint64_t seed, int head) {
  SplitMix heads{seed};
  for (int h = 0; h < head; ++h) heads.next();
  SplitMix draws{heads.next()};
  std::vector<PlainCluster> clusters;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const double share = static_cast<double>(draws.next() >> 32) / 4294967296.;
    if (share * static_cast<double>(keys.size() - i) <
        static_cast<double>(count) - static_cast<double>(clusters.size()))
      clusters.push_back({keys[i], {}});
  }
  REQUIRE(static_cast<int>(clusters.size()) == count);
  for (int i = 0; i < iterations; ++i) {
    give_out(keys, from, clusters);
    for (PlainCluster& c : clusters) {
      if (c.members.empty()) continue;
      std::vector<double> mean(keys[0].size());
      for (const int t : c.members)
        for (std::size_t d = 0; d < mean.size(); ++d)
          mean[d] += keys[static_cast<std::size_t>(t - from)][d] / static_cast<double>(c.members.size());
      c.centroid = mean;
    }
  }
  give_out(keys, from, clusters);
  return clusters;
}

inline std::vector<std::vector<double>> keys_of(const OnText& run, int layer, int head, int from, int to) {
  std::vector<std::vector<double>> keys;
  for (int t = from; t < to; ++t)
    keys.push_back(run.layer(layer).keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(head)]);
  return keys;
}

}  // namespace kvlab::test
