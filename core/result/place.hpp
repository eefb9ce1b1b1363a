// Where a policy stands between a lower and an upper one, question by question: (own - low) / (high - low).
#pragma once
#include <cstdint>
#include <span>

#include "result/paired.hpp"

namespace kvlab {

// A question that all three answered. Higher is better: scores of weight 1, or -nll (nats) of `weight` tokens.
struct Rung {
  int context = 0;
  double own = 0, low = 0, high = 0, weight = 1;
};

struct Place {
  std::int64_t questions = 0, contexts = 0;
  double span = 0;           // mean of (high - low)
  Interval span_interval{};  // 95 %; NaN with too few contexts
  double place = 0;          // sum(own - low) / sum(high - low); NaN unless span_interval lies above 0
  Interval interval{};       // 95 %; NaN without a place, and with too few contexts
};

// The interval is the bootstrap over contexts of result/interval.hpp, of the ratio of the two sums. A resample whose
// sum of (high - low) is 0 or less has no ratio. It counts beyond both ends, so it widens the interval. An end that
// lies among such resamples is infinite. Scores from 0 to 1 have two contexts more, as a difference has: +1 and -1 for
// (own - low) and 0 for (high - low). Otherwise an own policy that answers as `low` or `high` does would have an
// interval without a width.
// Questions whose scores are not finite are left out.
Place place_of(std::span<const Rung> rungs);

// The 95 % interval of sum(own) / sum(other), which is the place above 0 with `other` as the upper policy. Each
// resample draws both sums, so neither counts as known. Scores from 0 to 1 have the same two contexts more, and no end
// below 0. NaN with too few contexts, and where so many resamples have no ratio that an end would be infinite.
Interval ratio_interval(std::span<const Pair> pairs);

}  // namespace kvlab
