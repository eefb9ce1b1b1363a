#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/page/reference.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::ops {
namespace {

// Returns whether a is selected before b: the higher score first, NaN below everything.
bool better(float a, float b) { return std::isnan(a) ? false : std::isnan(b) || a > b; }

// Rank 0 is the best. Equal scores rank by lower index.
std::vector<int> by_score(const std::vector<float>& scores) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return better(scores[a], scores[b]); });
  return order;
}

// A token is pinned when fewer than `first` tokens come before it, or fewer than `last` after it.
std::vector<bool> pinned_tokens(const PagedKv& kv, int row, int head, const Pins& pins) {
  std::vector<std::int32_t> position(kv.tokens(row, head));
  token_positions_reference(kv, row, head, kv.tokens(row, head), position.data());
  std::vector<bool> out;
  for (const auto p : position) {
    const auto before = std::count_if(position.begin(), position.end(), [&](auto x) { return x < p; });
    const auto after = std::count_if(position.begin(), position.end(), [&](auto x) { return x > p; });
    out.push_back(before < pins.first || after < pins.last);
  }
  return out;
}

void write_best(const std::vector<float>& scores, std::vector<bool> chosen, int keep, const IndexList& list, int row,
                int head) {
  auto count = std::count(chosen.begin(), chosen.end(), true);
  for (const int i : by_score(scores))
    if (count < keep && !chosen[i]) {
      chosen[i] = true;
      ++count;
    }
  list.count(row, head) = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i)
    if (chosen[i]) list.index(row, head, list.count(row, head)++) = static_cast<std::int32_t>(i);
}

std::vector<float> scores_of(const View<const float, 3>& scores, int row, int head, int n) {
  std::vector<float> out;
  for (int i = 0; i < n; ++i) out.push_back(scores(row, head, i));
  return out;
}

int pin_count(const Allotment& a, int row) { return a.pins ? a.pins[row].first + a.pins[row].last : 0; }

void allot_by_score_row(const Allotment& a, int row, double floor, bool exact_total) {
  const int heads = static_cast<int>(a.keep.extent[1]), budget = std::max(0, a.total[row] - pin_count(a, row));
  std::vector<float> candidates;
  std::vector<int> owner, free(heads, 0), count(heads, 0);
  for (int h = 0; h < heads; ++h) {
    std::vector<bool> pinned(a.length(row, h), false);
    if (pin_count(a, row) > 0) pinned = pinned_tokens(a.kv->pages, row, h, a.pins[row]);
    for (std::size_t t = 0; t < pinned.size(); ++t) {
      if (pinned[t]) continue;
      candidates.push_back(a.scores(row, h, t));
      owner.push_back(h);
      ++free[h];
    }
  }
  const int sum = std::min(heads * budget, static_cast<int>(candidates.size()));
  const std::vector<int> order = by_score(candidates);
  for (int i = 0; i < sum; ++i) ++count[owner[order[i]]];
  std::vector<double> share(heads);
  std::vector<int> keep(heads);
  for (int h = 0; h < heads; ++h) {
    share[h] = count[h] * (1 - floor) + std::trunc(budget * floor);
    keep[h] = std::min(free[h], static_cast<int>(std::nearbyint(share[h])));
  }
  while (exact_total) {
    const int missing = sum - std::accumulate(keep.begin(), keep.end(), 0), step = missing > 0 ? 1 : -1;
    int best = -1;
    for (int h = 0; h < heads && missing != 0; ++h) {
      const bool possible = step > 0 ? keep[h] < free[h] : keep[h] > 0;
      if (possible && (best < 0 || step * (share[h] - keep[h]) > step * (share[best] - keep[best]))) best = h;
    }
    if (best < 0) break;
    keep[best] += step;
  }
  for (int h = 0; h < heads; ++h) a.keep(row, h) = a.length(row, h) - free[h] + keep[h];
}

}  // namespace

void top_tokens_reference(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> keep,
                          const Pins* pins, TokenList list) {
  TokenChoice choice;
  choice.keep = keep;
  choice.pins = pins;
  top_tokens_reference(kv, scores, choice, list);
}

void top_tokens_reference(const PagedKv& kv, View<const float, 3> scores, const TokenChoice& c, TokenList list) {
  for (int r = 0; r < kv.rows; ++r) {
    const std::int64_t at = list.at(r);
    std::vector<std::int32_t> held;
    for (int h = 0; h < kv.kv_heads; ++h) held.push_back(c.keep.data ? c.keep(r, h) : list.count(at, h));
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (!c.heads.on(kv.slots[r], h)) continue;
      const int from = c.by ? c.by[h] : h, n = kv.tokens(r, from), wide = c.among && !c.keep.data ? c.among[h] : h;
      std::vector<std::int32_t> best(static_cast<std::size_t>(n)), count(1);
      IndexList found;
      found.index = View<std::int32_t, 3>::dense(best.data(), {1, 1, n});
      found.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
      write_best(scores_of(scores, r, from, n),
                 c.pins ? pinned_tokens(kv, r, from, c.pins[r]) : std::vector<bool>(best.size()),
                 held[static_cast<std::size_t>(wide)], found, 0, 0);
      list.count(at, h) = c.keep.data ? count[0] : std::min(count[0], held[static_cast<std::size_t>(h)]);
      for (int i = 0; i < list.count(at, h); ++i) list.index(at, h, i) = best[static_cast<std::size_t>(i)];
    }
  }
}

float overlap_reference(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists, int row, int head) {
  const std::int64_t at = lists.at(row);
  const int count = lists.count(at, head), n = kv.tokens(row, head);
  const std::vector<int> order = by_score(scores_of(scores, row, head, n));
  std::vector<int> listed;
  for (int i = 0; i < count; ++i) listed.push_back(lists.index(at, head, i));
  const auto both = std::count_if(order.begin(), order.begin() + std::min(count, n),
                                  [&](int t) { return std::binary_search(listed.begin(), listed.end(), t); });
  return static_cast<float>(both) / static_cast<float>(count);
}

void top_pages_reference(const PagedKv& kv, View<const float, 3> page_scores, View<const std::int32_t, 2> page_budgets,
                         Pins pins, PageList out) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::vector<bool> chosen(kv.pages(r, h), false);
      if (pins.newest_page && !chosen.empty()) chosen.back() = true;
      write_best(scores_of(page_scores, r, h, kv.pages(r, h)), chosen, page_budgets(r, h), out, r, h);
    }
}

void set_pinned_reference(const PagedKv& kv, Pins pins, float value, Scores scores) {
  const int heads = static_cast<int>(scores.extent[1]), group = heads / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const auto pinned = pinned_tokens(kv, r, h / group, pins);
      for (std::size_t t = 0; t < pinned.size(); ++t)
        if (pinned[t]) scores(r, h, t) = value;
    }
}

void set_listed_reference(const TokenList& list, float value, Scores scores) {
  for (int r = 0; r < scores.extent[0]; ++r)
    for (int h = 0; h < scores.extent[1]; ++h)
      for (int i = 0; i < list.count(list.at(r), h); ++i) {
        const std::int32_t place = list.index(list.at(r), h, i);
        if (place >= 0 && place < scores.extent[2]) scores(r, h, place) = value;
      }
}

void head_sum_reference(const PagedKv& kv, View<const float, 3> in, Pins leave_out, View<float, 2> out) {
  const int heads = static_cast<int>(in.extent[1]), group = heads / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const auto pinned = pinned_tokens(kv, r, h / group, leave_out);
      double sum = 0;
      for (std::size_t t = 0; t < pinned.size(); ++t) sum += pinned[t] ? 0. : double{in(r, h, t)};
      out(r, h) = static_cast<float>(sum);
    }
}

void tokens_of_share_reference(const PagedKv& kv, View<const float, 3> scores, float share, Pins leave_out,
                               View<float, 2> out) {
  const int heads = static_cast<int>(scores.extent[1]), group = heads / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const auto pinned = pinned_tokens(kv, r, h / group, leave_out);
      std::vector<double> ordered;
      for (std::size_t t = 0; t < pinned.size(); ++t)
        if (!pinned[t] && scores(r, h, t) > 0) ordered.push_back(scores(r, h, t));
      std::sort(ordered.begin(), ordered.end());
      double all = 0, sum = 0;
      for (const double x : ordered) all += x;
      int count = 0;
      while (!ordered.empty() && sum < double{share} * all) {
        sum += ordered.back();
        ordered.pop_back();
        ++count;
      }
      out(r, h) = static_cast<float>(count);
    }
}

void top_p_tokens_reference(const PagedKv& kv, View<const float, 3> weights, float p, Pins pins, TokenList list) {
  const int group = static_cast<int>(weights.extent[1]) / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      std::vector<bool> taken = pinned_tokens(kv, r, h, pins);
      for (int q = h * group; q < (h + 1) * group; ++q) {
        const std::vector<float> scores = scores_of(weights, r, q, kv.tokens(r, h));
        std::vector<int> order = by_score(scores);
        std::erase_if(order, [&](int t) { return !(scores[t] > 0); });
        double all = 0, sum = 0;
        for (auto t = order.rbegin(); t != order.rend(); ++t) all += scores[*t];
        for (const int t : order) {
          if (p < 1 && sum >= double{p} * all) break;
          taken[t] = true, sum += scores[t];
        }
      }
      list.count(list.at(r), h) = 0;
      for (std::size_t t = 0; t < taken.size(); ++t)
        if (taken[t]) list.index(list.at(r), h, list.count(list.at(r), h)++) = static_cast<std::int32_t>(t);
    }
}

void allot_uniform_reference(const Allotment& a) { allot_tokens_reference(a, a.total); }

void allot_tokens_reference(const Allotment& a, const std::int32_t* tokens) {
  for (int r = 0; r < a.keep.extent[0]; ++r)
    for (int h = 0; h < a.keep.extent[1]; ++h)
      a.keep(r, h) = std::min(a.length(r, h), std::max({tokens[r], pin_count(a, r), 0}));
}

void allot_by_score_reference(const Allotment& a, double floor, bool exact_total) {
  for (int r = 0; r < a.keep.extent[0]; ++r) allot_by_score_row(a, r, floor, exact_total);
}

}  // namespace kvlab::ops
