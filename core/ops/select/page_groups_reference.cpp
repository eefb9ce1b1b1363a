#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/select/page_groups.hpp"

namespace kvlab::ops {
namespace {

// Whether group a comes before group b: of greater scores, NaN last, then of lower numbers.
bool before(const std::vector<double>& score, int a, int b) {
  const double x = score[static_cast<std::size_t>(a)], y = score[static_cast<std::size_t>(b)];
  if (std::isnan(x) != std::isnan(y)) return std::isnan(y);
  if (x > y || y > x) return x > y;
  return a < b;
}

}  // namespace

void group_pages_reference(const PagedKv& kv, View<const float, 3> page_scores, const GroupChoice& choice,
                           PageList list) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (!choice.heads.on(kv.slots[r], h)) continue;
      const int pages = kv.pages(r, h), groups = (pages + choice.parts - 1) / choice.parts;
      const bool all = kv.tokens(r, h) <= choice.whole || choice.most[h] >= groups;
      std::vector<double> score;
      for (int g = 0; g < groups; ++g) {
        double best = NAN;
        for (int p = g * choice.parts; p < std::min(pages, (g + 1) * choice.parts) && !all; ++p)
          if (const double x = page_scores(r, h, p); !(best >= x) && !std::isnan(x)) best = x;
        score.push_back(best);
      }
      std::vector<bool> chosen(static_cast<std::size_t>(groups));
      int left = all ? groups : choice.most[h];
      if (choice.newest_group && groups > 0) chosen.back() = true, --left;
      for (; left > 0; --left) {
        int next = -1;
        for (int g = 0; g < groups; ++g)
          if (!chosen[static_cast<std::size_t>(g)] && (next < 0 || before(score, g, next))) next = g;
        chosen[static_cast<std::size_t>(next)] = true;
      }
      int count = 0;
      for (int p = 0; p < pages; ++p)
        if (chosen[static_cast<std::size_t>(p / choice.parts)]) list.index(list.at(r), h, count++) = p;
      list.count(list.at(r), h) = count;
    }
}

void begun_periods_reference(const PagedKv& kv, int period, HeadNumbers last, HeadFlags begins) {
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      int begun = 0;
      for (int t = 0; t < kv.tokens(r, h); ++t) begun += t % period == 0;
      begins(kv.slots[r], h) = begun != last(0, kv.slots[r], h);
      last(0, kv.slots[r], h) = begun;
    }
}

}  // namespace kvlab::ops
