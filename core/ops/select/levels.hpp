// The decisions of ops::levels and ops::demote, on both devices.
#pragma once
#include <kvlab/ops.hpp>

#include <limits>

namespace kvlab::ops {

constexpr std::int32_t& number_of(const HeadNumbers& all, std::int64_t slot, int head) {
  return all(slot / all.extent[1], slot % all.extent[1], head);
}

constexpr int first_counted(const LevelRule& rule, int seen) {
  return rule.queries > 0 && seen > rule.queries ? seen - rule.queries : 0;
}
constexpr float mean_of(float sum, int seen, int position, int first) {
  const int queries = seen - (position > first ? position : first);
  return sum / static_cast<float>(queries > 1 ? queries : 1);
}
constexpr std::uint8_t level_of(const LevelRule& rule, float mean, int seen, int position) {
  const float unit = static_cast<float>(rule.unit == LevelRule::of_text ? seen : position + 1);
  return mean >= rule.high_from / unit ? 0 : mean >= rule.low_from / unit ? 1 : level_gone;
}
// The mean over so many heads, rounded.
constexpr int rounded_mean(std::int64_t sum, int heads) { return static_cast<int>((2 * sum + heads) / (2 * heads)); }

// A head's tokens that may step down. There is none: place -1, the mean infinity, and NaN for `leaving`. A mean of NaN
// is -infinity here.
struct Candidate {
  std::int32_t place;
  float mean;
};
struct LevelCandidates {
  Candidate high, low, leaving;
  int seen;
};
constexpr LevelCandidates no_candidates(int seen) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  return {{-1, infinity}, {-1, infinity}, {-1, std::numeric_limits<float>::quiet_NaN()}, seen};
}
constexpr Candidate candidate(std::int32_t place, float mean) {
  return {place, mean == mean ? mean : -std::numeric_limits<float>::infinity()};
}

struct Fall {
  enum What : std::uint8_t { stays, is_out, takes_place, becomes_low } what = stays;
  bool leaving = false;  // of the token that leaves the window, not of the least high one
};

constexpr Fall fall_of(const LevelRule& rule, const LevelCandidates& c) {
  const float unit = static_cast<float>(c.seen), high = rule.high_from / unit, low = rule.low_from / unit;
  const float h = c.high.mean, l = c.low.mean, m = c.leaving.mean;
  if (!rule.leaving_decides)
    return {h < low && h < l      ? Fall::is_out
            : h < high && l < low ? Fall::takes_place
            : h < high            ? Fall::becomes_low
                                  : Fall::stays};
  if (m >= high) return {h < low ? Fall::is_out : h < high ? Fall::becomes_low : Fall::stays};
  if (m >= low) return {l < low ? Fall::takes_place : Fall::becomes_low, true};
  return {m < low ? Fall::is_out : Fall::stays, true};
}

// Writes what follows for one head.
constexpr void write_fall(const Fall& fall, const LevelCandidates& own, int lower_pages, int page_size,
                          std::int32_t& pending, const Demotion& to, int row, int head) {
  const int place = fall.leaving ? own.leaving.place : own.high.place;
  const int behind = lower_pages * page_size + pending;
  const int other = fall.what == Fall::takes_place ? own.low.place : behind;
  const bool falls = fall.what != Fall::stays && place >= 0 && other >= 0;
  const bool moves = falls && fall.what != Fall::is_out && place != other;
  const bool leaves = falls && fall.what != Fall::becomes_low;
  if (moves) to.pairs.index(row, head, 0) = place, to.pairs.index(row, head, 1) = other;
  if (leaves) to.out.index(row, head, 0) = place;
  if (falls && fall.what == Fall::becomes_low) ++pending;
  const bool full = pending == page_size;
  if (full) to.full.index(row, head, 0) = lower_pages, pending = 0;
  to.pairs.count(row, head) = moves ? 2 : 0;
  to.out.count(row, head) = leaves ? 1 : 0;
  to.full.count(row, head) = full ? 1 : 0;
}

// A head's candidates with the means over all heads of its row. of(i): those of head i.
template <class Of>
constexpr LevelCandidates with_means(const LevelCandidates& own, const Of& of, int heads) {
  LevelCandidates c = own;
  c.high.mean = c.low.mean = c.leaving.mean = 0;
  for (int i = 0; i < heads; ++i)
    c.high.mean += of(i).high.mean, c.low.mean += of(i).low.mean, c.leaving.mean += of(i).leaving.mean;
  const float n = static_cast<float>(heads);
  c.high.mean /= n, c.low.mean /= n, c.leaving.mean /= n;
  return c;
}

}  // namespace kvlab::ops
