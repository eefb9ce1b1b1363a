#include "ops/select/page_groups.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

// The best score of a group's pages, which end before `pages`. NaN is none.
float score_of(const float* page_scores, int group, int parts, int pages) {
  float best = NAN;
  for (int p = group * parts; p < std::min(pages, (group + 1) * parts); ++p)
    if (!(best >= page_scores[p]) && page_scores[p] == page_scores[p]) best = page_scores[p];
  return best;
}

void choose(const PagedKv& kv, const float* page_scores, const GroupChoice& c, int row, int head,
            std::vector<bool>& chosen) {
  const int pages = kv.pages(row, head), groups = static_cast<int>(chosen.size());
  std::vector<std::uint64_t> keys;
  const bool newest = c.newest_group && groups > 0;
  for (int g = 0; g < groups - newest; ++g)
    keys.push_back(selection_key(score_of(page_scores, g, c.parts, pages), static_cast<std::uint32_t>(g)));
  const auto wanted = static_cast<std::size_t>(std::max(0, c.most[head] - newest));
  select_greatest(keys.data(), keys.size(), wanted);
  for (std::size_t i = 0; i < wanted; ++i) chosen[selection_index(keys[i])] = true;
  if (newest) chosen.back() = true;
}

}  // namespace

void group_pages(const PagedKv& kv, View<const float, 3> page_scores, const GroupChoice& c, PageList list, Stream s) {
  const char* op = "group_pages";
  check_kv(kv, op, s);
  check_list(kv, list, op);
  if (c.parts < 1 || !c.most)
    fail(Errc::internal, op,
         "got groups of " + std::to_string(c.parts) + " pages and " + (c.most ? "their" : "no") +
             " numbers, wanted at least 1 page, and a number for each KV head");
  if (page_scores.extent[0] < kv.rows || page_scores.extent[1] != kv.kv_heads || page_scores.stride[2] != 1)
    fail(Errc::internal, op,
         "got scores " + extents(page_scores) + ", wanted [row, " + std::to_string(kv.kv_heads) +
             " KV heads, page], dense");
  run_put_off();  // it may write the scores
  if (s.device() == Device::cuda) return on_cuda<group_pages>(kv, page_scores, c, list, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (!c.heads.on(kv.slots[r], h)) continue;
      const int pages = kv.pages(r, h), groups = (pages + c.parts - 1) / c.parts;
      const bool all = kv.tokens(r, h) <= c.whole || c.most[h] >= groups;
      if (!all && page_scores.extent[2] < pages)
        fail(Errc::internal, op,
             "got scores " + extents(page_scores) + ", wanted those of " + std::to_string(pages) + " pages");
      std::vector<bool> chosen(static_cast<std::size_t>(groups), all);
      if (!all) choose(kv, &page_scores(r, h, 0), c, r, h, chosen);
      std::int64_t count = 0;
      for (int p = 0; p < pages; ++p) {
        if (!chosen[static_cast<std::size_t>(p / c.parts)]) continue;
        if (count < list.index.extent[2]) list.index(list.at(r), h, count) = p;
        ++count;
      }
      if (count > list.index.extent[2])
        fail(Errc::internal, op,
             "got a list for " + std::to_string(list.index.extent[2]) + " pages, wanted room for " +
                 std::to_string(count));
      list.count(list.at(r), h) = static_cast<std::int32_t>(count);
    }
}

void begun_periods(const PagedKv& kv, int period, HeadNumbers last, HeadFlags begins, Stream s) {
  const char* op = "begun_periods";
  check_kv(kv, op, s);
  if (period < 1) fail(Errc::internal, op, "got a period of " + std::to_string(period) + " tokens, wanted at least 1");
  if (last.extent[0] != 1 || last.extent[1] != begins.extent[0] || last.extent[2] < kv.kv_heads ||
      begins.extent[1] < kv.kv_heads)
    fail(Errc::internal, op,
         "got numbers " + extents(last) + " and flags " + extents(begins) + ", wanted them of one layer's slots and " +
             std::to_string(kv.kv_heads) + " KV heads");
  if (s.device() == Device::cuda) return on_cuda<begun_periods>(kv, period, last, begins, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int begun = (kv.tokens(r, h) + period - 1) / period;
      std::int32_t& before = last(0, kv.slots[r], h);
      begins(kv.slots[r], h) = begun != before;
      before = begun;
    }
}

}  // namespace kvlab::ops
