// Scores of pages by their summaries, and the votes of a window's queries.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "base/half.hpp"
#include "base/put_off.hpp"
#include "cases/layer.hpp"
#include "cases/on_caches.hpp"
#include "ops/page/reference.hpp"
#include "ops/score/reference.hpp"
#include "ops/select/candidates.hpp"
#include "ops/select/chosen_pages.hpp"
#include "ops/select/inject.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

// The GPU's kernel splits a query into its rounded value and a rounded rest: a product errs by up to 2^-17 of its size.
double page_margin(Device device, GroupRule rule) {
  return device == Device::cpu ? Tolerance{}.score : rule == GroupRule::sum ? 1e-3 : 3e-4;
}

// A vote adds up probabilities.
double votes_margin(Device device) { return device == Device::cpu ? 5 * Tolerance{}.probability : 2e-4; }

void check_votes(OnCache& x) {
  const int window = 1 + static_cast<int>(x.n % 9);
  Numbers<4> queries(x, {x.c.rows(), x.c.heads(), window, x.kv.head_dim});
  Ints seen;
  for (int r = 0; r < x.c.rows(); ++r) seen.push_back(3 * x.kv.tokens(r, 0) + 1);
  const auto there = queries.put();
  const std::int32_t* seen_there = x.place.put(seen);
  for (const int heads : {x.c.heads(), x.c.kv_heads()})
    for (const int newest : {0, 1, 40})
      x.same<3>(
          fmt::format("window_votes of {} heads for {} newest", heads, newest),
          Guarded<3>({x.c.rows(), heads, x.c.room()}).view(), votes_margin(x.stream().device()),
          [&](Scores out) { ops::window_votes(there, seen_there, x.there, out, x.stream(), {}, newest); },
          [&](Scores out) { ops::window_votes_reference(queries.view(), seen.data(), x.kv, out, {}, newest); });
}

// Shapes of the tensor cores.
void check_wide_votes(Place& place, Check& check, CodecSide keys) {
  unsigned seed = 1;
  for (const int dim : {64, 96, 128, 256})
    for (const int window : {1, 8, 32, 33, 100}) {
      const int group = window == 32 ? 4 : 2;
      PagedOptions o;
      o.rows = 2, o.kv_heads = 2, o.head_dim = dim, o.page_size = window % 2 ? 8 : 16, o.dtype = DType::bf16;
      o.codec.k = keys;
      o.max_pages = 400 / o.page_size + 1;
      PagedFixture cache(o);
      std::mt19937 rng(seed++);
      const int lengths[] = {400, 130, 0, 1};
      for (int i = 0; i < 4; ++i) cache.fill_random(i / 2, i % 2, lengths[i], rng);
      const int heads = o.kv_heads * group;
      const std::vector<float> q = normals(std::int64_t{o.rows} * heads * window * dim, seed);
      const auto queries = View<const float, 4>::dense(q.data(), {o.rows, heads, window, dim});
      const Ints seen = {400, 1};
      const PagedKv there = place.put(cache.view(), cache.arena_bytes());
      const auto queries_there = place.put(queries);
      const std::int32_t* seen_there = place.put(seen);
      for (const int votes : {heads, o.kv_heads})
        for (const int newest : {0, 150})
          same<3>(
              place, check,
              fmt::format("head size {}, {} queries, votes of {} heads for {} newest", dim, window, votes, newest),
              Guarded<3>({o.rows, votes, 405}).view(), votes_margin(place.stream().device()),
              [&](Scores out) { ops::window_votes(queries_there, seen_there, there, out, place.stream(), {}, newest); },
              [&](Scores out) { ops::window_votes_reference(queries, seen.data(), cache.view(), out, {}, newest); });
    }
}

constexpr Summary summary_kinds[] = {Summary::min_max, Summary::mean, Summary::centre_radius};
const char* word_of(Summary kind) {
  return kind == Summary::mean ? "means" : kind == Summary::min_max ? "boxes" : "boxes around centres";
}

// A summary's numbers.
float number_of(const Summaries& s, const std::byte* summary, std::int64_t numbers, std::int64_t i) {
  if (s.bits == 8) {
    float shared[2];  // scale and zero
    std::memcpy(shared, summary + numbers, sizeof shared);
    return static_cast<float>(std::to_integer<int>(summary[i])) * shared[0] + shared[1];
  }
  return s.dtype == DType::f32 ? reinterpret_cast<const float*>(summary)[i]
                               : static_cast<float>(reinterpret_cast<const bf16*>(summary)[i]);
}

// The summaries of a cache's pages equal their references, and so do the scores by them.
void check_summaries(OnCache& x) {
  const auto& o = x.c.cache.options();
  const bool wide = o.dtype == DType::f32;
  for (const auto& [kind, bits] : {std::pair{Summary::min_max, 16},
                                   {Summary::mean, 16},
                                   {Summary::centre_radius, 16},
                                   {Summary::min_max, 8},
                                   {Summary::mean, 8},
                                   {Summary::centre_radius, 8}}) {
    const auto of_kind = x.check.in(fmt::format("{} of {} bits", word_of(kind), bits));
    const std::int64_t page_bytes = summary_bytes(kind, bits, o.dtype, o.head_dim),
                       each = std::int64_t{summary_vectors(kind)} * o.head_dim;
    std::vector<std::byte> data(static_cast<std::size_t>(o.rows * o.kv_heads * o.max_pages * page_bytes)), plain(data);
    const Summaries s{kind,       o.dtype, data.data(), o.kv_heads * o.max_pages * page_bytes, o.max_pages * page_bytes,
                      page_bytes, bits};
    std::vector<float> got, wanted;
    float farthest = 0;  // of two numbers, in steps between codes
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h)
        for (int p = 0; p < x.kv.pages(r, h); ++p) {
          const PageEntry& e = x.kv.entry(r, h, p);
          const auto at = s.at(x.kv.slots[r], h, p) - s.data;
          ops::summarize_page(x.kv.frame(e), x.kv.layout(e), e.tokens, kind, o.dtype, data.data() + at, bits);
          ops::summarize_page_reference(x.kv.frame(e), x.kv.layout(e), e.tokens, kind, o.dtype, plain.data() + at,
                                        bits);
          float scale = 0;
          if (bits == 8) std::memcpy(&scale, plain.data() + at + each, sizeof scale);
          for (std::int64_t i = 0; i < each; ++i) {
            got.push_back(number_of(s, data.data() + at, each, i));
            wanted.push_back(number_of(s, plain.data() + at, each, i));
            if (bits == 8)
              farthest =
                  std::max(farthest, (std::abs(got.back() - wanted.back()) - 1e-5f * std::abs(wanted.back())) / scale);
          }
        }
    if (kind == Summary::min_max && o.codec.k.bits == 0)
      x.check.that("summarize_page gives the same bytes", data == plain);
    else if (bits == 8)  // decoding and sums differ by a rounding, which may be a code
      x.check.within("summarize_page, steps between codes", farthest, 1.01);
    else
      x.check.equal("summarize_page", got, wanted, wide ? 1e-5 : 0x1p-7);
    Numbers<3> queries(x, {x.c.rows(), x.c.heads(), o.head_dim});
    const auto queries_there = queries.put();
    Summaries there = s;
    there.data = x.place.put(data);
    for (const auto& [rule, word] : Choices<GroupRule>::all) {
      const GroupRule by = rule;
      x.same<3>(
          fmt::format("page_score, {}", word), Guarded<3>({o.rows, o.kv_heads, o.max_pages + 1}).view(),
          page_margin(x.stream().device(), by),
          [&](Scores out) { ops::page_score(queries_there, x.there, there, by, 0.125f, out, x.stream()); },
          [&](Scores out) { ops::page_score_reference(queries.view(), x.kv, s, by, 0.125f, out); });
    }
  }
}

struct PageCase {
  int rows = 3, kv_heads = 2, dim = 128, group = 4, page_size = 16;
  Ints pages;  // [row, kv_head], cycled
  Summary kind = Summary::min_max;
  DType dtype = DType::bf16;
  GroupRule rule = GroupRule::max;
  bool newest = false;
  unsigned seed = 1;
  int bits = 16;        // of the summaries
  int budget = -1;      // pages per head; negative: any number
  int summary_gap = 0;  // bytes after each summary
  int query_gap = 0;    // elements after each query
  bool ties = false;    // few scores are distinct
  bool nans = false;    // some scores are NaN

  std::string text() const {
    return fmt::format(
        "{} rows of {} KV heads in groups of {}, dim {}, pages {}, {} of {}, rule {}, budget {}, gaps {} and {}{}{}{}",
        rows, kv_heads, group, dim, fmt::join(pages, " "), word_of(kind), bits == 8 ? "codes" : name_of(dtype),
        static_cast<int>(rule), budget, summary_gap, query_gap, newest ? ", newest page" : "", ties ? ", ties" : "",
        nans ? ", NaN" : "");
  }
};

// Writes the number as `dtype` and returns what it reads as.
float write_number(float x, DType dtype, std::byte* to) {
  if (dtype == DType::bf16) {
    const bf16 y(x);
    std::memcpy(to, &y, 2);
    return static_cast<float>(y);
  }
  if (dtype == DType::f16) {
    const std::uint16_t y = float_to_half(x);
    std::memcpy(to, &y, 2);
    return half_to_float(y);
  }
  std::memcpy(to, &x, 4);
  return x;
}

void check_pages(const PageCase& c, Device device, Check& check) {
  const auto scope = check.in(c.text());
  Place place(device);
  const DType dtype = c.dtype == DType::f16 && device == Device::cpu ? DType::bf16 : c.dtype;  // the CPU reads no f16
  std::mt19937 rng(c.seed);
  const int most = *std::max_element(c.pages.begin(), c.pages.end()) + 1, heads = c.kv_heads * c.group;
  Ints length, slots, budget;
  for (int r = 0; r < c.rows; ++r) slots.push_back(c.rows - 1 - r);
  for (int i = 0; i < c.rows * c.kv_heads; ++i) {
    const int n = c.pages[static_cast<std::size_t>(i) % c.pages.size()];
    length.push_back(n ? n * c.page_size - static_cast<int>(rng() % static_cast<unsigned>(c.page_size)) : 0);
    budget.push_back(c.budget < 0 ? static_cast<int>(rng() % static_cast<unsigned>(most / 2 + 3)) : c.budget);
  }
  const std::vector<PageEntry> table(static_cast<std::size_t>(c.rows * c.kv_heads * most));
  const LengthsOnly cache(c.rows, c.kv_heads, c.page_size, length);
  PagedKv kv = cache.view();
  kv.table = View<const PageEntry, 3>::dense(table.data(), {c.rows, c.kv_heads, most});
  kv.slots = slots.data();
  kv.head_dim = c.dim;

  // Summaries in f32, as the reference reads them, and as they are stored.
  const std::int64_t width = std::int64_t{summary_vectors(c.kind)} * c.dim;
  const std::int64_t count = std::int64_t{c.rows} * c.kv_heads * most * width;
  const auto size = c.bits == 8 ? 1 : static_cast<std::int64_t>(size_of(dtype));
  std::vector<float> wide(static_cast<std::size_t>(count));
  const std::int64_t page_bytes = summary_bytes(c.kind, c.bits, dtype, c.dim) + c.summary_gap;
  std::vector<std::byte> stored(static_cast<std::size_t>(count / width * page_bytes), std::byte{0xff});
  const std::vector<float> numbers = normals(count, c.seed);
  // Codes of a page: any of them, but low ends are no more than high ones.
  const auto write_codes = [&](std::int64_t page) {
    std::byte* to = stored.data() + page * page_bytes;
    const bool box = c.kind != Summary::mean;
    const float scale = c.nans && page % 3 == 0 ? NAN
                        : c.ties                ? 1
                                                : 0.01f + static_cast<float>(rng() % 100) * 1e-4f,
                zero = c.ties ? 0 : -static_cast<float>(rng() % 400) * 1e-2f;
    for (std::int64_t d = 0; d < c.dim; ++d) {
      const int a = c.ties ? (d ? 0 : static_cast<int>(rng() % 3)) : static_cast<int>(rng() % 256),
                b = c.ties ? a : static_cast<int>(rng() % 256);
      to[d] = static_cast<std::byte>(box ? std::min(a, b) : a);
      if (box) to[c.dim + d] = static_cast<std::byte>(std::max(a, b));
    }
    const float shared[] = {scale, zero};
    std::memcpy(to + width, shared, sizeof shared);
    for (std::int64_t i = 0; i < width; ++i)
      wide[static_cast<std::size_t>(page * width + i)] = static_cast<float>(std::to_integer<int>(to[i])) * scale + zero;
  };
  for (std::int64_t page = 0; c.bits == 8 && page < count / width; ++page) write_codes(page);
  for (std::int64_t i = 0; c.bits == 16 && i < count; ++i) {
    float x = numbers[static_cast<std::size_t>(i)];
    if (c.ties) x = i % width ? 0 : std::round(x);
    if (c.kind != Summary::mean) x = i % width < c.dim ? -std::abs(x) : std::abs(x);
    if (c.nans && i / width % 3 == 0) x = NAN;
    wide[static_cast<std::size_t>(i)] =
        write_number(x, dtype, stored.data() + i / width * page_bytes + i % width * size);
  }
  const auto summaries = [&](DType of, const std::byte* data, std::int64_t page, int bits) {
    return Summaries{c.kind, of, data, c.kv_heads * most * page, most * page, page, bits};
  };
  const std::vector<float> q = normals(std::int64_t{c.rows} * heads * (c.dim + c.query_gap), c.seed + 1);
  const auto wide_queries = View<const float, 3>::dense(q.data(), {c.rows, heads, c.dim + c.query_gap});
  const auto narrow = [&](View<const float, 3> all) {
    all.extent[2] = c.dim;
    return all;
  };
  const std::array<std::int64_t, 3> extent{c.rows, c.kv_heads, most + 3};
  const Guarded<3> wanted(extent), fresh(extent);
  ops::page_score_reference(narrow(wide_queries), kv,
                            summaries(DType::f32, reinterpret_cast<const std::byte*>(wide.data()), width * 4, 16),
                            c.rule, 0.125f, wanted.view());

  const Stream s = place.stream();
  const PagedKv there = place.put(kv, cache.bytes());
  const auto queries = narrow(place.put(wide_queries));
  const Summaries on_place = summaries(dtype, place.put(stored), page_bytes, c.bits);
  const auto budgets = View<const std::int32_t, 2>::dense(budget.data(), {c.rows, c.kv_heads});
  const auto budgets_there = place.put(budgets);
  const Pins pins{0, 0, c.newest};

  const auto alone = place.put(fresh.view());
  ops::page_score(queries, there, on_place, c.rule, 0.125f, alone, s);
  const std::vector<float> scores = place.get(alone);
  check.equal("page_score", scores, wanted.values(), page_margin(device, c.rule));
  // The selection must be exact for the place's own scores.
  ListMemory list, start;
  const IndexList chosen = list.empty({c.rows, c.kv_heads, most}), poison = start.empty({c.rows, c.kv_heads, most});
  ops::top_pages_reference(kv, View<const float, 3>::dense(scores.data(), extent), budgets, pins, PageList{chosen});
  for (const char* run : {"score_pages", "score_pages again, with the counters that the first run left"}) {
    const auto of_run = check.in(run);
    const auto fused = place.put(fresh.view());
    const PageList out{place.put(poison)};
    ops::score_pages(queries, there, on_place, c.rule, 0.125f, budgets_there, pins, fused, out, s);
    check.equal("scores", place.get(fused), scores, 0);
    check.equal("counts", place.get(out.count), list.count);
    check.equal("entries", place.get(out.index), list.index);
  }

  // Some heads choose among some pages, into lists that last. The reference sees the candidates as a cache of their
  // own.
  const auto of_choice = check.in("a choice");
  PageChoice choice;
  choice.rule = c.rule;
  choice.scale = 0.125f;
  choice.newest_page = c.newest;
  choice.leave_out = {static_cast<int>(rng() % 3 ? rng() % 50 : 0), static_cast<int>(rng() % 3 ? rng() % 70 : 0)};
  if (c.budget < 0)
    choice.budget = 7;
  else
    choice.budgets = budgets;
  std::vector<std::uint8_t> flags(static_cast<std::size_t>(c.rows * c.kv_heads));
  for (auto& f : flags) f = rng() % 3 > 0;
  const auto marks = View<const std::uint8_t, 2>::dense(flags.data(), {c.rows, c.kv_heads});
  choice.heads = Heads::flagged(marks);
  const int first = ops::first_candidate(choice.leave_out, c.page_size);
  Ints candidates_only, amount(static_cast<std::size_t>(c.rows * c.kv_heads), 7);
  for (const int n : length)
    candidates_only.push_back(ops::candidates(n, c.page_size, choice.leave_out).count() * c.page_size);
  PagedKv shifted = kv;
  shifted.length = View<const std::int32_t, 2>::dense(candidates_only.data(), {c.rows, c.kv_heads});
  const Guarded<3> wanted_part(extent);
  auto part = [&](View<float, 3> v) {
    v.data += first;
    return v;
  };
  ops::page_score_reference(
      narrow(wide_queries), shifted,
      summaries(DType::f32, reinterpret_cast<const std::byte*>(wide.data()) + first * width * 4, width * 4, 16), c.rule,
      0.125f, part(wanted_part.view()));
  const auto chosen_scores = place.put(fresh.view());
  PageList kept{place.put(poison)};
  kept.slots = there.slots;
  PageChoice choice_there = choice;
  choice_there.heads = Heads::flagged(place.put(marks));
  if (choice.budgets) choice_there.budgets = budgets_there;
  ops::score_pages(queries, there, on_place, choice_there, chosen_scores, kept, s);
  std::vector<float> own = place.get(chosen_scores), all = wanted_part.values();
  const auto own_view = View<float, 3>::dense(own.data(), extent), all_view = View<float, 3>::dense(all.data(), extent);
  ListMemory best, none;
  const IndexList picked = best.empty({c.rows, c.kv_heads, most}), by_slot = none.empty({c.rows, c.kv_heads, most});
  ops::top_pages_reference(
      shifted, part(own_view),
      choice.budgets ? budgets : View<const std::int32_t, 2>::dense(amount.data(), {c.rows, c.kv_heads}),
      {0, 0, c.newest && choice.leave_out.last == 0}, PageList{picked});
  for (int r = 0; r < c.rows; ++r)
    for (int h = 0; h < c.kv_heads; ++h) {
      const int slot = slots[static_cast<std::size_t>(r)];
      if (!choice.heads.on(slot, h)) {
        for (std::int64_t i = 0; i < extent[2]; ++i) all_view(r, h, i) = Guarded<3>::poison;
        continue;
      }
      by_slot.count(slot, h) = picked.count(r, h);
      for (int i = 0; i < picked.count(r, h); ++i) by_slot.index(slot, h, i) = picked.index(r, h, i) + first;
    }
  check.equal("scores", own, all, page_margin(device, c.rule));
  check.equal("counts", place.get(kept.count), none.count);
  check.equal("entries", place.get(kept.index), none.index);

  // The same choice, and lists that are injected in its place.
  const auto of_injection = check.in("injected");
  std::vector<std::uint32_t> kept_bits(
      static_cast<std::size_t>(c.rows * c.kv_heads * ops::inject_words(kv.table.extent[2])));
  std::vector<std::uint32_t> sequence(static_cast<std::size_t>(c.rows));
  for (auto& x : sequence) x = rng() % 1000;
  ops::InjectArgs wanted_lists;
  wanted_lists.pages = kv;
  wanted_lists.list = PageList{by_slot};
  wanted_lists.list.slots = kv.slots;
  wanted_lists.pins = choice.leave_out;
  wanted_lists.pins.newest_page = c.newest;
  wanted_lists.heads = choice.heads;
  wanted_lists.state =
      View<std::uint32_t, 3>::dense(kept_bits.data(), {c.rows, c.kv_heads, ops::inject_words(kv.table.extent[2])});
  wanted_lists.sequence = sequence.data();
  wanted_lists.overlap = 300'000;
  ops::InjectArgs lists;
  lists.state = place.put(wanted_lists.state);
  lists.sequence = place.put(sequence);
  lists.overlap = wanted_lists.overlap;
  ops::InjectedUse used;
  const ops::Injected injected{&lists, nullptr, &used};
  PagedKv with = there;
  with.injected = &injected;
  for (int i = 0; i < 3; ++i) {
    ops::score_pages(queries, with, on_place, choice_there, chosen_scores, kept, s);
    for (int r = 0; r < c.rows; ++r)
      for (int h = 0; h < c.kv_heads; ++h) {
        const int slot = slots[static_cast<std::size_t>(r)];
        if (!choice.heads.on(slot, h)) continue;
        by_slot.count(slot, h) = picked.count(r, h);
        for (int p = 0; p < picked.count(r, h); ++p) by_slot.index(slot, h, p) = picked.index(r, h, p) + first;
      }
    ops::inject_pages_reference(wanted_lists);
    check.equal("counts", place.get(kept.count), none.count);
    check.equal("entries", place.get(kept.index), none.index);
  }
  check.that("the injection is noted", used.lists && !used.turns && !used.drift);
  check.that("memory around inputs and outputs is as it was", place.margins_intact());
}

std::vector<PageCase> every_head_size() {
  std::vector<PageCase> v;
  PageCase c;
  c.pages = {97, 0, 1, 16, 17, 300};
  for (const int dim : {64, 96, 128, 256})
    for (const int group : {1, 3, 4, 5, 8, 16})
      for (const Summary kind : {Summary::min_max, Summary::mean})
        for (const GroupRule rule : {GroupRule::max, GroupRule::mean, GroupRule::sum, GroupRule::softmax_mean}) {
          c.dim = dim, c.group = group, c.kind = kind, c.rule = rule;
          c.dtype = (group + dim / 32) % 3 ? DType::bf16 : DType::f16;
          c.newest = ++c.seed % 2;
          v.push_back(c);
        }
  return v;
}

// What the GPU's tensor cores do not take.
std::vector<PageCase> other_shapes() {
  std::vector<PageCase> v;
  PageCase c;
  c.pages = {97, 0, 1, 16, 17, 40};
  for (const auto& [dim, group, dtype] : {std::tuple{128, 4, DType::f32},
                                          {80, 4, DType::bf16},
                                          {8, 1, DType::f16},
                                          {64, 17, DType::bf16},
                                          {104, 32, DType::f32}})
    for (const GroupRule rule : {GroupRule::max, GroupRule::mean, GroupRule::softmax_mean}) {
      c.dim = dim, c.group = group, c.dtype = dtype, c.rule = rule;
      ++c.seed;
      v.push_back(c);
    }
  return v;
}

std::vector<PageCase> shared_blocks() {
  std::vector<PageCase> v;
  PageCase c;
  c.rows = 1, c.kv_heads = 2;
  c.pages = {9000, 8999};
  v.push_back(c);
  c.rule = GroupRule::softmax_mean;
  v.push_back(c);
  c.pages = {2048, 1024};
  for (const bool ties : {false, true}) {
    c.ties = ties, c.newest = !ties, c.budget = ties ? -1 : 128;
    v.push_back(c);
  }
  c.ties = c.newest = false, c.budget = -1;
  c.rule = GroupRule::max;
  c.dim = 64, c.kind = Summary::mean;
  c.pages = {14335, 3};
  v.push_back(c);
  c.pages = {16001, 14337};
  v.push_back(c);
  c.rows = 1, c.kv_heads = 1;
  c.pages = {14336};
  for (const bool ties : {false, true}) {
    c.ties = ties, c.budget = ties ? 700 : -1;
    v.push_back(c);
  }
  c.ties = false, c.budget = -1;
  c.rows = 700, c.kv_heads = 4;  // more pairs of row and KV head than one launch takes
  c.pages = {3, 0, 20, 1, 16, 33, 0};
  v.push_back(c);
  c.rows = 12, c.kv_heads = 8, c.dim = 128, c.kind = Summary::min_max;
  c.pages = {640, 600, 17, 639};
  v.push_back(c);
  return v;
}

// Adds rows without pages: many pairs share the blocks.
constexpr int many_pairs = 70;
Ints among_empty(Ints pages) {
  pages.resize(many_pairs, 0);
  return pages;
}

std::vector<PageCase> cuts() {
  std::vector<PageCase> v;
  PageCase c;
  c.rows = many_pairs / 5, c.kv_heads = 5;
  for (int tiles = 1; tiles <= 40; tiles += tiles < 20 ? 1 : 5) {  // the cuts move through the heads behind
    c.pages = among_empty({16 * tiles, 321, 0, 150, 16});
    c.rule = tiles % 4 ? GroupRule::max : GroupRule::softmax_mean;
    c.newest = ++c.seed % 2;
    v.push_back(c);
  }
  c.rows = 1, c.rule = GroupRule::max;
  for (const int tiles : {1, 2, 7, 8, 9, 16, 31, 33}) {
    c.pages = {16 * tiles, 321, 0, 150, 16 * tiles - 15};
    c.newest = ++c.seed % 2;
    v.push_back(c);
  }
  c.rows = 60, c.kv_heads = 4;
  for (const auto& pages : {Ints{1}, {0, 0, 1, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 700}, {1, 15, 16, 0, 17}, {0}}) {
    c.pages = pages, c.newest = ++c.seed % 2;
    v.push_back(c);
  }
  return v;
}

std::vector<PageCase> budgets_and_ties() {
  std::vector<PageCase> v;
  PageCase c;
  c.kv_heads = 4;
  for (const auto& pages : {Ints{1, 3, 40, 16}, {1023, 1024, 1025, 2048}, {2049, 4096, 4097, 700}})
    for (const int budget : {0, 1, 130, 5000})
      for (const bool ties : {false, true}) {
        const bool shared = ++c.seed / 2 % 2;
        c.rows = shared ? many_pairs / 4 : 1;
        c.pages = shared ? among_empty(pages) : pages;
        c.budget = budget, c.ties = ties, c.newest = c.seed % 2;
        v.push_back(c);
      }
  return v;
}

std::vector<PageCase> not_numbers() {
  std::vector<PageCase> v;
  PageCase c;
  c.nans = true, c.dim = 64, c.kind = Summary::mean, c.rule = GroupRule::mean, c.kv_heads = 2;
  for (const int budget : {20, 250, 400})
    for (const int rows : {1, many_pairs / 2}) {
      c.rows = rows, c.budget = budget, c.newest = ++c.seed % 2;
      c.pages = rows > 1 ? among_empty({300, 399}) : Ints{300, 399};
      v.push_back(c);
    }
  return v;
}

std::vector<PageCase> gaps() {
  std::vector<PageCase> v;
  PageCase c;
  c.pages = {97, 0, 1, 16, 17, 150};
  for (const int dim : {64, 96, 128, 256})
    for (const int group : {4, 8})
      for (const int gap : {16, 128, 640}) {
        c.dim = dim, c.group = group, c.summary_gap = gap;
        c.query_gap = static_cast<int>(++c.seed % 3) * 2;
        c.kind = summary_kinds[c.seed / 3 % 3];
        c.dtype = c.seed % 2 ? DType::bf16 : DType::f16;
        v.push_back(c);
      }
  return v;
}

constexpr int votes_window = 32;
// The queries of a window at the end of a prompt. Heads: of the votes.
template <int Heads>
class Votes final : public Scene {
 public:
  Votes(Place& place, int copies)
      : place_(place),
        layer_(place, copies),
        q_(randoms(std::int64_t{Layer::query_heads} * votes_window * Layer::head_dim)),
        queries_(of(place.put(q_))),
        seen_(place.put(&Layer::tokens, 1)),
        out_(View<float, 3>::dense(place.take<float>(std::size_t{Heads} * Layer::tokens), {1, Heads, Layer::tokens})) {}
  void run(int copy) override {
    ops::window_votes(queries_, seen_, layer_.there[static_cast<std::size_t>(copy)], out_, place_.stream());
  }
  void check(Check& check) override {
    const Guarded<3> wanted(out_.extent);
    ops::window_votes_reference(of(q_.data()), &Layer::tokens, layer_.plain, wanted.view());
    run(0);
    check.equal("votes", place_.get(out_), wanted.values(), votes_margin(place_.stream().device()));
  }

 private:
  static View<const float, 4> of(const float* q) {
    return View<const float, 4>::dense(q, {1, Layer::query_heads, votes_window, Layer::head_dim});
  }
  Place& place_;
  Layer layer_;
  std::vector<float> q_;
  View<const float, 4> queries_;
  const std::int32_t* seen_;
  Scores out_;
};

// Choices that wait for those of other layers give what each gives alone.
struct OfLayers {
  int layers, rows, kv_heads, group, head_dim;
  GroupRule rule;
  bool flagged;
  bool even = true;  // memory of the layers lies at a constant distance
  bool classes = false, means = false, injects = false, codes = false;
  int pages = 70;
};

void check_layers(Place& place, const OfLayers& o, Check& outer) {
  const auto within = outer.in(fmt::format(
      "{} layers, {} x {} heads of {}, group {}, rule {}{}{}", o.layers, o.rows, o.kv_heads, o.head_dim, o.group,
      static_cast<int>(o.rule), o.flagged ? ", flagged" : "",
      std::string(o.even ? "" : ", uneven") + (o.classes ? ", classes" : "") + (o.means ? ", means" : "") +
          (o.injects ? ", injected" : "") + (o.codes ? ", codes" : "") + fmt::format(", {} pages", o.pages)));
  constexpr int page_size = 16;
  const int pages = o.pages;
  std::mt19937 rng(static_cast<unsigned>(o.layers * 131 + o.kv_heads));
  const std::int64_t heads = std::int64_t{o.rows} * o.kv_heads, all = heads * o.layers;
  const auto n = static_cast<std::size_t>(all);
  Ints length(n);
  for (auto& x : length) x = rng() % 7 ? static_cast<int>(rng() % (page_size * pages)) : 0;
  const LengthsOnly cache(o.rows, o.kv_heads, page_size, Ints(static_cast<std::size_t>(heads), page_size * pages));
  PagedKv plain = cache.view();
  plain.head_dim = o.head_dim;
  const PagedKv first = place.put(plain, LengthsOnly::bytes());
  std::vector<bf16> boxes(n * static_cast<std::size_t>(pages) * 2 * static_cast<std::size_t>(o.head_dim));
  for (std::size_t i = 0; i < boxes.size(); ++i)
    boxes[i] = bf16(static_cast<float>(rng() % 1000) * (i / static_cast<std::size_t>(o.head_dim) % 2 ? 1e-3f : -1e-3f));
  const Summary kind = o.means ? Summary::mean : Summary::min_max;
  const int bits = o.codes ? 8 : 16;
  const std::int64_t page = summary_bytes(kind, bits, DType::bf16, o.head_dim);
  std::vector<std::byte> codes(o.codes ? n * static_cast<std::size_t>(pages * page) : 0);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(rng() % 256);
  for (std::size_t i = 0; i < codes.size(); i += static_cast<std::size_t>(page)) {
    const float shared[] = {0.01f, -1.f};  // scale and zero
    std::memcpy(codes.data() + i + static_cast<std::size_t>(summary_vectors(kind) * o.head_dim), shared, sizeof shared);
  }
  std::vector<std::uint8_t> flags(n);
  for (auto& f : flags) f = rng() % 2;
  const std::vector<float> q = randoms(all * o.group * o.head_dim);
  const auto* const lengths = place.put(length);
  const std::byte* const summaries_there =
      o.codes ? place.put(codes) : reinterpret_cast<const std::byte*>(place.put(boxes));
  const auto* const flags_there = place.put(flags);
  const auto* const q_there = place.put(q);
  const auto list_of = [&](std::int64_t layers) {
    ListMemory memory;
    return place.put(memory.empty({layers * o.rows, o.kv_heads, pages}));
  };
  const IndexList apart = list_of(o.layers), together = list_of(o.layers), elsewhere = list_of(1);
  const auto scores =
      View<float, 3>::dense(place.take<float>(static_cast<std::size_t>(heads * pages)), {o.rows, o.kv_heads, pages});
  const auto* const classes =
      place.put(std::vector<std::uint8_t>(flags.begin(), flags.begin() + o.layers * o.kv_heads));
  const std::int64_t words = ops::inject_words(pages);
  const auto zeros = [&] { return place.put(std::vector<std::uint32_t>(n * static_cast<std::size_t>(words))); };
  std::uint32_t *const state_apart = zeros(), *const state_together = zeros();
  const auto* const sequences = place.put(std::vector<std::uint32_t>(static_cast<std::size_t>(o.rows), 5));
  const auto choose = [&](int l, const IndexList& lists) {
    ops::InjectedUse used;
    ops::InjectArgs others;
    others.state = View<std::uint32_t, 3>::dense(
        (lists.index.data == apart.index.data ? state_apart : state_together) + l * heads * words,
        {o.rows, o.kv_heads, words});
    others.sequence = sequences, others.layer = l, others.seed = 7, others.overlap = 600'000;
    const ops::Injected injected{&others, nullptr, &used};
    PagedKv kv = first;
    if (o.injects) kv.injected = &injected;
    kv.length = View<const std::int32_t, 2>::dense(lengths + l * heads, {o.rows, o.kv_heads});
    const Summaries summaries{
        kind, DType::bf16, summaries_there + l * heads * pages * page, o.kv_heads * pages * page, pages * page,
        page, bits};
    PageChoice choice;
    choice.rule = o.rule, choice.scale = 0.125f, choice.budget = 9, choice.leave_out = {20, 40};
    if (o.flagged)
      choice.heads =
          Heads::flagged(View<const std::uint8_t, 2>::dense(flags_there + l * heads, {o.rows, o.kv_heads}), true);
    if (o.classes) choice.heads = choice.heads.except(classes + l * o.kv_heads);
    IndexList list = lists;
    list.index.data += l * heads * pages, list.count.data += l * heads;
    list.index.extent[0] = list.count.extent[0] = o.rows;
    if (!o.even && l == 1 && lists.index.data == together.index.data) list = elsewhere;
    list.slots = kv.slots;
    ops::score_pages(View<const float, 3>::dense(q_there + l * heads * o.group * o.head_dim,
                                                 {o.rows, std::int64_t{o.kv_heads} * o.group, o.head_dim}),
                     kv, summaries, choice, scores, PageList{list}, place.stream());
    return list;
  };
  for (int time = 0; time <= o.injects; ++time) {  // a sequence's first list stays
    for (int l = 0; l < o.layers; ++l) choose(l, apart);
    const PutOffScope scope(true);
    for (int l = 0; l < o.layers; ++l) choose(l, together), ops::forget_put_off_scores();
    run_put_off();
  }
  Ints wanted_count = place.get(apart.count), wanted = place.get(apart.index), count = place.get(together.count),
       got = place.get(together.index);
  if (!o.even) {  // the second layer's lists are elsewhere
    const auto put = [&](Ints& to, const Ints& from) {
      std::ranges::copy(from, to.begin() + static_cast<std::ptrdiff_t>(from.size()));
    };
    put(count, place.get(elsewhere.count)), put(got, place.get(elsewhere.index));
  }
  outer.equal("counts", count, wanted_count);
  outer.equal("entries", got, wanted);
}

void check_all_layers(Place& place, Check& check) {
  for (const GroupRule rule : {GroupRule::max, GroupRule::softmax_mean})
    for (const bool flagged : {false, true})
      for (const auto& [layers, rows, kv_heads, group, dim] :
           {std::tuple{3, 2, 2, 4, 128}, std::tuple{2, 1, 8, 8, 64}, std::tuple{12, 10, 8, 2, 128}})
        check_layers(place, {layers, rows, kv_heads, group, dim, rule, flagged}, check);
  check_layers(place, {3, 2, 2, 4, 128, GroupRule::max, false, false}, check);
  check_layers(place, {4, 3, 2, 4, 128, GroupRule::max, true, true, true}, check);
  check_layers(place, {3, 2, 2, 4, 128, GroupRule::mean, false, true, false, true}, check);
  check_layers(place, {3, 2, 2, 3, 80, GroupRule::max, true}, check);
  for (const bool means : {false, true})
    check_layers(place, {3, 2, 2, 4, 128, GroupRule::max, true, true, false, means, false, true}, check);
  for (const bool even : {true, false})
    check_layers(place, {4, 3, 2, 4, 128, GroupRule::max, true, even, false, false, true}, check);
  // More pairs than a block lays out at once, and rows too long for registers.
  OfLayers o = {40, 32, 8, 1, 64, GroupRule::softmax_mean, false};
  o.means = true, o.pages = 18;
  check_layers(place, o, check);
  for (const GroupRule rule : {GroupRule::mean, GroupRule::softmax_mean}) {
    o = {2, 3, 2, 2, 64, rule, true};
    o.means = true, o.pages = 4500;
    check_layers(place, o, check);
  }
}

// The boxes of a step's pages, and the best pages of each head.
struct Boxes {
  int rows, query_heads, kv_heads, head_dim, tokens, page_size;
  int selected;  // pages; 0: only scores
  GroupRule rule = GroupRule::max;
  int bits = 16;

  int pages() const { return (tokens + page_size - 1) / page_size; }
  std::int64_t page_bytes() const { return summary_bytes(Summary::min_max, bits, DType::bf16, head_dim); }
  double bytes() const { return static_cast<double>(page_bytes()) * rows * kv_heads * pages(); }
  float scale() const { return rule == GroupRule::softmax_mean ? 0.125f : 1.f; }
};

class BoxScene final : public Scene {
 public:
  BoxScene(Place& place, const Boxes& b, int copies)
      : place_(place),
        b_(b),
        cache_(b.rows, b.kv_heads, b.page_size, Ints(static_cast<std::size_t>(b.rows * b.kv_heads), b.tokens)),
        plain_(cache_.view()),
        q_(randoms(std::int64_t{b.rows} * b.query_heads * b.head_dim)),
        boxes_(static_cast<std::size_t>(b.bytes()) / sizeof(bf16)),
        budget_(static_cast<std::size_t>(b.rows * b.kv_heads), b.selected) {
    const std::vector<float> random = randoms(1 << 16);
    const auto dim = static_cast<std::size_t>(b.head_dim);
    if (b.bits == 8) {
      auto* const bytes = reinterpret_cast<std::byte*>(boxes_.data());
      const auto page = static_cast<std::size_t>(b.page_bytes());
#pragma omp parallel for schedule(static)
      for (std::size_t p = 0; p < 2 * boxes_.size() / page; ++p) {
        for (std::size_t i = 0; i < 2 * dim; ++i) {
          const auto x = static_cast<int>(20 * std::abs(random[((p * 2 * dim + i) * 2654435761u >> 7) & 0xffff]));
          bytes[p * page + i] = static_cast<std::byte>(std::clamp(i < dim ? 128 - x : 128 + x, 0, 255));
        }
        const float shared[] = {0.05f, -6.4f};  // scale and zero
        std::memcpy(bytes + p * page + 2 * dim, shared, sizeof shared);
      }
    } else {
#pragma omp parallel for schedule(static)
      for (std::size_t i = 0; i < boxes_.size(); ++i) {
        const float x = std::abs(random[(i * 2654435761u >> 7) & 0xffff]);
        boxes_[i] = bf16(i / dim % 2 ? x : -x);
      }
    }
    plain_.head_dim = b.head_dim;
    kv_ = place.put(plain_, cache_.bytes());
    queries_ = of(place.put(q_));
    for (int c = 0; c < copies; ++c) copies_.push_back(place.put(boxes_));
    budget_there_ = place.put(budget());
    const std::array<std::int64_t, 3> extent{b.rows, b.kv_heads, b.pages()};
    scores_ = View<float, 3>::dense(place.take<float>(budget_.size() * static_cast<std::size_t>(b.pages())), extent);
    out_ = place.put(memory_.empty(lists()));
  }
  void run(int copy) override {
    const Summaries s = summaries(copies_[static_cast<std::size_t>(copy)]);
    if (b_.selected)
      ops::score_pages(queries_, kv_, s, b_.rule, b_.scale(), budget_there_, {}, scores_, PageList{out_},
                       place_.stream());
    else
      ops::page_score(queries_, kv_, s, b_.rule, b_.scale(), scores_, place_.stream());
  }
  void check(Check& check) override {
    const Guarded<3> wanted(scores_.extent);
    ops::page_score_reference(of(q_.data()), plain_, summaries(boxes_.data()), b_.rule, b_.scale(), wanted.view());
    run(0);
    const std::vector<float> scores = place_.get(scores_);
    check.equal("scores", scores, wanted.values(), page_margin(place_.stream().device(), b_.rule));
    if (b_.selected == 0) return;
    // The selection must be exact for the place's own scores.
    ListMemory list;
    ops::top_pages_reference(plain_, View<const float, 3>::dense(scores.data(), scores_.extent), budget(), {},
                             PageList{list.empty(lists())});
    check.equal("counts", place_.get(out_.count), list.count);
    check.equal("entries", place_.get(out_.index), list.index);
  }

 private:
  std::array<std::int64_t, 3> lists() const { return {b_.rows, b_.kv_heads, b_.selected}; }
  Summaries summaries(const bf16* data) const {
    const std::int64_t page = b_.page_bytes(), head = page * b_.pages();
    return {Summary::min_max, DType::bf16, reinterpret_cast<const std::byte*>(data), head * b_.kv_heads, head, page,
            b_.bits};
  }
  View<const float, 3> of(const float* q) const {
    return View<const float, 3>::dense(q, {b_.rows, b_.query_heads, b_.head_dim});
  }
  View<const std::int32_t, 2> budget() const {
    return View<const std::int32_t, 2>::dense(budget_.data(), {b_.rows, b_.kv_heads});
  }

  Place& place_;
  Boxes b_;
  LengthsOnly cache_;
  PagedKv plain_, kv_;
  std::vector<float> q_;
  std::vector<bf16> boxes_;
  Ints budget_;
  View<const float, 3> queries_;
  std::vector<bf16*> copies_;
  View<const std::int32_t, 2> budget_there_;
  Scores scores_;
  ListMemory memory_;
  IndexList out_;
};

Case boxes(const Boxes& b, bool cuda, std::string shape) {
  Case c{"score", std::move(shape)};
  c.make = [b](Place& place, int copies) { return std::make_unique<BoxScene>(place, b, copies); };
  (cuda ? c.timed_cuda : c.timed_cpu) = true;
  c.work.bytes = b.bytes();
  c.copies = cuda ? copies_beyond(b.bytes(), 300e6, 1 << 20) : Layer::copies;
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  v.push_back(on_caches("score", "votes of a window", 36, check_votes));
  for (const CodecSide keys : {CodecSide{}, CodecSide{8}, CodecSide{4}, CodecSide{2}, fp8})
    v.push_back(checked("score",
                        fmt::format("votes of a window, wide heads and long windows, {} keys", format_of(keys, "bf16")),
                        [keys](Place& place, Check& check) { check_wide_votes(place, check, keys); }));
  v.push_back(on_caches("score", "summaries of pages and scores by them", 36, check_summaries));
  // The emulated GPU takes them all even when quick: most machines test the kernels nowhere else.
  const auto pages = [&](const char* shape, std::vector<PageCase> (*cases)()) {
    v.push_back(checked("score", shape, [cases](Place& place, Check& check) {
      const Device device = place.stream().device();
      const std::vector<PageCase> all = cases();
      for (std::size_t i = 0; i < all.size(); i += quick() && device == Device::cpu ? 5 : 1)
        check_pages(all[i], device, check);
      for (std::size_t i = 0; i < all.size(); i += 3) {
        PageCase in_codes = all[i];
        in_codes.bits = 8;
        check_pages(in_codes, device, check);
      }
    }));
  };
  pages("pages: every head size, group, summary and rule on ragged rows", every_head_size);
  pages("pages: other shapes", other_shapes);
  pages("pages: heads shared by many blocks, blocks shared by many heads, too long for one launch", shared_blocks);
  pages("pages: cuts at every place of a head, and in heads of a page", cuts);
  pages("pages: budgets of none, of one and of more than there is, ties", budgets_and_ties);
  pages("pages: scores that are NaN", not_numbers);
  v.push_back(checked("score", "pages: choices of layers that wait for each other", check_all_layers));
  pages("pages: summaries and queries with gaps, heads of 64, groups of 8", gaps);

  const int tokens = Layer::tokens;
  Work votes{.bytes = 2. * Layer::kv_heads * tokens * Layer::head_dim,
             .flops = 2. * Layer::query_heads * votes_window * Layer::head_dim * tokens,
             .reads = false};
  v.push_back(on_layer<Votes<Layer::query_heads>>(
      fmt::format("window_votes, {} queries, {} tokens", votes_window, tokens), votes));
  v.push_back(on_layer<Votes<Layer::kv_heads>>(
      fmt::format("window_votes of groups, {} queries, {} tokens", votes_window, tokens), votes));
  const Boxes layer{1, Layer::query_heads, Layer::kv_heads, Layer::head_dim, tokens, Layer::page_size, 0};
  v.push_back(boxes(layer, false, fmt::format("page_score, boxes of {} pages", layer.pages())));
  // Llama-3.1-8B's heads.
  for (const GroupRule rule : {GroupRule::max, GroupRule::softmax_mean})
    for (const auto& [rows, context, page_size] : {std::tuple{40, 10240, 16},
                                                   {40, 10240, 32},
                                                   {8, 32768, 16},
                                                   {1, 32768, 16},
                                                   {1, 131072, 16},
                                                   {1, 229376, 16}}) {
      const bool softmax = rule == GroupRule::softmax_mean;
      if (softmax && context > 32768) continue;
      const Boxes b{rows, 32, 8, 128, context, page_size, 1024 / page_size, rule};
      Case c = boxes(b, true, "");
      c.shape = fmt::format("boxes{}, top {} of {} pages of {}, {} x {}, one of {}", softmax ? " softmax_mean" : "",
                            b.selected, b.pages(), page_size, rows, context, c.copies);
      c.kernel = "mma, fused top-k";
      v.push_back(c);
    }
  for (const auto& [rows, context] : {std::pair{40, 10240}, {8, 32768}, {1, 32768}, {1, 131072}}) {
    const Boxes b{rows, 32, 8, 128, context, 16, 64, GroupRule::max, 8};
    Case c = boxes(b, true, "");
    c.shape = fmt::format("boxes in codes, top {} of {} pages of 16, {} x {}, one of {}", b.selected, b.pages(), rows,
                          context, c.copies);
    c.kernel = "mma, fused top-k";
    v.push_back(c);
  }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
