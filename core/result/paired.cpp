#include "result/paired.hpp"

#include <kvlab/random.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

namespace kvlab {
namespace {

constexpr double not_known = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t most_enumerated = 16;
constexpr double most_exact_reach = 1e5, most_exact_work = 1e8;  // length of the distribution, additions
constexpr int draws = 20000, resamples = 2000;
constexpr double level = 0.05, power = 0.8;

// The share of sign choices whose total is at least |observed| away from 0. Whole numbers; `reach` = sum of |sums|.
double whole_number_p(const std::vector<double>& sums, double reach, double observed) {
  const auto zero = static_cast<std::size_t>(reach);  // chance[zero + t]: of the total t
  std::vector<double> chance(2 * zero + 1, 0.), next;
  chance[zero] = 1;
  std::size_t reached = 0;
  for (const double sum : sums) {
    const auto step = static_cast<std::size_t>(std::fabs(sum));
    next.assign(chance.size(), 0.);
    for (std::size_t at = zero - reached; at <= zero + reached; ++at) {
      next[at - step] += chance[at] / 2;
      next[at + step] += chance[at] / 2;
    }
    reached += step;
    chance.swap(next);
  }
  const auto far = static_cast<std::size_t>(std::fabs(observed));
  double p = 0;
  for (std::size_t at = 0; at < chance.size(); ++at)
    if (at <= zero - far || at >= zero + far) p += chance[at];
  return std::min(1., p);
}

double enumerated_p(const std::vector<double>& sums, double observed, double slack) {
  const std::size_t choices = std::size_t{1} << sums.size();
  std::size_t far = 0;
  for (std::size_t choice = 0; choice < choices; ++choice) {
    double total = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) total += choice >> i & 1 ? sums[i] : -sums[i];
    far += std::fabs(total) >= std::fabs(observed) - slack;
  }
  return static_cast<double>(far) / static_cast<double>(choices);
}

double drawn_p(const std::vector<double>& sums, double observed, double slack) {
  Random random(20240607, sums.size());
  int far = 0;
  for (int draw = 0; draw < draws; ++draw) {
    double total = 0;
    std::uint64_t signs = 0;
    for (std::size_t i = 0; i < sums.size(); ++i, signs >>= 1) {
      if (i % 64 == 0) signs = random.next();
      total += signs & 1 ? sums[i] : -sums[i];
    }
    far += std::fabs(total) >= std::fabs(observed) - slack;
  }
  return (1. + far) / (1. + draws);
}

double mean_of(const std::vector<double>& values, const std::vector<double>& weights,
               const std::vector<std::size_t>& drawn) {
  double value = 0, weight = 0;
  for (const std::size_t c : drawn) value += values[c], weight += weights[c];
  return value / weight;
}

// The quantiles of 2.5 and 97.5 % of places, each of which is counted.
Rank interval_of(const std::vector<int>& best, const std::vector<int>& worst) {
  const auto place = [](const std::vector<int>& counts, int rank) {
    std::size_t at = 0;
    for (int seen = counts[0]; seen <= rank; seen += counts[at]) ++at;
    return static_cast<int>(at) + 1;
  };
  const int outside = static_cast<int>(level / 2 * resamples);
  return {0, place(best, outside), place(worst, resamples - 1 - outside)};
}

// How many of `means` are better than `own`, and how many are equal, itself included.
std::pair<int, int> better_and_equal(const std::vector<double>& means, double own, bool lower_is_better) {
  int better = 0, equal = 0;
  for (const double mean : means) {
    const bool same = std::fabs(mean - own) <= 1e-12 * std::fabs(own);
    equal += same;
    better += !same && (lower_is_better ? mean < own : mean > own);
  }
  return {better, equal};
}

}  // namespace

double sign_flip_p(const std::vector<double>& all) {
  std::vector<double> sums;
  std::copy_if(all.begin(), all.end(), std::back_inserter(sums), [](double sum) { return sum != 0; });
  if (sums.empty()) return 1;
  const double observed = std::accumulate(sums.begin(), sums.end(), 0.);
  const double reach =
      std::accumulate(sums.begin(), sums.end(), 0., [](double r, double s) { return r + std::fabs(s); });
  const bool whole = std::all_of(sums.begin(), sums.end(), [](double sum) { return sum == std::floor(sum); });
  if (whole && reach <= most_exact_reach && reach * static_cast<double>(sums.size()) <= most_exact_work)
    return whole_number_p(sums, reach, observed);
  const double slack = 1e-9 * reach;  // totals that differ by rounding are equal
  return sums.size() <= most_enumerated ? enumerated_p(sums, observed, slack) : drawn_p(sums, observed, slack);
}

ScoreRange range_of(std::span<const Pair> pairs) {
  const auto every = [&](auto holds) {
    return std::all_of(pairs.begin(), pairs.end(),
                       [&](const Pair& p) { return p.weight == 1 && holds(p.own) && holds(p.other); });
  };
  if (every([](double v) { return v == 0 || v == 1; })) return ScoreRange::zero_one;
  return every([](double v) { return v >= 0 && v <= 1; }) ? ScoreRange::share : ScoreRange::unbounded;
}

Difference difference_of(std::span<const Pair> given) {
  std::vector<Pair> pairs;
  std::copy_if(given.begin(), given.end(), std::back_inserter(pairs),
               [](const Pair& p) { return std::isfinite(p.own) && std::isfinite(p.other) && p.weight > 0; });
  Difference out;
  out.range = range_of(pairs);
  std::vector<Scored> differences;
  std::map<int, double> sums;
  double value = 0, weight = 0;
  for (const Pair& p : pairs) {
    const double d = p.own - p.other;
    differences.push_back({p.context, d, p.weight});
    sums[p.context] += d;
    value += d, weight += p.weight;
    (d < 0 ? out.lost : d > 0 ? out.won : p.own == 0 ? out.neither : out.both) += 1;
  }
  out.pairs = static_cast<std::int64_t>(pairs.size());
  out.contexts = static_cast<std::int64_t>(sums.size());
  out.mean = pairs.empty() ? not_known : value / weight;
  out.interval = difference_interval(differences, out.range);
  out.error = clustered_error(differences);
  out.mcnemar = out.range == ScoreRange::zero_one && out.pairs == out.contexts;
  std::vector<double> flipped;
  for (const auto& [context, sum] : sums) flipped.push_back(sum);
  out.p = pairs.empty() ? not_known : sign_flip_p(flipped);
  return out;
}

std::vector<double> holm(const std::vector<double>& p) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < p.size(); ++i)
    if (!std::isnan(p[i])) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return p[a] < p[b]; });
  std::vector<double> out(p.size(), not_known);
  double most = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    most = std::max(most, std::min(1., p[order[i]] * static_cast<double>(order.size() - i)));
    out[order[i]] = most;
  }
  return out;
}

double detectable_share(double n, double churn) {
  if (!(n >= 6)) return not_known;
  const double a = normal_quantile(level / 2), b = normal_quantile(1 - power);
  const auto needed = [&](double x) {  // pairs
    const double differing = x + churn;
    return std::pow((a * std::sqrt(differing) + b * std::sqrt(differing - x * x)) / x, 2);
  };
  double low = 0, high = std::max(0., 1 - churn);
  if (high == 0 || needed(high) > n) return not_known;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (needed(middle) > n ? low : high) = middle;
  }
  return high;
}

double detectable_mean(double error) { return (normal_quantile(level / 2) + normal_quantile(1 - power)) * error; }

std::vector<Rank> ranks_of(const std::vector<std::vector<double>>& values, const std::vector<double>& weights,
                           bool lower_is_better) {
  const std::size_t policies = values.size();
  std::vector<std::size_t> drawn(weights.size());
  std::vector<double> means(policies);
  const auto take_means = [&] {
    for (std::size_t p = 0; p < policies; ++p) means[p] = mean_of(values[p], weights, drawn);
  };
  std::iota(drawn.begin(), drawn.end(), std::size_t{0});
  take_means();
  const std::vector<double> of_all = means;
  std::vector<std::vector<int>> best(policies, std::vector<int>(policies)), worst = best;
  Random random(20240607, weights.size());
  for (int r = 0; r < resamples; ++r) {
    for (std::size_t& c : drawn) c = random.below(weights.size());
    take_means();
    for (std::size_t p = 0; p < policies; ++p) {
      const auto [better, equal] = better_and_equal(means, means[p], lower_is_better);
      ++best[p][static_cast<std::size_t>(better)];
      ++worst[p][static_cast<std::size_t>(better + equal - 1)];
    }
  }
  std::vector<Rank> out;
  for (std::size_t p = 0; p < policies; ++p) {
    const auto [better, equal] = better_and_equal(of_all, of_all[p], lower_is_better);
    out.push_back(interval_of(best[p], worst[p]));
    out.back().rank = better + (equal + 1) / 2.;
  }
  return out;
}

}  // namespace kvlab
