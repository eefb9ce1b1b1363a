#include "result/place.hpp"

#include <kvlab/random.hpp>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <vector>

namespace kvlab {
namespace {

constexpr double not_known = std::numeric_limits<double>::quiet_NaN();
constexpr double infinite = std::numeric_limits<double>::infinity();

struct Context {
  double above = 0, span = 0, weight = 0;  // sums of own - low, high - low and the questions' weights
};

std::vector<Context> contexts_of(const std::vector<Rung>& rungs) {
  std::map<int, Context> sums;
  for (const Rung& r : rungs) {
    Context& c = sums[r.context];
    c.above += r.own - r.low;
    c.span += r.high - r.low;
    c.weight += r.weight;
  }
  std::vector<Context> out;
  for (const auto& [id, sum] : sums) out.push_back(sum);
  return out;
}

Context sum_of(const std::vector<Context>& contexts) {
  Context all;
  for (const Context& c : contexts) all.above += c.above, all.span += c.span, all.weight += c.weight;
  return all;
}

// Resamples of such contexts all have the same place, so they tell no interval.
bool alike(const std::vector<Context>& contexts) {
  constexpr double rounding = 1e-12;
  const Context all = sum_of(contexts);  // not one context: all are like one whose sums are 0
  return std::all_of(contexts.begin(), contexts.end(), [&](const Context& c) {
    const double one = c.above * all.span, other = all.above * c.span;
    return std::fabs(one - other) <= rounding * (std::fabs(one) + std::fabs(other));
  });
}

Interval bootstrap(const std::vector<Context>& contexts, bool padded) {
  const std::size_t n = contexts.size();
  const Context all = sum_of(contexts);
  std::vector<double> weights, residuals, ratios;
  for (const Context& c : contexts) {
    weights.push_back(c.weight);
    if (!padded) residuals.push_back(c.above - all.above / all.span * c.span);
  }
  Random random(20240607, n);
  for (int r = 0; r < bootstrap_resamples; ++r) {
    Context drawn;
    for (std::size_t i = 0; i < n; ++i) {
      const Context& c = contexts[random.below(n)];
      drawn.above += c.above;
      drawn.span += c.span;
    }
    if (drawn.span > 0) ratios.push_back(drawn.above / drawn.span);
  }
  std::sort(ratios.begin(), ratios.end());
  const std::size_t without = bootstrap_resamples - ratios.size(), outside = bootstrap_outside(weights, residuals);
  if (without > outside) return {-infinite, infinite};
  return {ratios[outside - without], ratios[ratios.size() - 1 - (outside - without)]};
}

Interval interval_of(std::vector<Context> contexts, ScoreRange range) {
  const bool enough = contexts.size() >= fewest_contexts && !alike(contexts);
  const bool padded = range == ScoreRange::zero_one || (range == ScoreRange::share && !enough);
  if (!enough && !padded) return {not_known, not_known};
  if (padded) contexts.insert(contexts.end(), {{1, 0, 1}, {-1, 0, 1}});
  return bootstrap(contexts, padded);
}

}  // namespace

Place place_of(std::span<const Rung> given) {
  std::vector<Rung> rungs;
  std::copy_if(given.begin(), given.end(), std::back_inserter(rungs), [](const Rung& r) {
    return std::isfinite(r.own) && std::isfinite(r.low) && std::isfinite(r.high) && r.weight > 0;
  });
  Place out;
  out.span = out.place = not_known;
  out.span_interval = out.interval = {not_known, not_known};
  if (rungs.empty()) return out;
  std::vector<Pair> pairs;
  std::vector<Scored> spans;
  for (const Rung& r : rungs) {
    pairs.push_back({r.context, r.high, r.low, r.weight});
    spans.push_back({r.context, r.high - r.low, r.weight});
  }
  out.span_interval = difference_interval(spans, range_of(pairs));
  const std::vector<Context> contexts = contexts_of(rungs);
  const Context all = sum_of(contexts);
  out.questions = static_cast<std::int64_t>(rungs.size());
  out.contexts = static_cast<std::int64_t>(contexts.size());
  out.span = all.span / all.weight;
  if (!(out.span_interval.low > 0)) return out;
  for (const Rung& r : rungs) pairs.push_back({r.context, r.own, r.low, r.weight});
  out.place = all.above / all.span;
  out.interval = interval_of(contexts, range_of(pairs));
  return out;
}

Interval ratio_interval(std::span<const Pair> given) {
  std::vector<Rung> rungs;
  std::vector<Pair> pairs;
  for (const Pair& p : given) {
    if (!std::isfinite(p.own) || !std::isfinite(p.other) || !(p.weight > 0)) continue;
    rungs.push_back({p.context, p.own, 0, p.other, p.weight});
    pairs.push_back(p);
  }
  const std::vector<Context> contexts = contexts_of(rungs);
  if (contexts.size() < 2) return {not_known, not_known};
  const ScoreRange range = range_of(pairs);
  Interval out = interval_of(contexts, range);
  if (range != ScoreRange::unbounded) out.low = std::max(0., out.low);
  return std::isfinite(out.high) ? out : Interval{not_known, not_known};
}

}  // namespace kvlab
