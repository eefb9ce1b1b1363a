#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 150, steps = 20, page_size = 8;

struct Rule {
  double p = .85f;  // the op's share is an f32
  bool int4 = true;
  int tokens = 64;  // of the candidates; 0 = a quarter of the text
};

// The fewest of the weights, best first, that make up p of their sum, as ascending places.
std::vector<int> fewest(const std::vector<double>& weights, double p) {
  double all = 0, sum = 0;
  for (const double w : weights) all += w;
  for (std::size_t n = 1; n <= weights.size(); ++n) {
    const std::vector<int> kept = best(weights, positions_to(static_cast<int>(weights.size())), n);
    sum = 0;
    for (const int t : kept) sum += weights[static_cast<std::size_t>(t)];
    if (sum >= p * all * (1 - 1e-12)) return kept;
  }
  return positions_to(static_cast<int>(weights.size()));
}

// A key as 4-bit codes of its elements give it.
std::vector<double> rounded(const std::vector<double>& key) {
  const auto [least, greatest] = std::minmax_element(key.begin(), key.end());
  const auto low = static_cast<float>(*least), scale = (static_cast<float>(*greatest) - low) / 15;
  std::vector<double> out;
  for (const double x : key) out.push_back(low + double{scale} * std::nearbyint((static_cast<float>(x) - low) / scale));
  return out;
}

std::vector<int> tokens_of_head(const OnText& run, int layer, int head, int position, const Rule& rule) {
  const auto& seen = run.layer(layer);
  const int n = position + 1, pages = (n + page_size - 1) / page_size;
  std::vector<double> most(static_cast<std::size_t>(pages), -INFINITY);
  for (const auto& of_query :
       page_bounds(seen.queries, seen.keys, static_cast<std::size_t>(position), head, run.group(), page_size))
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], of_query[i]);
  most.back() = INFINITY;
  const int wanted = std::max(1, (rule.tokens > 0 ? rule.tokens : n / 4) / page_size);
  std::vector<int> candidates;
  for (const int page : best(most, positions_to(pages), static_cast<std::size_t>(std::min(wanted, pages))))
    for (int t = page * page_size; t < std::min(n, (page + 1) * page_size); ++t) candidates.push_back(t);
  std::set<int> read{position};
  for (int g = 0; g < run.group(); ++g) {
    const auto& q =
        seen.queries.at[static_cast<std::size_t>(position)][static_cast<std::size_t>(head * run.group() + g)];
    std::vector<double> logits;
    for (const int t : candidates) {
      const auto& key = seen.keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(head)];
      logits.push_back(dot(q, rule.int4 ? rounded(key) : key) / std::sqrt(static_cast<double>(q.size())));
    }
    for (const int i : fewest(softmax(logits), rule.p)) read.insert(candidates[static_cast<std::size_t>(i)]);
  }
  return {read.begin(), read.end()};
}

void check_reads(std::map<std::string, ParamValue> params, const Rule& rule) {
  params["dense_layers"] = std::int64_t{1}, params["tokens"] = std::int64_t{rule.tokens};
  OnText run(Role::policy, "twilight", params, 0, prompt + steps, page_size);
  run.prefill(prompt);
  int pruned = 0, reads = 0;
  Rule all = rule;
  all.p = 1;
  for (int step = 0; step < steps; ++step) {
    run.step();
    CHECK(run.layer(0).read[static_cast<std::size_t>(step)].empty());
    for (int layer = 1; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(step, layer, head);
        const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
        CHECK(read == tokens_of_head(run, layer, head, prompt + step, rule));
        CHECK(run.kept(layer, head) == positions_to(prompt + step + 1));
        pruned += read.size() < tokens_of_head(run, layer, head, prompt + step, all).size();
        ++reads;
      }
  }
  if (rule.p < 1)
    CHECK(pruned > reads / 2);
  else
    CHECK(pruned == 0);
}

}  // namespace

TEST_CASE("twilight: the card's weights and codes") {
  const std::vector<double> w{10, 4, 3, 2, 1};  // .5, .2, .15, .1, .05 in twentieths
  CHECK(fewest(w, .8) == std::vector<int>{0, 1, 2});
  CHECK(fewest(w, .6) == std::vector<int>{0, 1});
  CHECK(fewest(w, .5) == std::vector<int>{0});
  const auto key = rounded({-1.5, .13, 1.5});
  CHECK(key[0] == Approx(-1.5));
  CHECK(key[1] == Approx(.1));
  CHECK(key[2] == Approx(1.5));
}

TEST_CASE("twilight reads on real text what a plain implementation reads") {
  check_reads({}, {});
  check_reads({{"p", .5}, {"estimate", std::string("exact")}}, {.p = .5, .int4 = false});
  check_reads({{"p", .95}}, {.p = .95f, .tokens = 0});
}

TEST_CASE("twilight: p = 1 reads all candidates, and so does no top_p") {
  check_reads({{"p", 1.}}, {.p = 1});
  check_reads({{"top_p", false}, {"estimate", std::string("exact")}}, {.p = 1, .int4 = false});
}

TEST_CASE("twilight: short prompts, and what it cannot obey") {
  OnText run(Role::policy, "twilight", {{"p", .001}}, 0, 64, page_size);
  run.prefill(1);
  run.step();
  CHECK(run.layer(0).read[0].empty());
  for (const auto& head : run.layer(2).read[0]) {
    CHECK(head.size() <= 2);
    CHECK(head.back() == 1);
  }
  const auto with = [](std::map<std::string, ParamValue> params, int budget) {
    return OnText(Role::policy, "twilight", params, budget, 64, page_size);
  };
  CHECK_THROWS_WITH(with({{"tokens", std::int64_t{7}}}, 0),
                    Catch::Contains("got tokens 7, wanted 0 or at least 8, those of a page"));
  CHECK_THROWS_WITH(with({}, 64), Catch::Contains("got a budget for a policy that decides by itself"));
}
