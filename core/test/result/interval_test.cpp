#include "result/interval.hpp"

#include <kvlab/random.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

using namespace kvlab;

namespace {

bool nothing(const Interval& i) { return std::isnan(i.low) && std::isnan(i.high); }

// Scores of contexts with one question each.
std::vector<Scored> alone(const std::vector<double>& scores) {
  std::vector<Scored> out;
  for (std::size_t i = 0; i < scores.size(); ++i) out.push_back({static_cast<int>(i), scores[i]});
  return out;
}

std::vector<double> zeros_and_ones(int ones, int n) {
  std::vector<double> out(static_cast<std::size_t>(n), 0.);
  for (int i = 0; i < ones; ++i) out[static_cast<std::size_t>(i)] = 1;
  return out;
}

// Draws samples of `contexts` contexts with draw(random). Returns the share of their intervals that hold `truth`.
template <class Draw>
double coverage(int samples, int contexts, double truth, Draw draw) {
  int held = 0;
  for (int s = 0; s < samples; ++s) {
    Random random(static_cast<std::uint64_t>(contexts), static_cast<std::uint64_t>(s));
    std::vector<Scored> questions;
    for (int c = 0; c < contexts; ++c)
      for (const double score : draw(random)) questions.push_back({c, score});
    const Interval i = score_interval(questions);
    held += i.low <= truth && truth <= i.high;
  }
  return held / static_cast<double>(samples);
}

}  // namespace

TEST_CASE("Wilson's interval is the formula's") {
  // z = 1.959964, n = 3, p = 1: (1 + z²/6 - z·sqrt(z²/36)) / (1 + z²/3) = 1 / (1 + z²/3) = 0.43850.
  struct Known {
    int ones, n;
    double low, high;
  };
  for (const Known& k : {Known{3, 3, 0.43850, 1},
                         {0, 3, 0, 0.56150},
                         {7, 10, 0.39678, 0.89221},
                         {1, 2, 0.09453, 0.90547},
                         {50, 100, 0.40383, 0.59617}}) {
    CAPTURE(k.ones, k.n);
    for (const Interval& i : {wilson_interval(k.ones / static_cast<double>(k.n), k.n),
                              score_interval(alone(zeros_and_ones(k.ones, k.n)))}) {
      CHECK(i.low == Approx(k.low).margin(1e-5));
      CHECK(i.high == Approx(k.high).margin(1e-5));
    }
  }
}

TEST_CASE("Wilson's interval ends at 0 and 1, not beside them") {
  for (const double n : {1., 3., 7., 1000.}) {
    CHECK(wilson_interval(0, n).low == 0);
    CHECK(wilson_interval(1, n).high == 1);
  }
}

TEST_CASE("Wilson's interval ends where the share is 1.96 standard errors away") {
  for (const double share : {0.01, 0.3, 0.5, 0.9})
    for (const double n : {2., 17., 400.}) {
      CAPTURE(share, n);
      const Interval i = wilson_interval(share, n);
      for (const double end : {i.low, i.high})
        CHECK(std::fabs(share - end) == Approx(1.959964 * std::sqrt(end * (1 - end) / n)).epsilon(1e-6));
    }
}

TEST_CASE("a single context has no interval, whatever it was asked") {
  CHECK(nothing(score_interval({})));
  CHECK(nothing(score_interval(alone({1}))));
  CHECK(nothing(score_interval({{7, 1}, {7, 0}, {7, 1}})));
  CHECK(nothing(score_interval({{7, 0.2}, {7, 0.9}})));
  CHECK(nothing(perplexity_interval({{0, 30, 10}})));
}

TEST_CASE("questions that have no score leave the interval as it is") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Interval with = score_interval(alone({0, nan, 1, nan})), without = score_interval(alone({0, 1}));
  CHECK(with.low == without.low);
  CHECK(with.high == without.high);
}

TEST_CASE("questions over one context count less than questions of their own") {
  std::vector<Scored> same, mixed;  // 6 contexts of 4 questions, half of them right
  for (int c = 0; c < 6; ++c)
    for (int q = 0; q < 4; ++q) {
      same.push_back({c, double(c % 2)});
      mixed.push_back({c, double(q % 2)});
    }
  const Interval context = wilson_interval(0.5, 6), question = wilson_interval(0.5, 24);
  CHECK(score_interval(same).low == Approx(context.low));  // the answers of a context are equal: 6 observations
  CHECK(score_interval(same).high == Approx(context.high));
  CHECK(score_interval(mixed).low == Approx(question.low));  // at most one observation per question
  std::vector<Scored> right;
  for (int c = 0; c < 3; ++c)
    for (int q = 0; q < 4; ++q) right.push_back({c, 1});
  CHECK(score_interval(right).low == Approx(wilson_interval(1, 3).low));
}

TEST_CASE("the interval of other scores is Wilson's where contexts are too few or all alike") {
  const Interval alike = score_interval(alone({0.5, 0.5, 0.5}));
  CHECK(alike.low == Approx(wilson_interval(0.5, 3).low));
  CHECK(alike.high == Approx(wilson_interval(0.5, 3).high));
  CHECK(score_interval(alone(std::vector<double>(20, 0.9))).low == Approx(wilson_interval(0.9, 20).low));
  CHECK(score_interval(alone({0.2, 0.4, 0.9})).low == Approx(wilson_interval(0.5, 3).low));
  CHECK(nothing(score_interval(alone({3, 4, 5}))));  // such a score's range is unknown
}

TEST_CASE("0/1 scores of clustered questions are covered in 95 of 100 cases, or more") {
  // The questions of a context are right with its own probability, 0.4 or 1.
  const auto draw = [](Random& random) {
    const double right = random.unit() < 0.5 ? 0.4 : 1;
    std::vector<double> out;
    for (int q = 0; q < 4; ++q) out.push_back(random.unit() < right);
    return out;
  };
  for (const int contexts : {10, 20, 40}) {
    CAPTURE(contexts);
    const double share = coverage(10000, contexts, 0.7, draw);  // a standard error of 0.002
    CHECK(share > 0.945);
    CHECK(share < 0.985);
  }
}

TEST_CASE("the bootstrap covers the truth in 93 to 97 of 100 cases") {
  // Context and question each give half of a score. A context has one to five questions.
  const auto even = [](Random& random) {
    const double context = random.unit();
    std::vector<double> out(1 + random.below(5));
    for (double& score : out) score = (context + random.unit()) / 2;
    return out;
  };
  // Skewed scores: products of three uniform numbers, two of them the context's.
  const auto skewed = [](Random& random) {
    const double context = random.unit() * random.unit();
    std::vector<double> out(3);
    for (double& score : out) score = context * random.unit();
    return out;
  };
  for (const int contexts : {8, 16}) {
    CAPTURE(contexts);
    const double share = coverage(500, contexts, 0.5, even);
    CHECK(share > 0.93);
    CHECK(share < 0.97);
  }
  const double share = coverage(500, 40, 0.125, skewed);
  CHECK(share > 0.93);
  CHECK(share < 0.97);
}

// By hand, of 30 contexts of which two have 1 and the others 0: the mean is 1/15, the kurtosis 13.07, and the variance
// has 60 / (13.07 - 27/29) = 4.94 degrees of freedom. So t is 2.580, widened 2.624, and 0.00435 of the resamples lie
// beyond it.
TEST_CASE("the bootstrap takes more resamples where few contexts make up the variance") {
  const std::vector<double> weights(30, 1.);
  std::vector<double> residuals(30, -1. / 15), halves;
  residuals[0] = residuals[7] = 14. / 15;
  for (int i = 0; i < 30; ++i) halves.push_back(i % 2 ? 1 : -1);
  CHECK(bootstrap_outside(weights, residuals) == 21);
  // 29 degrees of freedom at most: t is 2.045, widened 2.080, and 0.01875 lie beyond it.
  CHECK(bootstrap_outside(weights, halves) == 93);
  CHECK(bootstrap_outside(weights, {}) == 93);
  CHECK(bootstrap_outside(weights, std::vector<double>(30, 0.)) == 93);
  for (double& r : residuals) r *= 1e-200;
  CHECK(bootstrap_outside(weights, residuals) == 21);
}

TEST_CASE("the bootstrap draws contexts, not questions") {
  // 8 contexts of 50 equal questions each: the interval is that of 8 values, not of 400.
  std::vector<Scored> clustered;
  std::vector<double> values;
  for (int c = 0; c < 8; ++c) {
    values.push_back(0.1 * (c + 1));
    for (int q = 0; q < 50; ++q) clustered.push_back({c, values.back()});
  }
  const Interval many = score_interval(clustered), few = score_interval(alone(values));
  CHECK(many.low == Approx(few.low));
  CHECK(many.high == Approx(few.high));
  // Student's t: 0.45 -+ 2.365 * 0.245 / sqrt(8).
  CHECK(few.low == Approx(0.45 - 0.205).margin(0.03));
  CHECK(few.high == Approx(0.45 + 0.205).margin(0.03));
}

TEST_CASE("perplexity's interval is exp of the nll per token, each text with its length") {
  std::vector<Scored> texts, long_ones;
  for (int t = 0; t < 8; ++t) {
    const double tokens = t == 0 ? 1 : 1000;
    texts.push_back({t, (t == 0 ? 20 : 2 + 0.1 * t) * tokens, tokens});  // a badly predicted text of one token
    if (t > 0) long_ones.push_back({t, texts.back().value, tokens});
  }
  const Interval i = perplexity_interval(texts), without = perplexity_interval(long_ones);
  CHECK(i.low > std::exp(2.1));
  CHECK(i.high < std::exp(2.7 + 0.05));  // the mean of exp would be 6e7
  CHECK(i.low < without.low + 0.5);
  CHECK(nothing(perplexity_interval({{0, 20, 10}, {1, 30, 10}, {2, 25, 10}})));
  CHECK(nothing(perplexity_interval(std::vector<Scored>(8, {0, 20, 10}))));
}

TEST_CASE("the same scores have the same interval") {
  const auto scores = alone({0.1, 0.5, 0.2, 0.9, 0.4, 0.7, 0.3});
  CHECK(score_interval(scores).low == score_interval(scores).low);
  CHECK(score_interval(scores).high == score_interval(scores).high);
}
