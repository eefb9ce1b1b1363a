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

// The best pages of a head, as many tokens of them as it gets, by quest's bounds.
std::vector<int> tokens_of_pages(const OnText& run, int layer, int head, int position, int tokens, bool newest) {
  const auto& seen = run.layer(layer);
  const int n = position + 1, pages = (n + page_size - 1) / page_size;
  std::vector<double> most(static_cast<std::size_t>(pages), -INFINITY);
  for (const auto& of_query :
       page_bounds(seen.queries, seen.keys, static_cast<std::size_t>(position), head, run.group(), page_size))
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], of_query[i]);
  if (newest) most.back() = INFINITY;
  const int wanted = std::max(1, tokens / page_size);
  std::vector<int> candidates;
  for (const int page : best(most, positions_to(pages), static_cast<std::size_t>(std::min(wanted, pages))))
    for (int t = page * page_size; t < std::min(n, (page + 1) * page_size); ++t) candidates.push_back(t);
  return candidates;
}

// What the query heads of a KV head take of the candidates, and the newest token.
std::vector<int> pruned(const OnText& run, int layer, int head, int position, const std::vector<int>& candidates,
                        double p, bool int4) {
  const auto& seen = run.layer(layer);
  std::set<int> read{position};
  for (int g = 0; g < run.group(); ++g) {
    const auto& q =
        seen.queries.at[static_cast<std::size_t>(position)][static_cast<std::size_t>(head * run.group() + g)];
    std::vector<double> logits;
    for (const int t : candidates) {
      const auto& key = seen.keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(head)];
      logits.push_back(dot(q, int4 ? rounded(key) : key) / std::sqrt(static_cast<double>(q.size())));
    }
    for (const int i : fewest(softmax(logits), p)) read.insert(candidates[static_cast<std::size_t>(i)]);
  }
  return {read.begin(), read.end()};
}

std::vector<int> tokens_of_head(const OnText& run, int layer, int head, int position, const Rule& rule) {
  const int tokens = rule.tokens > 0 ? rule.tokens : (position + 1) / 4;
  return pruned(run, layer, head, position, tokens_of_pages(run, layer, head, position, tokens, true), rule.p,
                rule.int4);
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

using Candidates = std::function<std::vector<int>(const OnText& run, int layer, int head, int position)>;

// A run of another method under twilight. `first`: layers that twilight leaves alone. Those from `begins` on have
// lists.
struct Under {
  Role role = Role::selector;
  std::string name;
  std::map<std::string, ParamValue> params;
  int budget = 0, begins = 0, first = 0;
  float p = .85f;
};

OnText run_under(const Under& u) {
  return OnText(u.role, u.name, u.params, u.budget, prompt + steps, page_size,
                OnText::Second{.role = Role::pruner,
                               .name = "twilight",
                               .params = {{"p", double{u.p}}, {"dense_layers", std::int64_t{u.first}}}});
}

// also: tokens that are read in any case.
void check_prunes(const Under& u, const Candidates& candidates, const Candidates& also = {}) {
  OnText run = run_under(u);
  run.prefill(100);  // a prompt of two chunks
  run.prefill(prompt - 100);
  int fewer = 0;
  for (int step = 0; step < steps; ++step) {
    run.step();
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(u.name, step, layer, head);
        const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)];
        CHECK(run.kept(layer, head) == positions_to(prompt + step + 1));
        if (layer < u.begins) {
          CHECK(read.empty());
          continue;
        }
        const std::vector<int> of = candidates(run, layer, head, prompt + step);
        const std::vector<int>& got = read[static_cast<std::size_t>(head)];
        if (layer < u.first) {  // a list of pages, as the first method gives it
          std::vector<int> tokens;
          for (const int page : got)
            for (int t = page * page_size; t < std::min(prompt + step + 1, (page + 1) * page_size); ++t)
              tokens.push_back(t);
          CHECK(tokens == of);
          continue;
        }
        std::vector<int> wanted = pruned(run, layer, head, prompt + step, of, u.p, true);
        if (also) {
          std::set<int> all(wanted.begin(), wanted.end());
          for (const int t : also(run, layer, head, prompt + step)) all.insert(t);
          wanted.assign(all.begin(), all.end());
        }
        CHECK(got == wanted);
        fewer += wanted.size() < of.size();
      }
  }
  CHECK(fewer > steps);
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

TEST_CASE("twilight prunes the pages of a selector") {
  const Candidates pages = [](const OnText& run, int layer, int head, int position) {
    return tokens_of_pages(run, layer, head, position, 64, false);
  };
  const Under quest{.name = "quest", .params = {{"dense_layers", std::int64_t{1}}}, .budget = 64, .begins = 1};
  Under u = quest;
  check_prunes(u, pages);
  u.first = 3, u.p = .5f;
  check_prunes(u, pages);
  u = quest;
  u.params["last_page"] = true, u.p = .6f;  // a pin: the newest page is read whole
  check_prunes(
      u, [&](const OnText& run, int l, int h, int at) { return tokens_of_pages(run, l, h, at, 64, true); },
      [](const OnText&, int, int, int position) {
        std::vector<int> newest;
        for (int t = position / page_size * page_size; t <= position; ++t) newest.push_back(t);
        return newest;
      });
}

TEST_CASE("twilight prunes the tokens of a policy, and the whole cache") {
  const Rule base{.p = .95f};
  check_prunes(
      {.role = Role::policy,
       .name = "twilight",
       .params = {{"p", double{base.p}}, {"tokens", std::int64_t{base.tokens}}, {"dense_layers", std::int64_t{1}}},
       .begins = 1,
       .p = .6f},
      [&](const OnText& run, int l, int h, int at) { return tokens_of_head(run, l, h, at, base); });
  check_prunes({.role = Role::policy, .name = "full", .begins = 2, .first = 2},
               [](const OnText&, int, int, int position) { return positions_to(position + 1); });
}

TEST_CASE("twilight refuses a method whose tokens move, or whose attention is another") {
  const auto prefilled = [](const Under& u) {
    OnText run = run_under(u);
    run.prefill(prompt);
    run.step();
  };
  CHECK_THROWS_WITH(prefilled({.role = Role::policy, .name = "leankv"}),
                    Catch::Contains("got a pruner beside a method that moves tokens to pages of another codec"));
  CHECK_THROWS_WITH(prefilled({.role = Role::policy, .name = "arkvale", .budget = 120}),
                    Catch::Contains("reads all pages on the device, whatever it lists"));
  CHECK_THROWS_WITH(prefilled({.role = Role::policy, .name = "magicpig"}),
                    Catch::Contains("changes what attention computes"));
  CHECK_THROWS_WITH(prefilled({.role = Role::policy, .name = "think"}), Catch::Contains("rewrites keys or values"));
}

TEST_CASE("twilight prunes methods that place pages on the host") {
  for (const char* name : {"arkvale", "freekv"}) {
    CAPTURE(name);
    std::map<std::string, ParamValue> params = {{"sinks", std::int64_t{8}}, {"window", std::int64_t{8}}};
    if (std::string(name) == "arkvale") params["resident"] = false;
    OnText run = run_under({.role = Role::policy, .name = name, .params = params, .budget = 80, .first = 2});
    run.prefill(prompt);
    for (int step = 0; step < steps; ++step) run.step();
    const auto& read = run.layer(3).read.back();
    REQUIRE(read.size() == static_cast<std::size_t>(run.config().kv_heads));
    for (const auto& head : read) {
      CHECK(head.size() < 80);
      for (int t = 0; t < 8; ++t)  // pins of the first method
        CHECK(
            (std::count(head.begin(), head.end(), t) && std::count(head.begin(), head.end(), prompt + steps - 1 - t)));
    }
  }
}
