// SubGen beside a plain implementation of the paper's stream, and of attention that reads its two estimates.
#include <kvlab/random.hpp>

#include "support/plain_clusters.hpp"
#include "support/recorded.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Row = std::vector<double>;

constexpr int prompt = 70, steps = 12, sinks = 2, window = 10, most_clusters = 6, samples = 2, values = 5;

std::map<std::string, ParamValue> settings(double radius, std::map<std::string, ParamValue> more = {}) {
  more.insert({{"radius", radius},
               {"clusters", std::int64_t{most_clusters}},
               {"samples", std::int64_t{samples}},
               {"values", std::int64_t{values}},
               {"sinks", std::int64_t{sinks}},
               {"window", std::int64_t{window}},
               {"seed", std::int64_t{9}}});
  return more;
}

double squared(const Row& x) { return dot(x, x); }

// Draws of text position p in a KV head: fractions, by number.
class Draws {
 public:
  Draws(int layer, int head, int p) {
    const auto number = [](std::uint64_t start, int i) {
      SplitMix numbers{start};
      for (int k = 0; k < i; ++k) numbers.next();
      return numbers.next();
    };
    const std::uint64_t of_sequence = Random(9, 0).next();
    const std::uint64_t key = Random(of_sequence, static_cast<std::uint32_t>(layer)).next();
    SplitMix numbers{number(number(key, head), p)};
    for (int i = 0; i < samples + values; ++i) at.push_back(static_cast<double>(numbers.next() >> 32) / 4294967296.);
  }
  Row at;
};

struct Sketch {
  struct Cluster {
    Row centre;
    int count = 0;
    std::vector<Row> members = std::vector<Row>(samples);
  };
  std::vector<Cluster> clusters;
  std::vector<std::pair<Row, Row>> drawn = std::vector<std::pair<Row, Row>>(values);  // key, value
  double mu = 0;

  void add(const Row& key, const Row& value, double radius, const Draws& draws) {
    Cluster* nearest = nullptr;
    double least = INFINITY;
    for (Cluster& c : clusters) {
      Row away = key;
      for (std::size_t d = 0; d < away.size(); ++d) away[d] -= c.centre[d];
      if (std::sqrt(squared(away)) < least) least = std::sqrt(squared(away)), nearest = &c;
    }
    if (!nearest || (least > radius && clusters.size() < most_clusters))
      clusters.push_back({key}), nearest = &clusters.back();
    ++nearest->count;
    for (std::size_t i = 0; i < samples; ++i)
      if (draws.at[i] < 1. / nearest->count) nearest->members[i] = key;
    mu += squared(value);
    for (std::size_t j = 0; j < values; ++j)
      if (draws.at[samples + j] < squared(value) / mu) drawn[j] = {key, value};
  }
};

// Attention of a query to tokens of the cache and to the sketch.
Row attention(const Recorded::Layer& l, const Row& q, int kv_head, const std::vector<int>& read, const Sketch& sketch) {
  const auto weight = [&](const Row& key) { return std::exp(dot(q, key) / std::sqrt(static_cast<double>(q.size()))); };
  Row out(q.size(), 0);
  double total = 0;
  const auto add = [&](const Row& v, double w) {
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += w * v[d];
  };
  for (const int t : read) {
    const double w = weight(l.keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(kv_head)]);
    add(l.values.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(kv_head)], w);
    total += w;
  }
  for (const auto& c : sketch.clusters)
    for (const Row& key : c.members) total += weight(key) * c.count / samples;
  for (const auto& [key, value] : sketch.drawn)
    if (!key.empty()) add(value, sketch.mu / values * weight(key) / squared(value));
  for (double& x : out) x /= total;
  return out;
}

}  // namespace

// The card: one cluster of two keys of zeros, and both values drawn once: 6.667 / 2.
TEST_CASE("subgen: the plain implementation gives the card's estimate") {
  Sketch sketch;
  sketch.clusters.push_back({{0}, 2, {{0}, {0}}});
  sketch.mu = 10;
  sketch.drawn = {{{0}, {1}}, {{0}, {3}}};
  // The plain implementation has five samples; two of them stand for all here, so mu grows by 5 / 2.
  sketch.mu *= values / 2.;
  CHECK(attention({}, {0}, 0, {}, sketch)[0] == Approx(10. / 3));
}

TEST_CASE("subgen attends as a plain implementation of the stream does") {
  const double radius = GENERATE(0., 4., 1000.);
  CAPTURE(radius);
  Recorded run("subgen", settings(radius), {}, prompt + 2 * steps);
  run.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
  // A saved sequence keeps its sketches and goes on with the same draws.
  Recorded later("subgen", settings(radius), {}, prompt + 2 * steps);
  later.layers = run.layers;
  later.restore(run.save(), prompt + steps);
  for (int i = 0; i < 3; ++i) later.step();
  const int heads = run.config().heads, group = heads / run.config().kv_heads;
  int changed = 0, most = 0;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      const Recorded::Layer& l = later.layers[static_cast<std::size_t>(layer)];
      Sketch sketch;
      int joined = sinks;
      for (int p = prompt; p < prompt + steps + 3; ++p) {
        std::vector<int> read;
        for (; joined < p - window; ++joined)
          sketch.add(l.keys.at[static_cast<std::size_t>(joined)][static_cast<std::size_t>(head)],
                     l.values.at[static_cast<std::size_t>(joined)][static_cast<std::size_t>(head)], radius,
                     Draws(layer, head, joined));
        for (int t = 0; t <= p; ++t)
          if (t < sinks || t >= p - window) read.push_back(t);
        for (int h = head * group; h < (head + 1) * group; ++h) {
          CAPTURE(layer, h, p);
          const Row& q = l.queries.at[static_cast<std::size_t>(p)][static_cast<std::size_t>(h)];
          const Row& got = l.outputs.at[static_cast<std::size_t>(p)][static_cast<std::size_t>(h)];
          const Row wanted = attention(l, q, head, read, sketch);
          REQUIRE(farthest(got, wanted) < 1e-4 * (1 + std::sqrt(squared(wanted))));
          changed += farthest(wanted, attention(l, q, head, read, Sketch())) > 1e-2;
        }
      }
      most = std::max(most, static_cast<int>(sketch.clusters.size()));
      std::vector<int> kept;
      for (int t = 0; t < prompt + steps; ++t)
        if (t < sinks || t >= prompt + steps - window) kept.push_back(t);
      CHECK(run.kept(layer, head) == kept);
    }
  CHECK(changed > 0);
  CHECK(most == (radius == 1000 ? 1 : most_clusters));
}

TEST_CASE("subgen: short texts stay whole, no sketch is streaming_llm, and what it refuses") {
  Recorded run("subgen", settings(4, {{"sketch", false}}), {}, 40);
  run.prefill(sinks + window);
  CHECK(run.kept(0, 0) == positions_to(sinks + window));
  run.step();
  auto kept = positions_to(sinks + window + 1);
  kept.erase(kept.begin() + sinks);
  CHECK(run.kept(0, 0) == kept);
  const auto make = [](const std::map<std::string, ParamValue>& params) { Recorded("subgen", params, {}, 40); };
  CHECK_THROWS_WITH(make({{"clusters", std::int64_t{0}}}), Catch::Contains("clusters"));
  CHECK_THROWS_WITH(make({{"samples", std::int64_t{0}}}), Catch::Contains("samples"));
  CHECK_THROWS_WITH(make({{"values", std::int64_t{0}}}), Catch::Contains("values"));
  CHECK_THROWS_WITH(make({{"radius", -1.}}), Catch::Contains("radius"));
}

TEST_CASE("k_center keeps on real text what a plain greedy k-center keeps") {
  constexpr int tokens = 130, budget = 40;
  const double share = GENERATE(0.5, 0.);
  const int first = GENERATE(0, 3), newest = static_cast<int>(share * budget);
  CAPTURE(share, first);
  OnText run("k_center", {{"recent", share}, {"sinks", std::int64_t{first}}}, budget, tokens + 1);
  run.prefill(tokens);
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      const auto& keys = run.layer(layer).keys.at;
      std::vector<int> kept;
      std::vector<double> nearest(tokens, INFINITY);
      for (int t = 0; t < tokens; ++t)
        if (t < first || t >= tokens - newest) kept.push_back(t), nearest[static_cast<std::size_t>(t)] = -1;
      while (std::ssize(kept) < budget) {
        const auto far = static_cast<std::size_t>(std::max_element(nearest.begin(), nearest.end()) - nearest.begin());
        kept.push_back(static_cast<int>(far));
        for (std::size_t t = 0; t < tokens; ++t) {
          std::vector<double> apart = keys[t][static_cast<std::size_t>(head)];
          for (std::size_t d = 0; d < apart.size(); ++d) apart[d] -= keys[far][static_cast<std::size_t>(head)][d];
          nearest[t] = std::min(nearest[t], dot(apart, apart));
        }
        nearest[far] = -1;
      }
      std::sort(kept.begin(), kept.end());
      CHECK(run.kept(layer, head) == kept);
    }
}
