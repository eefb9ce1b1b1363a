// Products with the rows of listed pages.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include "cases/on_caches.hpp"
#include "ops/score/reference.hpp"

namespace kvlab::cases {
namespace {

// Where rows differ in their last bits, rounding may give them other codes.
bool has_same_rows(const OnCache& x) {
  return x.kv.rope != RopeRegime::cache_relative && x.kv.layouts[0].codec.k.bits == 0;
}

// Lists of rows, and lists of slots in another order.
void check_listed_rows(OnCache& x) {
  const int rows = x.c.rows();
  const PagedOptions& o = x.c.cache.options();
  std::vector<std::int32_t> slots;
  for (int r = 0; r < rows; ++r) slots.push_back(rows - 1 - r);
  const std::int32_t* slots_there = x.place.put(slots);
  for (const bool lasts : {false, true}) {
    ListMemory memory;
    PageList list{memory.choose(
        o, o.max_pages, [&](int r, int h) { return x.kv.pages(lasts ? rows - 1 - r : r, h); },
        [&] { return x.c.rng() % 3 == 0; })};
    PageList there = x.place.put(list);
    list.slots = lasts ? slots.data() : nullptr, there.slots = lasts ? slots_there : nullptr;
    for (const std::int64_t heads : {x.c.kv_heads(), x.c.heads()}) {
      Numbers<3> vectors(x, {rows, heads, x.kv.head_dim});
      const auto vectors_there = vectors.put();
      for (const int bits : {0, 1, 4, 8}) {
        if (bits > 0 && !has_same_rows(x)) continue;
        x.same<3>(
            fmt::format("listed_row_dot of {} heads, {} bits", heads, bits),
            Guarded<3>({rows, heads, x.c.room()}).view(), Tolerance{}.rows(x.kv, x.stream()),
            [&](Scores out) {
              ops::listed_row_dot({&x.there, KvSide::key}, vectors_there, there, bits, out, x.stream());
            },
            [&](Scores out) {
              ops::listed_row_dot_reference({&x.kv, KvSide::key}, vectors.view(), list, bits, out);
            });
      }
    }
  }
}

std::vector<Case> list() { return {on_caches("rows", "of listed pages", 36, check_listed_rows)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
