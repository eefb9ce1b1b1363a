#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::ops {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Rated {
  int place;
  std::int32_t position;
  double mean;
};

double rounded(double x) { return static_cast<double>(static_cast<float>(x)); }

std::vector<Rated> rate(const PagedKv& kv, int row, int head, const std::vector<double>& sums, int seen, int first) {
  std::vector<std::int32_t> position(sums.size());
  token_positions_reference(kv, row, head, kv.tokens(row, head), position.data());
  std::vector<Rated> all;
  for (std::size_t t = 0; t < sums.size(); ++t)
    all.push_back(
        {static_cast<int>(t), position[t], rounded(sums[t] / std::max(1, seen - std::max<int>(position[t], first)))});
  return all;
}

// Best first.
bool better(const Rated& a, const Rated& b) {
  if (std::isnan(a.mean) || std::isnan(b.mean)) return !std::isnan(a.mean) || (std::isnan(b.mean) && a.place < b.place);
  return a.mean != b.mean ? a.mean > b.mean : a.place < b.place;
}

// The number of a KV head; `slot` counts the slots of all layers.
std::int32_t& of_head(const HeadNumbers& numbers, int slot, int head) {
  int layer = 0;
  while (slot >= numbers.extent[1]) slot -= static_cast<int>(numbers.extent[1]), ++layer;
  return numbers(layer, slot, head);
}

double ranked(double mean) { return std::isnan(mean) ? -infinity : mean; }

}  // namespace

void levels_reference(const PagedKv& kv, View<const float, 3> sums, const std::int32_t* seen, const LevelRule& rule,
                      View<std::uint8_t, 3> out, const LevelNumbers& numbers) {
  for (int r = 0; r < kv.rows; ++r) {
    const int first = rule.queries ? std::max(0, seen[r] - rule.queries) : 0;
    std::vector<std::vector<Rated>> open;  // the tokens outside of the window
    double highs = 0, lows = 0;
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::vector<double> own;
      for (int t = 0; t < kv.tokens(r, h); ++t) own.push_back(sums(r, h, t));
      open.emplace_back();
      for (const Rated& x : rate(kv, r, h, own, seen[r], first)) {
        out(r, h, x.place) = 0;
        if (seen[r] - x.position <= rule.window) continue;
        open.back().push_back(x);
        const double tokens = rule.unit == LevelRule::of_token ? x.position + 1 : seen[r];
        if (x.mean >= rounded(double{rule.high_from} / tokens)) {
          ++highs;
        } else if (x.mean >= rounded(double{rule.low_from} / tokens)) {
          ++lows, out(r, h, x.place) = 1;
        } else {
          out(r, h, x.place) = level_gone;
        }
      }
    }
    for (int h = 0; h < kv.kv_heads; ++h) {
      auto& tokens = open[static_cast<std::size_t>(h)];
      std::sort(tokens.begin(), tokens.end(), better);
      const auto high = static_cast<std::size_t>(std::floor(highs / kv.kv_heads + .5)),
                 low = static_cast<std::size_t>(std::floor(lows / kv.kv_heads + .5));
      for (std::size_t i = 0; rule.same_numbers && i < tokens.size(); ++i)
        out(r, h, tokens[i].place) = i < high ? 0 : i < high + low ? 1 : level_gone;
      of_head(numbers.pending, kv.slots[r], h) = 0;
      if (numbers.first) of_head(numbers.first, kv.slots[r], h) = first;
    }
  }
}

void demote_reference(const StateColumn& sums, const LevelRule& rule, const LevelNumbers& numbers, const Demotion& to) {
  const PagedKv& kv = *sums.kv;
  for (int r = 0; r < kv.rows; ++r) {
    const int slot = kv.slots[r];
    struct Head {
      int seen = 0, lower = 0, high = -1, low = -1, leaving = -1;
      double h = infinity, l = infinity, m = std::numeric_limits<double>::quiet_NaN();
    };
    std::vector<Head> heads;
    for (int h = 0; h < kv.kv_heads; ++h) {
      Head& head = heads.emplace_back();
      to.pairs.count(r, h) = to.out.count(r, h) = to.full.count(r, h) = 0;
      if (kv.lower_pages) head.lower = kv.lower_pages(slot, h);
      const int n = kv.tokens(r, h), low_tokens = head.lower * kv.page_size + of_head(numbers.pending, slot, h);
      if (n == 0) continue;
      std::vector<double> own;
      for (int t = 0; t < n; ++t) {
        const PageEntry& e = kv.entry(r, h, t / kv.page_size);
        const auto* column = reinterpret_cast<const float*>(kv.frame(e) + kv.layout(e).state);
        own.push_back(column[sums.column * kv.page_size + t % kv.page_size]);
      }
      const int first = numbers.first ? of_head(numbers.first, slot, h) : 0;
      std::vector<Rated> all = rate(kv, r, h, own, 0, 0);  // for the positions
      head.seen = all.back().position + 1;
      all = rate(kv, r, h, own, head.seen, first);
      std::sort(all.begin(), all.end(), better);
      for (const Rated& x : all) {  // the last one of each level remains
        if (head.seen - x.position < rule.window) continue;
        if (x.place < low_tokens)
          head.low = x.place, head.l = ranked(x.mean);
        else
          head.high = x.place, head.h = ranked(x.mean);
        if (x.place >= low_tokens && head.seen - x.position == rule.window)
          head.leaving = x.place, head.m = ranked(x.mean);
      }
    }
    for (int h = 0; h < kv.kv_heads; ++h) {
      const Head& own = heads[static_cast<std::size_t>(h)];
      double least = own.h, low = own.l, leaving = own.m;
      if (rule.same_numbers) {
        least = low = leaving = 0;
        for (const Head& x : heads) least += x.h / kv.kv_heads, low += x.l / kv.kv_heads, leaving += x.m / kv.kv_heads;
      }
      if (own.seen == 0) continue;
      const double to_high = rounded(double{rule.high_from} / own.seen),
                   to_low = rounded(double{rule.low_from} / own.seen);
      int out = -1, swap_with = -1, sinks = -1;
      if (!rule.leaving_decides) {
        if (least < to_low && least < low)
          out = own.high;
        else if (least < to_high && low < to_low)
          out = own.high, swap_with = own.low;
        else if (least < to_high)
          sinks = own.high;
      } else if (leaving >= to_high) {
        if (least < to_low)
          out = own.high;
        else if (least < to_high)
          sinks = own.high;
      } else if (leaving >= to_low) {
        if (low < to_low)
          out = own.leaving, swap_with = own.low;
        else
          sinks = own.leaving;
      } else if (leaving < to_low) {
        out = own.leaving;
      }
      std::int32_t& pending = of_head(numbers.pending, slot, h);
      const auto pair = [&](int from, int with) {
        to.pairs.index(r, h, 0) = from, to.pairs.index(r, h, 1) = with, to.pairs.count(r, h) = 2;
      };
      if (swap_with >= 0) pair(out, swap_with);
      if (out >= 0) to.out.index(r, h, to.out.count(r, h)++) = out;
      if (sinks < 0) continue;
      const int behind = own.lower * kv.page_size + pending;
      if (sinks != behind) pair(sinks, behind);
      if (++pending < kv.page_size) continue;
      pending = 0;
      to.full.index(r, h, to.full.count(r, h)++) = own.lower;
    }
  }
}

}  // namespace kvlab::ops
