// Page lists of whole heads, and the choice of pages on the device.
#include "ops/select/placement.hpp"

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

// One head of ten pages of 4, the last of 2 tokens, in two tiers.
struct TwoTiers {
  PagedFixture cache{{1, 1, 8, 4, 10}};
  std::vector<PageEntry> host = std::vector<PageEntry>(10);
  TwoTiers() {
    for (int t = 0; t < 38; ++t) cache.append(0, 0, std::vector<float>(8, 0.f), std::vector<float>(8, 0.f));
  }
  struct Lists {
    Ints recall, offload, drop;
    bool operator==(const Lists&) const = default;
  };
  // absent: not on the device. copied: also on the host. attended: empty = every page.
  Lists place(const Ints& absent, const Ints& copied, const Ints& attended, Pins pins, int resident) {
    for (const int page : absent) cache.unmap(0, 0, page);
    for (const int page : copied) host[static_cast<std::size_t>(page)].frame = 0;
    List recall(1, 1, 10), offload(1, 1, 10), drop(1, 1, 10), read(1, 1, 10);
    std::copy(attended.begin(), attended.end(), read.index.begin());
    read.count[0] = static_cast<int>(attended.size());
    ops::PlacementArgs a;
    a.device = a.host = cache.view();
    a.host.table = View<const PageEntry, 3>::dense(host.data(), {1, 1, 10});
    a.attended = attended.empty() ? nullptr : &read.list;
    a.pins = pins;
    a.resident_tokens = resident;
    a.recall = recall.list, a.offload = offload.list, a.drop = drop.list;
    ops::place_pages(a, Stream::cpu());
    return {recall.of(0, 0), offload.of(0, 0), drop.of(0, 0)};
  }
};

}  // namespace

TEST_CASE("place_pages by hand") {
  using L = TwoTiers::Lists;
  SECTION("everything is read: what is absent comes up, nothing goes") {
    CHECK(TwoTiers().place({1, 2, 8}, {1, 2, 8}, {}, {}, 0) == L{{1, 2, 8}, {}, {}});
  }
  SECTION("no room beside what is read: all else goes but the newest page, without a copy it is offloaded first") {
    CHECK(TwoTiers().place({1, 2, 8}, {0, 1, 2, 3, 8}, {2, 5}, {}, 0) == L{{2}, {4, 6, 7}, {0, 3, 4, 6, 7}});
  }
  SECTION("pinned tokens are read with their pages") {
    CHECK(TwoTiers().place({0, 8}, {0, 8}, {5}, {5, 3}, 0) == L{{0, 8}, {2, 3, 4, 6, 7}, {2, 3, 4, 6, 7}});
  }
  SECTION("a resident window keeps the newest pages that are there") {
    CHECK(TwoTiers().place({7, 8}, {7, 8}, {0, 2}, {}, 20) == L{{}, {1, 3, 4}, {1, 3, 4}});
    CHECK(TwoTiers().place({}, {}, {0}, {}, 1000) == L{{}, {}, {}});
  }
  SECTION("a page that does not exist") {
    CHECK_THROWS_AS(TwoTiers().place({}, {}, {3, 10}, {}, 0), Error);
    CHECK_THROWS_AS(TwoTiers().place({}, {}, {-1}, {}, 0), Error);
  }
}

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

  TwoTiers t;
  std::int32_t length = 0;
  ops::lengths(t.cache.view(), View<std::int32_t, 2>::dense(&length, {1, 1}), Stream::cpu());
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
}
