// top_tokens, top_pages and the divisions of a budget.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <cmath>
#include <limits>

#include "base/joined_calls.hpp"
#include "cases/case.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/quick.hpp"
#include "ops/score/reference.hpp"
#include "ops/select/drifted.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

const char* const kinds[] = {"normal",  "equal",   "few values", "one outlier", "wide exponents", "rising",
                             "falling", "special", "tiny",       "all NaN",     "infinities"};

float value_of(int kind, int i, int n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  const float special[] = {-0.f, 0.f, INFINITY, -INFINITY, NAN, 1.f, -1.f, 1e-40f, -1e-40f};
  switch (kind) {
    case 0: return normal(rng);
    case 1: return 3.f;
    case 2: return static_cast<float>(rng() % 5);
    case 3: return i == n / 3 ? 1e30f : normal(rng) * 1e-3f;
    case 4: return normal(rng) * std::exp2(static_cast<float>(static_cast<int>(rng() % 200) - 100));
    case 5: return static_cast<float>(i) - static_cast<float>(n) / 2;
    case 6: return static_cast<float>(-i / 2);
    case 7: return rng() % 3 ? special[rng() % 9] : static_cast<float>(rng() % 5);
    case 8: return normal(rng) * 1e-42f;
    case 9: return NAN;
    default:
      return rng() % 2 ? std::numeric_limits<float>::max() : rng() % 2 ? -std::numeric_limits<float>::max() : INFINITY;
  }
}

// Compares the lists that an op and its reference write. Entries behind a count must stay poisoned.
template <class Op, class Plain>
void same_lists(Place& place, Check& check, const std::string& what, std::array<std::int64_t, 3> extent, const Op& op,
                const Plain& plain) {
  ListMemory wanted, start;
  const IndexList list = wanted.empty(extent), there = place.put(start.empty(extent));
  plain(list);
  op(there);
  check.equal(what + ", counts", place.get(there.count), wanted.count);
  check.equal(what + ", entries", place.get(there.index), wanted.index);
}

// Both selections over heads of these lengths, with ragged budgets and every kind of scores.
void check_lengths(Place& place, Check& check, const Ints& lengths, unsigned seed) {
  const int rows = static_cast<int>(lengths.size()) / 2, heads = 2;
  std::mt19937 rng(seed);
  const LengthsOnly of_tokens(rows, heads, 16, lengths);
  const std::int64_t room = of_tokens.view().table.extent[2] * 16;
  Ints page_tokens;
  for (const int n : lengths) page_tokens.push_back(n * 4 - (n ? n % 4 : 0));  // n pages of 4 tokens
  const LengthsOnly of_pages(rows, heads, 4, page_tokens);
  const PagedKv paged = of_pages.view();
  const PagedKv kv_there = place.put(of_tokens.view(), of_tokens.bytes()),
                paged_there = place.put(paged, of_pages.bytes());
  const Stream s = place.stream();
  for (int kind = 0; kind < 11; ++kind) {
    std::vector<float> scores(static_cast<std::size_t>(rows * heads * room), 1e38f);
    const auto view = View<float, 3>::dense(scores.data(), {rows, heads, room});
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < heads; ++h) {
        const int n = lengths[static_cast<std::size_t>(r * heads + h)];
        for (int i = 0; i < n; ++i) view(r, h, i) = value_of(kind, i, n, rng);
      }
    const auto scores_there = place.put(view);
    for (int budget = 0; budget < 4; ++budget) {
      const auto scope = check.in(fmt::format("{} scores, budget {}", kinds[kind], budget));
      Ints keep;
      for (const int n : lengths)
        keep.push_back(budget == 0   ? static_cast<int>(rng() % 5) - 1
                       : budget == 1 ? n / 4
                       : budget == 2 ? n - static_cast<int>(rng() % 4) + 1
                                     : static_cast<int>(rng() % static_cast<unsigned>(n + 2)));
      const auto wanted = View<const std::int32_t, 2>::dense(keep.data(), {rows, heads});
      const auto there = place.put(wanted);
      same_lists(
          place, check, "top_tokens", {rows, heads, room},
          [&](IndexList l) { ops::top_tokens(kv_there, scores_there, there, nullptr, TokenList{l}, s); },
          [&](IndexList l) { ops::top_pages_reference(paged, view, wanted, {}, PageList{l}); });  // reads no page
      for (const bool newest : {false, true})
        same_lists(
            place, check, newest ? "top_pages with the newest page" : "top_pages", {rows, heads, room},
            [&](IndexList l) {
              ops::top_pages(paged_there, scores_there, there, {0, 0, newest}, PageList{l}, s);
            },
            [&](IndexList l) {
              ops::top_pages_reference(paged, view, wanted, {0, 0, newest}, PageList{l});
            });
    }
  }
}

void check_pins(Place& place, Check& check) {
  for (unsigned n = 0; n < 120; n += quick() ? 7 : 1) {
    RandomCache c(n);
    const PagedKv kv = c.cache.view();
    auto scores = c.normal(std::int64_t{c.rows()} * c.kv_heads() * c.room());
    for (float& x : scores)
      if (n % 2) x = value_of(7, 0, 0, c.rng);
    const auto of = View<float, 3>::dense(scores.data(), {c.rows(), c.kv_heads(), c.room()});
    std::vector<Pins> pins(static_cast<std::size_t>(c.rows()));
    for (Pins& p : pins)
      p = {static_cast<int>(c.rng() % 5), static_cast<int>(c.rng() % (n % 7 ? 9 : 90)), c.rng() % 2 == 0};
    Ints amount(static_cast<std::size_t>(c.rows() * c.kv_heads()));
    for (auto& a : amount) a = static_cast<int>(c.rng() % static_cast<unsigned>(c.room() + 5));
    if (n % 5 == 0)  // a decode step: one token of each head leaves
      for (int r = 0; r < c.rows(); ++r)
        for (int h = 0; h < c.kv_heads(); ++h)
          amount[static_cast<std::size_t>(r * c.kv_heads() + h)] = std::max(0, kv.tokens(r, h) - 1);
    const auto keep = View<const std::int32_t, 2>::dense(amount.data(), {c.rows(), c.kv_heads()});
    const PagedKv there = place.put(kv, c.cache.arena_bytes());
    const auto of_there = place.put(of);
    const auto keep_there = place.put(keep);
    const Pins* pins_there = place.put(pins);
    const Stream s = place.stream();
    const std::array<std::int64_t, 3> extent{c.rows(), c.kv_heads(), c.room()};
    const auto scope = check.in(fmt::format("cache {}", n));
    for (const bool pinned : {false, true})
      same_lists(
          place, check, pinned ? "top_tokens with pins" : "top_tokens", extent,
          [&](IndexList l) {
            ops::top_tokens(there, of_there, keep_there, pinned ? pins_there : nullptr, TokenList{l}, s);
          },
          [&](IndexList l) { ops::top_tokens_reference(kv, of, keep, pinned ? pins.data() : nullptr, TokenList{l}); });
    same_lists(
        place, check, "top_pages", extent,
        [&](IndexList l) { ops::top_pages(there, of_there, keep_there, pins[0], PageList{l}, s); },
        [&](IndexList l) { ops::top_pages_reference(kv, of, keep, pins[0], PageList{l}); });
  }
}

void check_long_pins(Place& place, Check& check) {
  PagedFixture cache({1, 1, 8, 16, 64});
  std::mt19937 rng(3);
  Ints position(1000);
  for (std::size_t i = 0; i < position.size(); ++i) position[i] = static_cast<int>(i) / 2 * 70000;
  std::shuffle(position.begin(), position.end(), rng);
  const std::vector<float> x(8, 0.f);
  for (const int p : position) cache.append(0, 0, x, x, p);
  std::vector<float> scores(1000);
  for (float& s : scores) s = static_cast<float>(rng() % 100);
  const auto of = View<float, 3>::dense(scores.data(), {1, 1, 1000});
  const PagedKv kv = cache.view(), there = place.put(kv, cache.arena_bytes());
  const auto of_there = place.put(of);
  for (const Pins pins : {Pins{1, 0}, Pins{0, 1}, Pins{3, 5}, Pins{4, 300}, Pins{499, 500}, Pins{600, 600}})
    for (const int keep : {0, 10, 400, 999, 1000}) {
      const auto wanted = View<const std::int32_t, 2>::dense(&keep, {1, 1});
      const auto keep_there = place.put(wanted);
      const Pins* pins_there = place.put(&pins, 1);
      same_lists(
          place, check, fmt::format("{} first and {} last pinned of {}", pins.first, pins.last, keep), {1, 1, 1010},
          [&](IndexList l) { ops::top_tokens(there, of_there, keep_there, pins_there, TokenList{l}, place.stream()); },
          [&](IndexList l) { ops::top_tokens_reference(kv, of, wanted, &pins, TokenList{l}); });
    }
}

void check_allotments(Place& place, Check& check) {
  for (unsigned n = 0; n < 120; n += quick() ? 7 : 1) {
    RandomCache c(n);
    LayerKv kv;
    kv.pages = c.cache.view();
    auto scores = c.normal(std::int64_t{c.rows()} * c.kv_heads() * c.room());
    if (n % 2)
      for (float& x : scores) x = static_cast<float>(c.rng() % 7);
    std::vector<Pins> pins(static_cast<std::size_t>(c.rows()));
    Ints total, length;
    for (int r = 0; r < c.rows(); ++r) {
      pins[static_cast<std::size_t>(r)] = {static_cast<int>(c.rng() % 3), static_cast<int>(c.rng() % 3)};
      total.push_back(static_cast<int>(c.rng() % 60));
      for (int h = 0; h < c.kv_heads(); ++h) length.push_back(kv.pages.tokens(r, h));
    }
    Ints keep(length.size(), -7);
    Allotment a;
    a.scores = View<float, 3>::dense(scores.data(), {c.rows(), c.kv_heads(), c.room()});
    a.length = View<const std::int32_t, 2>::dense(length.data(), {c.rows(), c.kv_heads()});
    a.pins = n % 3 ? pins.data() : nullptr;
    a.total = total.data();
    a.keep = View<std::int32_t, 2>::dense(keep.data(), {c.rows(), c.kv_heads()});
    a.kv = &kv;
    LayerKv kv_there = kv;
    kv_there.pages = place.put(kv.pages, c.cache.arena_bytes());
    Allotment b = a;
    b.scores = place.put(a.scores);
    b.length = place.put(a.length);
    if (a.pins) b.pins = place.put(pins);
    b.total = place.put(total);
    b.keep = place.put(a.keep);
    b.kv = &kv_there;
    const Stream s = place.stream();
    const double floor = static_cast<double>(c.rng() % 11) / 10;
    const auto scope = check.in(fmt::format("cache {}, floor {}", n, floor));
    for (const bool exact : {false, true}) {
      ops::allot_by_score_reference(a, floor, exact);
      ops::allot_by_score(b, floor, exact, s);
      check.equal(exact ? "allot_by_score, exact total" : "allot_by_score", place.get(b.keep), keep);
    }
    ops::allot_uniform_reference(a);
    ops::allot_uniform(b, s);
    check.equal("allot_uniform", place.get(b.keep), keep);
    std::reverse(total.begin(), total.end());
    ops::allot_tokens_reference(a, total.data());
    ops::allot_tokens(b, place.put(total), s);
    check.equal("allot_tokens", place.get(b.keep), keep);
  }
}

Ints backwards(int rows) {
  Ints slots;
  for (int r = rows - 1; r >= 0; --r) slots.push_back(r);
  return slots;
}

// Lists that last, of some heads, by the scores of other heads, and as many tokens as they or other lists hold.
void check_choices(Place& place, Check& check) {
  for (unsigned n = 0; n < 60; n += quick() ? 7 : 1) {
    const auto scope = check.in(fmt::format("choice {}", n));
    std::mt19937 rng(n);
    const int rows = 1 + static_cast<int>(rng() % 3), heads = 1 + static_cast<int>(rng() % 4),
              most = n % 9 ? 90 : 20000;
    Ints length, keep, by, among, held;
    std::vector<std::uint8_t> flags;
    for (int i = 0; i < rows * heads; ++i) {
      length.push_back(static_cast<int>(rng() % static_cast<unsigned>(most)));
      keep.push_back(static_cast<int>(rng() % static_cast<unsigned>(most)));
      held.push_back(static_cast<int>(rng() % static_cast<unsigned>(most)));
      flags.push_back(rng() % 3 > 0);
    }
    const int wide = static_cast<int>(rng() % static_cast<unsigned>(heads));
    for (int h = 0; h < heads; ++h) {
      by.push_back(static_cast<int>(rng() % static_cast<unsigned>(heads)));
      among.push_back(h % 3 ? wide : h);
    }
    among[static_cast<std::size_t>(wide)] = wide;
    // A number that others follow must stay, whichever list is written first. So no head is shorter than a list.
    for (int i = 0; i < rows * heads; ++i)
      for (int h = 0; h < heads; ++h)
        held[static_cast<std::size_t>(i)] =
            std::min(held[static_cast<std::size_t>(i)], length[static_cast<std::size_t>(i / heads * heads + h)]);
    const Ints slots = backwards(rows);
    const LengthsOnly memory(rows, heads, 16, length);
    PagedKv kv = memory.view();
    kv.slots = slots.data();
    const PagedKv there = place.put(kv, memory.bytes());
    const std::int64_t room = kv.table.extent[2] * 16;
    std::vector<float> values(static_cast<std::size_t>(rows * heads * room));
    for (float& x : values) x = value_of(static_cast<int>(n % 9), static_cast<int>(&x - values.data()), 90, rng);
    const auto scores = View<const float, 3>::dense(values.data(), {rows, heads, room});
    ListMemory of_lists;
    IndexList list = of_lists.empty({rows, heads, room});
    for (int i = 0; i < rows * heads; ++i) list.count(i / heads, i % heads) = held[static_cast<std::size_t>(i)];
    IndexList list_there = place.put(list);
    list.slots = kv.slots, list_there.slots = there.slots;
    TokenChoice choice, choice_there;
    const auto marks = View<const std::uint8_t, 2>::dense(flags.data(), {rows, heads});
    choice.heads = Heads::flagged(marks), choice_there.heads = Heads::flagged(place.put(marks));
    if (n % 2) choice.by = by.data(), choice_there.by = place.put(by);
    if (n % 4 == 0) {
      choice.keep = View<const std::int32_t, 2>::dense(keep.data(), {rows, heads});
      choice_there.keep = place.put(choice.keep);
    } else if (n % 4 != 1) {
      choice.among = among.data(), choice_there.among = place.put(among);
    }
    const auto scores_there = place.put(scores);
    ops::top_tokens_reference(kv, scores, choice, TokenList{list});
    ops::top_tokens(there, scores_there, choice_there, TokenList{list_there}, place.stream());
    check.equal("counts", place.get(list_there.count), of_lists.count);
    check.equal("entries", place.get(list_there.index), of_lists.index);
  }
}

// Lists that agree with the best tokens more or less, for some steps. The threshold is an overlap, or lies beside one.
// In some caches what a check finds is injected.
void check_drifted(Place& place, Check& check) {
  for (unsigned n = 0; n < 60; n += quick() ? 7 : 1) {
    const bool injects = n % 4 == 3;
    const auto scope = check.in(fmt::format("cache {}{}", n, injects ? ", injected" : ""));
    std::mt19937 rng(100 + n);
    const bool tall = n % 8 == 0;
    const int rows = 1 + static_cast<int>(rng() % 3), heads = 1 + static_cast<int>(rng() % 5);
    const int most = tall ? 26000 : 90, steps = tall ? 3 : 24;
    ops::DriftRule rule;
    rule.window = 1 + static_cast<int>(rng() % 6), rule.period = 1 + static_cast<int>(rng() % 7);
    rule.lead = static_cast<int>(rng() % 9);
    Ints length, leaders(static_cast<std::size_t>(heads)), count_of_steps;
    for (int i = 0; i < rows * heads; ++i) length.push_back(1 + static_cast<int>(rng() % static_cast<unsigned>(most)));
    for (int h = 0; h < heads; ++h)  // the first head of three leads the two others, and every fifth head has no leader
      leaders[static_cast<std::size_t>(h)] = h % 5 == 4 ? -1 : h / 3 * 3;
    for (int r = 0; r < rows; ++r) count_of_steps.push_back(static_cast<int>(rng() % 5));
    const Ints slots = backwards(rows);
    const LengthsOnly memory(rows, heads, 16, length);
    PagedKv kv = memory.view();
    kv.slots = slots.data();
    PagedKv there = place.put(kv, memory.bytes());
    std::vector<std::uint32_t> sequence;
    for (int r = 0; r < rows; ++r) sequence.push_back(rng() % 1000);
    const ops::InjectedDrift drift{300'000, sequence.data(), static_cast<int>(n % 5), n};
    ops::InjectedDrift drift_there = drift;
    drift_there.sequence = place.put(sequence);
    ops::InjectedUse used;
    const ops::Injected injected{.used = &used, .drift = &drift_there};
    if (injects) there.injected = &injected;
    const std::int64_t room = kv.table.extent[2] * 16;
    ListMemory of_lists;
    IndexList list = of_lists.empty({rows, heads, room});
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < heads; ++h) {
        const auto slot = kv.slots[r];
        list.count(slot, h) = 0;
        const unsigned share = rng() % 9;
        for (int t = 0; t < length[static_cast<std::size_t>(slot * heads + h)]; ++t)
          if (rng() % 8 < share) list.index(slot, h, list.count(slot, h)++) = t;
      }
    IndexList list_there = place.put(list);
    list.slots = kv.slots, list_there.slots = there.slots;
    std::vector<std::uint8_t> flags(static_cast<std::size_t>(rows * heads));
    const std::vector<float> none(static_cast<std::size_t>(rows * heads * rule.window));
    const auto of_heads = View<std::uint8_t, 2>::dense(flags.data(), {rows, heads});
    const ops::DriftWatch watch{
        place.put(View<float, 3>::dense(const_cast<float*>(none.data()), {rows, heads, rule.window})),
        place.put(of_heads)};
    const HeadFlags drifted = place.put(of_heads);
    // Overlaps of each head and row since its list is new, the oldest first.
    std::vector<std::vector<float>> overlaps(flags.size());
    const std::int32_t* leaders_there = place.put(leaders);
    for (int step = 0; step < steps; ++step) {
      const auto in_step = check.in(fmt::format("step {}", step));
      std::vector<float> values(static_cast<std::size_t>(rows * heads * room));
      for (float& x : values) x = value_of(static_cast<int>(n % 9), static_cast<int>(&x - values.data()), 90, rng);
      const auto scores = View<float, 3>::dense(values.data(), {rows, heads, room});
      if (step == 0) {
        const float any = ops::overlap_reference(kv, scores, TokenList{list}, 0, 0);
        rule.threshold = std::isnan(any) ? .5f : rng() % 2 ? any : std::nextafter(any, 2.f);
      }
      if (rng() % 12 == 0) {
        ops::forget_overlaps(there, watch, place.stream());
        for (auto& o : overlaps) o.clear();
      }
      const std::vector<std::uint8_t> rests = place.get(watch.rests);
      std::vector<std::uint8_t> moved(flags.size()), wanted(flags.size());
      for (int r = 0; r < rows; ++r)
        for (int h = 0; h < heads; ++h) {
          const auto at = static_cast<std::size_t>(kv.slots[r] * heads + h);
          if (leaders[static_cast<std::size_t>(h)] != h || list.count(kv.slots[r], h) == 0) continue;
          auto& known = overlaps[at];
          known.push_back(ops::overlap_reference(kv, scores, TokenList{list}, r, h));
          if (rests[at]) std::fill_n(&scores(r, h, 0), room, std::numeric_limits<float>::quiet_NaN());
          if ((count_of_steps[static_cast<std::size_t>(kv.slots[r])] + rule.lead) % rule.period) continue;
          std::vector<float> last(static_cast<std::size_t>(rule.window), 1.f);
          const std::size_t all = std::min(known.size(), last.size());
          std::copy_n(known.end() - static_cast<std::ptrdiff_t>(all), all, last.begin());
          std::ranges::sort(last);
          const std::size_t middle = last.size() / 2;
          const float median = last.size() % 2 ? last[middle] : (last[middle - 1] + last[middle]) / 2;
          const int slot = kv.slots[r];
          moved[at] =
              injects ? drift.drifts(slot, h, count_of_steps[static_cast<std::size_t>(slot)]) : median < rule.threshold;
          if (moved[at]) known.clear();
          check.that("a head that drifts has scores", !moved[at] || !rests[at]);
        }
      for (int r = 0; r < rows; ++r)
        for (int h = 0; h < heads; ++h) {
          const int leader = leaders[static_cast<std::size_t>(h)];
          wanted[static_cast<std::size_t>(kv.slots[r] * heads + h)] =
              leader >= 0 && moved[static_cast<std::size_t>(kv.slots[r] * heads + leader)];
        }
      ops::DriftRule rule_there = rule;
      rule_there.steps = place.put(count_of_steps);
      ops::drifted_heads(there, place.put(scores), TokenList{list_there}, rule_there, leaders_there, watch, drifted,
                         place.stream());
      check.that("drifted heads are marked", place.get(drifted) == wanted);
      for (auto& x : count_of_steps) ++x;
    }
    check.that("the injection is noted", used.drift == injects);
  }
}

// Checks of drift that wait for those of other layers do what each does alone, for some steps.
void check_drift_in_layers(Place& place, Check& check) {
  for (unsigned n = 0; n < 24; n += quick() ? 5 : 1) {
    const int layers = std::array{3, 1, 11, 2}[n % 4], rows = 1 + static_cast<int>(n % 3),
              heads = 1 + static_cast<int>(n * 5 % 7), group = 1 + static_cast<int>(n % 4);
    const ops::VotePooling pooling{n % 5 == 4 ? Pooling::max : Pooling::average, n % 4 == 1 ? 3 : 5,
                                   n % 3 == 2 ? GroupRule::mean : GroupRule::max};
    const bool other_rule = n % 7 == 3, shorter = n % 6 == 2, tall = n % 8 == 7, same_flags = n % 10 == 5;
    const bool many = n % 8 == 2;  // long heads of many layers, of which a block of top_tokens takes several
    const bool injects = n % 3 == 2;
    const char* const size = tall ? ", tall" : many ? ", many" : "";
    const auto scope = check.in(fmt::format("{} layers, {} x {} heads, group {}{}{}{}{}{}", layers, rows, heads, group,
                                            other_rule ? ", another rule" : "", shorter ? ", a shorter callback" : "",
                                            size, same_flags ? ", the same flags" : "", injects ? ", injected" : ""));
    std::mt19937 rng(300 + n);
    const int most = tall ? 26000 : many ? 8400 : 150, window = 5;
    const Ints slots = backwards(rows);
    const auto count_of = [](std::int64_t x) { return static_cast<std::size_t>(x); };
    struct Layer {
      PagedKv kv;
      Ints index, length;
      const std::int32_t *index_there, *leaders;
      std::int64_t logits;  // heads that have them
      IndexList list;
    };
    // What the ops write.
    struct Written {
      IndexList list;
      ops::DriftWatch watch;
      HeadFlags drifted;
      View<float, 3> scores;
    };
    std::vector<Layer> all;
    std::vector<Written> alone, joined, by_scores;  // the last: without logits, by the scores of the first
    const LengthsOnly memory(rows, heads, 16, Ints(count_of(rows * heads), most));
    PagedKv plain = memory.view();
    plain.slots = slots.data();
    const PagedKv common = place.put(plain, LengthsOnly::bytes());
    const std::int64_t room = common.table.extent[2] * 16;
    const std::uint32_t* const sequence = place.put(std::vector<std::uint32_t>{7, 8, 9});
    ListMemory of_lists[11];
    for (int l = 0; l < layers; ++l) {
      Layer of{common, Ints(count_of(heads), -1), {}, nullptr, nullptr, 0, {}};
      Ints leaders, &length = of.length;
      for (int h = 0; h < heads; ++h) leaders.push_back((h + l) % 5 == 4 ? -1 : h / 3 * 3);
      for (int h = heads - 1; h >= 0; --h)
        if (leaders[count_of(h)] == h) of.index[count_of(h)] = static_cast<std::int32_t>(of.logits++);
      for (int i = 0; i < rows * heads; ++i)
        length.push_back(1 + static_cast<int>(rng() % static_cast<unsigned>(most)));
      of.kv.length = View<const std::int32_t, 2>::dense(place.put(length), {rows, heads});
      of.index_there = place.put(of.index), of.leaders = place.put(leaders);
      of.list = of_lists[l].empty({rows, heads, room});
      for (int r = 0; r < rows; ++r)
        for (int h = 0; h < heads; ++h)
          for (int t = of.list.count(r, h) = 0; t < length[count_of(r * heads + h)]; ++t)
            if (rng() % 3 == 0) of.list.index(r, h, of.list.count(r, h)++) = t;
      for (auto* to : {&alone, &joined, &by_scores}) {
        const std::vector<float> none(count_of(rows * heads * room), -1.f);
        std::vector<float> missed(count_of(rows * heads * window));
        std::vector<std::uint8_t> flags(count_of(rows * heads));
        const auto of_heads = View<std::uint8_t, 2>::dense(flags.data(), {rows, heads});
        Written w{place.put(of.list),
                  {place.put(View<float, 3>::dense(missed.data(), {rows, heads, window})), place.put(of_heads)},
                  place.put(of_heads),
                  place.put(View<float, 3>::dense(const_cast<float*>(none.data()), {rows, heads, room}))};
        w.list.slots = common.slots;
        if (same_flags && l > 0) w.drifted = to->front().drifted;
        to->push_back(w);
      }
      all.push_back(of);
    }
    Ints steps(count_of(rows));
    bool some = false;
    for (int step = 0; step < 9; ++step) {
      const std::int32_t* const steps_there = place.put(steps);
      std::vector<View<float, 4>> logits;
      std::vector<std::vector<float>> wanted;  // scores of each layer
      for (const Layer& of : all) {
        std::normal_distribution<float> normal(0, 4);
        std::vector<float> x(count_of(rows * of.logits * room * group));
        for (float& y : x) y = normal(rng);
        const std::array<std::int64_t, 4> extent{rows, of.logits, room, group};
        logits.push_back(View<float, 4>::dense(place.put(x), extent));
        const Written& before = alone[wanted.size()];
        std::vector<std::uint8_t> rests = place.get(before.watch.rests);
        wanted.push_back(place.get(before.scores));
        PagedKv kv = plain;
        kv.length = View<const std::int32_t, 2>::dense(of.length.data(), {rows, heads});
        const auto marks = View<std::uint8_t, 2>::dense(rests.data(), {rows, heads});
        const HeadLogits left{View<float, 4>::dense(x.data(), extent), of.index.data(), Heads::flagged(marks, false)};
        ops::pooled_logits_reference(kv, left, pooling,
                                     View<float, 3>::dense(wanted.back().data(), {rows, heads, room}));
      }
      // What a callback's cache points to is gone when the call waits, as in a run.
      const auto observe = [&](int l, Written& w) {
        const Layer& of = all[count_of(l)];
        const ops::InjectedDrift drift{400'000, sequence, l, n};
        ops::InjectedUse used;
        const ops::Injected injected{.used = &used, .drift = &drift};
        PagedKv kv = of.kv;
        if (injects) kv.injected = &injected;
        const HeadLogits left{logits[count_of(l)], of.index_there, Heads::flagged(w.watch.rests, false)};
        const ops::DriftRule rule{.threshold = .4f,
                                  .window = window,
                                  .period = other_rule && l == 1 ? 3 : 5,
                                  .lead = l,
                                  .steps = steps_there};
        if (&w == &by_scores[count_of(l)])
          ops::drifted_heads(kv, w.scores, TokenList{w.list}, rule, of.leaders, w.watch, w.drifted, place.stream());
        else
          ops::drifted_by_logits(kv, left, pooling, w.scores, TokenList{w.list}, rule, of.leaders, w.watch, w.drifted,
                                 place.stream());
        if (shorter && l == 1) return;
        const TokenChoice choice{.heads = Heads::flagged(w.drifted), .by = of.leaders};
        ops::top_tokens(of.kv, w.scores, choice, TokenList{w.list}, place.stream());
      };
      for (int l = 0; l < layers; ++l) {
        observe(l, alone[count_of(l)]);
        by_scores[count_of(l)].scores = alone[count_of(l)].scores;
        observe(l, by_scores[count_of(l)]);
      }
      {
        const PutOffScope waits(true);
        for (int l = 0; l < layers; ++l) observe(l, joined[count_of(l)]), end_joined_callback();
        run_put_off();
      }
      for (int l = 0; l < layers; ++l) {
        const auto in_layer = check.in(fmt::format("step {}, layer {}", step, l));
        const Written &a = alone[count_of(l)], &j = joined[count_of(l)];
        check.equal("scores", place.get(a.scores), wanted[count_of(l)], 5 * Tolerance{}.probability);
        check.that("scores", place.get(j.scores) == place.get(a.scores));
        check.that("missed by scores", place.get(by_scores[count_of(l)].watch.missed) == place.get(a.watch.missed));
        check.that("missed", place.get(j.watch.missed) == place.get(a.watch.missed));
        check.that("heads that rest", place.get(j.watch.rests) == place.get(a.watch.rests));
        check.that("heads that drifted", place.get(j.drifted) == place.get(a.drifted));
        check.equal("counts", place.get(j.list.count), place.get(a.list.count));
        check.equal("entries", place.get(j.list.index), place.get(a.list.index));
        for (const std::uint8_t d : place.get(j.drifted)) some = some || d;
      }
      for (auto& x : steps) ++x;
    }
    check.that("some head drifts", some || heads == 1);
  }
}

// A selection at the size of a real step.
struct Step {
  int rows, kv_heads, entries, kept;
  bool pages = true;
  Pins pins = {};
};

class StepScene final : public Scene {
 public:
  StepScene(Place& place, const Step& step, int copies)
      : place_(place),
        step_(step),
        lengths_(step.rows, step.kv_heads, 16,
                 Ints(static_cast<std::size_t>(step.rows * step.kv_heads), step.entries * (step.pages ? 16 : 1))),
        cache_({step.rows, step.kv_heads, 8, 16, step.pages ? 0 : (step.entries + 15) / 16}),
        scores_(randoms(std::int64_t{step.rows} * step.kv_heads * step.entries)),
        keep_(static_cast<std::size_t>(step.rows * step.kv_heads), step.kept),
        pins_(static_cast<std::size_t>(step.rows), step.pins) {
    if (!step.pages)
      for (int r = 0; r < step.rows; ++r)
        for (int h = 0; h < step.kv_heads; ++h) cache_.fill_pooled(r, h, step.entries);
    plain_ = step.pages ? lengths_.view() : cache_.view();
    kv_ = place.put(plain_, step.pages ? lengths_.bytes() : cache_.arena_bytes());
    for (int c = 0; c < copies; ++c) copies_.push_back(place.put(scores_));
    keep_there_ = place.put(amount());
    pins_there_ = place.put(pins_);
    out_ = place.put(memory_.empty(extent()));
  }
  void run(int copy) override {
    const auto scores = of(copies_[static_cast<std::size_t>(copy)]);
    if (step_.pages)
      ops::top_pages(kv_, scores, keep_there_, step_.pins, PageList{out_}, place_.stream());
    else
      ops::top_tokens(kv_, scores, keep_there_, pins_there_, TokenList{out_}, place_.stream());
  }
  void check(Check& check) override {
    ListMemory wanted;
    const IndexList list = wanted.empty(extent());
    if (step_.pages)
      ops::top_pages_reference(plain_, of(scores_.data()), amount(), step_.pins, PageList{list});
    else
      ops::top_tokens_reference(plain_, of(scores_.data()), amount(), pins_.data(), TokenList{list});
    run(0);
    check.equal("counts", place_.get(out_.count), wanted.count);
    check.equal("entries", place_.get(out_.index), wanted.index);
  }

 private:
  std::array<std::int64_t, 3> extent() const { return {step_.rows, step_.kv_heads, step_.kept}; }
  View<const std::int32_t, 2> amount() const {
    return View<const std::int32_t, 2>::dense(keep_.data(), {step_.rows, step_.kv_heads});
  }
  View<const float, 3> of(const float* scores) const {
    return View<const float, 3>::dense(scores, {step_.rows, step_.kv_heads, step_.entries});
  }

  Place& place_;
  Step step_;
  LengthsOnly lengths_;
  PagedFixture cache_;
  PagedKv plain_, kv_;
  std::vector<float> scores_;
  Ints keep_;
  std::vector<Pins> pins_;
  std::vector<float*> copies_;
  View<const std::int32_t, 2> keep_there_;
  const Pins* pins_there_;
  ListMemory memory_;
  IndexList out_;
};

Case step(const Step& s, bool cuda, double bytes_of_entry = 4) {
  Case c{"select", fmt::format("{}, {} of {}{}, {} heads", s.pages ? "top_pages" : "top_tokens", s.kept, s.entries,
                               s.pins.last ? ", half pinned" : "", s.rows * s.kv_heads)};
  c.make = [s](Place& place, int copies) { return std::make_unique<StepScene>(place, s, copies); };
  (cuda ? c.timed_cuda : c.timed_cpu) = true;
  c.work.bytes = bytes_of_entry * s.rows * s.kv_heads * s.entries;
  c.copies = cuda ? copies_beyond(c.work.bytes, 300e6, 1 << 20) : 30;
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  const auto lengths = [&](const char* shape, std::vector<Ints> of, unsigned seed) {
    v.push_back(checked("select", shape, [of, seed](Place& place, Check& check) {
      for (std::size_t i = 0; i < of.size(); ++i) check_lengths(place, check, of[i], seed + static_cast<unsigned>(i));
    }));
  };
  lengths("short heads, around the sizes of warps, words and candidate lists",
          {{0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 300, 511, 513}}, 1);
  lengths("heads in registers, every block size", {{2048, 2047, 640, 1000}, {8192, 2049, 5000, 1}, {14336, 14335}}, 2);
  lengths("heads in shared memory", {{20000, 16385}}, 6);
  lengths("heads that stay in global memory", {{40000, 70001}}, 5);
  v.push_back(checked("select", "pins by text position, on caches of every kind", check_pins));
  v.push_back(checked("select", "pins of a long head out of text order, equal positions together", check_long_pins));
  v.push_back(checked("select", "allotments", check_allotments));
  v.push_back(step({1, 3, 4096, 512, false}, false));
  v.push_back(step({1, 3, 4096, 4095, false, {.last = 2048}}, false, 8));  // positions too
  v.push_back(step({1, 3, 256, 64}, false));
  for (const auto& [n, k] : {std::pair{2048, 128}, {8192, 128}, {8192, 512}}) v.push_back(step({40, 8, n, k}, true));
  v.push_back(checked("select", "tokens of some heads, by other heads and of other numbers", check_choices));
  v.push_back(checked("select", "heads whose best tokens moved away from their lists", check_drifted));
  v.push_back(checked("select", "such heads of several layers at once", check_drift_in_layers));
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
