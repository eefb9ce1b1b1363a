// Levels of tokens: those of a prompt, and the token that steps down in a decode step.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <cmath>

#include "cases/on_caches.hpp"
#include "ops/select/reference.hpp"

namespace kvlab::cases {
namespace {

using ops::LevelRule;
using Ints = std::vector<std::int32_t>;

const char* const kinds[] = {"shares", "few values", "equal", "special", "all NaN", "all infinite"};

float value_of(int kind, std::mt19937& rng) {
  const float special[] = {-0.f, 0.f, INFINITY, -INFINITY, NAN, 1.f, -1.f, 1e-40f, 3e38f};
  switch (kind) {
    case 0: return std::exp(-8.f * std::uniform_real_distribution<float>()(rng));
    case 1: return static_cast<float>(rng() % 4) / 4;
    case 2: return .25f;
    case 3: return rng() % 2 ? special[rng() % 9] : .5f;
    case 4: return NAN;
    default: return INFINITY;
  }
}

// A random cache whose first pages may lie in a second codec. It stands for the rows of two layers.
struct Split {
  OnCache& x;
  PageLayout layouts[2];
  Ints lower;
  PagedKv kv, there;

  explicit Split(OnCache& of) : x(of), kv(of.kv) {
    layouts[0] = kv.layouts[0];
    layouts[1] = ops::make_layout(layouts[0].dtype, fitting({{2}, {2}}, kv.head_dim), kv.page_size, kv.head_dim,
                                  layouts[0].state_columns);
    kv.layouts = layouts;
    const auto slots = kv.table.extent[0];
    lower.assign(static_cast<std::size_t>(slots * kv.kv_heads), 0);
    for (int r = 0; r < kv.rows; ++r)
      for (int h = 0; h < kv.kv_heads; ++h) {
        const int full = kv.tokens(r, h) / kv.page_size, pages = static_cast<int>(x.c.rng() % 3) * full / 3;
        lower[static_cast<std::size_t>(kv.slots[r] * kv.kv_heads + h)] = pages;
        for (int page = 0; page < pages; ++page) re_encode(x.c.cache.entry(r, h, page));
      }
    kv.lower_pages = View<const std::int32_t, 2>::dense(lower.data(), {slots, kv.kv_heads});
  }
  Split(const Split&) = delete;

  // Sums of this kind in column 1.
  void fill(int kind) {
    for (int r = 0; r < kv.rows; ++r)
      for (int h = 0; h < kv.kv_heads; ++h)
        for (int t = 0; t < kv.tokens(r, h); ++t) {
          const PageEntry& e = kv.entry(r, h, t / kv.page_size);
          reinterpret_cast<float*>(kv.frame(e) + kv.layout(e).state)[kv.page_size + t % kv.page_size] =
              value_of(kind, x.c.rng);
        }
    there = x.place.put(kv, x.c.cache.arena_bytes());
  }
  int position(int row, int head, int token) const {
    std::int32_t at;
    const PageEntry& e = kv.entry(row, head, token / kv.page_size);
    std::memcpy(&at, kv.frame(e) + kv.layout(e).positions + token % kv.page_size * 4, 4);
    return at;
  }

 private:
  void re_encode(PageEntry& e) {
    const std::byte* frame = kv.frame(e);
    const std::vector<std::byte> old(frame, frame + layouts[0].bytes);
    for (int t = 0; t < e.tokens; ++t) ops::copy_token(old.data(), layouts[0], t, kv.frame(e), layouts[1], t);
    e.codec = 1;
  }
};

// Numbers of the heads of two layers, for an op and for its reference.
struct Numbers2 {
  Ints pending, first;
  ops::LevelNumbers own, there;

  Numbers2(Split& s, bool counted) : pending(s.lower.size()), first(s.lower.size()) {
    const std::int64_t slots = s.kv.table.extent[0], layers = slots % 2 ? 1 : 2;
    for (int r = 0; r < s.kv.rows; ++r)
      for (int h = 0; h < s.kv.kv_heads; ++h) {
        const auto i = static_cast<std::size_t>(s.kv.slots[r] * s.kv.kv_heads + h);
        const int room = s.kv.tokens(r, h) - s.lower[i] * s.kv.page_size;
        pending[i] =
            static_cast<int>(s.x.c.rng() % 2) * std::min({s.kv.page_size, room + 1, 1 + s.x.c.pick({0, 1, 99})});
        if (pending[i]) --pending[i];
        first[i] = s.x.c.pick({0, 3, 40});
      }
    own.pending = HeadNumbers::dense(pending.data(), {layers, slots / layers, s.kv.kv_heads});
    own.first = HeadNumbers::dense(first.data(), own.pending.extent);
    there.pending = s.x.place.put(own.pending), there.first = s.x.place.put(own.first);
    if (!counted) own.first = there.first = {};
  }
  Numbers2(const Numbers2&) = delete;
  void check(Split& s, const std::string& what) const {
    s.x.check.equal(what + ", pending", s.x.place.get(there.pending), pending);
    if (there.first) s.x.check.equal(what + ", first", s.x.place.get(there.first), first);
  }
};

LevelRule random_rule(OnCache& x) {
  LevelRule rule;
  rule.high_from = static_cast<float>(x.c.pick({0, 1, 4, 20, 80})) / 4;
  rule.low_from = rule.high_from * static_cast<float>(x.c.pick({0, 1, 3, 10})) / 10;
  rule.window = x.c.pick({1, 4, 20, 64, 400});
  rule.same_numbers = x.c.rng() % 2 == 0;
  return rule;
}

void check_levels(OnCache& x) {
  Split split(x);
  split.fill(0);
  const PagedKv& kv = split.kv;
  for (int kind = 0; kind < 6; ++kind) {
    Numbers<3> sums(x, {x.c.rows(), x.c.kv_heads(), x.c.room()});
    for (int r = 0; r < kv.rows; ++r)
      for (int h = 0; h < kv.kv_heads; ++h)
        for (int t = 0; t < x.c.room(); ++t) sums.own()(r, h, t) = 9 * value_of(kind, x.c.rng);
    const auto sums_there = sums.put();
    for (const auto unit : {LevelRule::of_text, LevelRule::of_token}) {
      LevelRule rule = random_rule(x);
      rule.unit = unit;
      rule.queries = x.c.pick({0, 1, 16, 64});
      const auto scope = x.check.in(fmt::format("{} scores, unit {}, high from {}, low from {}, {} same", kinds[kind],
                                                static_cast<int>(unit), rule.high_from, rule.low_from,
                                                rule.same_numbers ? "the" : "not the"));
      Ints seen;
      for (int r = 0; r < kv.rows; ++r) seen.push_back(1 + x.c.pick({0, 90, 270, 300}));
      Numbers2 numbers(split, x.c.rng() % 2 == 0);
      std::vector<std::uint8_t> wanted(static_cast<std::size_t>(x.c.rows() * x.c.kv_heads() * x.c.room()), 7);
      const auto own = View<std::uint8_t, 3>::dense(wanted.data(), {x.c.rows(), x.c.kv_heads(), x.c.room()});
      const auto got = x.place.put(own);
      ops::levels_reference(kv, sums.view(), seen.data(), rule, own, numbers.own);
      ops::levels(split.there, sums_there, x.place.put(seen), rule, got, numbers.there, x.stream());
      x.check.that("levels are equal", x.place.get(got) == wanted);
      numbers.check(split, "levels");
    }
  }
}

void check_demote(OnCache& x) {
  Split split(x);
  const PagedKv& kv = split.kv;
  for (int kind = 0; kind < 6; ++kind) {
    split.fill(kind);
    for (const bool leaving : {false, true})
      for (int i = 0; i < 3; ++i) {
        LevelRule rule = random_rule(x);
        rule.leaving_decides = leaving;
        // A token of the first head leaves the window.
        if (const int n = kv.tokens(0, 0); leaving && n > 0)
          rule.window = std::max(1, split.position(0, 0, n - 1) + 1 -
                                        split.position(0, 0, static_cast<int>(x.c.rng() % static_cast<unsigned>(n))));
        const auto scope = x.check.in(fmt::format("{} scores, window {}, high from {}, low from {}, {} same{}",
                                                  kinds[kind], rule.window, rule.high_from, rule.low_from,
                                                  rule.same_numbers ? "the" : "not the", leaving ? ", leaving" : ""));
        Numbers2 numbers(split, x.c.rng() % 2 == 0);
        ListMemory memory[6];
        const std::array<std::int64_t, 3> two{kv.rows, kv.kv_heads, 2}, one{kv.rows, kv.kv_heads, 1};
        const ops::Demotion own{{memory[0].empty(two)}, {memory[1].empty(one)}, {memory[2].empty(one)}};
        const ops::Demotion there{{x.place.put(memory[3].empty(two))},
                                  {x.place.put(memory[4].empty(one))},
                                  {x.place.put(memory[5].empty(one))}};
        ops::demote_reference({&kv, 1}, rule, numbers.own, own);
        ops::demote({&split.there, 1}, rule, numbers.there, there, x.stream());
        const IndexList lists[] = {there.pairs, there.out, there.full};
        for (int l = 0; l < 3; ++l) {
          const char* const what[] = {"pairs", "out", "full"};
          x.check.equal(fmt::format("{}, counts", what[l]), x.place.get(lists[l].count), memory[l].count);
          x.check.equal(fmt::format("{}, entries", what[l]), x.place.get(lists[l].index), memory[l].index);
        }
        numbers.check(split, "demote");
      }
  }
}

// A decode step of all layers.
class DemoteScene final : public Scene {
 public:
  static constexpr int heads = 8, page_size = 16, tokens = 2048;

  DemoteScene(Place& place, int rows, int copies)
      : place_(place),
        cache_({rows, heads, 8, page_size, tokens / page_size, DType::bf16, {}, 1}),
        lower_(static_cast<std::size_t>(rows * heads)),
        pending_(lower_.size()) {
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < heads; ++h) cache_.fill_pooled(r, h, tokens);
    kv_ = cache_.view();
    kv_.lower_pages = View<const std::int32_t, 2>::dense(lower_.data(), {rows, heads});
    const auto sums = normals(std::int64_t{rows} * heads * tokens, 3);
    const auto of = View<const float, 3>::dense(sums.data(), {rows, heads, tokens});
    ops::blend_state({&kv_, 0}, 0, of, 1, Stream::cpu());
    rule_.high_from = 2, rule_.low_from = -1e9f, rule_.window = 64;  // a token of each head becomes low
    for (int c = 0; c < copies; ++c) there_.push_back(place.put(kv_, cache_.arena_bytes()));
    numbers_.pending = place.put(HeadNumbers::dense(pending_.data(), {1, rows, heads}));
    to_ = {{place.put(memory_[0].empty({rows, heads, 2}))},
           {place.put(memory_[1].empty({rows, heads, 1}))},
           {place.put(memory_[2].empty({rows, heads, 1}))}};
  }
  void run(int copy) override {
    ops::demote({&there_[static_cast<std::size_t>(copy)], 0}, rule_, numbers_, to_, place_.stream());
  }
  void check(Check& check) override {
    ListMemory memory[3];
    const ops::Demotion to{{memory[0].empty({kv_.rows, heads, 2})},
                           {memory[1].empty({kv_.rows, heads, 1})},
                           {memory[2].empty({kv_.rows, heads, 1})}};
    ops::demote_reference({&kv_, 0}, rule_, {HeadNumbers::dense(pending_.data(), {1, kv_.rows, heads}), {}}, to);
    run(0);
    check.equal("pairs", place_.get(to_.pairs.index), memory[0].index);
    check.equal("pending", place_.get(numbers_.pending), pending_);
  }

 private:
  Place& place_;
  PagedFixture cache_;
  Ints lower_, pending_;
  PagedKv kv_;
  LevelRule rule_;
  std::vector<PagedKv> there_;
  ops::LevelNumbers numbers_;
  ListMemory memory_[3];
  ops::Demotion to_;
};

Case demotion(int rows, bool cuda) {
  Case c{"levels", fmt::format("demote, {} x {} heads of {} tokens", rows, DemoteScene::heads, DemoteScene::tokens)};
  c.make = [rows](Place& place, int copies) { return std::make_unique<DemoteScene>(place, rows, copies); };
  (cuda ? c.timed_cuda : c.timed_cpu) = true;
  c.work.bytes = 8. * rows * DemoteScene::heads * DemoteScene::tokens;  // sums and positions
  c.copies = cuda ? copies_beyond(c.work.bytes, 300e6, 16) : 4;
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  v.push_back(on_caches("levels", "of a prompt", 36, check_levels));
  v.push_back(on_caches("levels", "one token steps down", 36, check_demote));
  v.push_back(demotion(32, false));
  v.push_back(demotion(64, true));
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
