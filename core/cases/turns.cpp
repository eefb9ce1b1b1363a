// What each sequence has at a place of its own: its count of steps, and rings of vectors.
#include <kvlab/rings.hpp>
#include <kvlab/turns.hpp>

#include "cases/on_caches.hpp"

namespace kvlab::cases {
namespace {

// Slots without a row keep their numbers.
void check_turns(OnCache& x) {
  std::vector<std::int32_t> steps;
  std::vector<float> lead;
  for (std::int64_t slot = 0; slot < x.kv.length.extent[0]; ++slot) {
    steps.push_back(x.c.pick({0, 0, 1, 7, 1000000}));
    lead.push_back(static_cast<float>(x.c.pick({0, 1, 15, 4095})));
  }
  const std::int32_t* steps_there = x.place.put(steps);
  const float* lead_there = x.place.put(lead);
  for (const bool begins : {false, true}) {
    std::vector<std::int32_t> wanted(steps.size(), -7);
    const auto there = x.place.put(View<std::int32_t, 1>::dense(wanted.data(), {x.kv.length.extent[0]}));
    for (int r = 0; r < x.kv.rows; ++r) {
      const auto slot = static_cast<std::size_t>(x.kv.slots[r]);
      const bool first = steps[slot] == 0 && begins;
      wanted[slot] = first ? 0 : steps[slot] + static_cast<std::int32_t>(lead[slot]);
    }
    ops::take_turns(x.there, steps_there, lead_there, begins, there.data, x.stream());
    x.check.equal(begins ? "take_turns where the first step is 0" : "take_turns", x.place.get(there), wanted);
  }
}

// Other places keep their numbers.
void check_rings(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), length = 5, width = x.c.pick({1, 8, 130});
  std::vector<std::int32_t> place;
  for (std::int64_t r = 0; r < rows; ++r) place.push_back(x.c.pick({0, 1, 4}));
  const std::int32_t* place_there = x.place.put(place);
  Numbers<3> vectors(x, {rows, heads, width});
  const auto there = vectors.put();
  Numbers<4> ring(x, {x.kv.length.extent[0], heads, length, width});
  x.same<4>(
      "put_in_rings", ring.own(), 0,
      [&](View<float, 4> out) { ops::put_in_rings(x.there, there, place_there, out, x.stream()); },
      [&](View<float, 4> out) {
        for (int r = 0; r < rows; ++r)
          for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t i = 0; i < width; ++i)
              out(x.kv.slots[r], h, place[static_cast<std::size_t>(r)], i) = vectors.view()(r, h, i);
      });
}

std::vector<Case> list() {
  return {on_caches("turns", "steps in turn", 36, check_turns),
          on_caches("turns", "rings of vectors", 36, check_rings)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
