// Work of heads that is spread over steps.
#include <fmt/format.h>

#include "cases/on_caches.hpp"
#include "ops/select/spread.hpp"

namespace kvlab::cases {
namespace {

using Flags = std::vector<std::uint8_t>;

// Twenty steps of marks at random. Slots without a row keep their flags.
void check_spread(OnCache& x) {
  const std::int64_t slots = x.kv.length.extent[0], heads = x.kv.kv_heads;
  const auto flags = [&](int odds) {
    Flags out;
    for (std::int64_t i = 0; i < slots * heads; ++i) out.push_back(static_cast<int>(x.c.rng() % 8) < odds);
    return out;
  };
  const auto view = [&](Flags& of) { return HeadFlags::dense(of.data(), {slots, heads}); };
  std::vector<std::int32_t> places, counts;
  for (std::int64_t h = 0; h < heads; ++h) places.push_back(static_cast<std::int32_t>(x.c.rng() % 9));
  for (std::int64_t i = 0; i < slots; ++i) counts.push_back(x.c.pick({0, 1, 5, 1000000}));
  ops::SpreadRule rule{.steps = x.c.pick({1, 2, 5, 8}), .lead = x.c.pick({0, 3})};
  ops::SpreadRule there = rule;
  rule.places = places.data(), there.places = x.place.put(places);
  Flags waits = flags(2), due = flags(4);
  const auto waits_there = x.place.put(view(waits)), due_there = x.place.put(view(due));
  for (int step = 0; step < 20; ++step) {
    const auto scope = x.check.in(fmt::format("step {} of turns of {}", step, rule.steps));
    Flags marked = flags(step % 3 == 0 ? 3 : 0);
    rule.counts = counts.data(), there.counts = x.place.put(counts);
    ops::spread_heads_reference(x.kv, view(marked), rule, view(waits), view(due));
    ops::spread_heads(x.there, x.place.put(view(marked)), there, waits_there, due_there, x.stream());
    x.check.that("the same heads are due", x.place.get(due_there) == due);
    x.check.that("the same heads wait", x.place.get(waits_there) == waits);
    for (std::int32_t& count : counts) ++count;
  }
  for (int r = 0; r < x.kv.rows; ++r)
    for (int h = 0; h < heads; ++h) view(waits)(x.kv.slots[r], h) = 0;
  ops::forget_waiting(x.there, waits_there, x.stream());
  x.check.that("no head of the rows waits", x.place.get(waits_there) == waits);
}

std::vector<Case> list() { return {on_caches("spread", "heads in turn", 36, check_spread)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
