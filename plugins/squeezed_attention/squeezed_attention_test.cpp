#include <kvlab/clusters.hpp>

#include <algorithm>

#include "support/plain_clusters.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Vector = std::vector<double>;

// Returns what one query gives a token of each cluster. logits: q . C / sqrt(D).
Vector shares_of(const Vector& logits, const std::vector<std::size_t>& sizes) {
  double sum = 0;
  Vector shares;
  for (std::size_t c = 0; c < logits.size(); ++c) sum += static_cast<double>(sizes[c]) * std::exp(logits[c]);
  for (const double x : logits) shares.push_back(std::exp(x) / sum);
  return shares;
}

// The mean over the group and over the queries at text positions from `from` to `to` - 1.
Vector mean_shares(const OnText& run, int layer, int head, const std::vector<PlainCluster>& clusters, int from,
                   int to) {
  std::vector<std::size_t> sizes;
  for (const PlainCluster& c : clusters) sizes.push_back(c.members.size());
  Vector mean(clusters.size());
  for (int i = from; i < to; ++i)
    for (int g = 0; g < run.group(); ++g) {
      const Vector& q =
          run.layer(layer).queries.at[static_cast<std::size_t>(i)][static_cast<std::size_t>(head * run.group() + g)];
      Vector logits;
      for (const PlainCluster& c : clusters)
        logits.push_back(dot(q, c.centroid) / std::sqrt(static_cast<double>(q.size())));
      const Vector shares = shares_of(logits, sizes);
      for (std::size_t c = 0; c < mean.size(); ++c) mean[c] += shares[c] / run.group() / (to - from);
    }
  return mean;
}

// It interpolates as numpy.quantile does.
double quantile(Vector x, double q) {
  std::sort(x.begin(), x.end());
  const double at = q * static_cast<double>(x.size() - 1);
  const auto i = static_cast<std::size_t>(at);
  return x[i] + (at - static_cast<double>(i)) * (x[std::min(i + 1, x.size() - 1)] - x[i]);
}

std::map<std::string, ParamValue> settings(double percent, double percentile, int window) {
  return {{"percent_clusters", percent},
          {"percentile", percentile},
          {"window", std::int64_t{window}},
          {"iterations", std::int64_t{4}},
          {"seed", std::int64_t{3}}};
}

}  // namespace

TEST_CASE("squeezed_attention: the plain implementation gives the card's shares") {
  // Sizes 3 and 1: 3 * 1 + 1 * 3 = 6.
  const Vector shares = shares_of({0, std::log(3.)}, {3, 1});
  CHECK(shares[0] == Approx(1. / 6));
  CHECK(shares[1] == Approx(1. / 2));
  CHECK(3 * shares[0] + shares[1] == Approx(1));
  CHECK(quantile({shares[0], shares[0], shares[0], shares[1]}, .9) == Approx(.4));
}

TEST_CASE("squeezed_attention reads on real text what a plain implementation reads") {
  constexpr int prompt = 170, steps = 8, window = 20, count = 12;  // 8 % of 150
  const double percentile = GENERATE(.5, .9);
  CAPTURE(percentile);
  OnText run(Role::policy, "squeezed_attention", settings(8, percentile, window), 0, prompt + steps, 8);
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) run.step();
  const int layers = run.config().layers, heads = run.config().kv_heads;
  std::vector<std::vector<PlainCluster>> clusters;  // [layer, head]
  Vector of_tokens;
  for (int i = 0; i < layers * heads; ++i) {
    const int layer = i / heads, head = i % heads;
    clusters.push_back(plain_clusters(keys_of(run, layer, head, 0, prompt - window), 0, count, 4,
                                      (std::uint64_t{3} << 16) + static_cast<std::uint64_t>(layer), head));
    const Vector shares = mean_shares(run, layer, head, clusters.back(), prompt - window, prompt);
    for (std::size_t c = 0; c < shares.size(); ++c)
      of_tokens.insert(of_tokens.end(), clusters.back()[c].members.size(), shares[c]);
  }
  REQUIRE(of_tokens.size() == static_cast<std::size_t>(layers * heads * (prompt - window)));
  const double threshold = quantile(of_tokens, percentile);
  int unsure = 0, read = 0;
  for (int i = 0; i < layers * heads; ++i)
    for (int step = 0; step < steps; ++step) {
      const int layer = i / heads, head = i % heads;
      CAPTURE(layer, head, step);
      const auto& here = clusters[static_cast<std::size_t>(i)];
      const Vector shares = mean_shares(run, layer, head, here, prompt + step, prompt + step + 1);
      std::vector<int> wanted;
      for (std::size_t c = 0; c < shares.size(); ++c) {
        if (shares[c] > threshold) wanted.insert(wanted.end(), here[c].members.begin(), here[c].members.end());
        unsure += std::abs(shares[c] / threshold - 1) < 1e-6;
      }
      read += static_cast<int>(wanted.size());
      for (int t = prompt - window; t <= prompt + step; ++t) wanted.push_back(t);
      std::sort(wanted.begin(), wanted.end());
      CHECK(run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)] == wanted);
      if (step == 0) CHECK(run.kept(layer, head) == positions_to(prompt + steps));
    }
  CHECK(unsure == 0);
  // Later queries are not those that gave the threshold, but they are like them.
  const double part = static_cast<double>(read) / (layers * heads * steps * (prompt - window));
  CHECK(part > (1 - percentile) / 2);
  CHECK(part < (1 - percentile) * 2);
}

TEST_CASE("squeezed_attention: short prompts, one cluster, and what it refuses") {
  const auto read = [](int of_prompt) {
    OnText run(Role::policy, "squeezed_attention", settings(5, .9, 10), 0, 64, 8);
    run.prefill(of_prompt);
    run.step();
    run.step();
    return run.layer(3).read[1][0].size();
  };
  CHECK(read(1) == 1 + 2);
  CHECK(read(10) == 10 + 2);
  // One cluster in each head: its tokens all have the same share, and nothing is above it.
  CHECK(read(11) == 10 + 2);
  CHECK(read(49) == 10 + 2);
  const auto make = [](const std::map<std::string, ParamValue>& params, int budget = 0) {
    OnText(Role::policy, "squeezed_attention", params, budget, 64, 8);
  };
  CHECK_THROWS_WITH(make({{"percent_clusters", 101.}}), Catch::Contains("percent_clusters"));
  CHECK_THROWS_WITH(make({{"percent_clusters", 0.}}), Catch::Contains("percent_clusters"));
  CHECK_THROWS_WITH(make({{"percentile", 1.5}}), Catch::Contains("percentile"));
  CHECK_THROWS_WITH(make({{"window", std::int64_t{0}}}), Catch::Contains("window"));
  CHECK_THROWS_WITH(make({}, 32), Catch::Contains("budget"));
}
