#include "ops/select/levels.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/device_op.hpp"
#include "base/per_thread.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

void check_rule(const LevelRule& rule, const char* op) {
  if (!(rule.low_from <= rule.high_from))
    fail(Errc::internal, op,
         "got low_from " + std::to_string(rule.low_from) + " and high_from " + std::to_string(rule.high_from) +
             ", wanted low_from to be the smaller one");
  if (rule.window < 1)
    fail(Errc::internal, op, "got a window of " + std::to_string(rule.window) + " tokens, wanted at least 1");
}

void check_numbers(const PagedKv& kv, const HeadNumbers& numbers, const char* what, const char* op) {
  if (!numbers || numbers.extent[0] * numbers.extent[1] < kv.table.extent[0] || numbers.extent[2] < kv.kv_heads)
    fail(Errc::internal, op, std::string("got too few numbers '") + what + "', wanted [layer, slot, kv_head]");
}

void check_one(const PagedKv& kv, const IndexList& list, int room, const char* op) {
  check_list(kv, list, op);
  if (list.slots || list.index.extent[2] < room)
    fail(Errc::internal, op,
         "got a list that lasts or has room for " + std::to_string(list.index.extent[2]) + ", wanted scratch for " +
             std::to_string(room));
}

// Returns the text positions of a head, until the next call of this thread.
const std::int32_t* positions_of(const PagedKv& kv, int row, int head) {
  thread_local std::vector<std::int32_t> position;
  const int n = kv.tokens(row, head);
  position.resize(static_cast<std::size_t>(n));
  token_positions(kv, row, head, n, position.data());
  return position.data();
}

struct Counts {
  std::int64_t high = 0, low = 0;
};

// Counts leave the window out.
Counts rate(const PagedKv& kv, const View<const float, 3>& sums, int seen, const LevelRule& rule,
            const View<std::uint8_t, 3>& out, int row, int head, int first) {
  const std::int32_t* position = positions_of(kv, row, head);
  Counts counts;
  for (int t = 0; t < kv.tokens(row, head); ++t) {
    std::uint8_t& level = out(row, head, t);
    level = 0;
    if (position[t] >= seen - rule.window) continue;
    level = level_of(rule, mean_of(sums(row, head, t), seen, position[t], first), seen, position[t]);
    counts.high += level == 0, counts.low += level == 1;
  }
  return counts;
}

// The best `high` tokens outside of the window become high, the next ones low.
void rank(const PagedKv& kv, const View<const float, 3>& sums, int seen, const LevelRule& rule,
          const View<std::uint8_t, 3>& out, int row, int head, int first, int high, int low) {
  const std::int32_t* position = positions_of(kv, row, head);
  thread_local std::vector<std::uint64_t> keys;
  keys.clear();
  for (int t = 0; t < kv.tokens(row, head); ++t)
    if (position[t] < seen - rule.window)
      keys.push_back(selection_key(mean_of(sums(row, head, t), seen, position[t], first), static_cast<unsigned>(t)));
  std::sort(keys.begin(), keys.end(), std::greater<>());
  for (int i = 0; i < static_cast<int>(keys.size()); ++i)
    out(row, head, selection_index(keys[static_cast<std::size_t>(i)])) = i < high ? 0 : i < high + low ? 1 : level_gone;
}

LevelCandidates find(const PagedKv& kv, int column, const LevelRule& rule, int first, int low_tokens, int row,
                     int head) {
  const int n = kv.tokens(row, head);
  if (n == 0) return no_candidates(0);
  const std::int32_t* position = positions_of(kv, row, head);
  const int seen = position[n - 1] + 1;
  LevelCandidates found = no_candidates(seen);
  std::uint64_t least[2] = {std::numeric_limits<std::uint64_t>::max(), std::numeric_limits<std::uint64_t>::max()};
  for (int begin = 0; begin < n; begin += kv.page_size) {
    const PageEntry& e = kv.entry(row, head, begin / kv.page_size);
    const float* sums =
        reinterpret_cast<const float*>(kv.frame(e) + kv.layout(e).state) + std::int64_t{column} * kv.page_size;
    for (int t = begin; t < std::min(begin + kv.page_size, n); ++t) {
      if (position[t] > seen - rule.window) continue;
      const float mean = mean_of(sums[t - begin], seen, position[t], first);
      const std::uint64_t key = selection_key(mean, static_cast<std::uint32_t>(t));
      const bool low = t < low_tokens;
      if (key < least[low]) {
        least[low] = key;
        (low ? found.low : found.high) = candidate(t, mean);
      }
      if (!low && position[t] == seen - rule.window) found.leaving = candidate(t, mean);
    }
  }
  return found;
}

}  // namespace

void levels(const PagedKv& kv, View<const float, 3> sums, const std::int32_t* seen, const LevelRule& rule,
            View<std::uint8_t, 3> out, const LevelNumbers& numbers, Stream s) {
  const char* op = "levels";
  resident_cache(&kv, op, s);
  check_kv_scores(kv, sums, "sums", op, s);
  check_rule(rule, op);
  check_numbers(kv, numbers.pending, "pending", op);
  if (numbers.first) check_numbers(kv, numbers.first, "first", op);
  if (out.extent[0] < kv.rows || out.extent[1] < kv.kv_heads ||
      (s.device() == Device::cpu && out.extent[2] < longest(kv)) || (kv.rows > 0 && !seen))
    fail(Errc::internal, op, "got too small an output or no text lengths, wanted [row, kv_head, token] and [row]");
  if (s.device() == Device::cuda) return on_cuda<levels>(kv, sums, seen, rule, out, numbers, s);
  for (int r = 0; r < kv.rows; ++r) {
    const int first = first_counted(rule, seen[r]), slot = kv.slots[r];
    Counts all;
    for (int h = 0; h < kv.kv_heads; ++h) {
      const Counts own = rate(kv, sums, seen[r], rule, out, r, h, first);
      all.high += own.high, all.low += own.low;
      number_of(numbers.pending, slot, h) = 0;
      if (numbers.first) number_of(numbers.first, slot, h) = first;
    }
    for (int h = 0; rule.same_numbers && h < kv.kv_heads; ++h)
      rank(kv, sums, seen[r], rule, out, r, h, first, rounded_mean(all.high, kv.kv_heads),
           rounded_mean(all.low, kv.kv_heads));
  }
}

void demote(const StateColumn& sums, const LevelRule& rule, const LevelNumbers& numbers, const Demotion& to, Stream s) {
  const char* op = "demote";
  const PagedKv& kv = checked_column(sums, op, s);
  check_rule(rule, op);
  check_numbers(kv, numbers.pending, "pending", op);
  if (numbers.first) check_numbers(kv, numbers.first, "first", op);
  check_one(kv, to.pairs, 2, op);
  check_one(kv, to.out, 1, op);
  check_one(kv, to.full, 1, op);
  if (s.device() == Device::cuda) return on_cuda<demote>(sums, rule, numbers, to, s);
  const std::int64_t tokens = std::int64_t{kv.rows} * kv.kv_heads * longest(kv);
  PerThread<LevelCandidates> candidates(static_cast<std::size_t>(kv.kv_heads));
#pragma omp parallel for schedule(dynamic) if (worth_threads(tokens))
  for (int r = 0; r < kv.rows; ++r) {
    const int slot = kv.slots[r];
    const auto found = candidates.own();
    const auto of = [&](int h) -> LevelCandidates& { return found[static_cast<std::size_t>(h)]; };
    const auto lower = [&](int h) { return kv.lower_pages ? kv.lower_pages(slot, h) : 0; };
    for (int h = 0; h < kv.kv_heads; ++h)
      of(h) = find(kv, sums.column, rule, numbers.first ? number_of(numbers.first, slot, h) : 0,
                   lower(h) * kv.page_size + number_of(numbers.pending, slot, h), r, h);
    for (int h = 0; h < kv.kv_heads; ++h) {
      const Fall fall = fall_of(rule, rule.same_numbers ? with_means(of(h), of, kv.kv_heads) : of(h));
      write_fall(fall, of(h), lower(h), kv.page_size, number_of(numbers.pending, slot, h), to, r, h);
    }
  }
}

}  // namespace kvlab::ops
