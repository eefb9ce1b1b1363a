#include <numeric>

#include "model/token_kinds.hpp"
#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Settings = std::map<std::string, ParamValue>;
using Marks = std::vector<bool>;

// The card's attention: [query][key].
const std::vector<std::vector<double>> card = {{1}, {.6, .4}, {.5, .3, .2}, {.4, .1, .4, .1}, {.3, .1, .2, .2, .2}};

// Gives the policy a prompt of five tokens with the card's attention. Token 0 is special and token 3 is punctuation.
// Key t is the unit vector t, so query i has the logarithms of its shares as elements. `second`: the group has another
// query head, which looks at all tokens alike.
std::vector<int> kept_of_card(const Settings& params, bool second = false) {
  constexpr int n = 5, dim = 8;
  PagedOptions o{1, 1, dim, 4, 2};
  o.state_columns = 1;
  PagedFixture cache(o);
  const int heads = second ? 2 : 1;
  std::vector<float> q(static_cast<std::size_t>(heads * n * dim));
  for (int t = 0; t < n; ++t) {
    std::vector<float> k(dim);
    k[static_cast<std::size_t>(t)] = 1;
    cache.append(0, 0, k, k);
    for (int j = 0; j <= t; ++j)
      q[static_cast<std::size_t>(t * dim + j)] = static_cast<float>(
          std::sqrt(double(dim)) * std::log(card[static_cast<std::size_t>(t)][static_cast<std::size_t>(j)]));
  }
  const std::vector<std::int32_t> ids = {0, 1, 1, 2, 1};
  const std::vector<std::uint8_t> kinds = {1, 0, 2};
  const PagedKv pages = cache.view();
  const Shape shape{1, heads, 1, dim, 4, 1, 8, DType::f32};
  const std::int32_t slot = 0, position = n, step = 0;
  const bool last = true;
  const std::vector<std::string> names = {"attention"};
  HeapWorkspace workspace;
  static Registry registry;
  const PluginInfo& info = registry.require(Role::policy, "fastgen");
  const auto policy = create<Policy>(info, resolve(info, params));
  policy->attach(shape, {}, workspace);
  LayerPrefill kv;
  kv.shape = &shape, kv.pages = pages, kv.keys = {&pages, KvSide::key}, kv.values = {&pages, KvSide::value};
  kv.state_names = &names, kv.workspace = &workspace, kv.max_length = n;
  kv.slots = &slot, kv.position = &position, kv.step = &step, kv.last = &last;
  kv.chunk_queries = View<const float, 4>::dense(q.data(), {1, heads, n, dim});
  kv.text = {View<const std::int32_t, 2>::dense(ids.data(), {1, n}),
             View<const std::uint8_t, 1>::dense(kinds.data(), {3})};
  const auto queries = policy->needs().window_queries();
  if (queries > 0)
    kv.window_queries = View<const float, 4>{q.data() + (n - queries) * dim, {1, 1, queries, dim}, {0, 0, dim, 1}};
  Edits edits;
  policy->prefill(kv, edits, Stream::cpu());
  REQUIRE(edits.all().size() == 1);
  const Surplus& surplus = edits.all()[0].surplus;
  std::vector<int> kept;
  for (int t = 0; t < n; ++t)
    if (surplus.scores(0, 0, t) > 0) kept.push_back(t);
  CHECK(surplus.keep(0, 0) == static_cast<int>(kept.size()));
  return kept;
}

Settings settings(double recovery, Settings more = {}) {
  more.insert({{"recovery", recovery}, {"sinks", std::int64_t{0}}});
  return more;
}

// FastGen by its card, in f64: one KV head of a layer.
struct Plain {
  double recovery = .85, frequent = .3, window = .3;
  int sinks = 4;
  bool least = false;  // of the group's heads
  std::size_t rule = 4;
  double margin = 1;             // how close a recovery comes to the threshold
  std::vector<int> kept;         // text positions
  std::vector<double> sum;       // of attention, by text position
  std::vector<TokenKind> kinds;  // of all text

  int newest(int seen) const { return std::max(1, static_cast<int>(window * seen)); }
  double mean(int p, int seen) const { return sum[static_cast<std::size_t>(p)] / (seen - p); }
  bool sure(int p, bool punctuation) const {
    const TokenKind kind = kinds[static_cast<std::size_t>(p)];
    return p < sinks || kind == TokenKind::special || (punctuation && kind == TokenKind::punctuation);
  }
  // Returns what a rule keeps of these positions.
  std::vector<int> of_rule(std::size_t which, const std::vector<int>& from, int seen) const {
    if (which == 4) return from;
    std::vector<int> others;
    std::set<int> out;
    for (const int p : from)
      if (sure(p, which > 0))
        out.insert(p);
      else
        others.push_back(p);
    if (which >= 2) {
      std::stable_sort(others.begin(), others.end(), [&](int a, int b) { return mean(a, seen) > mean(b, seen); });
      const auto best = static_cast<std::size_t>(std::ceil(frequent * seen));
      for (std::size_t i = 0; i < std::min(best, others.size()); ++i) out.insert(others[i]);
    }
    if (which == 3)
      for (const int p : from)
        if (p >= seen - newest(seen)) out.insert(p);
    return {out.begin(), out.end()};
  }
  // shares: [query head][query][key]; the queries are the last ones of `prompt`.
  void choose(const std::vector<std::vector<std::vector<double>>>& shares, int prompt) {
    const int count = static_cast<int>(shares[0].size());
    std::vector<double> columns(static_cast<std::size_t>(prompt));
    for (const auto& head : shares)
      for (const auto& row : head)
        for (std::size_t t = 0; t < columns.size(); ++t) columns[t] += row[t] / static_cast<double>(shares.size());
    sum.assign(kinds.size(), 0);
    for (int p = 0; p < prompt; ++p)  // the mean of the queries that see it, for all that saw it
      sum[static_cast<std::size_t>(p)] =
          columns[static_cast<std::size_t>(p)] / std::min(count, prompt - p) * (prompt - p);
    for (rule = 0; rule < 4; ++rule) {
      const auto mask = of_rule(std::min<std::size_t>(rule, 2), positions_to(prompt), prompt);
      std::vector<double> of_heads;
      for (const auto& head : shares) {
        double& got_by = of_heads.emplace_back();
        for (int i = 0; i < count; ++i)
          for (int j = 0; j < prompt; ++j) {
            const int query = prompt - count + i;
            if (std::binary_search(mask.begin(), mask.end(), j) || (rule == 3 && j > query - newest(prompt)))
              got_by += head[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] / count;
          }
      }
      const double got =
          least ? *std::min_element(of_heads.begin(), of_heads.end())
                : std::accumulate(of_heads.begin(), of_heads.end(), 0.) / static_cast<double>(shares.size());
      margin = std::min(margin, std::abs(got - recovery));
      if (got >= recovery) break;
    }
    kept = of_rule(rule, positions_to(prompt), prompt);
  }
};

}  // namespace

TEST_CASE("fastgen: the card's prompt, by hand") {
  using Kept = std::vector<int>;
  const Settings no_window{{"local", false}};
  CHECK(kept_of_card(settings(.5, no_window)) == Kept{0});            // 2.8 / 5
  CHECK(kept_of_card(settings(.6, no_window)) == Kept{0, 3});         // 3.1 / 5
  CHECK(kept_of_card(settings(.95, no_window)) == Kept{0, 1, 2, 3});  // 4.8 / 5
  CHECK(kept_of_card(settings(.97, no_window)) == Kept{0, 1, 2, 3, 4});
  // Windows of two give the queries 1, 1, 1, .9 and .7 with tokens 0 and 3: 4.6 / 5.
  Settings window{{"window_share", .4}, {"frequency", false}};
  CHECK(kept_of_card(settings(.91, window)) == Kept{0, 3, 4});
  CHECK(kept_of_card(settings(.93, window)) == Kept{0, 1, 2, 3, 4});
  // Without punctuation, tokens 1 and 2 have .9 / 4 and .8 / 3, token 3 has .3 / 2: 2.8 + .9 + .8 of 5.
  Settings plain{{"local", false}, {"punctuation", false}};
  CHECK(kept_of_card(settings(.6, plain)) == Kept{0, 1, 2});
  plain["special"] = false;  // 2.8 / 5 and .8 / 3 are the best means
  CHECK(kept_of_card(settings(.6, plain)) == Kept{0, 2});
  plain["sinks"] = std::int64_t{2};
  CHECK(kept_of_card(settings(.6, plain)) == Kept{0, 1});  // 3.7 / 5
}

// The second head gives token 0 1, 1/2, 1/3, 1/4 and 1/5, and token 3 1/4 and 1/5: 2.28 / 5 and 2.73 / 5. The card's
// has 2.8 / 5 and 3.1 / 5.
TEST_CASE("fastgen: a group recovers what its heads do on average, or what the least of them does") {
  using Kept = std::vector<int>;
  const auto kept = [](double recovery, const char* group) {
    return kept_of_card(settings(recovery, {{"local", false}, {"group", std::string(group)}}), true);
  };
  CHECK(kept(.5, "mean") == Kept{0});
  CHECK(kept(.5, "min") == Kept{0, 3});
  CHECK(kept(.45, "min") == Kept{0});
  CHECK(kept(.56, "mean") == Kept{0, 3});
  // By the group's mean tokens 1 and 2 have .27 and .26, and token 4 has .2.
  CHECK(kept(.56, "min") == Kept{0, 1, 2, 3});
  CHECK(kept(.97, "min") == Kept{0, 1, 2, 3, 4});
  CHECK(kept_of_card(settings(.6, {{"local", false}, {"group", std::string("min")}})) == Kept{0, 3});  // one head
}

TEST_CASE("fastgen: the last queries alone") {
  using Kept = std::vector<int>;
  // The last two queries give token 0 .7, token 3 .3, and tokens 1, 2 and 4 .2, .6 and .2. Token 4 is seen by one.
  Settings two{{"local", false}, {"queries", std::int64_t{2}}};
  CHECK(kept_of_card(settings(.34, two)) == Kept{0});
  CHECK(kept_of_card(settings(.49, two)) == Kept{0, 3});
  CHECK(kept_of_card(settings(.51, two)) == Kept{0, 2, 3, 4});  // means .3 and .2 rank before .1: .9
  CHECK(kept_of_card(settings(.91, two)) == Kept{0, 1, 2, 3, 4});
}

TEST_CASE("fastgen keeps on real text what a plain implementation keeps") {
  const double recovery = GENERATE(.3, .5, .7);
  const auto [queries, least] = GENERATE(table<int, bool>({{0, false}, {24, false}, {0, true}, {24, true}}));
  constexpr int prompt = 180, steps = 30;  // the policy takes 128 queries at once
  CAPTURE(recovery, queries, least);
  const Settings params{{"recovery", recovery},
                        {"queries", std::int64_t{queries}},
                        {"frequent_share", .1},
                        {"window_share", .2},
                        {"group", std::string(least ? "min" : "mean")}};
  OnText run(Role::policy, "fastgen", params, 0, prompt + steps, 8);
  const auto of_ids = token_kinds(run.config(), run.model().tokenizer.get());
  const auto control = std::find(of_ids.begin(), of_ids.end(), std::uint8_t{1}) - of_ids.begin();
  REQUIRE(control < std::ssize(of_ids));
  for (const std::size_t p : {50, 51, 120, prompt + 7}) run.text()[p] = static_cast<int>(control);
  run.prefill(prompt);
  std::vector<TokenKind> kinds;
  for (int p = 0; p < prompt + steps; ++p)
    kinds.push_back(static_cast<TokenKind>(of_ids[static_cast<std::size_t>(run.text()[static_cast<std::size_t>(p)])]));
  CHECK(std::count(kinds.begin(), kinds.end(), TokenKind::special) == 4);
  CHECK(std::count(kinds.begin(), kinds.end(), TokenKind::punctuation) > 3);
  const int layers = run.config().layers, heads = run.config().kv_heads;
  std::vector<Plain> plain;
  std::vector<int> heads_of_rule(5);
  for (int i = 0; i < layers * heads; ++i) {
    Plain& of = plain.emplace_back();
    of.recovery = recovery, of.frequent = .1, of.window = .2, of.kinds = kinds, of.least = least;
    std::vector<std::vector<std::vector<double>>> shares;
    for (int g = 0; g < run.group(); ++g)
      shares.push_back(
          window_shares(run, i / heads, i % heads * run.group() + g, prompt, queries > 0 ? queries : prompt));
    of.choose(shares, prompt);
    CAPTURE(i, of.rule, of.margin);
    CHECK(of.margin > 1e-5);  // f32 decides alike
    ++heads_of_rule[of.rule];
    CHECK(run.kept(i / heads, i % heads) == of.kept);
  }
  CAPTURE(heads_of_rule);
  CHECK(std::count(heads_of_rule.begin(), heads_of_rule.end(), 0) <= 3);  // heads differ
  for (int p = prompt; p < prompt + steps; ++p) {
    run.step();
    for (int i = 0; i < layers * heads; ++i) {
      Plain& of = plain[static_cast<std::size_t>(i)];
      const auto& seen = run.layer(i / heads);
      of.kept.push_back(p);
      for (int g = 0; g < run.group(); ++g) {
        const auto& q =
            seen.queries.at[static_cast<std::size_t>(p)][static_cast<std::size_t>(i % heads * run.group() + g)];
        std::vector<double> logits;
        for (const int t : of.kept)
          logits.push_back(dot(q, seen.keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(i % heads)]) /
                           std::sqrt(static_cast<double>(q.size())));
        const auto shares = softmax(logits);
        for (std::size_t t = 0; t < shares.size(); ++t)
          of.sum[static_cast<std::size_t>(of.kept[t])] += shares[t] / run.group();
      }
      of.kept = of.of_rule(of.rule, of.kept, p + 1);
      CAPTURE(p, i, of.rule);
      REQUIRE(run.kept(i / heads, i % heads) == of.kept);
    }
  }
}

TEST_CASE("fastgen: a short prompt may be excepted") {
  const Settings params{{"recovery", .01}, {"whole", std::int64_t{20}}};
  for (const int prompt : {20, 21}) {
    OnText run(Role::policy, "fastgen", params, 0, 40, 8);
    run.prefill(prompt);
    for (int i = 0; i < 4; ++i) run.step();
    CHECK((run.kept(0, 0) == positions_to(prompt + 4)) == (prompt == 20));
  }
}

TEST_CASE("fastgen: what it cannot use is refused") {
  CHECK_THROWS_WITH(OnText(Role::policy, "fastgen", {}, 64, 100, 8), Catch::Contains("budget"));
  CHECK_THROWS_WITH(OnText(Role::policy, "fastgen", {{"recovery", 0.}}, 0, 100, 8), Catch::Contains("recovery"));
}
