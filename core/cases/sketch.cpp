// Tokens that leave a cache join sketches: once many, then one at a time.
#include <fmt/format.h>

#include <algorithm>

#include "cases/on_caches.hpp"
#include "ops/score/reference.hpp"
#include "ops/select/sketch.hpp"

namespace kvlab::cases {
namespace {

// Sketches of a cache, all of it in vectors.
struct Sketch {
  std::vector<float> keys, values, weights, centre;
  std::vector<std::int32_t> count;
  std::vector<double> squares;
  std::vector<std::uint64_t> key;
  KvSketch view;

  Sketch(const OnCache& x, const SketchRule& rule) {
    const std::int64_t slots = x.kv.table.extent[0], heads = x.kv.kv_heads, dim = x.kv.head_dim, all = slots * heads,
                       tokens = rule.tokens();
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    keys.resize(size(all * tokens * dim)), values.resize(keys.size()), weights.resize(size(all * tokens));
    centre.resize(size(all * rule.clusters * dim)), count.resize(size(all * (1 + rule.clusters)));
    squares.resize(size(all * (1 + rule.values))), key.resize(size(slots), 77);
    view.tokens = {View<float, 4>::dense(keys.data(), {slots, heads, tokens, dim}),
                   View<float, 4>::dense(values.data(), {slots, heads, tokens, dim}),
                   View<float, 3>::dense(weights.data(), {slots, heads, tokens})};
    view.centre = View<float, 4>::dense(centre.data(), {slots, heads, rule.clusters, dim});
    view.count = View<std::int32_t, 3>::dense(count.data(), {slots, heads, 1 + rule.clusters});
    view.squares = View<double, 3>::dense(squares.data(), {slots, heads, 1 + rule.values});
    view.key = View<std::uint64_t, 1>::dense(key.data(), {slots});
  }
  Sketch(const Sketch&) = delete;
  KvSketch put(Place& p) const {
    return {{p.put(view.tokens.keys), p.put(view.tokens.values), p.put(view.tokens.weights)},
            p.put(view.centre),
            p.put(view.count),
            p.put(view.squares),
            p.put(view.key)};
  }
};

void same_sketch(OnCache& x, const std::string& what, const KvSketch& there, const Sketch& wanted) {
  const auto scope = x.check.in(what);
  Place& p = x.place;
  x.check.equal("counts", p.get(there.count), wanted.count);
  x.check.equal("centres", p.get(there.centre), wanted.centre, 0);
  x.check.equal("keys", p.get(there.tokens.keys), wanted.keys, 0);
  x.check.equal("values", p.get(there.tokens.values), wanted.values, 0);
  x.check.equal("weights", p.get(there.tokens.weights), wanted.weights, 1e-6);
  const auto narrow = [](const std::vector<double>& v) { return std::vector<float>(v.begin(), v.end()); };
  x.check.equal("squares", narrow(p.get(there.squares)), narrow(wanted.squares), 1e-6);
  x.check.that("the keys of draws are equal", p.get(there.key) == wanted.key);
}

void check_sketches(OnCache& x) {
  if (x.kv.rope != RopeRegime::original) return;
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads();
  Numbers<3> scores(x, {rows, heads, x.c.room()});
  const auto scores_there = scores.put();
  const std::vector<Pins> pins(static_cast<std::size_t>(rows), {.first = static_cast<int>(x.n % 3)});
  const Pins* pins_there = x.place.put(pins);
  std::vector<std::uint64_t> keys;
  for (std::int64_t r = 0; r < rows; ++r) keys.push_back(x.c.rng() * 0x9e3779b97f4a7c15ull);
  const std::uint64_t* keys_there = x.place.put(keys);
  // Radii of no key, of some and of all.
  const SketchRule rules[] = {{0, 3, 2, 4}, {3, 5, 1, 1}, {1e6f, 2, 3, 300}};
  for (const SketchRule& rule : rules) {
    Sketch sketch(x, rule);
    const KvSketch there = sketch.put(x.place);
    for (const int times : {0, 1, 2}) {
      std::vector<std::int32_t> keep;
      for (int r = 0; r < rows; ++r)
        for (int h = 0; h < heads; ++h) keep.push_back(times ? x.kv.tokens(r, h) - 1 : static_cast<int>(x.c.rng() % 9));
      Surplus own{.keep = View<const std::int32_t, 2>::dense(keep.data(), {rows, heads}), .pins = pins.data()};
      if (x.n % 2) own.scores = scores.view();
      Surplus put = own;
      put.keep.data = x.place.put(keep), put.pins = pins_there;
      if (x.n % 2) put.scores = scores_there;
      ops::sketch_surplus_reference(x.kv, own, rule, times ? nullptr : keys.data(), sketch.view);
      ops::sketch_surplus(x.there, put, rule, times ? nullptr : keys_there, there, x.stream());
      same_sketch(x, fmt::format("{} clusters, call {}", rule.clusters, times), there, sketch);
    }
  }
}

std::vector<Case> list() { return {on_caches("sketch", "tokens that leave join it", 36, check_sketches)}; }

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
