// Page lists of whole heads.
#include <kvlab/ops.hpp>

#include <catch2/catch.hpp>

#include "cases/paged_fixture.hpp"
#include "ops/select/allot.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

// A page list with poison in entries that nobody wrote.
struct List {
  Ints index, count;
  PageList list;
  List(int rows, int heads, int room)
      : index(static_cast<std::size_t>(rows * heads * room), -7), count(static_cast<std::size_t>(rows * heads), -7) {
    list.index = View<std::int32_t, 3>::dense(index.data(), {rows, heads, room});
    list.count = View<std::int32_t, 2>::dense(count.data(), {rows, heads});
  }
  List(const List&) = delete;
  Ints of(int row, int head) const {
    Ints out;
    for (int i = 0; i < list.count(row, head); ++i) out.push_back(list.index(row, head, i));
    return out;
  }
};

}  // namespace

TEST_CASE("older_pages, lengths and round_allotment by hand") {
  const Ints tokens = {9, 8, 0, 16};
  const auto of = View<const std::int32_t, 2>::dense(tokens.data(), {2, 2});
  List older(2, 2, 4);
  ops::older_pages(of, nullptr, 4, 1, older.list, Stream::cpu());
  CHECK(older.of(0, 0) == Ints{0, 1});
  CHECK(older.of(0, 1) == Ints{0});
  CHECK(older.of(1, 0) == Ints{});
  CHECK(older.of(1, 1) == Ints{0, 1, 2});
  const std::uint8_t rows[] = {1, 0};
  ops::older_pages(of, rows, 4, 0, older.list, Stream::cpu());
  CHECK(older.of(0, 0) == Ints{0, 1, 2});
  CHECK(older.of(1, 1) == Ints{});
  CHECK_THROWS_AS(ops::older_pages(of, nullptr, 4, 0, List(2, 2, 3).list, Stream::cpu()), Error);
  CHECK_THROWS_AS(ops::older_pages(of, nullptr, 0, 0, older.list, Stream::cpu()), Error);
  CHECK_THROWS_AS(ops::older_pages(of, nullptr, 4, -1, older.list, Stream::cpu()), Error);

  PagedFixture cache{{1, 1, 8, 4, 10}};
  for (int t = 0; t < 38; ++t) cache.append(0, 0, std::vector<float>(8, 0.f), std::vector<float>(8, 0.f));
  std::int32_t length = 0;
  ops::lengths(cache.view(), View<std::int32_t, 2>::dense(&length, {1, 1}), Stream::cpu());
  CHECK(length == 38);

  Ints keep = {7, 8, 0, 9};
  const auto kept = View<std::int32_t, 2>::dense(keep.data(), {2, 2});
  const std::uint8_t none[] = {0, 0};
  ops::round_allotment(of, none, 1, kept, Stream::cpu());
  CHECK(keep == Ints{7, 8, 0, 9});
  ops::round_allotment(of, none, 4, kept, Stream::cpu());
  CHECK(keep == Ints{4, 8, 0, 8});
  ops::round_allotment(of, rows, 4, kept, Stream::cpu());
  CHECK(keep == Ints{9, 8, 0, 8});
  ops::round_allotment(of, none, 4, kept, Stream::cpu());
  CHECK(keep == Ints{9, 8, 0, 8});  // a head that keeps everything keeps its partial page, too

  Ints part(4);
  const auto parts = View<std::int32_t, 2>::dense(part.data(), {2, 2});
  ops::share_of_keep(kept, 1, .5, parts, Stream::cpu());
  CHECK(part == Ints{4, 3, 0, 3});
  CHECK_THROWS_WITH(ops::share_of_keep(kept, 1, 1.5, parts, Stream::cpu()), Catch::Contains("got a share of 1.5"));
  CHECK_THROWS_WITH(ops::share_of_keep(View<const std::int32_t, 2>{}, 1, .5, parts, Stream::cpu()),
                    Catch::Contains("got fewer numbers than it is to write"));
}

TEST_CASE("aged_pages by hand") {
  const Ints tokens = {21, 20, 19, 3}, lower = {0, 2, 3, 0}, slots = {1, 0};
  PagedKv kv;
  kv.length = View<const std::int32_t, 2>::dense(tokens.data(), {2, 2});
  kv.slots = slots.data(), kv.rows = 2, kv.kv_heads = 2, kv.page_size = 4;
  const View<const std::int32_t, 2> of_cache;
  List aged(2, 2, 8);
  ops::aged_pages(kv, of_cache, 8, aged.list, Stream::cpu());
  CHECK(aged.of(1, 1) == Ints{0, 1, 2});  // no page is codes yet
  kv.lower_pages = View<const std::int32_t, 2>::dense(lower.data(), {2, 2});
  ops::aged_pages(kv, of_cache, 4, aged.list, Stream::cpu());
  CHECK(aged.of(1, 0) == Ints{0, 1, 2, 3});  // places 0 to 15 of 21, of which 17 to 20 stay
  CHECK(aged.of(1, 1) == Ints{2, 3});        // two are codes already
  CHECK(aged.of(0, 0) == Ints{});
  CHECK(aged.of(0, 1) == Ints{});
  ops::aged_pages(kv, of_cache, 0, aged.list, Stream::cpu());
  CHECK(aged.of(1, 0) == Ints{0, 1, 2, 3, 4});  // the page that is not full never
  CHECK(aged.of(0, 0) == Ints{3});
  const Ints one_less = {20, 20, 19, 3};
  ops::aged_pages(kv, View<const std::int32_t, 2>::dense(one_less.data(), {2, 2}), 1, aged.list, Stream::cpu());
  CHECK(aged.of(0, 0) == Ints{3});
  // KIVI's card, residual and pages of 4 tokens: of 10 and of 12 tokens its values have 6 and 8 codes, and its keys 8
  // and
  // 12. A page ages whole here, so both have 4 and 8.
  const Ints card = {10, 12, 10, 12};
  PagedKv kivi = kv;
  kivi.length = View<const std::int32_t, 2>::dense(card.data(), {2, 2}), kivi.lower_pages = {};
  ops::aged_pages(kivi, of_cache, 4, aged.list, Stream::cpu());
  CHECK(aged.of(0, 0) == Ints{0});
  CHECK(aged.of(0, 1) == Ints{0, 1});
  List small(2, 2, 1);
  ops::aged_pages(kv, of_cache, 0, small.list, Stream::cpu());
  CHECK(small.of(1, 0) == Ints{0});
  CHECK(small.of(1, 1) == Ints{2});
  CHECK_THROWS_AS(ops::aged_pages(kv, of_cache, -1, aged.list, Stream::cpu()), Error);
  CHECK_THROWS_AS(ops::aged_pages(kv, of_cache, 1, List(1, 2, 8).list, Stream::cpu()), Error);
}
