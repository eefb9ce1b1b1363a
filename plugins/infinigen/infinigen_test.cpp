#include "support/on_text.hpp"
#include "support/plain_layers.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 150, steps = 8;

struct Rule {
  double alpha = 4, ratio = .2;
  int cap = 400;
  double cap_share = 1;
  int dense = 2;
};

// Tokens that each head reads beside the step's own. scores: [KV head][token].
std::size_t number_of(const std::vector<Vector>& scores, const Rule& rule) {
  std::size_t all = 0;
  for (const Vector& of_head : scores)
    for (const double x : of_head) all += x > *std::max_element(of_head.begin(), of_head.end()) - rule.alpha;
  const auto share = static_cast<std::size_t>(rule.cap_share * static_cast<double>(scores[0].size()));
  return std::max<std::size_t>(
      1, std::min({all / scores.size(), rule.cap > 0 ? static_cast<std::size_t>(rule.cap) : all, share}));
}

// The channels of a KV head that guess: those of the greatest sums of |q| over the text positions of prompts.
std::vector<int> channels_of(const OnText& run, int layer, int head, double ratio, const std::vector<int>& prompts) {
  Vector sums(static_cast<std::size_t>(run.config().head_dim));
  for (const int i : prompts)
    for (int g = 0; g < run.group(); ++g) {
      const Vector& q =
          run.layer(layer).queries.at[static_cast<std::size_t>(i)][static_cast<std::size_t>(head * run.group() + g)];
      for (std::size_t d = 0; d < sums.size(); ++d) sums[d] += std::abs(q[d]);
    }
  return best(sums, positions_to(run.config().head_dim),
              static_cast<std::size_t>(std::max(1., ratio * run.config().head_dim)));
}

// [KV head][token] of the tokens before `position`. queries: the guessed ones, one head after the other.
std::vector<Vector> scores_of(const OnText& run, int layer, const Vector& queries, int position,
                              const std::vector<std::vector<int>>& channels) {
  const auto dim = static_cast<std::size_t>(run.config().head_dim);
  std::vector<Vector> scores;
  for (int h = 0; h < run.config().kv_heads; ++h) {
    Vector& of_head = scores.emplace_back(static_cast<std::size_t>(position), -INFINITY);
    for (std::size_t t = 0; t < of_head.size(); ++t)
      for (int g = h * run.group(); g < (h + 1) * run.group(); ++g) {
        double sum = 0;
        for (const int d : channels[static_cast<std::size_t>(h)])
          sum += queries[static_cast<std::size_t>(g) * dim + static_cast<std::size_t>(d)] *
                 run.layer(layer).keys.at[t][static_cast<std::size_t>(h)][static_cast<std::size_t>(d)];
        of_head[t] = std::max(of_head[t], sum / std::sqrt(static_cast<double>(dim)));
      }
  }
  return scores;
}

// Returns the mean share of the text that is read.
double check_reads(const std::map<std::string, ParamValue>& params, const Rule& rule, int second = 0) {
  OnText run(Role::policy, "infinigen", params, 0, prompt + steps + second + steps, 8);
  std::vector<int> prompts;
  const auto feed = [&](int from, int tokens) {
    run.prefill(tokens);
    for (int i = 0; i < tokens; ++i) prompts.push_back(from + i);
  };
  feed(0, prompt);
  const ModelConfig& c = run.config();
  const int all = second > 0 ? 2 * steps : steps, dense = rule.dense;
  double share = 0;
  for (int step = 0; step < all; ++step) {
    if (step == steps) feed(prompt + steps, second);
    run.step();
    const int position = prompt + step + (step < steps ? 0 : second);
    Vector x = embedded(run.model(), run.text()[static_cast<std::size_t>(position)]), guessed;
    for (int layer = 0; layer < c.layers; ++layer) {
      CAPTURE(step, layer);
      const auto& here = run.layer(layer);
      const auto& read = here.read[static_cast<std::size_t>(step)];
      if (layer < dense) {
        CHECK(read.empty());
      } else {
        std::vector<std::vector<int>> channels;
        for (int h = 0; h < c.kv_heads; ++h) channels.push_back(channels_of(run, layer, h, rule.ratio, prompts));
        const auto scores = scores_of(run, layer, guessed, position, channels);
        const std::size_t m = number_of(scores, rule);
        for (int h = 0; h < c.kv_heads; ++h) {
          std::vector<int> wanted = best(scores[static_cast<std::size_t>(h)], positions_to(position), m);
          wanted.push_back(position);
          CHECK(read[static_cast<std::size_t>(h)] == wanted);
        }
        share += static_cast<double>(m) / position / all / (c.layers - dense);
      }
      if (layer + 1 == c.layers) break;
      guessed = queries_ahead(run.model(), layer, x, position);
      Vector attended;
      for (const Vector& head : here.outputs.at[static_cast<std::size_t>(step)])
        attended.insert(attended.end(), head.begin(), head.end());
      finish_layer(run.model(), layer, attended, x);
    }
    CHECK(run.kept(c.layers - 1, 0) == positions_to(position + 1));
  }
  return share;
}

}  // namespace

TEST_CASE("infinigen: the plain implementation gives the card's number") {
  const std::vector<Vector> scores{{9, 6.2, 5.1, 4.9, 1}, {3, 2.9, 2.5, -1.5, -.5}};
  const std::size_t m = number_of(scores, {});
  CHECK(m == 3);
  for (const Vector& of_head : scores) CHECK(best(of_head, positions_to(5), m) == std::vector<int>{0, 1, 2});
}

TEST_CASE("infinigen reads on real text what a plain implementation reads") {
  const double some = check_reads({}, {});
  CHECK(some > 0);
  CHECK(some < 1);
  CHECK(check_reads({{"alpha", 1.5}, {"partial_ratio", .35}}, {.alpha = 1.5, .ratio = .35}) < some);
  check_reads({{"alpha", 8.}, {"cap", std::int64_t{11}}}, {.alpha = 8, .cap = 11});
  check_reads({{"alpha", 8.}, {"cap", std::int64_t{0}}, {"cap_share", .125}},
              {.alpha = 8, .cap = 0, .cap_share = .125});
}

TEST_CASE("infinigen: layer 0 guesses for layer 1 where that is not dense, too") {
  check_reads({{"dense_layers", std::int64_t{1}}}, {.dense = 1});
}

TEST_CASE("infinigen: the queries of a second prompt count with those of the first") { check_reads({}, {}, 130); }

TEST_CASE("infinigen: short prompts, and what it refuses") {
  const auto read = [](std::map<std::string, ParamValue> params, int of_prompt, int layer) {
    OnText run(Role::policy, "infinigen", params, 0, 64, 8);
    run.prefill(of_prompt);
    run.step();
    return run.layer(layer).read[0];
  };
  CHECK(read({}, 1, 2)[0].size() == 2);
  // Layer 0 has no layer before it.
  CHECK(read({{"dense_layers", std::int64_t{0}}}, 30, 0).empty());
  CHECK(!read({{"dense_layers", std::int64_t{0}}}, 30, 1).empty());
  CHECK(read({{"dense_layers", std::int64_t{99}}}, 30, 7).empty());
  const auto make = [](const std::map<std::string, ParamValue>& params, int budget = 0) {
    OnText(Role::policy, "infinigen", params, budget, 64, 8);
  };
  CHECK_THROWS_WITH(make({{"alpha", 0.}}), Catch::Contains("alpha"));
  CHECK_THROWS_WITH(make({{"cap_share", 0.}}), Catch::Contains("cap_share"));
  CHECK_THROWS_WITH(make({{"partial_ratio", 1.5}}), Catch::Contains("partial_ratio"));
  CHECK_THROWS_WITH(make({}, 32), Catch::Contains("budget"));
}
