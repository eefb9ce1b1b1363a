// Blocks of tokens: mass that is summed, vectors that are made of it as a text grows, and lists of pages.
#include <fmt/format.h>

#include <algorithm>

#include "cases/on_caches.hpp"
#include "ops/select/blocks.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

// Blocks of a cache and lengths of its rows, all of it in vectors.
struct Blocks {
  std::vector<float> key, mass;
  Ints made, length;
  KeyBlocks view;
  View<std::int32_t, 2> lengths;

  Blocks(OnCache& x, std::int64_t blocks)
      : key(static_cast<std::size_t>(slots(x) * x.c.heads() * blocks * x.kv.head_dim), -7),
        mass(x.c.normal(slots(x) * x.c.heads() * x.c.room())),
        made(static_cast<std::size_t>(slots(x)), 0),
        length(static_cast<std::size_t>(slots(x) * x.kv.kv_heads)) {
    view.key = View<float, 4>::dense(key.data(), {slots(x), x.c.heads(), blocks, x.kv.head_dim});
    view.mass = View<float, 3>::dense(mass.data(), {slots(x), x.c.heads(), x.c.room()});
    view.made = View<std::int32_t, 1>::dense(made.data(), {slots(x)});
    lengths = View<std::int32_t, 2>::dense(length.data(), {slots(x), x.kv.kv_heads});
  }
  static std::int64_t slots(const OnCache& x) { return x.kv.length.extent[0]; }
  // All heads of a row get the length of its shortest, and half of that in the first round.
  void cut(const OnCache& x, const View<const std::int32_t, 2>& whole, bool half) const {
    for (std::int64_t s = 0; s < slots(x); ++s) {
      int least = whole(s, 0);
      for (int h = 1; h < x.kv.kv_heads; ++h) least = std::min(least, whole(s, h));
      for (int h = 0; h < x.kv.kv_heads; ++h) lengths(s, h) = half ? least / 2 : least;
    }
  }
};

void check_list(OnCache& x, const BlockRule& rule, const Blocks& b, const KeyBlocks& there) {
  const std::int64_t rows = x.c.rows(), heads = x.c.kv_heads(), room = x.c.room(), blocks = b.view.key.extent[2];
  Numbers<3> queries(x, {rows, x.c.heads(), x.kv.head_dim}), scores(x, {rows, 1, blocks});
  Ints most, entries(static_cast<std::size_t>(rows * heads * room)), count(static_cast<std::size_t>(rows * heads));
  for (std::int64_t r = 0; r < rows; ++r)
    most.push_back(static_cast<int>(x.c.rng() % (x.n % 2 ? 5u : static_cast<unsigned>(blocks + 2))));
  PageList list;
  list.index = View<std::int32_t, 3>::dense(entries.data(), {rows, heads, room});
  list.count = View<std::int32_t, 2>::dense(count.data(), {rows, heads});
  const PageList list_there = x.place.put(list);
  ops::block_pages_reference(x.kv, queries.view(), rule, most.data(), b.view, list);
  const auto most_there = x.place.put(View<const std::int32_t, 1>::dense(most.data(), {rows}));
  ops::block_pages(x.there, queries.put(), rule, most_there.data, there, x.place.put(scores.own()), list_there,
                   x.stream());
  x.check.equal("counts of pages", x.place.get(list_there.count), count);
  Ints got = x.place.get(list_there.index);
  for (std::size_t head = 0; head < count.size(); ++head)  // what lies behind a list means nothing
    for (auto i = static_cast<std::size_t>(count[head]); i < static_cast<std::size_t>(room); ++i)
      got[head * static_cast<std::size_t>(room) + i] = entries[head * static_cast<std::size_t>(room) + i];
  x.check.equal("pages", got, entries);
}

void check_blocks(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;  // keys count as they are stored
  const Stream s = x.stream();
  const int page = x.kv.page_size;
  const auto up_to = [&](int n) { return static_cast<int>(x.c.rng() % static_cast<unsigned>(n)); };
  BlockRule rule{page * up_to(3), page * (1 + up_to(3)), up_to(20), 0};
  rule.representatives = 1 + up_to(rule.block);
  rule.unturned = x.n % 3 == 1;
  Blocks b(x, rule.blocks(x.c.room()) + 1);
  const View<const std::int32_t, 2> whole = x.kv.length;
  const KeyBlocks there{x.place.put(b.view.key), x.place.put(b.view.mass), x.place.put(b.view.made)};
  for (const bool half : {true, false}) {
    const auto scope = x.check.in(fmt::format("{} tokens in a block, {} of them count, {}", rule.block,
                                              rule.representatives, half ? "half of the text" : "all of it"));
    b.cut(x, whole, half);
    const Ints lengths = b.length;
    x.kv.length = View<const std::int32_t, 2>::dense(lengths.data(), b.lengths.extent);
    x.there.length = x.place.put(x.kv.length);
    Numbers<3> mass(x, {x.c.rows(), x.c.heads(), x.c.room()});
    if (up_to(2)) std::fill_n(mass.own().data, x.c.rows() * x.c.heads() * x.c.room(), 0.f);
    const int newest = half ? 0 : up_to(12);
    ops::add_block_mass(x.there, mass.put(), newest, there, s);
    ops::add_block_mass_reference(x.kv, mass.view(), newest, b.view);
    x.check.equal("mass", x.place.get(there.mass), b.mass, 0);
    ops::make_blocks(x.there, rule, there, s);
    ops::make_blocks_reference(x.kv, rule, b.view);
    x.check.equal("numbers of blocks", x.place.get(there.made), b.made);
    x.check.equal("vectors", x.place.get(there.key), b.key, rule.unturned ? 1e-6 : 0);
    check_list(x, rule, b, there);
    Numbers<3> queries(x, {x.c.rows(), x.c.heads(), x.kv.head_dim}), turned(x, queries.own().extent);
    const auto queries_there = queries.put();
    const int to = up_to(5000), count = 1 + up_to(4);
    Numbers<4> chunk(x, {x.c.rows(), x.c.heads(), count, x.kv.head_dim});
    Numbers<3> mean(x, queries.own().extent);
    const auto chunk_there = chunk.put();
    for (const int at : {-1, to})
      x.same<3>(
          "mean_query", mean.own(), 1e-6,
          [&](const View<float, 3>& out) { ops::mean_query(x.there, chunk_there, at, out, s); },
          [&](const View<float, 3>& out) { ops::mean_query_reference(x.kv, chunk.view(), at, out); });
    x.same<3>(
        "turn_queries", turned.own(), 1e-6,
        [&](const View<float, 3>& out) { ops::turn_queries(x.there, queries_there, to, out, s); },
        [&](const View<float, 3>& out) { ops::turn_queries_reference(x.kv, queries.view(), to, out); });
  }
}

// Blocks of equal mass, and scores of which some are equal.
void check_ties(OnCache& x) {
  x.kv.rope = x.there.rope = RopeRegime::original;
  BlockRule rule{0, x.kv.page_size * 2, 1, 2};
  rule.representatives = std::min(2, rule.block);
  Blocks b(x, rule.blocks(x.c.room()) + 1);
  for (float& m : b.mass) m = x.c.rng() % 4 ? static_cast<float>(x.c.rng() % 2) : NAN;
  b.cut(x, x.kv.length, false);
  x.kv.length = View<const std::int32_t, 2>::dense(b.length.data(), b.lengths.extent);
  x.there.length = x.place.put(x.kv.length);
  KeyBlocks there{x.place.put(b.view.key), x.place.put(b.view.mass), x.place.put(b.view.made)};
  ops::make_blocks(x.there, rule, there, x.stream());
  ops::make_blocks_reference(x.kv, rule, b.view);
  x.check.equal("vectors", x.place.get(there.key), b.key, 0);
  for (float& k : b.key) k = static_cast<float>(x.c.rng() % 100 == 0);  // most scores are 0
  for (std::size_t i = 0; i < b.key.size(); i += 1 + x.c.rng() % 2000) b.key[i] = NAN;
  there.key = x.place.put(b.view.key);
  check_list(x, rule, b, there);
}

std::vector<Case> list() {
  return {on_caches("blocks", "of rows that grow", 36, check_blocks), on_caches("blocks", "with ties", 24, check_ties)};
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
