// Which pages lie on the device, page lists of whole heads, and lists that follow a made-up or recorded pattern.
#include <fmt/format.h>
#include <kvlab/fill_heads.hpp>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <random>

#include "cases/case.hpp"
#include "cases/inject_fixture.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/quick.hpp"
#include "ops/select/allot.hpp"
#include "ops/select/page_order.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::cases {
namespace {

// Tables of two tiers. A page has no frame with probability `absent` / 4 in the upper one, 1/2 in the lower one.
struct Tiers {
  int rows, heads, page_size, most;
  Ints length, slots;
  std::vector<PageEntry> table[2];
  std::vector<std::byte> frame = std::vector<std::byte>(granule_bytes);
  PageLayout layout;
  PagedKv kv[2];

  Tiers(int rows_, int heads_, int page_size_, int most_, unsigned absent, std::mt19937& rng)
      : rows(rows_), heads(heads_), page_size(page_size_), most(most_) {
    for (int i = 0; i < rows * heads; ++i)
      length.push_back(static_cast<int>(rng() % static_cast<unsigned>(most * page_size + 1)));
    length[0] = most * page_size;
    if (length.size() > 1) length[1] = 0;
    for (int r = 0; r < rows; ++r) slots.push_back(rows - 1 - r);
    for (int t = 0; t < 2; ++t) {
      table[t].resize(static_cast<std::size_t>(rows * heads * most));
      for (PageEntry& e : table[t]) e.frame = rng() % 4 < (t ? 2 : absent) ? null_frame : 0;
      kv[t].base = frame.data();
      kv[t].layouts = &layout;
      kv[t].table = View<const PageEntry, 3>::dense(table[t].data(), {rows, heads, most});
      kv[t].length = View<const std::int32_t, 2>::dense(length.data(), {rows, heads});
      kv[t].slots = slots.data();
      kv[t].rows = rows, kv[t].kv_heads = heads, kv[t].head_dim = 64, kv[t].page_size = page_size;
    }
  }
  Tiers(const Tiers&) = delete;
};

// A page list for the reference, and its copy at the place.
struct Lists {
  ListMemory memory;
  PageList list, there;
  Lists(Place& place, const Tiers& t, int room) : list{memory.empty({t.rows, t.heads, room})}, there(place.put(list)) {}
  Lists(const Lists&) = delete;
  void compare(Place& place, Check& check, const std::string& what) const {
    check.equal(what + ", counts", place.get(there.count), memory.count);
    check.equal(what + ", entries", place.get(there.index), memory.index);
  }
};

void check_lists(Place& place, Check& check, const Tiers& t, unsigned n, std::mt19937& rng) {
  const Stream s = place.stream();
  Ints length(t.length.size(), -7);
  const auto view = [&](Ints& x) { return View<std::int32_t, 2>::dense(x.data(), {t.rows, t.heads}); };
  const auto of = view(length), of_there = place.put(of);
  ops::lengths_reference(t.kv[0], of);
  ops::lengths(place.put(t.kv[0], t.frame.size()), of_there, s);
  check.equal("lengths", place.get(of_there), length);

  std::vector<std::uint8_t> mask(static_cast<std::size_t>(t.rows));
  for (auto& m : mask) m = rng() % 2;
  const std::uint8_t* mask_there = place.put(mask);
  const int newest = static_cast<int>(rng() % 5);
  Lists older(place, t, t.most);
  ops::older_pages_reference(of, n % 3 ? mask.data() : nullptr, t.page_size, newest, older.list);
  ops::older_pages(of_there, n % 3 ? mask_there : nullptr, t.page_size, newest, older.there, s);
  older.compare(place, check, "older_pages");

  // tokens that a step has counted and not yet written, and as many pages as a step encodes
  PagedKv kv = t.kv[0];
  Ints lower, written;
  for (const int x : t.length) lower.push_back(static_cast<int>(rng() % static_cast<unsigned>(x / t.page_size + 1)));
  for (const int x : length) written.push_back(std::max(x - 1, 0));
  if (n % 5) kv.lower_pages = View<const std::int32_t, 2>::dense(lower.data(), {t.rows, t.heads});
  const auto before = n % 2 ? view(written) : View<std::int32_t, 2>();
  const int residual = static_cast<int>(rng() % static_cast<unsigned>(n % 4 ? 3 * t.page_size : 1 + t.most));
  Lists aged(place, t, n % 3 ? t.most : std::min(t.most, 2));
  ops::aged_pages_reference(kv, before, residual, aged.list);
  ops::aged_pages(place.put(kv, t.frame.size()), before ? place.put(before) : before, residual, aged.there, s);
  aged.compare(place, check, "aged_pages");

  Ints keep;
  for (const int x : length) keep.push_back(x ? static_cast<int>(rng() % static_cast<unsigned>(x + 1)) : 0);
  const auto kept = view(keep), kept_there = place.put(kept);
  const int unit = n % 2 ? t.page_size : 1;
  ops::round_allotment_reference(of, mask.data(), unit, kept);
  ops::round_allotment(of_there, mask_there, unit, kept_there, s);
  check.equal("round_allotment", place.get(kept_there), keep);
  Ints part(keep.size()), part_there(keep.size(), -7);
  const auto to = place.put(view(part_there));
  const int pinned = static_cast<int>(rng() % 9);
  const double share = n % 4 ? static_cast<double>(rng() % 65) / 64 : 0.3;
  ops::share_of_keep_reference(kept, pinned, share, view(part));
  ops::share_of_keep(kept_there, pinned, share, to, s);
  check.equal("share_of_keep", place.get(to), part);
}

// Order of pages: of some heads, with left out tokens that may be all.
void check_order(Place& place, Check& check, const Tiers& t, unsigned n, std::mt19937& rng) {
  const auto below = [&](int x) { return static_cast<int>(rng() % static_cast<unsigned>(x)); };
  std::vector<float> scores, order;
  for (int i = 0; i < t.rows * t.heads * t.most; ++i) {
    scores.push_back(static_cast<float>(below(1000)) / 8);
    order.push_back(static_cast<float>(-i));
  }
  std::vector<std::uint8_t> marks(static_cast<std::size_t>(t.rows * t.heads));
  for (auto& m : marks) m = rng() % 3 > 0;
  const auto flags = View<std::uint8_t, 2>::dense(marks.data(), {t.rows, t.heads});
  const auto of = [&](std::vector<float>& x) { return View<float, 3>::dense(x.data(), {t.rows, t.heads, t.most}); };
  const Pins left_out{below(n % 2 ? 40 : 1), below(n % 3 ? 40 : 1), false};
  const auto there = place.put(of(order)), scores_there = place.put(of(scores));
  const bool some = n % 4 > 0;
  ops::keep_page_scores_reference(t.kv[0], of(scores), left_out, some ? Heads::flagged(flags) : Heads{}, of(order));
  ops::keep_page_scores(place.put(t.kv[0], t.frame.size()), scores_there, left_out,
                        some ? Heads::flagged(place.put(flags)) : Heads{}, there, place.stream());
  check.equal("keep_page_scores", place.get(there), order, 0);
}

void check_tiers(Place& place, Check& check, const Tiers& t, unsigned n, std::mt19937& rng) {
  const auto scope = check.in(fmt::format("tables of {} rows, {} KV heads, {} pages of {}, number {}", t.rows, t.heads,
                                          t.most, t.page_size, n));
  check_lists(place, check, t, n, rng);
  check_order(place, check, t, n, rng);
}

void check_small(Place& place, Check& check) {
  const auto pick = [](std::mt19937& rng, std::initializer_list<int> of) { return of.begin()[rng() % of.size()]; };
  for (unsigned n = 0; n < 150; n += quick() ? 11 : 1) {
    std::mt19937 rng(n);
    const int rows = 1 + static_cast<int>(rng() % 5), heads = 1 + static_cast<int>(rng() % 9);
    const int page_size = pick(rng, {1, 4, 8, 16});
    const int most = n % 7 ? 1 + static_cast<int>(rng() % static_cast<unsigned>(1 + 90 / page_size)) : 700;
    check_tiers(place, check, Tiers(rows, heads, page_size, most, n % 5, rng), n, rng);
  }
}

void check_large(Place& place, Check& check) {
  struct Size {
    int rows, heads, page_size, most;
  };
  std::mt19937 rng(1);
  for (const Size& c : {Size{3, 2, 16, 5}, Size{2, 3, 8, 33}, Size{1, 2, 16, 640}, Size{1, 1, 16, 9000}})
    for (unsigned n = 0; n < 12; n += quick() ? 3 : 1)
      check_tiers(place, check, Tiers(c.rows, c.heads, c.page_size, c.most, n % 5, rng), n, rng);
}

// Rows that lie three entries apart, of which two are used.
void check_fill(Place& place, Check& check) {
  Ints wanted(60, -7);
  const std::int32_t* out = place.put(wanted);
  for (std::size_t r = 0; r < 20; ++r) wanted[3 * r] = wanted[3 * r + 1] = 5;
  const auto whole = View<std::int32_t, 2>::dense(const_cast<std::int32_t*>(out), {20, 3});
  ops::fill_heads(View<std::int32_t, 2>{whole.data, {20, 2}, {3, 1}}, 5, place.stream());
  check.equal("fill_heads", place.get(whole), wanted);
}

// Sequences that grow and choose pages at random. Equal numbers give equal sequences.
struct RandomInjection {
  std::mt19937 rng;
  InjectFixture f;
  Ints first, steps, page, taken;  // taken: [slot] decode steps
  std::vector<std::int64_t> begin;
  std::vector<std::uint8_t> flags;

  explicit RandomInjection(unsigned n)
      : rng(n), f(1 + static_cast<int>(n % 3), 1 + static_cast<int>(n / 3 % 4), n % 2 ? 16 : 5, n % 7 ? 70 : 700) {
    for (auto& x : f.length) x = static_cast<int>(below(f.most * f.args.pages.page_size - 20));
    ops::InjectArgs& a = f.args;
    a.pins = {static_cast<int>(below(n % 4 ? 20 : 1)), static_cast<int>(below(n % 5 ? 30 : 1)), n % 3 > 0};
    a.layer = static_cast<int>(below(9)), a.seed = n;
    for (auto& x : f.sequence) x = below(1000);
    a.overlap = static_cast<std::int32_t>(below(1'000'001));
    if (n % 4 == 3) record();
    taken.resize(static_cast<std::size_t>(f.rows));
    if (n % 8 == 7) a.steps = taken.data();
    a.rerank_overlap = static_cast<std::int32_t>(below(1'000'001));
    if (n % 3 > 0 && n % 4 != 3) a.clock = taken.data();
    if (n % 5 > 2) a.list.slots = f.slots.data();
    flags.resize(static_cast<std::size_t>(f.rows * f.heads));
    if (n % 3 == 1) a.heads = Heads::flagged(marks());
  }
  View<const std::uint8_t, 2> marks() const {
    return View<const std::uint8_t, 2>::dense(flags.data(), {f.rows, f.heads});
  }

  void next() {
    for (auto& x : f.length) x += static_cast<int>(below(3));
    for (auto& x : taken) x += static_cast<int>(1 + below(2));
    for (auto& x : flags) x = below(3) > 0;
    if (below(3) == 0) f.question[0] = below(3);
    for (int r = 0; r < f.rows; ++r)
      for (int h = 0; h < f.heads; ++h) {
        const int pages = f.args.pages.pages(r, h);
        const unsigned share = 1 + below(8);
        const std::int64_t at = f.args.list.at(r);
        int& count = f.args.list.count(at, h);
        count = 0;
        for (int p = 0; p < pages; ++p)
          if (below(8) < share || p == pages - 1) f.args.list.index(at, h, count++) = p;
      }
  }

 private:
  unsigned below(int n) { return static_cast<unsigned>(rng() % static_cast<unsigned>(n)); }

  void record() {
    ops::RecordedPages& r = f.args.recorded;
    r.questions = 3, r.layers = 3, r.heads = 2;
    r.layer = f.args.layer % 3;
    first = {2, 0, 0}, steps = {3, 0, 2};  // lists in another order than questions; question 1 has none
    for (auto& x : f.question) x = below(3);
    for (int list = 0; list < 5 * r.layers * r.heads; ++list) {
      begin.push_back(static_cast<std::int64_t>(page.size()));
      for (int p = 0; p < f.most; ++p)
        if (below(4) == 0) page.push_back(p);
    }
    begin.push_back(static_cast<std::int64_t>(page.size()));
    r.first = first.data(), r.steps = steps.data(), r.begin = begin.data(), r.page = page.data();
  }
};

void check_injection(Place& place, Check& check) {
  for (unsigned n = 0; n < (quick() ? 40 : 120); ++n) {
    RandomInjection x(n);
    ops::InjectArgs a = x.f.args;
    a.pages = place.put(a.pages, x.f.frame.size());
    a.state = place.put(a.state);
    a.sequence = place.put(x.f.sequence);
    if (a.recorded.first) {
      a.recorded.first = place.put(x.first);
      a.recorded.steps = place.put(x.steps);
      a.recorded.begin = place.put(x.begin);
      a.recorded.page = place.put(x.page);
    }
    for (int step = 0; step < 6; ++step) {
      const auto scope = check.in(fmt::format("sequence {}, step {}", n, step));
      x.next();
      a.list = place.put(x.f.args.list);
      if (a.list.slots) a.list.slots = a.pages.slots;
      if (a.steps) a.steps = place.put(x.taken);
      if (a.clock) a.clock = place.put(x.taken);
      if (a.heads.flags) a.heads = Heads::flagged(place.put(x.marks()));
      a.question = place.put(x.f.question);
      a.pages.length = place.put(x.f.args.pages.length);
      ops::inject_pages(a, place.stream());
      ops::inject_pages_reference(x.f.args);
      check.equal("counts", place.get(a.list.count), x.f.count);
      check.equal("entries", place.get(a.list.index), x.f.index);
      check.that("the state is the same", place.get(a.state) == x.f.state);
    }
  }
}

std::vector<Case> list() {
  return {checked("placement", "small tables", check_small), checked("placement", "large tables", check_large),
          checked("placement", "one number for every head", check_fill),
          checked("placement", "injected lists", check_injection)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
