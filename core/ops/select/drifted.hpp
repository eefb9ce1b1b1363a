// Calls of drifted_heads and drifted_by_logits on CUDA that wait for those of other layers, and what the CPU and the
// GPU share of it.
#pragma once
#include <kvlab/ops.hpp>

#include <vector>

#include "ops/page/injected.hpp"

namespace kvlab::ops {

// Replaces what checks of drift find (`inject` of an experiment). A hash of seed, sequence, layer, leader and step
// decides which leaders drift. Scores and overlaps are computed as without it.
struct InjectedDrift {
  std::int32_t share = 0;                   // millionths of a check's leaders
  const std::uint32_t* sequence = nullptr;  // [slot] number of the sequence; null = nothing is injected
  int layer = 0;
  std::uint64_t seed = 0;

  constexpr bool drifts(int slot, int leader, int step) const {
    const std::uint64_t drawn =
        inject_stream(seed, layer, sequence[slot], leader, static_cast<std::uint32_t>(step)) >> 32;
    return static_cast<std::int32_t>(drawn * 1'000'000 >> 32) < share;
  }
};

struct DriftedHeads {
  PagedKv kv;
  View<const float, 3> scores;
  TokenList lists;
  DriftRule rule;
  const std::int32_t* leaders;
  DriftWatch watch;
  HeadFlags drifted;
  Stream stream = Stream::cpu();
  HeadLogits logits = {};  // none: drifted_heads; else drifted_by_logits, into `scores`
  VotePooling pooling = {};
  InjectedDrift injected = {};

  // Where drifted_by_logits leaves the scores.
  View<float, 3> written_scores() const { return {const_cast<float*>(scores.data), scores.extent, scores.stride}; }
  const void* output() const { return drifted.data; }
  static void run(const std::vector<DriftedHeads>& calls);
};
// CUDA only. Calls that differ in nothing but memory, and in DriftRule::lead, share launches.
void drifted_in_layers(const std::vector<DriftedHeads>& calls);

inline constexpr int most_overlaps = 64;  // of a window

// The median of n > 0 numbers, none of them NaN; the mean of the two middle ones of an even n. Sorts them.
constexpr float median_of(float* x, int n) {
  for (int i = 1; i < n; ++i)
    for (int j = i; j > 0 && x[j] < x[j - 1]; --j) {
      const float lower = x[j];
      x[j] = x[j - 1], x[j - 1] = lower;
    }
  return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

constexpr float overlap_of(float missed, int count) {
  return (static_cast<float>(count) - missed) / static_cast<float>(count);
}

// Steps to the next check; 0 = this step has one.
constexpr int steps_to_check(const DriftRule& rule, int steps) {
  const int behind = (steps + rule.lead) % rule.period;
  return behind == 0 ? 0 : rule.period - behind;
}

// Whether scores of a step count.
constexpr bool step_counts(const DriftRule& rule, int left) { return rule.window > rule.period || left < rule.window; }

struct Watched {
  bool drifted, rests;
};

// Of a leader: what an injection makes of a check in this step, and of one in the next.
struct InjectedChecks {
  bool any = false, now = false, next = false;
};
constexpr InjectedChecks injected_checks(const InjectedDrift& injected, int slot, int leader, int step) {
  if (!injected.sequence) return {};
  return {true, injected.drifts(slot, leader, step), injected.drifts(slot, leader, step + 1)};
}

// A leader's step. missed: its numbers, dense. now: of a list of `count` > 0 tokens, those that are not among the best,
// or -1 without scores. left: steps to the next check.
constexpr Watched watch_step(const DriftRule& rule, float* missed, int count, int now, int left,
                             InjectedChecks injected = {}) {
  const int window = rule.window, majority = window / 2 + 1;
  const bool apart = window <= rule.period;  // checks share no step
  if (!apart)
    for (int i = 0; i + 1 < window; ++i) missed[i] = missed[i + 1];
  if (now >= 0 && step_counts(rule, left)) missed[apart ? window - 1 - left : window - 1] = static_cast<float>(now);
  Watched out{false, false};
  if (left == 0) {
    float overlaps[most_overlaps] = {};
    for (int i = 0; i < window; ++i) overlaps[i] = overlap_of(missed[i], count);
    out.drifted = injected.any ? injected.now : median_of(overlaps, window) < rule.threshold;
    if (apart || out.drifted)
      for (int i = 0; i < window; ++i) missed[i] = 0;
  }
  if (!apart) return out;
  const int next = left == 0 ? rule.period - 1 : left - 1, known = left == 0 ? 0 : window - left;
  int high = 0, low = 0;
  for (int i = 0; i < known; ++i) ++(overlap_of(missed[i], count) < rule.threshold ? low : high);
  // A majority decides the median. One below the threshold leaves the check to do, which needs that step's scores.
  // So does one that is to find drift by injection.
  out.rests = next >= window || high >= majority || (low >= majority && next > 0);
  if (injected.next && next == 0) out.rests = false;
  return out;
}

}  // namespace kvlab::ops
