#include "result/interval.hpp"

#include <kvlab/random.hpp>

#include <algorithm>
#include <boost/math/distributions/normal.hpp>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <limits>
#include <map>

namespace kvlab {
namespace {

constexpr double confidence = 0.95;
constexpr double upper_tail = (1 - confidence) / 2;
constexpr int resamples = bootstrap_resamples;
constexpr Interval none{std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::quiet_NaN()};

double z_score() {
  static const double z = normal_quantile(upper_tail);
  return z;
}

double t_quantile(double freedom) {
  const boost::math::students_t t(freedom);
  return boost::math::quantile(boost::math::complement(t, upper_tail));
}

struct Context {
  double value = 0, weight = 0;
};

std::vector<Context> contexts_of(const std::vector<Scored>& questions) {
  std::map<int, Context> sums;
  for (const Scored& q : questions) {
    if (!std::isfinite(q.value) || !(q.weight > 0)) continue;
    sums[q.context].value += q.value;
    sums[q.context].weight += q.weight;
  }
  std::vector<Context> out;
  for (const auto& [id, sum] : sums) out.push_back(sum);
  return out;
}

Context total(const std::vector<Context>& contexts) {
  Context all;
  for (const Context& c : contexts) {
    all.value += c.value;
    all.weight += c.weight;
  }
  return all;
}

bool alike(const std::vector<Context>& contexts) {
  return std::all_of(contexts.begin(), contexts.end(), [&](const Context& c) {
    return c.value * contexts.front().weight == contexts.front().value * c.weight;
  });
}

// How many contexts of equal size count as much as these? Fewer, where few contexts have most questions (Kish 1965).
double contexts_of_equal_size(const std::vector<double>& weights) {
  double sum = 0, squares = 0;
  for (const double w : weights) sum += w, squares += w * w;
  return std::max(2., sum * sum / squares);
}

// Degrees of freedom of a variance that these residuals estimate: n - 1 for normal ones (O'Neill 2014).
double freedom_of(const std::vector<double>& residuals) {
  const auto n = static_cast<double>(residuals.size());
  double largest = 0, squares = 0, fourths = 0;
  for (const double r : residuals) largest = std::max(largest, std::fabs(r));
  if (largest == 0) return n - 1;  // contexts that differ only by rounding
  for (const double r : residuals) squares += std::pow(r / largest, 2), fourths += std::pow(r / largest, 4);
  return 2 * n / (n * fourths / (squares * squares) - (n - 3) / (n - 1));
}

Interval bootstrap(const std::vector<Context>& contexts, bool padded = false) {
  const std::size_t n = contexts.size();
  Random random(20240607, n);
  std::vector<double> ratios(resamples), weights, residuals;
  for (double& ratio : ratios) {
    Context drawn;
    for (std::size_t i = 0; i < n; ++i) {
      const Context& c = contexts[random.below(n)];
      drawn.value += c.value;
      drawn.weight += c.weight;
    }
    ratio = drawn.value / drawn.weight;
  }
  std::sort(ratios.begin(), ratios.end());
  const Context all = total(contexts);
  for (const Context& c : contexts) {
    weights.push_back(c.weight);
    if (!padded) residuals.push_back(c.value - all.value / all.weight * c.weight);
  }
  const std::size_t rank = bootstrap_outside(weights, residuals);
  return {ratios[rank], ratios[resamples - 1 - rank]};
}

// Of sum(values) / sum(weights); 2 contexts or more.
double ratio_variance(const std::vector<Context>& contexts) {
  const auto n = static_cast<double>(contexts.size());
  const Context all = total(contexts);
  double squares = 0;
  for (const Context& c : contexts) squares += std::pow(c.value - all.value / all.weight * c.weight, 2);
  return n / (n - 1) * squares / (all.weight * all.weight);
}

// How many independent 0/1 scores count as much as these?
double effective_questions(const std::vector<Context>& contexts) {
  const auto n = static_cast<double>(contexts.size());
  const Context all = total(contexts);
  if (all.weight == n) return n;
  const double share = all.value / all.weight;
  if (share == 0 || share == 1) return n;  // equal scores do not show the design effect: assume the worst
  const double variance = ratio_variance(contexts);
  const double design_effect = variance / (share * (1 - share) / all.weight);
  const double few = std::pow(z_score() / t_quantile(n - 1), 2);
  return std::clamp(few * all.weight / design_effect, n, all.weight);
}

// Whether Tango's score test keeps a difference of `x`. share: of losses, the likeliest one where the difference is x.
bool holds(double x, double won, double lost, double n) {
  const double a = 2 * n, b = (2 * n - won + lost) * x - won - lost, c = -lost * x * (1 - x);
  const double share = (std::sqrt(std::max(0., b * b - 4 * a * c)) - b) / (2 * a);
  const double apart = won - lost - n * x;
  return apart * apart <= z_score() * z_score() * n * (2 * share + x * (1 - x));
}

// The upper end of Tango's interval of (won - lost) / n.
double highest_difference(double won, double lost, double n) {
  constexpr int halvings = 60;
  double low = (won - lost) / n, high = 1;
  for (int i = 0; i < halvings; ++i) {
    const double middle = (low + high) / 2;
    (holds(middle, won, lost, n) ? low : high) = middle;
  }
  return low;
}

}  // namespace

Interval wilson_interval(double share, double n) {
  const double z = z_score(), z2 = z * z / n;
  const double middle = share + z2 / 2, half = z * std::sqrt((share * (1 - share) + z2 / 4) / n);
  return {share <= 0 ? 0 : (middle - half) / (1 + z2), share >= 1 ? 1 : (middle + half) / (1 + z2)};
}

Interval score_interval(const std::vector<Scored>& questions) {
  const std::vector<Context> contexts = contexts_of(questions);
  if (contexts.size() < 2) return none;
  const Context all = total(contexts);
  const double mean = all.value / all.weight;
  const auto every = [&](auto holds) {
    return std::all_of(questions.begin(), questions.end(),
                       [&](const Scored& q) { return !std::isfinite(q.value) || holds(q.value); });
  };
  if (every([](double v) { return v == 0 || v == 1; })) return wilson_interval(mean, effective_questions(contexts));
  if (contexts.size() >= fewest_contexts && !alike(contexts)) return bootstrap(contexts);
  if (!every([](double v) { return v >= 0 && v <= 1; })) return none;
  return wilson_interval(mean, static_cast<double>(contexts.size()));
}

Interval perplexity_interval(const std::vector<Scored>& texts) {
  const std::vector<Context> contexts = contexts_of(texts);
  if (contexts.size() < fewest_contexts || alike(contexts)) return none;
  const Interval nll = bootstrap(contexts);
  return {std::exp(nll.low), std::exp(nll.high)};
}

Interval difference_interval(const std::vector<Scored>& differences, ScoreRange range) {
  std::vector<Context> contexts = contexts_of(differences);
  if (contexts.size() < 2) return none;
  const auto alone = [](const Context& c) { return c.weight == 1; };
  if (range == ScoreRange::zero_one && contexts.size() >= fewest_contexts &&
      std::all_of(contexts.begin(), contexts.end(), alone)) {
    const auto count = [&](double value) {
      return static_cast<double>(
          std::count_if(contexts.begin(), contexts.end(), [&](const Context& c) { return c.value == value; }));
    };
    const double won = count(1), lost = count(-1), n = static_cast<double>(contexts.size());
    return {-highest_difference(lost, won, n), highest_difference(won, lost, n)};
  }
  const bool enough = contexts.size() >= fewest_contexts && !alike(contexts);
  const bool padded = range == ScoreRange::zero_one || (range == ScoreRange::share && !enough);
  if (!enough && !padded) return none;
  if (padded) contexts.insert(contexts.end(), {{1, 1}, {-1, 1}});
  return bootstrap(contexts, padded);
}

double clustered_error(const std::vector<Scored>& questions) {
  const std::vector<Context> contexts = contexts_of(questions);
  return contexts.size() < 2 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(ratio_variance(contexts));
}

std::size_t bootstrap_outside(const std::vector<double>& weights, const std::vector<double>& residuals) {
  const double equal = contexts_of_equal_size(weights);
  const double freedom = residuals.empty() ? equal - 1 : std::min(equal - 1, freedom_of(residuals));
  const double widened = -std::sqrt(equal / (equal - 1)) * t_quantile(freedom);
  const double tail = boost::math::cdf(boost::math::normal(), widened);
  return static_cast<std::size_t>(tail * resamples);
}

double normal_quantile(double tail) {
  return boost::math::quantile(boost::math::complement(boost::math::normal(), tail));
}

}  // namespace kvlab
