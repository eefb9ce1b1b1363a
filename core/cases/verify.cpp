// Checks of the numbers that a plugin wrote.
#include "ops/score/verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "cases/on_caches.hpp"
#include "ops/page/reference.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

// What a reference found. It compares plain numbers where Finding packs them.
struct Found {
  std::uint64_t count = 0;
  std::tuple<int, int, std::uint32_t> first{std::numeric_limits<int>::max(), 0, 0};  // layer, KV head, number
  std::pair<std::int64_t, std::int64_t> over{0, 0};                                  // kept, total

  void add(int layer, int head, std::int32_t number) {
    ++count;
    first = std::min(first, {layer, head, static_cast<std::uint32_t>(number)});
  }
  void compare(Check& check, const ops::Finding& f) const {
    check.that(fmt::format("{} wrong numbers are counted, got {}", count, f.count), f.count == count);
    if (count == 0)
      check.that("nothing is named", f.first == 0);
    else
      check.that("the first wrong number is named",
                 first == std::tuple(f.layer(), f.kv_head(), static_cast<std::uint32_t>(f.number())));
    check.that("the row that keeps most over its total is named",
               f.over == 0 ? over.first == 0 : over == std::pair<std::int64_t, std::int64_t>(f.kept(), f.total()));
  }
};

ops::Finding get(Place& place, ops::Finding* finding) {
  return place.get(View<ops::Finding, 1>::dense(finding, {1}))[0];
}

void check_nan(OnCache& x) {
  Numbers<3> scores(x, {x.c.rows(), x.c.kv_heads(), x.c.room()});
  float* in = scores.own().data;
  const auto entries = static_cast<std::size_t>(x.c.rows() * x.c.kv_heads() * x.c.room());
  for (std::size_t i = 0; x.n % 3 && i < entries; i += 1 + x.n % 5) in[i] = std::numeric_limits<float>::quiet_NaN();
  const ops::Finding nothing;
  ops::Finding* got = x.place.put(&nothing, 1);
  const Scores there = x.place.put(scores.own());
  Found wanted;
  for (const int layer : {x.n % 2 ? 4 : 2, 3}) {
    for (int r = 0; r < x.kv.rows; ++r)
      for (int h = 0; h < x.kv.kv_heads; ++h) {
        Ints position(static_cast<std::size_t>(x.kv.tokens(r, h)));
        ops::token_positions_reference(x.kv, r, h, x.kv.tokens(r, h), position.data());
        for (std::size_t t = 0; t < position.size(); ++t)
          if (std::isnan(scores.own()(r, h, static_cast<std::int64_t>(t)))) wanted.add(layer, h, position[t]);
      }
    ops::find_nan(x.there, layer, there, got, x.stream());
  }
  if (x.n % 3 && x.kv.tokens(0, 0) > 0) x.check.that("there is something to find", wanted.count > 0);
  wanted.compare(x.check, get(x.place, got));
}

void check_keep(Place& place, Check& check) {
  constexpr int rows = 300, heads = 5, layers = 3;
  Ints keep(rows * heads), length(keep.size()), total(rows);
  std::vector<Pins> pins(rows);
  for (int row = 0; row < rows; ++row) {
    total[static_cast<std::size_t>(row)] = 40 + row % 7;
    pins[static_cast<std::size_t>(row)] = {row % 3, row % 2};
  }
  for (std::size_t i = 0; i < keep.size(); ++i) {
    length[i] = static_cast<std::int32_t>(i * 37 % 101);
    keep[i] = length[i] + (i % 50 == 49 ? 1 : 0) - (i % 70 == 69 ? 200 : 0);
  }
  Allotment a;
  a.layers = layers;
  a.keep = place.put(View<std::int32_t, 2>::dense(keep.data(), {rows, heads}));
  a.length = place.put(View<const std::int32_t, 2>::dense(length.data(), {rows, heads}));
  a.total = place.put(total);
  std::vector<std::int64_t> kept(rows, -7);
  std::int64_t* kept_there = place.put(kept);
  const ops::Finding nothing;
  ops::Finding* got = place.put(&nothing, 1);
  Found wanted;
  for (const bool pinned : {false, true}) {
    const auto scope = check.in(pinned ? "with pins" : "without pins");
    a.pins = pinned ? place.put(pins) : nullptr;
    for (const int layer : {0, 1, 0, 1, 2}) {
      a.layer = layer;
      ops::find_keep(a, kept_there, got, place.stream());
      for (std::size_t r = 0; r < rows; ++r) {
        if (layer == 0) kept[r] = 0;
        for (int h = 0; h < heads; ++h) {
          const std::size_t i = r * heads + static_cast<std::size_t>(h);
          kept[r] += keep[i];
          if (keep[i] < 0 || keep[i] > length[i]) wanted.add(layer, h, keep[i]);
        }
        const int most = total[r] + 1 + (pinned ? pins[r].first + pins[r].last : 0);
        if (layer + 1 == layers && kept[r] > layers * heads * most)
          wanted.over = std::max(wanted.over, {kept[r], layers * heads * total[r]});
      }
    }
    check.that("there is something to find", wanted.count > 0 && wanted.over.first > 0);
    wanted.compare(check, get(place, got));
    check.that("the sums of rows are the same", place.get(View<std::int64_t, 1>::dense(kept_there, {rows})) == kept);
  }
}

std::vector<Case> list() {
  return {on_caches("verify", "NaN among scores", 36, check_nan), checked("verify", "tokens to keep", check_keep)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
