#include <kvlab/ops.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "support/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Ints = std::vector<std::int32_t>;

// One row, one or more heads of `tokens` tokens each; what top_tokens and top_pages give for these scores.
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
    index.assign(heads * (capacity + 1), -7);  // one entry of guard a head
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

TEST_CASE("top_tokens: exact against a stable sort, with ties, infinities, zeros of both signs and NaN") {
  std::mt19937 rng(3);
  for (int trial = 0; trial < 200; ++trial) {
    const int n = 1 + static_cast<int>(rng() % 60), keep = static_cast<int>(rng() % 64);
    Selection s({n});
    std::vector<float> scores(n);
    const float special[] = {-0.f, 0.f, INFINITY, -INFINITY, NAN, 1.f, -1.f, 1e-40f, -1e-40f};
    for (float& x : scores) x = rng() % 3 ? special[rng() % 9] : static_cast<float>(rng() % 5);
    Ints order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      if (std::isnan(scores[a]) || std::isnan(scores[b])) return !std::isnan(scores[a]) && std::isnan(scores[b]);
      return scores[a] > scores[b];
    });
    order.resize(std::min(n, keep));
    std::sort(order.begin(), order.end());
    REQUIRE(s.tokens(scores, keep) == order);
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
  std::vector<float> scores(heads * most, 1e9f);  // entries past a head's length mean nothing
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
  // Two recent tokens pinned in each head: candidates are the first four scores.
  auto c = card;
  c[1][4] = c[1][5] = 100;                          // pinned: must not draw budget
  CHECK(allot({c, {0, 2}, 4}, 0.0) == Ints{6, 2});  // four best of .9 .8 .7 .6 | .35 .2 .1 .05
  CHECK(allot({c, {0, 2}, 4}, 1.0) == Ints{4, 4});
  CHECK(allot({c, {0, 2}, 1}, 0.5) == Ints{2, 2});            // pins alone exceed the total
  CHECK(allot({{{1, 2, 3}, {}}, {}, 2}, 0.5) == Ints{3, 0});  // a short head gives its share to the other
}

TEST_CASE("allot_by_score: the sum is exact and no head exceeds its length") {
  std::mt19937 rng(8);
  for (int trial = 0; trial < 200; ++trial) {
    AllotCase c;
    const int heads = 1 + static_cast<int>(rng() % 5);
    int free = 0;
    c.pins = {static_cast<int>(rng() % 3), static_cast<int>(rng() % 3)};
    const int pinned = c.pins.first + c.pins.last;
    for (int h = 0; h < heads; ++h) {
      std::vector<float> s(10 + rng() % 40);
      for (float& x : s) x = static_cast<float>(rng() % 7);
      free += static_cast<int>(s.size()) - pinned;
      c.scores.push_back(s);
    }
    c.total = pinned + static_cast<int>(rng() % 30);
    const Ints keep = allot(c, static_cast<double>(rng() % 11) / 10);
    int sum = 0;
    for (int h = 0; h < heads; ++h) {
      REQUIRE(keep[h] >= pinned);
      REQUIRE(keep[h] <= static_cast<int>(c.scores[h].size()));
      sum += keep[h];
    }
    REQUIRE(sum == heads * pinned + std::min(free, heads * (c.total - pinned)));
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
  CHECK_THROWS_AS(ops::allot_tokens(a, tokens.data(), Stream::cuda(nullptr)), Error);
}
