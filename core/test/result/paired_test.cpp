#include "result/paired.hpp"

#include <kvlab/random.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "support/places.hpp"

using namespace kvlab;

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

// Values of scipy and of exact fractions (tools/goldens/paired.py).
nlohmann::json golden(const char* part) {
  std::ifstream in(test::source_root() / "core/test/golden/paired.json");
  const nlohmann::json values = nlohmann::json::parse(in).at(part);
  REQUIRE(!values.empty());
  return values;
}

// One question per context: `lost` right under the other policy alone, `won` under the own alone.
std::vector<Pair> table(int both, int lost, int won, int neither) {
  std::vector<Pair> out;
  const auto add = [&](int count, double own, double other) {
    for (int i = 0; i < count; ++i) out.push_back({static_cast<int>(out.size()), own, other});
  };
  add(both, 1, 1), add(lost, 0, 1), add(won, 1, 0), add(neither, 0, 0);
  return out;
}

// A population of pairs of questions. Contexts make both policies right or wrong together, and losses are likelier in
// some contexts than in others.
struct Population {
  int questions;
  double lost, won;  // shares of questions
  bool binary;

  double truth() const { return binary ? won - lost : (won - lost) / 2; }
  void draw(Random& random, int context, std::vector<Pair>& out) const {
    const double liable = questions == 1 ? 1 : random.unit() < 0.5 ? 0.4 : 1.6, level = random.unit();
    for (int q = 0; q < questions; ++q) {
      const double u = random.unit();
      const double d = u < lost * liable ? -1 : u > 1 - won * liable ? 1 : 0;
      const double same = level < 0.5 ? 0 : 1;
      if (binary)
        out.push_back({context, d == 0 ? same : d > 0, d == 0 ? same : d < 0});
      else  // a flip moves a share of a score, 1/2 in the mean
        out.push_back({context, 0.25 + level / 4 + d * random.unit() / 4, 0.25 + level / 4 - d * random.unit() / 4});
    }
  }
};

double coverage(const Population& population, int contexts, int trials) {
  int held = 0;
  for (int t = 0; t < trials; ++t) {
    Random random(static_cast<std::uint64_t>(contexts), static_cast<std::uint64_t>(t));
    std::vector<Pair> pairs;
    for (int c = 0; c < contexts; ++c) population.draw(random, c, pairs);
    const Interval i = difference_of(pairs).interval;
    const double truth = population.binary ? population.truth() : (population.won - population.lost) / 4;
    held += i.low <= truth && truth <= i.high;
  }
  return held / static_cast<double>(trials);
}

// Differences that are common, with one question per context and with several; 0/1 scores and others.
const std::vector<Population> common = {
    {1, 0.3, 0.15, true}, {4, 0.2, 0.1, true}, {1, 0.4, 0.2, false}, {4, 0.25, 0.1, false}};
// Hardly any pair differs: the interval may be too wide, but not too narrow.
const std::vector<Population> rare = {{1, 0.05, 0, true}, {1, 0.02, 0.02, true}, {4, 0.03, 0, true}};
// The same of scores between 0 and 1. Few contexts make up all of the variance then.
const std::vector<Population> rare_shares = {{1, 0.05, 0, false}, {1, 0.1, 0, false}};

// Right answers of 0.8 against 0.6, each for itself (0.2 * 0.6 lost, 0.8 * 0.4 won); losses of 5 %; scores between 0
// and 1.
const std::vector<Population> few = {{1, 0.12, 0.32, true}, {1, 0.05, 0, true}, {1, 0.4, 0.2, false}};

// Two standard errors of the share of `trials`. Seeds are fixed: a test passes always, or never.
double slack(int trials) { return 2 * std::sqrt(0.95 * 0.05 / trials); }

void check_common(int contexts, int trials, const std::vector<Population>& populations = common) {
  for (const Population& p : populations) {
    CAPTURE(contexts, p.questions, p.lost, p.won, p.binary);
    const double share = coverage(p, contexts, trials);
    CHECK(share > 0.93 - slack(trials));
    CHECK(share < 0.97 + slack(trials));
  }
}

void check_rare(int contexts, int trials, const std::vector<Population>& populations = rare) {
  for (const Population& p : populations) {
    CAPTURE(contexts, p.questions, p.lost, p.won);
    CHECK(coverage(p, contexts, trials) > 0.93 - slack(trials));
  }
}

}  // namespace

TEST_CASE("counts, mean and test of a table of answers are those by hand") {
  // 10 pairs: difference (1 - 6) / 10; p = 2 * (C(7,0) + C(7,1)) / 2^7 = 16 / 128.
  const Difference d = difference_of(table(2, 6, 1, 1));
  CHECK((d.both == 2 && d.lost == 6 && d.won == 1 && d.neither == 1));
  CHECK((d.pairs == 10 && d.contexts == 10));
  CHECK(d.mean == Approx(-0.5));
  CHECK(d.mcnemar);
  CHECK(d.p == Approx(0.125));
  CHECK(d.interval.low < -0.5);
  CHECK(d.interval.high > -0.5);
  // Squares of d - mean: 6 * 0.25 + 2.25 + 3 * 0.25 = 4.5; over 9 * 10.
  CHECK(d.error == Approx(std::sqrt(4.5 / 90)));
}

TEST_CASE("the test of one 0/1 question per context is McNemar's exact test") {
  for (const auto& known : golden("mcnemar")) {
    CAPTURE(known);
    const Difference d = difference_of(table(3, known["lost"], known["won"], 2));
    CHECK(d.mcnemar);
    CHECK(d.p == Approx(known["p"].get<double>()).epsilon(1e-9));
  }
  CHECK(difference_of(table(5, 0, 0, 5)).p == 1);
}

TEST_CASE("the interval of one 0/1 question per context is Tango's") {
  for (const auto& known : golden("score_intervals")) {
    CAPTURE(known);
    const int lost = known["lost"], won = known["won"], pairs = known["pairs"];
    const Interval i = difference_of(table(1, lost, won, pairs - lost - won - 1)).interval;
    CHECK(i.low == Approx(known["low"].get<double>()).margin(1e-6));
    CHECK(i.high == Approx(known["high"].get<double>()).margin(1e-6));
  }
  // By hand, with z = 1.959964: without a flip x² n = z² x (1 - x), so x = z² / (n + z²) = 3.841459 / 13.841459. With
  // flips of one kind alone (n - n x)² = z² n (1 - x²), so x = (n - z²) / (n + z²) = 6.158541 / 13.841459.
  const Interval equal = difference_of(table(5, 0, 0, 5)).interval, lost = difference_of(table(0, 10, 0, 0)).interval;
  CHECK(equal.high == Approx(0.277533).margin(1e-6));
  CHECK(equal.low == Approx(-0.277533).margin(1e-6));
  CHECK(lost.low == -1);
  CHECK(difference_of(table(0, 5, 0, 0)).interval.high > 0);  // McNemar's p is 0.0625
  CHECK(lost.high == Approx(-0.444934).margin(1e-6));
}

TEST_CASE("intervals of right answers of 0.8 against 0.6 cover the truth in 93 to 97 of 100 cases") {
  check_common(20, 2000, {few[0]});
}

TEST_CASE("sign flips are exact for whole sums, for few sums, and nearly so by draws") {
  for (const auto& known : golden("sign_flips")) {
    CAPTURE(known);
    const auto sums = known["sums"].get<std::vector<double>>();
    const double p = known["p"];
    // 20,000 draws: four standard errors.
    const bool drawn = sums.size() > 16 && sums[0] != std::floor(sums[0]);
    CHECK(sign_flip_p(sums) == Approx(p).margin(drawn ? 4 * std::sqrt(p * (1 - p) / 20000) : 1e-12));
  }
  CHECK(sign_flip_p({}) == 1);
  CHECK(sign_flip_p({0, 0}) == 1);
  CHECK(sign_flip_p({0.1, 0.2, -0.3}) == 1);  // sums of 0 in truth, of rounding errors here
}

TEST_CASE("questions of a context flip together") {
  std::vector<Pair> pairs;  // 4 contexts of 5 questions, all lost
  for (int i = 0; i < 20; ++i) pairs.push_back({i / 5, 0, 1});
  const Difference d = difference_of(pairs);
  CHECK(!d.mcnemar);
  CHECK(d.p == Approx(2 / 16.));  // and not 2 / 2^20
  CHECK((d.pairs == 20 && d.contexts == 4));
  CHECK(d.interval.high - d.interval.low > 0.2);
}

TEST_CASE("pairs without a score on either side are left out, and no pair has no difference") {
  std::vector<Pair> pairs = table(2, 6, 1, 1);
  pairs.push_back({50, nan_value, 1});
  pairs.push_back({51, 1, nan_value});
  CHECK(difference_of(pairs).pairs == 10);
  const Difference none = difference_of({});
  CHECK((std::isnan(none.mean) && std::isnan(none.p) && std::isnan(none.interval.low)));
}

TEST_CASE("the difference of texts is that of nats per token, each text with its length") {
  // (22 + 300 - 20 - 310) / (10 + 100)
  const std::vector<Pair> texts = {{0, 22, 20, 10}, {1, 300, 310, 100}};
  const Difference d = difference_of(texts);
  CHECK(d.mean == Approx(-8 / 110.));
  CHECK(d.range == ScoreRange::unbounded);
  CHECK(std::isnan(d.interval.low));  // two texts
}

TEST_CASE("equal answers have an interval around 0 that shrinks with their number") {
  const Interval of_30 = difference_of(table(20, 0, 0, 10)).interval,
                 many = difference_of(table(200, 0, 0, 100)).interval;
  CHECK((of_30.low < -0.03 && of_30.high > 0.03));  // three in 100 would be missed in 40 of 100 cases
  CHECK((many.low > -0.03 && many.high < 0.03));
  CHECK((many.low < 0 && many.high > 0));
}

TEST_CASE("Holm's adjustment is the step-down product, in the order given") {
  // Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.06.
  const std::vector<double> out = holm({0.03, 0.01, nan_value, 0.04, 0.02});
  CHECK(out[0] == Approx(0.06));
  CHECK(out[1] == Approx(0.04));
  CHECK(std::isnan(out[2]));
  CHECK(out[3] == Approx(0.06));
  CHECK(out[4] == Approx(0.06));
  CHECK(holm({0.6, 0.7}) == std::vector<double>{1, 1});
}

TEST_CASE("the smallest detectable difference solves Connor's formula, and is found in 80 of 100 cases") {
  for (const auto& known : golden("detectable")) {
    CAPTURE(known);
    CHECK(detectable_share(known["n"], known["churn"]) == Approx(known["x"].get<double>()).epsilon(1e-6));
  }
  CHECK(detectable_mean(0.1) == Approx(0.1 * (1.959964 + 0.841621)).epsilon(1e-6));
  CHECK(std::isnan(detectable_share(5, 0)));  // 2 / 2^5 > 0.05
  CHECK(std::isnan(detectable_share(100, 1)));
  const double x = detectable_share(100, 0.1);
  int found = 0;
  for (int t = 0; t < 1000; ++t) {
    Random random(3, static_cast<std::uint64_t>(t));
    std::vector<double> sums;
    for (int i = 0; i < 100; ++i) {
      const double u = random.unit();
      sums.push_back(u < x + 0.05 ? -1 : u < x + 0.1 ? 1 : 0);
    }
    found += sign_flip_p(sums) < 0.05;
  }
  CHECK(found > 700);  // the exact test finds fewer than the formula's
  CHECK(found < 860);
}

TEST_CASE("ranks: the best is 1, equal ones share a place, and close ones have wide intervals") {
  const std::vector<double> weights(40, 1);
  std::vector<std::vector<double>> values(4, std::vector<double>(40));
  for (std::size_t c = 0; c < 40; ++c) {
    values[0][c] = 0;
    values[1][c] = values[2][c] = 1;
    values[3][c] = c % 2 ? 1 : c % 4 ? 0.9 : 1.1;  // a mean of 1, too, but not in every resample
  }
  const std::vector<Rank> ranks = ranks_of(values, weights, false);
  CHECK((ranks[0].rank == 4 && ranks[0].low == 4 && ranks[0].high == 4));
  CHECK(ranks[1].rank == 2);
  for (const std::size_t p : {1, 2, 3}) CHECK((ranks[p].low == 1 && ranks[p].high == 3));
  CHECK(ranks_of(values, weights, true)[0].rank == 1);
  CHECK(ranks_of({{3, 0}, {1, 1}}, {1, 9}, false)[0].rank == 1);  // 3 of 10 questions against 2
}

TEST_CASE("intervals of paired differences cover the truth in 93 to 97 of 100 cases") { check_common(30, 500); }

TEST_CASE("intervals of paired differences cover the truth in 93 to 97 of 100 cases, with many contexts") {
  check_common(100, 500, {common[1]});
}

TEST_CASE("intervals of rare differences cover the truth in 93 of 100 cases, or more") { check_rare(30, 500); }

TEST_CASE("intervals of rare differences of shares cover the truth in 93 of 100 cases, or more") {
  check_rare(50, 1000, rare_shares);
}

TEST_CASE("intervals of paired differences, in many trials", "[.long]") {
  for (const int contexts : {30, 100}) check_common(contexts, 3000), check_rare(contexts, 3000);
}

TEST_CASE("intervals of rare differences of shares, in many trials", "[.long]") {
  for (const int contexts : {10, 20, 30, 50, 100}) check_rare(contexts, 3000, rare_shares);
}

TEST_CASE("intervals of paired differences of few contexts, in many trials", "[.long]") {
  check_rare(10, 3000, few);
  for (const int contexts : {20, 50})
    check_common(contexts, 3000, {few[0], few[2]}), check_rare(contexts, 3000, {few[1]});
}
