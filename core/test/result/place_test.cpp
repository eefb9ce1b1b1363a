#include "result/place.hpp"

#include <kvlab/random.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

using namespace kvlab;

namespace {

// One question per context: the lower policy is right in the first `low` of `n`, the upper one in the first `high`, and
// so on.
std::vector<Rung> right_in(int n, int low, int own, int high) {
  std::vector<Rung> out;
  for (int c = 0; c < n; ++c) out.push_back({c, double(c < own), double(c < low), double(c < high)});
  return out;
}

double width(const Interval& interval) { return interval.high - interval.low; }

// A population of questions with a known place. A question is right under a policy if it is easier than the policy is
// strong, so answers of the three are correlated. Contexts are easier or harder as a whole.
struct Population {
  int questions;
  double low, own, high;
  bool binary;

  double truth() const { return (own - low) / (high - low); }
  void draw(Random& random, int context, std::vector<Rung>& out) const {
    const double shift = questions == 1 ? 0 : (random.unit() - 0.5) * 0.2;
    for (int q = 0; q < questions; ++q) {
      const double hard = random.unit();
      const auto score = [&](double strength) {
        const bool right = hard < strength + shift;
        return binary ? right : (right + random.unit()) / 2;  // differences of means are half of those of shares
      };
      out.push_back({context, score(own), score(low), score(high)});
    }
  }
};

// Within two standard errors of the share of `trials`. Seeds are fixed: a test passes always, or never.
void check_coverage(const Population& p, int contexts, int trials) {
  const double slack = 2 * std::sqrt(0.95 * 0.05 / trials);
  int told = 0, held = 0;
  for (int t = 0; t < trials; ++t) {
    Random random(static_cast<std::uint64_t>(contexts), static_cast<std::uint64_t>(t));
    std::vector<Rung> rungs;
    for (int c = 0; c < contexts; ++c) p.draw(random, c, rungs);
    const Place place = place_of(rungs);
    if (std::isnan(place.place)) continue;
    ++told;
    held += place.interval.low <= p.truth() && p.truth() <= place.interval.high;
  }
  CAPTURE(contexts, p.questions, p.low, p.own, p.high, p.binary, told);
  CHECK(told > 0.97 * trials);
  CHECK(held > (0.93 - slack) * told);
  CHECK(held < (0.97 + slack) * told);
}

const std::vector<Population> populations = {
    {4, 0.2, 0.5, 0.8, true}, {1, 0.2, 0.5, 0.9, false}, {4, 0.2, 0.65, 0.8, false}};

void check_ratio_coverage(int contexts) {
  for (const Population& p : populations) {
    const int trials = 500;
    int held = 0;
    for (int t = 0; t < trials; ++t) {
      Random random(static_cast<std::uint64_t>(contexts), static_cast<std::uint64_t>(t));
      std::vector<Rung> rungs;
      for (int c = 0; c < contexts; ++c) p.draw(random, c, rungs);
      std::vector<Pair> pairs;
      for (const Rung& r : rungs) pairs.push_back({r.context, r.own, r.high, r.weight});
      const Interval i = ratio_interval(pairs);
      const double truth = p.binary ? p.own / p.high : (p.own / 2 + 0.25) / (p.high / 2 + 0.25);
      held += i.low <= truth && truth <= i.high;
    }
    CAPTURE(contexts, p.questions, p.own, p.high, p.binary);
    CHECK(held > 0.915 * trials);
    CHECK(held < 0.985 * trials);
  }
}

}  // namespace

TEST_CASE("the interval of a ratio holds the true ratio of two policies in 95 of 100 cases, with few contexts") {
  check_ratio_coverage(25);
}

TEST_CASE("the interval of a ratio holds the true ratio of two policies in 95 of 100 cases, with many contexts") {
  check_ratio_coverage(100);
}

TEST_CASE("the interval of a ratio draws both sums, and has the width of the linearized ratio") {
  // own is other / 2 and a little noise. The difference varies as other does, the ratio as the noise does.
  Random random(5, 0);
  std::vector<Pair> pairs;
  double own = 0, other = 0;
  for (int c = 0; c < 400; ++c) {
    const double o = random.unit();
    pairs.push_back({c, o / 2 + 0.05 * (random.unit() - 0.5), o, 1});
    own += pairs.back().own, other += o;
  }
  const double ratio = own / other;
  double squares = 0;
  for (const Pair& p : pairs) squares += std::pow(p.own - ratio * p.other, 2);
  const double error = std::sqrt(400. / 399 * squares) / other;  // Cochran 1977
  const Interval i = ratio_interval(pairs);
  CHECK(i.low == Approx(ratio - 1.96 * error).margin(0.3 * error));
  CHECK(i.high == Approx(ratio + 1.96 * error).margin(0.3 * error));
}

TEST_CASE(
    "the interval of a ratio has a width where both answer alike, no end below 0, and is not there for one context") {
  const auto pairs_of = [](int n, int own, int other) {
    std::vector<Pair> pairs;
    for (int c = 0; c < n; ++c) pairs.push_back({c, double(c < own), double(c < other), 1});
    return pairs;
  };
  const Interval same = ratio_interval(pairs_of(20, 20, 20));
  CHECK(same.low < 1);
  CHECK(same.high > 1);
  CHECK(same.low > 0.7);
  const Interval none = ratio_interval(pairs_of(20, 0, 20));
  CHECK(none.low == 0);
  CHECK(none.high > 0);
  CHECK(none.high < 0.3);
  CHECK(std::isnan(ratio_interval(pairs_of(1, 1, 1)).low));
  CHECK(std::isnan(ratio_interval(pairs_of(20, 5, 0)).high));  // over a score of 0 there is no ratio
}

TEST_CASE("a place is the share of the way from the lower to the upper policy") {
  const Place p = place_of(right_in(20, 4, 8, 20));  // (8 - 4) / (20 - 4)
  CHECK(p.place == Approx(0.25));
  CHECK(p.span == Approx(0.8));
  CHECK((p.questions == 20 && p.contexts == 20));
  CHECK((p.interval.low < 0.25 && p.interval.high > 0.25));
  CHECK(place_of(right_in(20, 4, 4, 20)).place == 0);
  CHECK(place_of(right_in(20, 4, 20, 20)).place == 1);
  CHECK(place_of(right_in(20, 4, 0, 20)).place == Approx(-0.25));  // worse than the lower one
}

TEST_CASE("the order of contexts changes no interval, also where the three agree in the first") {
  // Scores from 0 to 1, and the same scores tenfold, which have no bounds. The low one is 0 and the high one 1, but for
  // one context.
  for (const double unit : {1., 10.}) {
    std::vector<Rung> rungs{{0, 0.5, 0.5, 0.5}};
    for (int c = 1; c < 20; ++c) rungs.push_back({c, 0.5 + 0.02 * c, 0, 1});
    for (Rung& r : rungs) r.own *= unit, r.low *= unit, r.high *= unit;
    const Place first = place_of(rungs);
    for (Rung& r : rungs) r.context = 19 - r.context;
    const Place last = place_of(rungs);
    CAPTURE(unit);
    // 0.5 + 0.02 * 10 on average. All places are from 0.52 to 0.88, so a mean of 19 or so is well within 0.1 of it.
    for (const Place& p : {first, last}) {
      CHECK(p.place == Approx(0.7));
      CHECK((p.interval.low > 0.6 && p.interval.low < 0.7));
      CHECK((p.interval.high < 0.8 && p.interval.high > 0.7));
    }
    // Resamples draw by number, so their noise stays.
    CHECK(last.interval.low == Approx(first.interval.low).margin(0.005));
    CHECK(last.interval.high == Approx(first.interval.high).margin(0.005));
  }
}

TEST_CASE("a policy that answers as an end does has an interval with a width") {
  for (const int own : {4, 20}) {
    const Place p = place_of(right_in(20, 4, own, 20));
    CHECK(p.interval.low < p.place);
    CHECK(p.interval.high > p.place);
  }
}

TEST_CASE("contexts that differ only by rounding have an interval with a width") {
  std::vector<Rung> rungs;
  for (int c = 0; c < 20; ++c) rungs.push_back({c, 0.1, 0, 0.3});  // the sums are not 2 and 6
  const Place p = place_of(rungs);
  CHECK(p.place == Approx(1 / 3.));
  CHECK(width(p.interval) > 0.01);
}

TEST_CASE("a place of texts weighs nats by tokens") {
  // -nats of texts with 10 and 100 tokens: (own - low) = 5 + 40 of (high - low) = 10 + 80, in each of three pairs.
  std::vector<Rung> texts;
  for (int pair = 0; pair < 3; ++pair) {
    texts.push_back({2 * pair, -25, -30, -20, 10});
    texts.push_back({2 * pair + 1, -260. - pair, -300, -220, 100});
  }
  const Place p = place_of(texts);
  CHECK(p.span == Approx(270 / 330.));
  CHECK(p.place == Approx((3 * 45 - 3) / 270.));
  CHECK((p.interval.low <= p.place && p.place <= p.interval.high));
  texts.pop_back();
  CHECK(std::isnan(place_of(texts).place));  // five texts have no interval, so they cannot tell
}

TEST_CASE("contexts are drawn, not their questions") {
  std::vector<Rung> once, five;
  for (const Rung& r : right_in(40, 8, 20, 36)) {
    once.push_back(r);
    for (int q = 0; q < 5; ++q) five.push_back(r);  // the same answer five times tells nothing new
  }
  const Place one = place_of(once), many = place_of(five);
  CHECK(many.place == Approx(one.place));
  CHECK((many.questions == 200 && many.contexts == 40));
  CHECK(width(many.interval) > 0.75 * width(one.interval));
}

TEST_CASE("a table that does not tell its ends apart gives no place") {
  CHECK(std::isnan(place_of(right_in(30, 10, 15, 11)).place));  // by one question
  const Place equal = place_of(right_in(30, 10, 15, 10)), below = place_of(right_in(30, 20, 15, 5));
  CHECK((std::isnan(equal.place) && std::isnan(equal.interval.low)));
  CHECK((equal.span_interval.low < 0 && equal.span_interval.high > 0));
  CHECK((std::isnan(below.place) && below.span == Approx(-0.5) && below.span_interval.high < 0));
  const Place alone = place_of(right_in(1, 0, 1, 1)), none = place_of({});
  CHECK((std::isnan(alone.place) && std::isnan(alone.span_interval.low)));
  CHECK((std::isnan(none.place) && std::isnan(none.span) && none.questions == 0));
}

TEST_CASE("questions without a score under one of the three are left out") {
  std::vector<Rung> rungs = right_in(20, 4, 8, 20);
  const double nan_value = std::numeric_limits<double>::quiet_NaN();
  rungs.push_back({20, nan_value, 1, 1});
  rungs.push_back({21, 1, nan_value, 1});
  rungs.push_back({22, 1, 1, nan_value});
  const Place p = place_of(rungs);
  CHECK(p.place == Approx(0.25));
  CHECK(p.questions == 20);
}

TEST_CASE("intervals of places cover the truth in 93 to 97 of 100 cases") {
  for (const Population& p : populations) check_coverage(p, 40, 500);
}

TEST_CASE("intervals of places, in many trials", "[.long]") {
  for (const Population& p : populations) check_coverage(p, 100, 3000);
}
