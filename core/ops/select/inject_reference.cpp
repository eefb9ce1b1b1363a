#include <algorithm>
#include <set>
#include <vector>

#include "ops/select/inject.hpp"

namespace kvlab::ops {
namespace {

bool pinned(const InjectArgs& a, int page, int tokens, int pages) {
  if (a.pins.newest_page && page == pages - 1) return true;
  for (int t = page * a.pages.page_size; t < std::min(tokens, (page + 1) * a.pages.page_size); ++t)
    if (t < a.pins.first || t >= tokens - a.pins.last) return true;
  return false;
}

}  // namespace

void inject_pages_reference(const InjectArgs& a) {
  for (int r = 0; r < a.pages.rows; ++r)
    for (int h = 0; h < a.pages.kv_heads; ++h) {
      const int slot = a.pages.slots[r], tokens = a.pages.tokens(r, h), pages = a.pages.pages(r, h),
                n = a.list.count(a.list.at(r), h);
      std::uint32_t* state = &a.state(slot, h, 0);
      const std::uint32_t question = a.asked(slot);
      if (state[1] != question && (a.steps || a.heads.on(slot, h))) state[0] = 0, state[1] = question;
      if (a.steps && state[0] == 0) state[0] = static_cast<std::uint32_t>(a.steps[slot]) + 1;
      if (!a.heads.on(slot, h)) continue;
      const std::uint32_t step = a.steps ? static_cast<std::uint32_t>(a.steps[slot]) + 1 - state[0] : state[0]++;
      std::set<int> chosen, old, drawn;
      for (int i = 0; i < n; ++i) chosen.insert(a.list.index(a.list.at(r), h, i));
      const std::int64_t list = a.recorded.first ? a.recorded.list(question, step, h) : -1;
      if (a.recorded.first) {
        for (std::int64_t i = list < 0 ? 0 : a.recorded.begin[list]; list >= 0 && i < a.recorded.begin[list + 1]; ++i)
          old.insert(a.recorded.page[i]);
      } else {
        for (int page = 0; page < pages; ++page)
          if (state[inject_header + page / 32] >> (page % 32) & 1) old.insert(page);
      }
      const auto stream = inject_stream(a.seed, a.layer, a.sequence[slot], h, a.recorded.first ? 0 : step);
      // A head that chose in each step has a last list of one step ago.
      const bool old_list = a.clock && state[2] != 0 && std::int64_t{a.clock[slot]} - (std::int64_t{state[2]} - 1) > 1;
      const int kept = a.recorded.first ? n : inject_kept(old_list ? a.rerank_overlap : a.overlap, n);
      state[2] = a.clock ? static_cast<std::uint32_t>(a.clock[slot] + 1) : 0u;
      const auto size = [](const std::set<int>& s) { return static_cast<int>(s.size()); };
      const auto shared = [&] {
        return std::count_if(drawn.begin(), drawn.end(), [&](int p) { return old.count(p); });
      };
      std::vector<bool> held, was_old;
      for (int page = 0; page < pages; ++page)
        held.push_back(pinned(a, page, tokens, pages)), was_old.push_back(old.count(page) > 0);
      // Draws the undrawn page of the greatest key among the old pages or the others. False: there is none.
      const auto draw = [&](bool of_old) {
        int best = -1;
        for (int page = 0; page < pages; ++page)
          if (!held[static_cast<std::size_t>(page)] && was_old[static_cast<std::size_t>(page)] == of_old &&
              (best < 0 || inject_key(stream, static_cast<std::uint32_t>(page)) >
                               inject_key(stream, static_cast<std::uint32_t>(best))) &&
              !drawn.count(page))
            best = page;
        if (best >= 0) drawn.insert(best);
        return best >= 0;
      };
      if (a.recorded.first ? list < 0 : step == 0) {
        drawn = chosen;
      } else {
        for (const int page : chosen)
          if (held[static_cast<std::size_t>(page)]) drawn.insert(page);
        while (size(drawn) < n && shared() < kept && draw(true)) {
        }
        while (size(drawn) < n && draw(false)) {
        }
        while (size(drawn) < n && draw(true)) {
        }
      }
      std::fill(state + inject_header, state + a.state.extent[2], 0u);
      int i = 0;
      for (const int page : drawn) {
        a.list.index(a.list.at(r), h, i++) = page;
        state[inject_header + page / 32] |= 1u << (page % 32);
      }
      a.list.count(a.list.at(r), h) = i;
    }
}

}  // namespace kvlab::ops
