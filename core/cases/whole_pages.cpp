// Pages that stay or leave as a whole, tokens beyond a threshold, and centres of keys.
#include "ops/select/whole_pages.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "cases/on_caches.hpp"
#include "ops/select/centres.hpp"

namespace kvlab::cases {
namespace {

void check_pages(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.kv.kv_heads, room = x.c.room();
  const std::int64_t pages = (room + x.kv.page_size - 1) / x.kv.page_size;
  const Stream s = x.stream();
  Numbers<3> of_pages(x, {rows, heads, pages}), in(x, {rows, heads, room});
  for (std::int64_t t = 0; t < room; t += 5) in.own()(0, 0, t) = std::nanf("");
  const auto pages_there = of_pages.put(), in_there = in.put();
  x.same<3>(
      "spread_pages", Guarded<3>({rows, heads, room}).view(), 0,
      [&](Scores out) { ops::spread_pages(x.there, pages_there, out, s); },
      [&](Scores out) { ops::spread_pages_reference(x.kv, of_pages.view(), out); });
  x.same<3>(
      "page_greatest", Guarded<3>({rows, heads, room}).view(), 0,
      [&](Scores out) { ops::page_greatest(x.there, in_there, out, s); },
      [&](Scores out) { ops::page_greatest_reference(x.kv, in.view(), out); });
  for (const int more : {0, 3, 11, 64}) {
    const std::vector<std::int32_t> most(static_cast<std::size_t>(rows), 2 * x.kv.page_size + more);
    std::vector<std::int32_t> wanted(static_cast<std::size_t>(rows * heads), -7);
    const auto keep = View<std::int32_t, 2>::dense(wanted.data(), {rows, heads}), there = x.place.put(keep);
    ops::room_for_page(x.there, x.place.put(most), there, s);
    ops::room_for_page_reference(x.kv, most.data(), keep);
    x.check.equal(fmt::format("room_for_page, {} tokens beside two pages", more), x.place.get(there), wanted);
  }
}

void check_beyond(OnCache& x) {
  const std::array<std::int64_t, 3> extent{x.c.rows(), x.kv.kv_heads, x.c.room()};
  Numbers<3> scores(x, extent);
  if (x.n % 3 == 0)
    for (std::int64_t t = 0; t < extent[2]; ++t) scores.own()(0, 0, t) = static_cast<float>(t % 4);  // ties
  if (x.n % 3 == 1) scores.own()(0, 0, 0) = std::nanf("");
  const auto there = scores.put();
  for (const double share : {0., .05, .5, 1.}) {
    const auto scope = x.check.in(fmt::format("tokens_beyond, share {}", share));
    ListMemory memory, start;
    const TokenList wanted{memory.empty(extent)}, list{x.place.put(start.empty(extent))};
    ops::tokens_beyond_reference(x.kv, scores.view(), share, wanted);
    ops::tokens_beyond(x.there, there, share, list, x.stream());
    x.check.equal("numbers", x.place.get(list.count), memory.count);
    x.check.equal("tokens", x.place.get(list.index), memory.index);
  }
}

void check_centres(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;
  const std::array<std::int64_t, 3> extent{x.c.rows(), x.kv.kv_heads, x.c.room()};
  Numbers<3> nearest(x, extent);
  for (std::int64_t t = 0; t < extent[2]; ++t)
    if (t < 2 || x.c.rng() % 5 == 0) nearest.own()(0, 0, t) = -std::numeric_limits<float>::infinity();
  for (const KvSide side : {KvSide::key, KvSide::value})
    for (const int count : {1, 6, 1000}) {
      const auto scope = x.check.in(fmt::format("{} centres of {}", count, side == KvSide::key ? "keys" : "values"));
      Guarded<3> out(extent);
      std::vector<float> near = Guarded<3>::copy(nearest.view());
      const auto near_there = x.place.put(nearest.own()), out_there = x.place.put(out.view());
      ops::farthest_first({&x.there, side}, count, near_there, out_there, x.stream());
      ops::farthest_first_reference({&x.kv, side}, count, View<float, 3>::dense(near.data(), extent), out.view());
      x.check.equal("centres", x.place.get(out_there), out.values(), 0);
      x.check.equal("distances", x.place.get(near_there), near, 1e-6);
    }
}

std::vector<Case> list() {
  return {on_caches("whole_pages", "of ragged rows", 36, check_pages),
          on_caches("tokens_beyond", "of ragged rows", 36, check_beyond),
          on_caches("farthest_first", "of ragged rows", 24, check_centres)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
