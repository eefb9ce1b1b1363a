// Paired comparisons: the same questions under two policies. Questions over one context are not independent, so a
// context is what is drawn or flipped. Intervals are those of result/interval.hpp.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "result/interval.hpp"

namespace kvlab {

// A question that both policies answered. `own` and `other` are scores of weight 1, or nll (nats) of `weight` tokens.
struct Pair {
  int context = 0;
  double own = 0, other = 0, weight = 1;
};

struct Difference {
  std::int64_t pairs = 0, contexts = 0;
  ScoreRange range = ScoreRange::zero_one;
  double mean = 0;        // sum(own - other) / sum(weight); NaN without pairs
  Interval interval{};    // 95 %
  double error = 0;       // standard error of the mean, over contexts; NaN for one context
  double p = 1;           // two-sided, of sign_flip_p(); NaN without pairs
  bool mcnemar = false;   // that test is McNemar's: 0/1 scores, one question per context
  std::int64_t both = 0;  // 0/1 scores: right under both; other scores: equal and not 0
  std::int64_t neither = 0;
  std::int64_t lost = 0, won = 0;  // own below other, own above other
};

// What the scores of these pairs show.
ScoreRange range_of(std::span<const Pair> pairs);

// Pairs whose scores are not finite are left out.
Difference difference_of(std::span<const Pair> pairs);

// The test of no difference in which each context's sum may as well have the other sign: how often is the total then
// at least as far from 0? With sums of -1, 0 and 1 this is McNemar's exact test (McNemar 1947: 2 * the smaller tail of
// a binomial with share 1/2, at most 1). Exact where sums are whole numbers or at most 16 are not 0. Else by
// 20,000 draws, which count themselves among the outcomes (Phipson and Smyth 2010). 1 if all sums are 0.
double sign_flip_p(const std::vector<double>& sums);

// Holm's step-down adjustment for several tests (Holm 1979), in the order given. NaN = no test, and stays NaN.
std::vector<double> holm(const std::vector<double>& p);

// The difference of 0/1 scores that a two-sided test at 5 % finds in 80 of 100 cases, with n independent pairs (Connor
// 1987): n = (z(.975) sqrt(d) + z(.8) sqrt(d - x^2))^2 / x^2 for the difference x, where the share d of pairs differs.
// Here d = x + churn: `churn` is the share of pairs that flip without changing the mean, as many to either side. NaN
// if no difference up to 1 is found so, and for n below 6: five flips to one side have p = 1/16.
double detectable_share(double n, double churn);

// The same for any mean with this standard error: (z(.975) + z(.8)) * error.
double detectable_mean(double error);

struct Rank {
  double rank = 0;        // 1 = best; equal ones share the mean of their places
  int low = 0, high = 0;  // 95 % interval
};

// values[policy][context]: sums of scores, over contexts of the weights given. The interval holds the places in 95 % of
// the resamples of contexts, an equal one counting as better and as worse (bootstrap of ranks: Goldstein and
// Spiegelhalter 1996; Hall and Miller 2009 show that it is too narrow for policies of nearly equal means). At least 2
// contexts.
std::vector<Rank> ranks_of(const std::vector<std::vector<double>>& values, const std::vector<double>& weights,
                           bool lower_is_better);

}  // namespace kvlab
