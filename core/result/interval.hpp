// 95 % confidence intervals of a cell's score. The cell's contexts are a sample of a population of contexts.
//
// Questions over one context are not independent, so the methods count or draw contexts:
// - Scores of 0 and 1: Wilson's interval (Wilson 1927). Where a context has several questions, n is the effective
//   number of questions: questions / design effect of the contexts, adjusted for its degrees of freedom (Korn and
//   Graubard 1998; Dean and Pagano 2015 compare it with others). It is at least the number of contexts and at most
//   that of questions.
// - Other scores: percentiles of the bootstrap over contexts of sum(scores) / sum(questions), widened for few contexts
//   (Hesterberg 2015, expanded percentile interval, with Kish's effective number as n). Where few contexts make up most
//   of the variance, it is little known, so t has the variance's own degrees of freedom (O'Neill 2014, by the
//   kurtosis).
// - Perplexity: exp of the same bootstrap of sum(nll) / sum(tokens) over texts.
//
// The bootstrap needs at least 6 contexts that are not all alike. With less, scores from 0 to 1 have Wilson's interval
// of one observation per context. Their variance is at most that of 0/1 scores of the same mean (Bhatia and Davis
// 2000). This interval is then rather too wide than too narrow. Perplexities then have no interval. A missing interval
// is NaN at both ends. A single context has none, because it does not show how contexts differ.
//
// A mean paired difference has the same bootstrap. Where nearly all pairs are equal, a resample holds too few of the
// others. So differences of 0/1 scores get two contexts more, of one question each, that differ by +1 and by -1 (Bonett
// and Price 2012 add these to Wald's interval). So do other scores from 0 to 1 with few contexts, or all alike. 0/1
// scores of one question per context have the score interval of a paired difference instead (Tango 1998), from 6
// contexts on. It may exclude 0 where McNemar's exact test does not: at four answers lost and none won, p = 0.125.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvlab {

struct Interval {
  double low, high;
};

// One question of a score that is sum(value) / sum(weight). Questions that are not finite are left out.
struct Scored {
  int context = 0;
  double value = 0, weight = 1;
};

// share: 0 to 1. n: observations, above 0; need not be whole.
Interval wilson_interval(double share, double n);

Interval score_interval(const std::vector<Scored>& questions);   // value = score, weight = 1
Interval perplexity_interval(const std::vector<Scored>& texts);  // value = nll in nats, weight = tokens

// What is known of scores whose differences are taken: 0 or 1 each, from 0 to 1, or nothing.
enum class ScoreRange : std::uint8_t { zero_one, share, unbounded };

// Of sum(value) / sum(weight); value = a question's difference. `range` is that of the scores.
Interval difference_interval(const std::vector<Scored>& differences, ScoreRange range);

// The standard error of sum(value) / sum(weight) over contexts (Cochran 1977, a ratio's linearized variance). NaN for
// fewer than two contexts.
double clustered_error(const std::vector<Scored>& questions);

// The bootstrap behind the intervals above, for other statistics. The range of fewer independent values than
// fewest_contexts misses their mean in more than 5 % of all cases: 2^(1 - n). bootstrap_outside: how many resamples lie
// outside of the interval, on either side; weights: of each context; residuals: what each adds to the statistic's
// error, in any unit, 0 in the sum. None where contexts were added: these widen it already.
inline constexpr int bootstrap_resamples = 5000;
inline constexpr std::size_t fewest_contexts = 6;
std::size_t bootstrap_outside(const std::vector<double>& weights, const std::vector<double>& residuals);

// The quantile of the standard normal distribution above which `upper_tail` lies.
double normal_quantile(double upper_tail);

}  // namespace kvlab
