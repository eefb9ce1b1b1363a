// Sums over a head's tokens and over rows, tokens of a share and lists of them, and listed tokens.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <cmath>
#include <limits>

#include "cases/on_caches.hpp"
#include "ops/score/abs_sums.hpp"
#include "ops/select/allot.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

constexpr float infinity = std::numeric_limits<float>::infinity();

const Pins some_pins[] = {{}, {.first = 3}, {.last = 2}, {.first = 4, .last = 9}, {.first = 1000}};

// The op and its reference must write the same whole numbers.
template <class Op, class Plain>
void same_numbers(OnCache& x, const std::string& what, std::array<std::int64_t, 2> extent, const Op& op,
                  const Plain& plain) {
  Ints wanted(static_cast<std::size_t>(extent[0] * extent[1]), -7);
  const auto there = x.place.put(View<std::int32_t, 2>::dense(wanted.data(), extent));
  plain(View<std::int32_t, 2>::dense(wanted.data(), extent));
  op(there);
  x.check.equal(what, x.place.get(there), wanted);
}

void check_sums(OnCache& x) {
  const Stream s = x.stream();
  for (const std::int64_t heads : {x.c.kv_heads(), x.c.heads()}) {
    Numbers<3> in(x, {x.c.rows(), heads, x.c.room()});
    if (x.n % 4 == 0) in.own()(0, 0, 0) = NAN;
    if (x.n % 4 == 1) in.own()(0, 0, 0) = -infinity;
    const auto there = in.put();
    for (const Pins& pins : some_pins)
      x.same<2>(
          fmt::format("head_sum of {} heads without {} first and {} last", heads, pins.first, pins.last),
          Guarded<2>({x.c.rows(), heads}).view(), 1e-6,
          [&](View<float, 2> out) { ops::head_sum(x.there, there, pins, out, s); },
          [&](View<float, 2> out) { ops::head_sum_reference(x.kv, in.view(), pins, out); });
  }
}

// Kinds of scores: shares of attention, whole numbers with many ties, mostly zeros, one kind of everything.
float share_of(unsigned kind, float normal, std::mt19937& rng) {
  const float special[] = {-0.f, 0.f, NAN, -infinity, -3.f, 1.f, 1e-40f, 2e-40f};
  switch (kind) {
    case 0: return std::exp(3 * normal);
    case 1: return static_cast<float>(rng() % 5);
    case 2: return rng() % 8 ? 0.f : normal;
    case 3: return special[rng() % 8];
    case 4: return rng() % 4 ? special[rng() % 8] : infinity;
    default: return 0;
  }
}

// Scores of one kind for all heads of a cache.
void fill(OnCache& x, unsigned kind, const Scores& scores) {
  for (std::int64_t r = 0; r < scores.extent[0]; ++r)
    for (std::int64_t h = 0; h < scores.extent[1]; ++h)
      for (std::int64_t t = 0; t < scores.extent[2]; ++t) scores(r, h, t) = share_of(kind, scores(r, h, t), x.c.rng);
}

void check_shares(OnCache& x) {
  const Stream s = x.stream();
  for (const std::int64_t heads : {x.c.kv_heads(), x.c.heads()})
    for (unsigned kind = 0; kind < 6; ++kind) {
      Numbers<3> scores(x, {x.c.rows(), heads, x.c.room()});
      fill(x, kind, scores.own());
      const auto there = scores.put();
      for (const Pins& pins : some_pins)
        for (const float share : {.5f, .9f, 1.f}) {
          if (share == 1 && kind != 1) continue;  // the last of many additions may not count
          x.same<2>(
              fmt::format("tokens_of_share {}, kind {}, pins {} and {}", share, kind, pins.first, pins.last),
              Guarded<2>({x.c.rows(), heads}).view(), 0,
              [&](View<float, 2> out) { ops::tokens_of_share(x.there, there, share, pins, out, s); },
              [&](View<float, 2> out) { ops::tokens_of_share_reference(x.kv, scores.view(), share, pins, out); });
        }
    }
}

// Entries behind a count must stay as they are.
void check_top_p(OnCache& x) {
  const std::array<std::int64_t, 3> extent{x.c.rows(), x.c.kv_heads(), x.c.room()};
  for (const std::int64_t heads : {x.c.kv_heads(), x.c.heads()})
    for (unsigned kind = 0; kind < 6; ++kind) {
      Numbers<3> weights(x, {x.c.rows(), heads, x.c.room()});
      fill(x, kind, weights.own());
      const auto there = weights.put();
      for (const Pins& pins : some_pins)
        for (const float p : {.5f, .9f, 1.f}) {
          const auto scope = x.check.in(fmt::format("top_p_tokens {} of {} heads, kind {}, pins {} and {}", p, heads,
                                                    kind, pins.first, pins.last));
          ListMemory wanted, start;
          const TokenList plain{wanted.empty(extent)}, list{x.place.put(start.empty(extent))};
          ops::top_p_tokens_reference(x.kv, weights.view(), p, pins, plain);
          ops::top_p_tokens(x.there, there, p, pins, list, x.stream());
          x.check.equal("counts", x.place.get(list.count), wanted.count);
          x.check.equal("entries", x.place.get(list.index), wanted.index);
        }
    }
}

// Lists of rows, and lists of slots in another order. Places past the scores are left alone.
void check_listed(OnCache& x) {
  const Stream s = x.stream();
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room(), entries = 7;
  Ints index(static_cast<std::size_t>(rows * heads * entries)), count(static_cast<std::size_t>(rows * heads)), slots;
  for (auto& i : index) i = static_cast<int>(x.c.rng() % static_cast<unsigned>(room + 3)) - 1;
  for (auto& n : count) n = static_cast<int>(x.c.rng() % (entries + 1));
  for (std::int64_t r = 0; r < rows; ++r) slots.push_back(static_cast<int>(rows - 1 - r));
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {rows, heads, entries});
  list.count = View<std::int32_t, 2>::dense(count.data(), {rows, heads});
  TokenList there;
  there.index = x.place.put(list.index), there.count = x.place.put(list.count);
  const std::int32_t* slots_there = x.place.put(slots);
  Numbers<3> start(x, {rows, heads, room});
  for (const bool lasts : {false, true}) {
    list.slots = lasts ? slots.data() : nullptr, there.slots = lasts ? slots_there : nullptr;
    x.same<3>(
        lasts ? "set_listed by slots" : "set_listed", start.own(), 0,
        [&](Scores out) { ops::set_listed(there, infinity, out, s); },
        [&](Scores out) { ops::set_listed_reference(list, infinity, out); });
  }
  same_numbers(
      x, "numbers_of_rows", {rows, heads},
      [&](View<std::int32_t, 2> out) { ops::numbers_of_rows(there.count, slots_there, out, s); },
      [&](View<std::int32_t, 2> out) {
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t h = 0; h < heads; ++h) out(r, h) = list.count(rows - 1 - r, h);
      });
}

// Slots that no row has keep their numbers.
void check_lengths_of_rows(OnCache& x) {
  std::vector<std::uint8_t> leave_out;
  for (int r = 0; r < x.kv.rows; ++r) leave_out.push_back(static_cast<std::uint8_t>(x.c.rng() % 2));
  const std::uint8_t* there = x.place.put(leave_out);
  same_numbers(
      x, "lengths_of_rows", {x.kv.length.extent[0], x.kv.length.extent[1]},
      [&](View<std::int32_t, 2> out) { ops::lengths_of_rows(x.there, there, out, x.stream()); },
      [&](View<std::int32_t, 2> out) {
        for (int r = 0; r < x.kv.rows; ++r)
          for (int h = 0; h < x.kv.kv_heads; ++h)
            out(x.kv.slots[r], h) = leave_out[static_cast<std::size_t>(r)] ? 0 : x.kv.tokens(r, h);
      });
}

// Rows of a part of a head's tokens, and of more than it holds.
void check_abs_sums(OnCache& x) {
  const std::int64_t room = x.c.room(), width = 40;
  PagedKv one = x.kv, there = x.there;
  one.rows = there.rows = 1;
  const int head = static_cast<int>(x.c.kv_heads()) - 1, first = static_cast<int>(room) / 3;
  Numbers<2> rows(x, {room - first, width});
  const auto rows_there = rows.put();
  Numbers<3> start(x, {1, x.c.kv_heads(), room});
  for (const bool begins : {true, false})
    x.same<3>(
        begins ? "add_abs_sums of the first rows" : "add_abs_sums", start.own(), 1e-6,
        [&](Scores out) { ops::add_abs_sums(there, head, first, rows_there, .25f, begins, out, x.stream()); },
        [&](Scores out) {
          for (int t = first; t < one.tokens(0, head); ++t) {
            double sum = 0;
            for (std::int64_t d = 0; d < width; ++d) sum += std::fabs(double{rows.view()(t - first, d)});
            out(0, head, t) = static_cast<float>((begins ? 0. : double{out(0, head, t)}) + .25 * sum);
          }
        });
}

std::vector<Case> list() {
  return {on_caches("shares", "sums of heads", 36, check_sums),
          on_caches("shares", "tokens of a share", 36, check_shares),
          on_caches("shares", "lists of tokens of a share", 36, check_top_p),
          on_caches("shares", "listed tokens", 36, check_listed),
          on_caches("shares", "lengths of rows", 36, check_lengths_of_rows),
          on_caches("shares", "sums of absolute numbers", 36, check_abs_sums)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
