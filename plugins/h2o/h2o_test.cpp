#include <numeric>

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Ints = std::vector<int>;
using Settings = std::map<std::string, ParamValue>;

// Scores of a prompt whose tokens got these sums of attention from its queries.
std::vector<float> scores(const Settings& params, std::vector<float> sums) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::scorer, "h2o");
  const auto scorer = create<Scorer>(info, resolve(info, params));
  const std::vector<std::string> names = scorer->needs().token_state();
  PagedOptions o{1, 1, 8, 4, 4};
  o.state_columns = static_cast<int>(names.size());
  PagedFixture cache(o);
  const auto tokens = static_cast<std::int32_t>(sums.size());
  for (int t = 0; t < tokens; ++t) cache.append(0, 0, std::vector<float>(8), std::vector<float>(8));
  Scored scored(cache, 1);
  scored.kv.state_names = &names;
  ops::add_mass(View<const float, 3>::dense(sums.data(), {1, 1, tokens}), GroupRule::mean, scored.kv.state("score"),
                Stream::cpu());
  Guarded<3> out({1, 1, tokens});
  scorer->score(scored.kv, out.view(), Stream::cpu());
  return out.values();
}

}  // namespace

TEST_CASE("h2o: sums, or means over the queries that could see a token, by hand") {
  const std::vector<float> sums = {2.8f, .9f, .8f, .3f, .2f};
  CHECK(scores({}, sums) == sums);
  // Five queries saw the first token, and one the last.
  const auto mean = scores({{"mean", true}}, sums);
  const std::vector<double> wanted = {.56, .225, .8 / 3, .15, .2};
  REQUIRE(mean.size() == wanted.size());
  for (std::size_t t = 0; t < wanted.size(); ++t) CHECK(mean[t] == Approx(wanted[t]));
}

TEST_CASE("h2o keeps on real text what a plain implementation keeps, by sums and by means") {
  constexpr int prompt = 120, budget = 30, steps = 6;
  struct Setting {
    bool mean;
    double heavy;
    int every;
  };
  // The last is kvpress's.
  for (const Setting x : {Setting{false, .5, 1}, {true, .5, 1}, {true, 1, 0}}) {
    OnText run(Role::scorer, "h2o", {{"mean", x.mean}, {"heavy", x.heavy}, {"every", std::int64_t{x.every}}}, budget,
               prompt + steps, 16);
    run.prefill(prompt);
    const int recent = budget - static_cast<int>(budget * x.heavy);
    const int layers = run.config().layers, heads = run.config().kv_heads;
    std::vector<std::vector<double>> sums;  // [layer, head][text position]
    std::vector<Ints> held;
    for (int i = 0; i < layers * heads; ++i) {
      auto& sum = sums.emplace_back(prompt + steps);
      for (int g = 0; g < run.group(); ++g)
        for (const auto& row : window_shares(run, i / heads, i % heads * run.group() + g, prompt, prompt))
          for (std::size_t t = 0; t < row.size(); ++t) sum[t] += row[t] / run.group();
      held.push_back(positions_to(prompt));
    }
    const auto evict = [&](std::size_t i, int seen) {
      std::vector<double> rank;
      Ints older;
      for (const int p : held[i])
        if (p < seen - recent) {
          older.push_back(p);
          rank.push_back(sums[i][static_cast<std::size_t>(p)] / (x.mean ? seen - p : 1));
        }
      Ints kept = best(rank, older, static_cast<std::size_t>(budget - recent));
      for (int p = seen - recent; p < seen; ++p) kept.push_back(p);
      held[i] = kept;
    };
    const auto check = [&] {
      for (int i = 0; i < layers * heads; ++i) {
        CAPTURE(x.mean, x.every, i / heads, i % heads);
        CHECK(run.kept(i / heads, i % heads) == held[static_cast<std::size_t>(i)]);
      }
    };
    for (std::size_t i = 0; i < held.size(); ++i) evict(i, prompt);
    check();
    for (int seen = prompt + 1; seen <= prompt + steps; ++seen) {
      run.step();
      for (int i = 0; i < layers * heads; ++i) {
        auto& own = held[static_cast<std::size_t>(i)];
        own.push_back(seen - 1);
        const auto& of = run.layer(i / heads);
        for (int g = 0; g < run.group(); ++g) {
          const auto& q = of.queries.at.back()[static_cast<std::size_t>(i % heads * run.group() + g)];
          std::vector<double> logits;
          for (const int p : own)
            logits.push_back(dot(q, of.keys.at[static_cast<std::size_t>(p)][static_cast<std::size_t>(i % heads)]) /
                             std::sqrt(static_cast<double>(q.size())));
          logits = softmax(logits);
          for (std::size_t t = 0; t < own.size(); ++t)
            sums[static_cast<std::size_t>(i)][static_cast<std::size_t>(own[t])] += logits[t] / run.group();
        }
        if (x.every > 0) evict(static_cast<std::size_t>(i), seen);
      }
      check();
    }
  }
}
