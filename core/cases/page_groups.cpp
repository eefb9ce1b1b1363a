// Groups of pages: lists of random scores with ties and NaN, and heads that begin periods.
#include <fmt/format.h>

#include <cmath>

#include "cases/case.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/quick.hpp"
#include "ops/select/page_groups.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

constexpr int rows = 3, heads = 2, page = 4;

float score_of(int kind, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case 0: return normal(rng);
    case 1: return static_cast<float>(rng() % 4);  // ties
    case 2: return rng() % 2 ? NAN : normal(rng);
    default: return rng() % 4 ? NAN : rng() % 2 ? INFINITY : -INFINITY;
  }
}

// Heads of these lengths in tokens.
void check_lengths(Place& place, Check& check, const Ints& lengths, unsigned seed) {
  std::mt19937 rng(seed);
  const LengthsOnly cache(rows, heads, page, lengths);
  const PagedKv kv = cache.view(), there = place.put(kv, cache.bytes());
  const std::int64_t slots = kv.length.extent[0], room = kv.table.extent[2];
  std::vector<std::uint8_t> flag(static_cast<std::size_t>(slots * heads));
  const auto flags = View<std::uint8_t, 2>::dense(flag.data(), {slots, heads});
  std::vector<float> scores(static_cast<std::size_t>(rows * heads * room));
  const auto view = View<float, 3>::dense(scores.data(), {rows, heads, room});
  for (int turn = 0; turn < 16; ++turn) {
    GroupChoice choice;
    choice.parts = 1 + static_cast<int>(rng() % 5);
    choice.newest_group = rng() % 2;
    choice.whole = rng() % 2 ? static_cast<int>(rng() % 60) : 0;
    const auto scope = check.in(fmt::format("turn {}, groups of {}", turn, choice.parts));
    for (float& x : scores) x = score_of(turn % 4, rng);
    const int groups = kv.pages(0, 0) / choice.parts + 2;
    const Ints most{static_cast<int>(rng() % static_cast<unsigned>(groups)),
                    turn % 3 ? static_cast<int>(rng() % 7) : 1 << 30};
    for (std::uint8_t& f : flag) f = rng() % 4 != 0;
    GroupChoice choice_there = choice;
    choice.most = most.data(), choice_there.most = place.put(most);
    choice.heads = Heads::flagged(flags), choice_there.heads = Heads::flagged(place.put(flags));
    ListMemory wanted, start;
    PageList list{wanted.empty({slots, heads, room})}, list_there{place.put(start.empty({slots, heads, room}))};
    list.slots = kv.slots, list_there.slots = there.slots;
    ops::group_pages_reference(kv, view, choice, list);
    ops::group_pages(there, place.put(View<const float, 3>(view)), choice_there, list_there, place.stream());
    check.equal("counts", place.get(list_there.count), wanted.count);
    check.equal("entries", place.get(list_there.index), wanted.index);
  }
}

void check_groups(Place& place, Check& check) {
  for (unsigned n = 0; n < (quick() ? 8 : 40); ++n) {
    const auto scope = check.in(fmt::format("lengths {}", n));
    std::mt19937 rng(n);
    Ints lengths;
    for (int i = 0; i < rows * heads; ++i)
      lengths.push_back(static_cast<int>(rng() % (n % 4 == 3 ? 9000 : 150)));  // 0 tokens, too
    check_lengths(place, check, lengths, n);
  }
}

void check_periods(Place& place, Check& check) {
  std::mt19937 rng(7);
  for (const int period : {1, 3, 4, 16}) {
    const auto scope = check.in(fmt::format("periods of {}", period));
    Ints lengths(rows * heads), last(rows * heads);
    std::vector<std::uint8_t> begins(rows * heads, 7);
    const auto numbers = HeadNumbers::dense(last.data(), {1, rows, heads});
    const auto flags = HeadFlags::dense(begins.data(), {rows, heads});
    const HeadNumbers numbers_there = place.put(numbers);
    const HeadFlags flags_there = place.put(flags);
    for (int step = 0; step < 20; ++step) {
      for (std::int32_t& n : lengths) n += static_cast<std::int32_t>(rng() % 3);
      const LengthsOnly cache(rows, heads, page, lengths);
      ops::begun_periods_reference(cache.view(), period, numbers, flags);
      ops::begun_periods(place.put(cache.view(), cache.bytes()), period, numbers_there, flags_there, place.stream());
      check.equal("numbers", place.get(numbers_there), last);
      check.that("flags", place.get(flags_there) == begins);
    }
  }
}

std::vector<Case> list() {
  return {checked("page_groups", "of ragged rows", check_groups), checked("page_groups", "periods", check_periods)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
