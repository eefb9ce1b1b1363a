#include <numeric>

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Settings = std::map<std::string, ParamValue>;
using Counts = std::vector<std::int32_t>;

Instance<Budget> budget_of(const Settings& params) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::budget, "cake_layers");
  return create<Budget>(info, resolve(info, params));
}

// Layers of one KV head with these sums of p ln p and of variances, `pinned` tokens of a window and so many others.
Division division(int total, const std::vector<float>& measured, int others, int pinned) {
  Division d;
  d.layers = static_cast<int>(measured.size()) / 2, d.kv_heads = 1, d.pinned = pinned;
  d.tokens = total / d.layers + pinned;
  d.measured = measured;
  d.length.assign(static_cast<std::size_t>(d.layers), others + pinned);
  return d;
}

// What the budget measures of one query head whose last two queries give the tokens before them these shares. The rest
// goes to the two newest tokens.
std::vector<float> measured(const std::vector<std::pair<double, double>>& shares) {
  PagedFixture cache({1, 1, 8, 4, 4});
  double rest = 1, second = 1;
  std::vector<std::pair<double, double>> all = shares;
  for (const auto& [a, b] : shares) rest -= a, second -= b;
  all.emplace_back(rest, second / 2), all.emplace_back(1e-30, second / 2);  // the first query does not see the last
  for (const auto& [a, b] : all) {
    std::vector<float> k(8);
    k[0] = static_cast<float>(std::log(a)), k[1] = static_cast<float>(std::log(b));
    cache.append(0, 0, k, k);
  }
  std::vector<float> queries(16);
  queries[0] = queries[9] = std::sqrt(8.f);
  Scored scored(cache, 1);
  scored.kv.window_queries = View<const float, 4>::dense(queries.data(), {1, 1, 2, 8});
  const auto budget = budget_of({{"window", std::int64_t{2}}});
  std::vector<float> out(2);
  budget->measure(scored.kv, {}, {.last = 2}, View<float, 3>::dense(out.data(), {1, 1, 2}), Stream::cpu());
  return out;
}

}  // namespace

TEST_CASE("cake_layers: spread and shift by hand") {
  const auto m = measured({{.6, .2}, {.2, .6}});
  CHECK(m[0] == Approx(-1.2568).epsilon(1e-4));
  CHECK(m[1] == Approx(.16).epsilon(1e-4));
  // The card's preferences, beside a layer whose spread and shift are 1: so is its preference at any temperature. The
  // budgets of 1000000 tokens show their shares.
  const auto preference = [&](double tau1, double tau2) {
    const auto keep =
        budget_of({{"tau1", tau1}, {"tau2", tau2}})->divide(division(1000000, {m[0], m[1], -1, 1}, 1000000, 0));
    return static_cast<double>(keep[0]) / keep[1];
  };
  CHECK(preference(1, 1) == Approx(.2011).epsilon(1e-3));
  CHECK(preference(1.6, .4) == Approx(.01181).epsilon(1e-3));
}

TEST_CASE("cake_layers: budgets of layers by hand") {
  // Preferences 1 and 3 of 100 tokens. The second layer has room for 60, so 15 go to the first.
  CHECK(budget_of({})->divide(division(100, {-1, 1, -3, 1}, 60, 0)) == Counts{40, 60});
  CHECK(budget_of({})->divide(division(100, {-1, 1, -3, 1}, 60, 5)) == Counts{45, 65});
  CHECK(budget_of({})->divide(division(100, {-1, 1, -1, 3}, 90, 0)) == Counts{25, 75});
  // 33.9 and 66.1 are rounded down. The first layer gets the token that this loses.
  CHECK(budget_of({})->divide(division(100, {-1, 1, -1.95f, 1}, 90, 0)) == Counts{34, 66});
  // Pins stay even where they exceed the budget.
  Division pinned = division(0, {-1, 1, -3, 1}, 60, 5);
  pinned.tokens = 3;
  CHECK(budget_of({})->divide(pinned) == Counts{5, 5});
  // Spread 16 counts as 4, and shift 16 as 16.
  CHECK(budget_of({{"tau1", 2.}})->divide(division(100, {-16, 1, -1, 1}, 90, 0)) == Counts{80, 20});
  CHECK(budget_of({{"tau2", 2.}})->divide(division(100, {-1, 1, -1, 16}, 90, 0)) == Counts{20, 80});
  // Nothing to go by, or nothing but noise.
  CHECK(budget_of({})->divide(division(100, {0, 0, 0, 0}, 60, 0)) == Counts{50, 50});
  CHECK(budget_of({})->divide(division(100, {-NAN, 1, -1, 1}, 200, 0)) == Counts{0, 100});
  CHECK(budget_of({})->divide(division(100, {-1, 1, -3, 1}, 20, 0)) == Counts{20, 20});
}

TEST_CASE("cake_layers with cake keeps on real text what a plain implementation keeps, and as much in decode steps") {
  constexpr int prompt = 150, budget = 40, window = 8;
  for (const int every : {0, 1}) {
    OnText run(Role::scorer, "cake",
               {{"window", std::int64_t{window}}, {"clustering", false}, {"every", std::int64_t{every}}}, budget,
               prompt + 8, 16, OnText::MakeProfile(),
               OnText::Split{"cake_layers", {{"window", std::int64_t{window}}, {"tau1", 1.6}, {"tau2", .8}}});
    run.prefill(prompt);
    const int layers = run.config().layers, heads = run.config().kv_heads, older = prompt - window;
    std::vector<double> preference;
    std::vector<std::vector<double>> scores;  // [layer, head]
    for (int layer = 0; layer < layers; ++layer) {
      double spread = 0, shift = 0;
      for (int h = 0; h < heads; ++h) {
        auto& score = scores.emplace_back(older);
        for (int g = 0; g < run.group(); ++g) {
          const auto rows = window_shares(run, layer, h * run.group() + g, prompt, window);
          for (int t = 0; t < older; ++t) {
            const auto at = static_cast<std::size_t>(t);
            double mean = 0, variance = 0;
            for (const auto& row : rows) {
              spread -= row[at] * std::log(row[at] + 1e-10);
              mean += row[at] / window;
            }
            for (const auto& row : rows) variance += (row[at] - mean) * (row[at] - mean) / (window - 1);
            shift += variance;
            score[at] += (mean + 200 * variance) / run.group();
          }
        }
      }
      preference.push_back(std::pow(spread, 1 / 1.6) * std::pow(shift, 1 / .8));
    }
    const double all = std::accumulate(preference.begin(), preference.end(), 0.);
    std::size_t kept = 0;
    std::vector<std::size_t> counts;
    for (int layer = 0; layer < layers; ++layer)
      for (int h = 0; h < heads; ++h) {
        CAPTURE(every, layer, h);
        const std::vector<int> got = run.kept(layer, h);
        counts.push_back(got.size()), kept += got.size();
        // Rounded down, and up to one token more for what rounding lost. No layer is full.
        const double exact = preference[static_cast<std::size_t>(layer)] / all * (budget - window) * layers + window;
        REQUIRE(exact < prompt);
        CHECK(std::abs(static_cast<double>(got.size()) - exact) < 1.001);
        auto wanted =
            best(scores[static_cast<std::size_t>(layer * heads + h)], positions_to(older), got.size() - window);
        for (int t = older; t < prompt; ++t) wanted.push_back(t);
        CHECK(got == wanted);
      }
    CHECK(kept == static_cast<std::size_t>(layers * heads * budget));
    for (int step = 1; step <= 3; ++step) {
      run.step();
      for (int i = 0; i < layers * heads; ++i)
        CHECK(run.kept(i / heads, i % heads).size() ==
              counts[static_cast<std::size_t>(i)] + static_cast<std::size_t>(every ? 0 : step));
    }
  }
}
