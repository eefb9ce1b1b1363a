#include "store/host_plan.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace kvlab::host_plan {
namespace {

// Frames that the heads before take of a pool, and behind the last head those of all. False: there are fewer, and none
// is taken.
bool take(const CudaStoreLayer& s, CudaPool pool, std::vector<std::int32_t>& frames) {
  std::int32_t all = 0;
  for (std::int32_t& of_head : frames) of_head = std::exchange(all, all + of_head);
  frames.push_back(all);
  if (all == 0) return true;
  if (all > *s.pool[pool].given - *s.pool[pool].taken) return s.counters->error |= store_no_frame, false;
  *s.pool[pool].taken += all;
  return true;
}

// The i-th frame of a head. The pool's counts are those after take().
std::int32_t frame_of(const CudaStoreLayer& s, CudaPool pool, const std::vector<std::int32_t>& frames, int head,
                      int i) {
  return s.pool[pool].at(*s.pool[pool].taken - frames.back() + frames[static_cast<std::size_t>(head)] + i);
}

struct HeadLevels {
  CudaStoreLevels::Plan plan;
  bool bad = false;
};

// Writes where chunks of a head's tokens begin. kept is -1 where all is as it was.
HeadLevels plan_head(const CudaStoreLayer& s, const CudaStoreLevels& a, int of) {
  const int row = of / s.kv_heads, head = of % s.kv_heads, p = s.layout.page_size;
  const std::int64_t at = std::int64_t{a.slots[row]} * s.kv_heads + head;
  const int n = s.length[at], codecs = s.lower_pages ? 2 : 1;
  if (n > a.levels.extent[2] || n > a.most) return {{}, true};
  CudaStoreLevels::Begin* begins = a.begins + std::int64_t{of} * a.chunks();
  const std::uint8_t* level = n > 0 ? &a.levels(row, head, 0) : nullptr;
  // No branch depends on a level: levels are hard to predict.
  int bad = 0;
  CudaStoreLevels::Begin sum;
  for (int first = 0; first < n; first += a.chunk) {
    begins[first / a.chunk] = sum;
    for (int t = first; t < std::min(n, first + a.chunk); ++t) {
      sum.lows += level[t] == 1, sum.others += (level[t] != 1) & (level[t] != level_gone);
      bad |= (level[t] != level_gone) & (level[t] >= codecs);
    }
  }
  if (bad) return {{}, true};
  const CudaStoreLevels::Plan plan = {sum.lows + sum.others, sum.lows / p * p};
  const bool same = plan.kept == n && plan.low == (s.lower_pages ? s.lower_pages[at] * p : 0) &&
                    std::all_of(level, level + plan.low, [](std::uint8_t of_token) { return of_token == 1; });
  return {same ? CudaStoreLevels::Plan{} : plan, false};
}

}  // namespace

void levels(const CudaStoreLayer& s, const CudaStoreLevels& a) {
  const int heads = a.rows * s.kv_heads, p = s.layout.page_size, room = (a.most + p - 1) / p;
  std::vector<std::int32_t> low(static_cast<std::size_t>(heads)), high(low);
  bool bad = false;
#pragma omp parallel for schedule(static) reduction(|| : bad)
  for (int of = 0; of < heads; ++of) {
    const HeadLevels own = plan_head(s, a, of);
    bad = bad || own.bad;
    a.plans[of] = own.plan;
    if (own.plan.kept < 0) continue;
    low[static_cast<std::size_t>(of)] = own.plan.low / p;
    high[static_cast<std::size_t>(of)] = (own.plan.kept + p - 1) / p - own.plan.low / p;
  }
  if (bad) s.counters->error |= store_bad_list;
  const bool fits = take(s, lower_pool, low) && take(s, device_pool, high);
#pragma omp parallel for schedule(static)
  for (int of = 0; of < heads; ++of) {
    CudaStoreLevels::Plan& plan = a.plans[of];
    if (!fits) plan.kept = -1;
    PageEntry* fresh = a.fresh + std::int64_t{of} * room;
    for (int page = 0; page < (plan.kept + p - 1) / p; ++page) {
      const bool lower = page < plan.low / p;
      PageEntry e;
      e.frame =
          lower ? frame_of(s, lower_pool, low, of, page) : frame_of(s, device_pool, high, of, page - plan.low / p);
      e.tokens = static_cast<std::uint16_t>(std::min(p, plan.kept - page * p));
      e.codec = lower;
      fresh[page] = e;
    }
  }
}

void encode(const CudaStoreLayer& s, const CudaStoreEncode& a) {
  const int heads = a.rows * s.kv_heads, p = s.layout.page_size;
  std::vector<std::int32_t> frames(static_cast<std::size_t>(heads));
  const auto index_of = [&](int of) { return std::int64_t{a.slots[of / s.kv_heads]} * s.kv_heads + of % s.kv_heads; };
#pragma omp parallel for schedule(static)
  for (int of = 0; of < heads; ++of) {
    const int row = of / s.kv_heads, head = of % s.kv_heads, count = a.count(row, head);
    const std::int64_t at = index_of(of);
    const int first = s.lower_pages[at];
    bool runs = count > 0 && count <= a.index.extent[2] && (first + count) * p <= s.length[at];
    for (int i = 0; runs && i < count; ++i) {
      const PageEntry& e = s.table[0][at * s.pages + first + i];
      runs = a.index(row, head, i) == first + i && e.frame >= 0 && e.codec != a.codec;
    }
    frames[static_cast<std::size_t>(of)] = runs ? count : 0;
  }
  const bool fits = take(s, lower_pool, frames);
  const int all = fits ? frames.back() : 0;
  const ops::FramePool &fresh = s.pool[lower_pool], &old = s.pool[device_pool];
  if (all > 0) {
    std::int32_t& peak = s.counters->peak_frames[device_pool];
    peak = std::max(peak, s.counters->frames[device_pool] - (*old.given - *old.taken));
    *old.taken -= all;
    if (s.counters->last_edit != a.edit) ++s.counters->fired;
    s.counters->last_edit = a.edit;
  }
  for (int of = 0; of < heads; ++of) {
    const std::int32_t before = frames[static_cast<std::size_t>(of)],
                       pages = all > 0 ? frames[static_cast<std::size_t>(of) + 1] - before : 0;
    a.runs[of] = {pages, *fresh.taken - all + before, *old.taken + before};
    s.lower_pages[index_of(of)] += pages;
  }
}

}  // namespace kvlab::host_plan
