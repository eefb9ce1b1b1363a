#include <kvlab/rewrite.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "cases/paged_fixture.hpp"
#include "ops/page/paged.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// A cache of one head and so many tokens of 8 elements. Its own keys do not matter.
struct Head {
  explicit Head(int tokens) : cache({1, 1, 8, 4, 4}) {
    for (int t = 0; t < tokens; ++t) cache.append(0, 0, std::vector<float>(8), std::vector<float>(8));
    kv = cache.view();
  }
  PagedFixture cache;
  PagedKv kv;
};

// Rows of one head, of which the first elements are given and the others are 0.
struct Rows {
  explicit Rows(const std::vector<std::vector<float>>& given) {
    for (const auto& row : given) {
      data.insert(data.end(), row.begin(), row.end());
      data.resize(data.size() + 8 - row.size());
    }
    view = View<float, 4>::dense(data.data(), {1, 1, static_cast<std::int64_t>(given.size()), 8});
  }
  std::vector<float> data;
  View<float, 4> view;
};

const Stream s = Stream::cpu();

}  // namespace

// The card's channels, with four more of a greater energy: qe = [4, 1, .25, 0], ke = [.1, 1, 4, 9].
TEST_CASE("ThinK's channels by hand") {
  const auto root = [](double x) { return static_cast<float>(std::sqrt(x)); };
  const Head head(3);
  // The means of two queries' squares, of two query heads each, and of three keys' squares.
  const Rows queries({{2, 1, 0, 0, 3, 3, 3, 3},
                      {root(8), root(2), 0, 0, 3, 3, 3, 3},
                      {root(4), 0, root(.5), 0, 3, 3, 3, 3},
                      {0, 1, root(.5), 0, 3, 3, 3, 3}});
  const auto of_heads = View<const float, 4>::dense(queries.data.data(), {1, 2, 2, 8});
  Rows keys({{root(.3), 1, root(12), 3, 2, 2, 2, 2}, {0, -1, 0, -3, 2, 2, 2, 2}, {0, 1, 0, 3, 2, 2, 2, 2}});
  Guarded<3> energy({1, 1, 8});
  ops::channel_energy(of_heads, head.kv, keys.view, energy.view(), s);
  const float wanted[] = {.4f, 1, 1, 0, 36, 36, 36, 36};
  for (int d = 0; d < 8; ++d) CHECK(energy(0, 0, d) == Approx(wanted[d]));
  CHECK(energy.margins_intact());

  const std::vector<float> whole = keys.data;
  ops::zero_channels(head.kv, energy.view(), 2, 1, keys.view, s);
  for (int t = 0; t < 3; ++t)
    for (int d = 0; d < 8; ++d) {
      CAPTURE(t, d);
      const bool gone = t < 2 && (d == 0 || d == 3);
      CHECK(keys.view(0, 0, t, d) == (gone ? 0 : whole[static_cast<std::size_t>(8 * t + d)]));
    }
}

TEST_CASE("zero_channels: of equal energies the last goes first, and NaN before all") {
  const Head head(1);
  const auto zeroed = [&](std::vector<float> energy, int count) {
    Rows rows({std::vector<float>(8, 1)});
    ops::zero_channels(head.kv, View<const float, 3>::dense(energy.data(), {1, 1, 8}), count, 0, rows.view, s);
    std::vector<int> out;
    for (int d = 0; d < 8; ++d)
      if (rows.data[static_cast<std::size_t>(d)] == 0) out.push_back(d);
    return out;
  };
  CHECK(zeroed({1, 1, 1, 1, 1, 1, 1, 1}, 3) == std::vector<int>{5, 6, 7});
  CHECK(zeroed({5, 2, NAN, 2, 5, 0, NAN, 9}, 1) == std::vector<int>{6});
  CHECK(zeroed({5, 2, NAN, 2, 5, 0, NAN, 9}, 4) == std::vector<int>{2, 3, 5, 6});
}

// The card: x_prev = [0, 3], x_cur = [2, 0], t = .6.
TEST_CASE("MiniCache's token by hand") {
  const Head head(1);
  Rows former({{0, 3}}), own({{2, 0}});
  Guarded<3> distance({1, 1, 1});
  ops::row_distance(head.kv, former.view, own.view, distance.view(), s);
  CHECK(distance(0, 0, 0) == Approx(.5));
  ListMemory memory;
  const TokenList none{memory.choose(
      head.cache.options(), 1, [](int, int) { return 1; }, [] { return false; })};
  ops::merge_rows(head.kv, .6f, none, former.view, own.view, s);
  CHECK(own.data[0] == Approx(1.6180).margin(1e-4));
  CHECK(own.data[1] == Approx(1.1756).margin(1e-4));
  CHECK(former.data[0] == Approx(2.4271).margin(1e-4));
  CHECK(former.data[1] == Approx(1.7634).margin(1e-4));
}

TEST_CASE("merge_rows leaves listed tokens, zeros and opposite rows alone") {
  const Head head(4);
  Rows former({{0, 3}, {0, 0}, {1, 2}, {1, 1}}), own({{2, 0}, {2, 0}, {-2, -4}, {2, 2}});
  const auto before = std::pair(former.data, own.data);
  Guarded<3> distance({1, 1, 4});
  ops::row_distance(head.kv, former.view, own.view, distance.view(), s);
  CHECK(distance(0, 0, 1) == 1);
  CHECK(distance(0, 0, 2) == 1);
  CHECK(distance(0, 0, 3) == Approx(0).margin(1e-6));
  ListMemory memory;
  const TokenList first{memory.choose(
      head.cache.options(), 4, [](int, int) { return 1; }, [] { return true; })};
  ops::merge_rows(head.kv, .6f, first, former.view, own.view, s);
  for (std::size_t i = 0; i < 32; ++i) {
    CAPTURE(i);
    CHECK(former.data[i] == Approx(before.first[i]).margin(1e-6));
    CHECK(own.data[i] == Approx(before.second[i]).margin(1e-6));
    if (i < 24) CHECK((former.data[i] == before.first[i] && own.data[i] == before.second[i]));
  }
}

TEST_CASE("turn_rows gives the keys before RoPE, and turns them back") {
  PagedFixture cache({1, 2, 16, 4, 8});
  PagedKv kv = cache.view();
  kv.rope_table.attention_scale = 1.5f;
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> plain;
  for (int head = 0; head < 2; ++head)
    for (int t = 0; t < 11; ++t) {
      std::vector<float> key(16);
      for (float& x : key) x = normal(rng);
      plain.push_back(key);
      const int position = 1000 * t + head;
      ops::rotate(key.data(), kv.rope_table, position);
      cache.append(0, head, key, key, position);
    }
  Guarded<4> rows({1, 2, 13, 16});
  ops::read_rows({&kv, KvSide::key}, rows.view(), s);
  const std::vector<float> stored = Guarded<4>::copy(rows.view());
  ops::turn_rows(kv, ops::RopeTurn::off, rows.view(), s);
  for (int head = 0; head < 2; ++head)
    for (int t = 0; t < 11; ++t)
      for (int d = 0; d < 16; ++d)
        CHECK(rows(0, head, t, d) ==
              Approx(plain[static_cast<std::size_t>(11 * head + t)][static_cast<std::size_t>(d)]).margin(1e-6));
  ops::turn_rows(kv, ops::RopeTurn::on, rows.view(), s);
  const std::vector<float> back = Guarded<4>::copy(rows.view());
  for (std::size_t i = 0; i < back.size(); ++i)
    if (i / 16 % 13 < 11) CHECK(back[i] == Approx(stored[i]).margin(1e-6));
  for (const auto i : {11 * 16, 12 * 16, 24 * 16, 26 * 16 - 1})  // rows of no token
    CHECK(back[static_cast<std::size_t>(i)] == stored[static_cast<std::size_t>(i)]);
  CHECK(rows.margins_intact());
  for (const auto regime : {RopeRegime::cache_relative, RopeRegime::re_rotate}) {
    kv.rope = regime;
    CHECK_THROWS_WITH(ops::turn_rows(kv, ops::RopeTurn::off, rows.view(), s),
                      Catch::Contains("got keys that RoPE turns by ranks, wanted the regime original"));
  }
  kv.rope = RopeRegime::original;
  kv.rope_table.inv_freq = nullptr;
  CHECK_THROWS_WITH(ops::turn_rows(kv, ops::RopeTurn::off, rows.view(), s), Catch::Contains("got no RoPE table"));
}

TEST_CASE("ops on rows refuse views that do not fit") {
  const Head head(3);
  Rows rows({{1}, {1}, {1}}), few({{1}, {1}});
  Guarded<3> energy({1, 1, 8}), narrow({1, 1, 4}), scores({1, 1, 3});
  const View<const float, 4> queries = rows.view;
  CHECK_THROWS_WITH(ops::channel_energy(queries, head.kv, few.view, energy.view(), s),
                    Catch::Contains("got rows of another shape"));
  CHECK_THROWS_WITH(ops::channel_energy(queries, head.kv, rows.view, narrow.view(), s),
                    Catch::Contains("got energies of another shape"));
  CHECK_THROWS_WITH(ops::zero_channels(head.kv, energy.view(), 9, 0, rows.view, s),
                    Catch::Contains("got 9 channels and 0 newest tokens"));
  CHECK_THROWS_WITH(ops::zero_channels(head.kv, energy.view(), 1, -1, rows.view, s),
                    Catch::Contains("-1 newest tokens"));
  CHECK_THROWS_WITH(ops::row_distance(head.kv, rows.view, few.view, scores.view(), s),
                    Catch::Contains("got rows of another shape"));
  ListMemory memory;
  const TokenList none{memory.choose(
      head.cache.options(), 1, [](int, int) { return 0; }, [] { return false; })};
  CHECK_THROWS_WITH(ops::merge_rows(head.kv, 1.5f, none, rows.view, rows.view, s), Catch::Contains("wanted 0 to 1"));
}

TEST_CASE("copy_rows: the listed tokens, and what it refuses") {
  PagedFixture cache({1, 2, 8, 4, 2});
  for (int head = 0; head < 2; ++head)
    for (int t = 0; t < 5; ++t) cache.append(0, head, std::vector<float>(8), std::vector<float>(8));
  const PagedKv kv = cache.view();
  std::vector<std::int32_t> index{1, 5}, count{1, 2};
  TokenList list;
  list.index = View<std::int32_t, 3>{index.data(), {1, 2, 2}, {0, 0, 1}};
  list.count = View<std::int32_t, 2>::dense(count.data(), {1, 2});
  std::vector<float> nines(80, 9), rows(80);
  const auto from = View<const float, 4>::dense(nines.data(), {1, 2, 5, 8});
  const auto to = View<float, 4>::dense(rows.data(), {1, 2, 5, 8});
  CHECK_THROWS_WITH(ops::copy_rows(kv, list, from, to, s), Catch::Contains("got place 5, wanted one of 5"));
  count[1] = 0;
  rows.assign(80, 0);
  ops::copy_rows(kv, list, from, to, s);
  for (int h = 0; h < 2; ++h)
    for (int t = 0; t < 5; ++t)
      for (int d = 0; d < 8; ++d) CHECK(to(0, h, t, d) == (h == 0 && t == 1 ? 9 : 0));
}

TEST_CASE("read_range: rows of the range alone, and what cannot be is refused") {
  PagedFixture cache({1, 1, 8, 4, 4});
  for (int t = 0; t < 10; ++t)
    cache.append(0, 0, std::vector<float>(8, static_cast<float>(t)), std::vector<float>(8, static_cast<float>(-t)));
  PagedKv kv = cache.view();
  std::vector<PageEntry> table(kv.table.data, kv.table.data + 3);
  table[0].frame = table[2].frame = null_frame;
  kv.table.data = table.data();
  std::int32_t first = 5, count = 3;
  const TokenRange range{View<const std::int32_t, 2>::dense(&first, {1, 1}),
                         View<const std::int32_t, 2>::dense(&count, {1, 1})};
  Guarded<4> out({1, 1, 3, 8});
  ops::read_range({&kv, KvSide::value}, range, out.view(), s);
  for (int i = 0; i < 3; ++i) CHECK(out(0, 0, i, 7) == static_cast<float>(-5 - i));
  CHECK(out.margins_intact());
  using Catch::Contains;
  const auto read = [&](std::int32_t from, std::int32_t n) {
    first = from, count = n;
    ops::read_range({&kv, KvSide::key}, range, out.view(), s);
  };
  read(10, 0);
  CHECK_THROWS_WITH(read(4, 4), Contains("got 4 tokens from place 4, wanted places below 10 and at most 3"));
  CHECK_THROWS_WITH(read(9, 2), Contains("got 2 tokens from place 9"));
  CHECK_THROWS_WITH(read(-1, 2), Contains("got 2 tokens from place -1"));
  CHECK_THROWS_WITH(read(7, 2), Contains("got page 2 of row 0, head 0 without a device frame"));
  CHECK_THROWS_WITH(ops::read_range({&kv, KvSide::key}, {}, out.view(), s), Contains("got no range"));
}
