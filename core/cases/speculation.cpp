// Magnitudes of queries by channel, and the number of tokens whose scores are near the greatest.
#include <cmath>

#include "cases/on_caches.hpp"
#include "ops/score/speculation.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

void check_magnitudes(OnCache& x) {
  for (const std::int64_t count : {1, 37}) {
    Numbers<4> queries(x, {x.c.rows(), x.c.heads(), count, x.kv.head_dim});
    Numbers<3> sums(x, {x.kv.length.extent[0], x.c.kv_heads(), x.kv.head_dim});
    const View<const float, 4> there = x.place.put(queries.view());
    x.same<3>(
        "add_magnitudes", sums.own(), 1e-6,
        [&](const View<float, 3>& out) { ops::add_magnitudes(x.there, there, out, x.stream()); },
        [&](const View<float, 3>& out) { ops::add_magnitudes_reference(x.kv, queries.view(), out); });
  }
}

void check_near(OnCache& x) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads();
  for (const bool special : {false, true}) {
    Numbers<3> scores(x, {rows, heads, x.c.room()}, 3);
    const float some[] = {NAN, -INFINITY, 2, 1, 0};
    for (std::int64_t i = 0; special && i < rows * heads * x.c.room(); ++i)
      scores.own().data[i] = some[x.c.rng() % std::size(some)];
    NearGreatest rule{.within = special ? 1.f : 2.5f, .newest = static_cast<int>(x.c.rng() % 3)};
    if (x.c.rng() % 2) rule.most = 1 + static_cast<int>(x.c.rng() % 9);
    if (x.c.rng() % 2) rule.most_share = .1f;
    Ints wanted(static_cast<std::size_t>(rows * heads), -7);
    const auto out = View<std::int32_t, 2>::dense(wanted.data(), {rows, heads});
    const auto there = x.place.put(out);
    ops::near_greatest_reference(x.kv, scores.view(), rule, out);
    ops::near_greatest(x.there, scores.put(), rule, there, x.stream());
    x.check.equal(special ? "near_greatest, with ties" : "near_greatest", x.place.get(there), wanted);
  }
}

std::vector<Case> list() {
  return {on_caches("speculation", "magnitudes of channels", 24, check_magnitudes),
          on_caches("speculation", "tokens near the greatest score", 36, check_near)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
