// Groups of pages by hand, and what their ops refuse.
#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "ops/select/page_groups.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Ints = std::vector<std::int32_t>;

// One head of so many tokens, in pages of `size`.
struct Scene {
  LengthsOnly cache;
  std::vector<float> score;
  Ints index = Ints(512), count{-7}, most{1};
  GroupChoice choice;
  bool reference = false;

  Scene(int tokens, int size, std::vector<float> scores) : cache(1, 1, size, {tokens}), score(std::move(scores)) {
    choice.parts = 2;
  }
  Ints pages(std::int64_t room = 512) {
    PageList list;
    list.index = View<std::int32_t, 3>::dense(index.data(), {1, 1, room});
    list.count = View<std::int32_t, 2>::dense(count.data(), {1, 1});
    choice.most = most.data();
    const auto scores = View<const float, 3>::dense(score.data(), {1, 1, static_cast<std::int64_t>(score.size())});
    reference ? ops::group_pages_reference(cache.view(), scores, choice, list)
              : ops::group_pages(cache.view(), scores, choice, list, Stream::cpu());
    return {index.begin(), index.begin() + count[0]};
  }
};

}  // namespace

TEST_CASE("page_groups: the card's pages of two parts, by hand") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene s(7, 2, {1, 9, 5, 6});
    s.reference = reference;
    CHECK(s.pages() == Ints{0, 1});  // 9 against 6
    s.score[1] = 5;
    CHECK(s.pages() == Ints{2, 3});
    s.score[0] = 6;
    CHECK(s.pages() == Ints{0, 1});  // the first of two sixes
    s.choice.newest_group = true;
    CHECK(s.pages() == Ints{2, 3});
    s.choice.newest_group = false;
    s.score = {NAN, NAN, NAN, -INFINITY};
    CHECK(s.pages() == Ints{2, 3});
    s.choice.whole = 7;
    CHECK(s.pages() == Ints{0, 1, 2, 3});
    s.choice.whole = 6;
    CHECK(s.pages() == Ints{2, 3});
    s.most[0] = 0;
    CHECK(s.pages() == Ints{});
    s.choice.newest_group = true;  // it takes a place even where there is none
    CHECK(s.pages() == Ints{2, 3});
    s.choice.parts = 3;
    CHECK(s.pages() == Ints{3});
  }
}

TEST_CASE("page_groups: the card's texts of 4096 and 6400 tokens") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Scene all(4097, 16, std::vector<float>(257));
    all.reference = reference;
    all.choice.parts = 4, all.choice.newest_group = true, all.choice.whole = 4097;
    all.most[0] = 64;
    CHECK(all.pages().size() == 257);  // 65 groups
    Scene some(6401, 16, std::vector<float>(401));
    some.reference = reference;
    some.choice = all.choice;
    some.most[0] = 64;
    for (int p = 0; p < 37 * 4; p += 4) some.score[static_cast<std::size_t>(p) + 2] = -1;  // the other parts are 0
    for (int p = 0; p < 37 * 4; ++p) some.score[static_cast<std::size_t>(p)] -= 1;
    Ints wanted;
    for (int p = 37 * 4; p < 100 * 4; ++p) wanted.push_back(p);
    wanted.push_back(400);
    CHECK(some.pages() == wanted);  // 63 groups of 0 to 99, and group 100
  }
}

TEST_CASE("page_groups: periods begin with their first token") {
  for (const bool reference : {false, true}) {
    CAPTURE(reference);
    Ints last(2);
    std::vector<std::uint8_t> begins(2);
    const auto call = [&](int first, int second) {
      const LengthsOnly cache(1, 2, 4, {first, second});
      const auto numbers = HeadNumbers::dense(last.data(), {1, 1, 2});
      const auto flags = HeadFlags::dense(begins.data(), {1, 2});
      reference ? ops::begun_periods_reference(cache.view(), 4, numbers, flags)
                : ops::begun_periods(cache.view(), 4, numbers, flags, Stream::cpu());
      return Ints{begins[0], begins[1]};
    };
    CHECK(call(0, 3) == Ints{0, 1});  // the first call
    CHECK(call(1, 4) == Ints{1, 0});
    CHECK(call(4, 5) == Ints{0, 1});
    CHECK(call(5, 8) == Ints{1, 0});
    CHECK(call(14, 8) == Ints{1, 0});
    CHECK(last == Ints{4, 2});
  }
}

TEST_CASE("page_groups: what the ops refuse") {
  Scene s(7, 2, {1, 9, 5, 6});
  s.choice.parts = 0;
  CHECK_THROWS_WITH(s.pages(), Catch::Contains("got groups of 0 pages and their numbers, wanted at least 1 page"));
  s.choice.parts = 2;
  CHECK_THROWS_WITH(s.pages(1), Catch::Contains("got a list for 1 pages, wanted room for 2"));
  s.score.pop_back();
  CHECK_THROWS_WITH(s.pages(), Catch::Contains("got scores [1, 1, 3], wanted those of 4 pages"));
  s.most[0] = 2;
  CHECK(s.pages() == Ints{0, 1, 2, 3});  // no scores are read
  Ints last(1);
  std::vector<std::uint8_t> begins(2);
  const auto call = [&](int period, std::int64_t heads) {
    ops::begun_periods(s.cache.view(), period, HeadNumbers::dense(last.data(), {1, 1, 1}),
                       HeadFlags::dense(begins.data(), {heads, 1}), Stream::cpu());
  };
  CHECK_THROWS_WITH(call(0, 1), Catch::Contains("got a period of 0 tokens, wanted at least 1"));
  CHECK_THROWS_WITH(call(4, 2), Catch::Contains("got numbers [1, 1, 1] and flags [2, 1]"));
}
