#include <kvlab/ops.hpp>

#include <algorithm>
#include <catch2/catch.hpp>

#include "cases/paged_fixture.hpp"
#include "ops/score/reference.hpp"
#include "ops/select/reference.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

// One row of one or more heads with `tokens` tokens each. It runs top_tokens and top_pages on given scores.
struct Selection {
  PagedFixture cache;
  int heads;
  Ints index, count, amount;
  Selection(const std::vector<int>& tokens, int page_size = 4)
      : cache({1, static_cast<int>(tokens.size()), 8, page_size, 64}), heads(static_cast<int>(tokens.size())) {
    for (int h = 0; h < heads; ++h)
      for (int t = 0; t < tokens[h]; ++t) cache.append(0, h, std::vector<float>(8, 0.f), std::vector<float>(8, 0.f));
    amount.assign(heads, 0);
  }
  template <class List>
  List list(int capacity) {
    List l;
    index.assign(heads * (capacity + 1), -7);  // one guard entry per head
    count.assign(heads, -7);
    l.index = {index.data(), {1, heads, capacity}, {heads * (capacity + 1), capacity + 1, 1}};
    l.count = View<std::int32_t, 2>::dense(count.data(), {1, heads});
    return l;
  }
  Ints result(int head, int capacity) const {
    const auto* begin = index.data() + head * (capacity + 1);
    for (int i = std::max(0, count[head]); i <= capacity; ++i) CHECK(begin[i] == -7);
    return {begin, begin + count[head]};
  }
  Ints tokens(std::vector<float> scores, int keep, Pins pins = {}, int capacity = 64) {
    std::fill(amount.begin(), amount.end(), keep);
    const auto l = list<TokenList>(capacity);
    const auto n = static_cast<std::int64_t>(scores.size()) / heads;
    ops::top_tokens(cache.view(), View<float, 3>::dense(scores.data(), {1, heads, n}),
                    View<const std::int32_t, 2>::dense(amount.data(), {1, heads}), &pins, l, Stream::cpu());
    return result(0, capacity);
  }
  Ints pages(std::vector<float> scores, int budget, bool newest) {
    std::fill(amount.begin(), amount.end(), budget);
    const auto l = list<PageList>(64);
    const auto n = static_cast<std::int64_t>(scores.size()) / heads;
    ops::top_pages(cache.view(), View<float, 3>::dense(scores.data(), {1, heads, n}),
                   View<const std::int32_t, 2>::dense(amount.data(), {1, heads}), {0, 0, newest}, l, Stream::cpu());
    return result(0, 64);
  }
};

}  // namespace

TEST_CASE("top_tokens: cards by hand") {
  Selection seven({7});
  CHECK(seven.tokens({.5f, 0, 0, .3f, .3f, 0, 0}, 2) == Ints{0, 3});  // SnapKV without pooling: tie to the lower index
  Selection four({4});
  CHECK(four.tokens({-1, -5, -2, -.5f}, 2) == Ints{0, 3});  // Knorm
  // H2O: heavy 2 and recent 2 of the column sums, then one decode step.
  Selection five({5});
  CHECK(five.tokens({2.8f, .9f, .8f, .3f, .2f}, 4, {0, 2}) == Ints{0, 1, 3, 4});
  CHECK(five.tokens({2.85f, .95f, 1.f, .3f, .1f}, 4, {0, 2}) == Ints{0, 2, 3, 4});
  // StreamingLLM: 2 sinks and 3 recent.
  Selection eight({8});
  CHECK(eight.tokens(std::vector<float>(8, 0.f), 5, {2, 3}) == Ints{0, 1, 5, 6, 7});
}

TEST_CASE("top_tokens: pins use up the budget first and stay when they exceed it") {
  Selection s({8});
  const std::vector<float> scores = {0, 9, 8, 7, 6, 5, 4, 3};
  CHECK(s.tokens(scores, 3, {1, 1}) == Ints{0, 1, 7});
  CHECK(s.tokens(scores, 1, {1, 2}) == Ints{0, 6, 7});
  CHECK(s.tokens(scores, 0, {}) == Ints{});
  CHECK(s.tokens(scores, -3, {}) == Ints{});
  CHECK(s.tokens(scores, 8, {}) == Ints{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(s.tokens(scores, 99, {4, 9}) == Ints{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK_THROWS_AS(s.tokens(scores, 5, {}, 4), Error);
  CHECK(s.tokens(scores, 4, {}, 4) == Ints{1, 2, 3, 4});
  Selection empty({0});
  CHECK(empty.tokens({}, 3) == Ints{});
}

TEST_CASE("top_tokens: pins follow text order, not places") {
  PagedFixture cache({1, 1, 8, 4, 8});
  const std::vector<float> x(8, 0.f);
  for (const int position : {5, 0, 9, 2, 7}) cache.append(0, 0, x, x, position);
  std::vector<float> scores = {0, 0, 0, 9, 8};
  Ints index(5), count(1), keep = {3};
  TokenList list;
  list.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, 5});
  list.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
  const Pins pins{1, 1};  // positions 0 and 9: places 1 and 2
  ops::top_tokens(cache.view(), View<float, 3>::dense(scores.data(), {1, 1, 5}),
                  View<const std::int32_t, 2>::dense(keep.data(), {1, 1}), &pins, list, Stream::cpu());
  CHECK(Ints(index.begin(), index.begin() + count[0]) == Ints{1, 2, 3});
}

TEST_CASE("pins of equal text positions go together, first and last alike") {
  PagedFixture cache({1, 1, 8, 4, 8});
  const std::vector<float> x(8, 0.f);
  for (const int position : {5, 1, 1, 9, 9}) cache.append(0, 0, x, x, position);
  std::vector<float> scores(5, 0.f);
  for (const Pins pins : {Pins{1, 0}, Pins{0, 1}, Pins{1, 1}}) {
    Ints index(5), count(1), keep = {1}, plain(5), plain_count(1);
    const auto list = [](Ints& i, Ints& n) {
      TokenList l;
      l.index = View<std::int32_t, 3>::dense(i.data(), {1, 1, 5});
      l.count = View<std::int32_t, 2>::dense(n.data(), {1, 1});
      return l;
    };
    const auto of = View<float, 3>::dense(scores.data(), {1, 1, 5});
    const auto one = View<const std::int32_t, 2>::dense(keep.data(), {1, 1});
    ops::top_tokens(cache.view(), of, one, &pins, list(index, count), Stream::cpu());
    ops::top_tokens_reference(cache.view(), of, one, &pins, list(plain, plain_count));
    CHECK(count[0] == 2 * (pins.first + pins.last));
    CHECK(count == plain_count);
    CHECK(index == plain);
  }
}

TEST_CASE("top_pages: Quest's rows by hand") {
  Selection ten({37});  // 10 pages of 4, the last partial
  const std::vector<float> scores = {5, 1, 9, 2, 3, 8, 4, 7, 6, 0};
  CHECK(ten.pages(scores, 4, false) == Ints{2, 5, 7, 8});
  CHECK(ten.pages(scores, 4, true) == Ints{2, 5, 7, 9});
  CHECK(ten.pages(scores, 3, false) == Ints{2, 5, 7});
  CHECK(ten.pages(scores, 1, true) == Ints{9});
  CHECK(ten.pages(scores, 0, true) == Ints{9});
  CHECK(ten.pages(scores, 10, true) == Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(ten.pages(scores, 50, false).size() == 10);
  ten.cache.unmap(0, 0, 3);  // selection reads no page
  CHECK(ten.pages(scores, 4, false) == Ints{2, 5, 7, 8});
}

namespace {

struct AllotCase {
  std::vector<std::vector<float>> scores;  // per head
  Pins pins = {};
  int total = 0;
};

Ints allot(const AllotCase& c, double floor) {
  const int heads = static_cast<int>(c.scores.size());
  std::size_t most = 0;
  std::vector<int> length;
  for (const auto& s : c.scores) {
    most = std::max(most, s.size());
    length.push_back(static_cast<int>(s.size()));
  }
  Selection cache(length);
  std::vector<float> scores(heads * most, 1e9f);  // entries past a head's length must not count
  for (int h = 0; h < heads; ++h) std::copy(c.scores[h].begin(), c.scores[h].end(), scores.begin() + h * most);
  Ints keep(heads, -7);
  LayerKv kv;
  kv.pages = cache.cache.view();
  Allotment a;
  a.scores = View<float, 3>::dense(scores.data(), {1, heads, static_cast<std::int64_t>(most)});
  a.length = View<const std::int32_t, 2>::dense(length.data(), {1, heads});
  a.pins = &c.pins;
  a.total = &c.total;
  a.keep = View<std::int32_t, 2>::dense(keep.data(), {1, heads});
  a.kv = &kv;
  if (floor < 0)
    ops::allot_uniform(a, Stream::cpu());
  else
    ops::allot_by_score(a, floor, true, Stream::cpu());
  return keep;
}

const std::vector<std::vector<float>> card = {{.9f, .8f, .7f, .6f, .5f, .4f}, {.35f, .2f, .1f, .05f, .01f, .001f}};

}  // namespace

TEST_CASE("allot_by_score: AdaKV's counts by hand") {
  CHECK(allot({card, {}, 4}, 0.5) == Ints{5, 3});
  CHECK(allot({card, {}, 4}, 0.2) == Ints{6, 2});  // 4.8 -> 5 and 1.6 -> 2; the lost token goes to the larger remainder
  CHECK(allot({card, {}, 4}, 1.0) == Ints{4, 4});
  CHECK(allot({card, {}, 4}, 0.0) == Ints{6, 2});
  CHECK(allot({card, {}, 6}, 0.5) == Ints{6, 6});
  CHECK(allot({card, {}, 60}, 0.5) == Ints{6, 6});
  CHECK(allot({card, {}, 0}, 0.5) == Ints{0, 0});
}

TEST_CASE("allot_by_score: pins are kept on top and their scores do not count") {
  // Two recent tokens of each head are pinned, so the candidates are the first four scores.
  auto c = card;
  c[1][4] = c[1][5] = 100;                          // pinned: must not draw budget
  CHECK(allot({c, {0, 2}, 4}, 0.0) == Ints{6, 2});  // four best of .9 .8 .7 .6 | .35 .2 .1 .05
  CHECK(allot({c, {0, 2}, 4}, 1.0) == Ints{4, 4});
  CHECK(allot({c, {0, 2}, 1}, 0.5) == Ints{2, 2});            // pins alone exceed the total
  CHECK(allot({{{1, 2, 3}, {}}, {}, 2}, 0.5) == Ints{3, 0});  // a short head gives its share to the other
}

TEST_CASE("allot_by_score: an exact sum is exact and no head exceeds its length") {
  for (unsigned n = 0; n < 120; ++n) {
    CAPTURE(n);
    RandomCache c(n);
    LayerKv kv;
    kv.pages = c.cache.view();
    auto scores = c.normal(std::int64_t{c.rows()} * c.kv_heads() * c.room());
    if (n % 2)
      for (float& x : scores) x = static_cast<float>(c.rng() % 7);
    std::vector<Pins> pins(c.rows());
    Ints total, length;
    for (int r = 0; r < c.rows(); ++r) {
      pins[r] = {static_cast<int>(c.rng() % 3), static_cast<int>(c.rng() % 3)};
      total.push_back(static_cast<int>(c.rng() % 60));
      for (int h = 0; h < c.kv_heads(); ++h) length.push_back(kv.pages.tokens(r, h));
    }
    Allotment a;
    a.scores = View<float, 3>::dense(scores.data(), {c.rows(), c.kv_heads(), c.room()});
    a.length = View<const std::int32_t, 2>::dense(length.data(), {c.rows(), c.kv_heads()});
    a.pins = n % 3 ? pins.data() : nullptr;
    a.total = total.data();
    a.kv = &kv;
    const auto run = [&](auto allot) {
      Ints keep(length.size(), -7);
      a.keep = View<std::int32_t, 2>::dense(keep.data(), {c.rows(), c.kv_heads()});
      allot();
      return keep;
    };
    const double floor = static_cast<double>(c.rng() % 11) / 10;
    const Ints keep = run([&] { ops::allot_by_score(a, floor, true, Stream::cpu()); });
    for (int r = 0; r < c.rows(); ++r) {
      const int wanted = a.pins ? pins[r].first + pins[r].last : 0, budget = std::max(0, total[r] - wanted);
      int sum = 0, pinned = 0, free = 0;
      for (int h = 0; h < c.kv_heads(); ++h) {
        const int at = r * c.kv_heads() + h, own = std::min(wanted, length[at]);
        REQUIRE(keep[at] >= own);
        REQUIRE(keep[at] <= length[at]);
        sum += keep[at];
        pinned += own;
        free += length[at] - own;
      }
      REQUIRE(sum == pinned + std::min(free, c.kv_heads() * budget));
    }
  }
}

TEST_CASE("allot_uniform and allot_tokens") {
  CHECK(allot({{{1, 1, 1}, {1, 1, 1, 1, 1, 1}}, {}, 4}, -1) == Ints{3, 4});
  CHECK(allot({{{1, 1, 1}, {1, 1, 1, 1, 1, 1}}, {2, 3}, 4}, -1) == Ints{3, 5});
  Ints length = {10, 3, 10, 3}, keep(4), tokens = {5, 2};
  Allotment a;
  a.length = View<const std::int32_t, 2>::dense(length.data(), {2, 2});
  a.keep = View<std::int32_t, 2>::dense(keep.data(), {2, 2});
  ops::allot_tokens(a, tokens.data(), Stream::cpu());
  CHECK(keep == Ints{5, 3, 2, 2});
}
