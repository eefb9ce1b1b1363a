#include <kvlab/clusters.hpp>

#include <algorithm>

#include "support/plain_clusters.hpp"
#include "support/quantile.hpp"

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

// The same for queries one by one, of clusters that a coarser level leaves. The others count for nothing.
std::vector<PlainCluster> left_by(const std::vector<PlainCluster>& coarse, const Vector& coarse_shares,
                                  double threshold, std::vector<PlainCluster> finer) {
  for (std::size_t c = 0; c < coarse.size(); ++c)
    if (!(coarse_shares[c] > threshold))
      for (const int f : coarse[c].members) finer[static_cast<std::size_t>(f)].members.clear();
  return finer;
}

// Coarse clusters of centroids, whose members become the tokens of these clusters.
std::vector<PlainCluster> with_tokens(std::vector<PlainCluster> coarse, const std::vector<PlainCluster>& finer) {
  for (PlainCluster& c : coarse) {
    std::vector<int> tokens;
    for (const int f : c.members) {
      const auto& of = finer[static_cast<std::size_t>(f)].members;
      tokens.insert(tokens.end(), of.begin(), of.end());
    }
    c.members = tokens;
  }
  return coarse;
}

// One entry for each token of the clusters.
void add_tokens(const std::vector<PlainCluster>& clusters, const Vector& shares, Vector& to) {
  for (std::size_t c = 0; c < shares.size(); ++c) to.insert(to.end(), clusters[c].members.size(), shares[c]);
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
  CHECK(plain_quantile(Vector{shares[0], shares[0], shares[0], shares[1]}, .9) == Approx(.4));
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
  const double threshold = plain_quantile(of_tokens, percentile);
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

TEST_CASE("squeezed_attention with offload reads the same, and the device holds the pages of it") {
  constexpr int prompt = 170, steps = 6, page = 8;
  const auto run_with = [&](bool offload) {
    auto given = settings(8, .8, 20);
    given["offload"] = offload;
    auto run = std::make_unique<OnText>(Role::policy, "squeezed_attention", given, 0, prompt + steps, page);
    run->prefill(prompt);
    for (int step = 0; step < steps; ++step) run->step();
    return run;
  };
  const auto away = run_with(true), here = run_with(false);
  CHECK(here->ledger().moved_total(Tier::host) == 0);
  std::size_t on_device = 0, all = 0;
  for (int layer = 0; layer < away->config().layers; ++layer) {
    CHECK(away->layer(layer).read == here->layer(layer).read);
    CHECK(away->layer(layer).outputs.at == here->layer(layer).outputs.at);
    for (int head = 0; head < away->config().kv_heads; ++head) {
      std::set<int> pages;
      for (const int t : away->layer(layer).read.back()[static_cast<std::size_t>(head)]) pages.insert(t / page);
      const auto device = away->pages_on(Tier::device, layer, head);
      CHECK(std::set<int>(device.begin(), device.end()) == pages);
      CHECK(away->pages_on(Tier::host, layer, head).size() >= (prompt + steps - 1) / page);
      on_device += pages.size(), all += (prompt + steps + page - 1) / page;
    }
  }
  CHECK(on_device < all);
}

TEST_CASE("squeezed_attention: coarse clusters rule out finer ones on real text as a plain implementation does") {
  constexpr int prompt = 170, steps = 6, window = 20, count = 24, coarse_count = 6;  // 16 % and 4 % of 150
  auto given = settings(16, .7, window);
  given["percent_coarse"] = 4.;
  given["percentile_coarse"] = .5;
  OnText run(Role::policy, "squeezed_attention", given, 0, prompt + steps, 8);
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) run.step();
  const int layers = run.config().layers, heads = run.config().kv_heads;
  std::vector<std::vector<PlainCluster>> fine, coarse;  // [layer, head]
  Vector of_fine, of_coarse;
  for (int i = 0; i < layers * heads; ++i) {
    const int layer = i / heads, head = i % heads;
    const std::uint64_t seed = (std::uint64_t{3} << 16) + static_cast<std::uint64_t>(layer);
    fine.push_back(plain_clusters(keys_of(run, layer, head, 0, prompt - window), 0, count, 4, seed, head));
    std::vector<Vector> centroids;
    for (const PlainCluster& c : fine.back()) centroids.push_back(c.centroid);
    coarse.push_back(plain_clusters(centroids, 0, coarse_count, 4, seed + 32768, head));
    const auto tokens = with_tokens(coarse.back(), fine.back());
    add_tokens(fine.back(), mean_shares(run, layer, head, fine.back(), prompt - window, prompt), of_fine);
    add_tokens(tokens, mean_shares(run, layer, head, tokens, prompt - window, prompt), of_coarse);
  }
  const double threshold = plain_quantile(of_fine, .7), low = plain_quantile(of_coarse, .5);
  int unsure = 0, ruled_out = 0;
  for (int i = 0; i < layers * heads; ++i)
    for (int step = 0; step < steps; ++step) {
      const int layer = i / heads, head = i % heads, at = prompt + step;
      CAPTURE(layer, head, step);
      const auto &here = fine[static_cast<std::size_t>(i)], &above = coarse[static_cast<std::size_t>(i)];
      const Vector first = mean_shares(run, layer, head, with_tokens(above, here), at, at + 1);
      for (const double x : first) unsure += std::abs(x / low - 1) < 1e-6;
      const auto left = left_by(above, first, low, here);
      const Vector shares = mean_shares(run, layer, head, left, at, at + 1),
                   flat = mean_shares(run, layer, head, here, at, at + 1);
      std::vector<int> wanted;
      for (std::size_t c = 0; c < shares.size(); ++c) {
        const auto& members = left[c].members;
        if (shares[c] > threshold) wanted.insert(wanted.end(), members.begin(), members.end());
        ruled_out += flat[c] > threshold && members.empty() && !here[c].members.empty();
        unsure += std::abs(shares[c] / threshold - 1) < 1e-6;
      }
      for (int t = prompt - window; t <= at; ++t) wanted.push_back(t);
      std::sort(wanted.begin(), wanted.end());
      CHECK(run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)] == wanted);
    }
  CHECK(unsure == 0);
  CHECK(ruled_out > 0);
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
  CHECK_THROWS_WITH(make({{"percent_coarse", 5.}}),
                    Catch::Contains("got percent_coarse 5.000000, wanted less than percent_clusters, 5.000000"));
  CHECK_THROWS_WITH(make({}, 32), Catch::Contains("budget"));
}
