// Made-up tokens: they join attention, and tokens that leave a cache join them.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <cmath>
#include <limits>

#include "cases/numbers.hpp"
#include "cases/on_caches.hpp"
#include "cases/relative_error.hpp"
#include "ops/attend/attend_made_up.hpp"
#include "ops/score/reference.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::cases {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// `count` made-up tokens of every slot, by hand and at the place.
struct Made {
  std::vector<float> keys, values, weights;
  MadeUpTokens own, there;

  Made(OnCache& x, std::int64_t count) {
    const std::int64_t slots = x.kv.table.extent[0], heads = x.kv.kv_heads, dim = x.kv.head_dim;
    keys = x.c.normal(slots * heads * count * dim), values = x.c.normal(slots * heads * count * dim);
    weights.assign(static_cast<std::size_t>(slots * heads * count), 0);
    own = {View<float, 4>::dense(keys.data(), {slots, heads, count, dim}),
           View<float, 4>::dense(values.data(), {slots, heads, count, dim}),
           View<float, 3>::dense(weights.data(), {slots, heads, count})};
  }
  Made(const Made&) = delete;
  void put(Place& place) { there = {place.put(own.keys), place.put(own.values), place.put(own.weights)}; }
};

// An attention of one query for each row, with outputs at the place.
struct Attention {
  Numbers<3> queries;
  ops::AttendArgs own, there;

  explicit Attention(OnCache& x) : queries(x, {x.c.rows(), x.c.heads(), x.kv.head_dim}) {
    own.kv = x.kv, own.queries = queries.view();
    there.kv = x.there, there.queries = queries.put();
  }
};

// The op beside its reference: weights of every size and none, attention that read nothing.
void check_joins(OnCache& x) {
  for (const std::int64_t count : {1, 3, 21}) {
    Attention a(x);
    Made made(x, count);
    for (float& w : made.weights) w = std::array{0.f, 0.f, 1.f, .25f, 7000.f, -2.f}[x.c.rng() % 6];
    made.put(x.place);
    Numbers<3> out(x, {x.c.rows(), x.c.heads(), x.kv.head_dim});
    Numbers<2> lse(x, {x.c.rows(), x.c.heads()}, 5);
    for (std::int64_t h = 0; h < x.c.heads(); h += 3) {
      lse.own()(0, h) = -infinity;
      for (int d = 0; d < x.kv.head_dim; ++d) out.own()(0, h, d) = 0;
    }
    a.there.out = x.place.put(out.own()), a.there.lse = x.place.put(lse.own());
    const bool rounds = x.stream().device() == Device::cuda && x.kv.layouts[0].dtype == DType::bf16;
    if (rounds) a.there.rounded = put_as(x.place, Guarded<3>::copy(out.own()), DType::bf16);
    a.own.out = out.own(), a.own.lse = lse.own();
    ops::attend_made_up(a.there, made.there, x.stream());
    ops::attend_made_up_reference(a.own, made.own);
    std::vector<float> got = x.place.get(a.there.out);
    x.check.equal(fmt::format("out of {} tokens", count), got, Guarded<3>::copy(out.own()), 2e-5);
    x.check.equal(fmt::format("lse of {} tokens", count), x.place.get(a.there.lse), Guarded<2>::copy(lse.own()), 2e-5);
    if (!rounds) continue;
    for (float& y : got) y = stored(y, DType::bf16);
    x.check.that("the rounded output is the output, rounded",
                 get_as(x.place, a.there.rounded, DType::bf16, std::ssize(got)) == got);
  }
}

// Attention over a list joined with the other tokens equals attention over all. A token of weight 3 counts three times.
void check_equals_all(OnCache& x) {
  constexpr int most = 5;  // tokens of a head that join
  Attention a(x);
  Made made(x, most);
  ListMemory memory;
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room();
  const TokenList list{memory.empty({rows, heads, room})};
  std::vector<float> keys(static_cast<std::size_t>(rows * heads * room * x.kv.head_dim)), values(keys.size());
  const auto of_keys = View<float, 4>::dense(keys.data(), {rows, heads, room, x.kv.head_dim});
  const auto of_values = View<float, 4>::dense(values.data(), {rows, heads, room, x.kv.head_dim});
  ops::read_rows_reference({&x.kv, KvSide::key}, of_keys);
  ops::read_rows_reference({&x.kv, KvSide::value}, of_values);
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const int n = x.kv.tokens(r, h), joins = std::min(n, static_cast<int>(x.c.rng() % (most + 1)));
      list.count(r, h) = n - joins;
      for (int t = 0; t < n - joins; ++t) list.index(r, h, t) = t;
      for (int i = 0; i < joins; ++i) {
        made.own.weights(x.kv.slots[r], h, i) = 1;
        for (int d = 0; d < x.kv.head_dim; ++d) {
          made.own.keys(x.kv.slots[r], h, i, d) = of_keys(r, h, n - joins + i, d);
          made.own.values(x.kv.slots[r], h, i, d) = of_values(r, h, n - joins + i, d);
        }
      }
    }
  made.put(x.place);
  const TokenList list_there = x.place.put(list);
  Guarded<3> out({rows, x.c.heads(), x.kv.head_dim});
  Guarded<2> lse({rows, x.c.heads()});
  a.own.out = out.view(), a.own.lse = lse.view();
  ops::attend_reference(a.own);
  a.there.out = x.place.unwritten(out.view().extent), a.there.lse = x.place.unwritten(lse.view().extent);
  a.there.tokens = &list_there;
  HeapWorkspace workspace;
  ops::attend(a.there, workspace, x.stream());
  ops::attend_made_up(a.there, made.there, x.stream());
  const bool cuda = x.stream().device() == Device::cuda;
  x.check.within("the output of attention over all tokens", relative(x.place.get(a.there.out), out.values()),
                 cuda ? 6e-3 : 1e-4);
  x.check.equal("the lse of attention over all tokens", x.place.get(a.there.lse), lse.values(), cuda ? 8e-3 : 5e-5);
}

const Pins some_pins[] = {{}, {.first = 3}, {.last = 2}, {.first = 4, .last = 9}};

// The tokens that leave by age, by scores and by a column, twice in a row.
void check_folds(OnCache& x) {
  if (x.kv.rope != RopeRegime::original) return;
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads();
  Numbers<3> scores(x, {rows, heads, x.c.room()});
  const auto scores_there = scores.put();
  const Pins& pins = some_pins[x.n % 4];
  const std::vector<Pins> pins_of(static_cast<std::size_t>(rows), pins);
  const Pins* pins_there = x.place.put(pins_of);
  ops::blend_state_reference({&x.kv, 1}, 0, scores.view(), 2);
  ops::blend_state({&x.there, 1}, 0, scores_there, 2, x.stream());
  for (const int by : {0, 1, 2})
    for (const bool one : {false, true}) {
      std::vector<std::int32_t> keep(static_cast<std::size_t>(rows * heads));
      for (int r = 0; r < rows; ++r)
        for (int h = 0; h < heads; ++h) {
          const int n = x.kv.tokens(r, h);
          keep[static_cast<std::size_t>(r * heads + h)] =
              one ? n - 1 : static_cast<int>(x.c.rng() % static_cast<unsigned>(n + 3));
        }
      Surplus own{.keep = View<const std::int32_t, 2>::dense(keep.data(), {rows, heads}), .pins = pins_of.data()};
      if (by == 1) own.scores = scores.view();
      if (by == 2) own.column = 1;
      Surplus there = own;
      there.keep.data = x.place.put(keep), there.pins = pins_there;
      if (by == 1) there.scores = scores_there;
      Made made(x, 2);
      made.put(x.place);
      for (int times = 0; times < 2; ++times) {
        ops::fold_surplus_reference(x.kv, own, 1, made.own);
        ops::fold_surplus(x.there, there, 1, made.there, x.stream());
      }
      const std::string what = fmt::format(
          "by {}, {}", std::array{"age", "scores", "column"}[static_cast<unsigned>(by)], one ? "one token" : "many");
      x.check.equal("weights " + what, x.place.get(made.there.weights), made.weights, 0);
      x.check.equal("keys " + what, x.place.get(made.there.keys), made.keys, 1e-5);
      x.check.equal("values " + what, x.place.get(made.there.values), made.values, 1e-5);
    }
}

std::vector<Case> list() {
  return {on_caches("made_up", "tokens that join attention", 36, check_joins),
          on_caches("made_up", "attention over all tokens", 36, check_equals_all),
          on_caches("made_up", "tokens that leave become one", 36, check_folds)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
