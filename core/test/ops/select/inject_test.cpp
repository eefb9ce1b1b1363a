// Page lists that follow a made-up or recorded pattern.
#include "ops/select/inject.hpp"

#include <catch2/catch.hpp>

#include <utility>

#include "cases/inject_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

int shared(const Ints& a, const Ints& b) {
  Ints both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return static_cast<int>(both.size());
}

bool ascending(const Ints& list, int pages) {
  return std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end() &&
         (list.empty() || (list.front() >= 0 && list.back() < pages));
}

}  // namespace

TEST_CASE("inject_kept rounds a share of a list") {
  CHECK(ops::inject_kept(0, 10) == 0);
  CHECK(ops::inject_kept(1'000'000, 10) == 10);
  CHECK(ops::inject_kept(800'000, 4) == 3);  // 3.2
  CHECK(ops::inject_kept(700'000, 5) == 4);  // 3.5
}

TEST_CASE("an injected list shares the wanted pages with the one before") {
  for (const int millionths : {0, 250'000, 800'000, 1'000'000}) {
    CAPTURE(millionths);
    InjectFixture f(1, 2, 4, 64);
    f.lengths(40 * 4);
    f.args.overlap = millionths;
    f.args.pins.newest_page = true;
    std::vector<Ints> before(2);
    for (int step = 0; step < 20; ++step) {
      CAPTURE(step);
      f.choose({1, 5, 7, 8, 20, 21, 30, 33, 38, 39});
      ops::inject_pages(f.args, Stream::cpu());
      for (int head = 0; head < 2; ++head) {
        const Ints now = f.of(0, head);
        CHECK(now.size() == 10);
        CHECK(ascending(now, 40));
        CHECK(now.back() == 39);  // pinned, so shared at every overlap
        if (step == 0)
          CHECK(now == Ints{1, 5, 7, 8, 20, 21, 30, 33, 38, 39});
        else
          CHECK(shared(now, before[static_cast<std::size_t>(head)]) == std::max(1, ops::inject_kept(millionths, 10)));
        before[static_cast<std::size_t>(head)] = now;
      }
    }
    CHECK((before[0] != before[1]) == (millionths < 1'000'000));
  }
}

TEST_CASE("where other pages are short, more are shared; a grown list takes others") {
  InjectFixture f(1, 1, 4, 8);
  f.lengths(6 * 4);
  f.choose({0, 1, 2, 3});
  ops::inject_pages(f.args, Stream::cpu());
  f.choose({0, 1, 2, 3});
  ops::inject_pages(f.args, Stream::cpu());
  CHECK(shared(f.of(0, 0), {0, 1, 2, 3}) == 2);  // the first list left two of six pages
  f.args.overlap = 1'000'000;
  const Ints before = f.of(0, 0);
  f.choose({0, 1, 2, 3, 4});
  ops::inject_pages(f.args, Stream::cpu());
  CHECK(f.of(0, 0).size() == 5);
  CHECK(shared(f.of(0, 0), before) == 4);
  f.choose({});
  ops::inject_pages(f.args, Stream::cpu());
  CHECK(f.of(0, 0) == Ints{});
}

TEST_CASE("a sequence without state starts with the selector's choice") {
  InjectFixture f(1, 1, 4, 16);
  f.lengths(64);
  f.choose({3, 4});
  ops::inject_pages(f.args, Stream::cpu());
  CHECK(f.state[0] == 1);
  CHECK(f.state[ops::inject_header] == 0b11000);
  std::fill(f.state.begin(), f.state.end(), 0u);
  f.choose({9, 12});
  ops::inject_pages(f.args, Stream::cpu());
  CHECK(f.of(0, 0) == Ints{9, 12});
}

TEST_CASE("recorded lists come in their order, heads modulo, and start again") {
  const Ints first = {0}, steps = {2}, pages = {1, 2, 0, 5, 3, 4, 6, 7};  // two steps of one layer and two heads
  const std::vector<std::int64_t> begin = {0, 2, 4, 6, 8};
  InjectFixture f(1, 3, 4, 8);
  f.lengths(32);
  f.args.recorded = {first.data(), steps.data(), begin.data(), pages.data(), 1, 1, 2, 0};
  for (int round = 0; round < 2; ++round) {
    f.choose({6, 7});
    ops::inject_pages(f.args, Stream::cpu());
    CHECK(f.of(0, 0) == Ints{1, 2});
    CHECK(f.of(0, 1) == Ints{0, 5});
    CHECK(f.of(0, 2) == Ints{1, 2});
    f.choose({6, 7});
    ops::inject_pages(f.args, Stream::cpu());
    CHECK(f.of(0, 0) == Ints{3, 4});
    CHECK(f.of(0, 1) == Ints{6, 7});
  }
  f.args.pins.newest_page = true;
  f.choose({0, 1, 2, 7});
  ops::inject_pages(f.args, Stream::cpu());
  CHECK(f.of(0, 0).size() == 4);
  CHECK(shared(f.of(0, 0), {1, 2, 7}) == 3);
}

TEST_CASE("each question follows its own recorded lists, from the first one") {
  // Question 0 has three steps, question 1 none, question 2 one.
  const Ints first = {1, 4, 0}, steps = {3, 0, 1}, pages = {7, 1, 2, 3};
  const std::vector<std::int64_t> begin = {0, 1, 2, 3, 4};
  InjectFixture f(2, 1, 4, 8);
  f.lengths(32);
  f.args.recorded = {first.data(), steps.data(), begin.data(), pages.data(), 3, 1, 1, 0};
  const auto next = [&](std::uint32_t of_slot_0, std::uint32_t of_slot_1) {
    f.question[0] = of_slot_0, f.question[1] = of_slot_1;
    f.choose({5});
    ops::inject_pages(f.args, Stream::cpu());
    return std::pair(f.of(1, 0)[0], f.of(0, 0)[0]);  // rows map to slots in reverse
  };
  CHECK(next(0, 2) == std::pair(1, 7));
  CHECK(next(0, 0) == std::pair(2, 1));
  CHECK(next(2, 0) == std::pair(7, 2));
  CHECK(next(0, 0) == std::pair(1, 3));
  CHECK(next(1, 9) == std::pair(5, 5));  // no recorded list: the selector's own choice
}

TEST_CASE("what is drawn follows the sequence, not the slot") {
  InjectFixture f(2, 2, 4, 64);
  f.lengths(40 * 4);
  f.args.overlap = 500'000;
  const Ints chosen{1, 5, 7, 8, 20, 21, 30, 33, 38, 39};
  const auto lists = [&](std::uint32_t first, std::uint32_t second) {
    std::fill(f.state.begin(), f.state.end(), 0u);
    f.sequence = {first, second};  // [slot]; rows map to slots in reverse
    f.args.sequence = f.sequence.data();
    std::vector<Ints> out(4);
    for (int step = 0; step < 5; ++step) {
      f.choose(chosen);
      ops::inject_pages(f.args, Stream::cpu());
      for (int row = 0; row < 2; ++row)
        for (int head = 0; head < 2; ++head) {
          const Ints now = f.of(row, head);
          auto& all = out[static_cast<std::size_t>(2 * row + head)];
          all.insert(all.end(), now.begin(), now.end());
        }
    }
    return out;
  };
  const auto one = lists(3, 9), other = lists(9, 3);
  CHECK(one[0] == other[2]);
  CHECK(one[1] == other[3]);
  CHECK(one[2] == other[0]);
  CHECK(one[0] != one[2]);
}

TEST_CASE("a head that does not choose keeps its list, and its next list follows that one") {
  InjectFixture f(1, 2, 4, 64);
  f.lengths(60 * 4);
  f.args.overlap = 700'000;
  f.args.pins = {9, 14, false};  // pages 0 to 2 and 56 to 59 are no candidates
  const Ints chosen{5, 6, 7, 8, 20, 21, 30, 33, 38, 39};
  std::vector<std::uint8_t> flags(2, 1);
  const auto marks = View<const std::uint8_t, 2>::dense(flags.data(), {1, 2});
  f.args.heads = Heads::flagged(marks);
  std::vector<Ints> before(2);
  std::vector<int> lists(2);
  for (int step = 0; step < 30; ++step) {
    CAPTURE(step);
    flags[0] = step % 3 == 0;
    for (int head = 0; head < 2; ++head)
      if (flags[static_cast<std::size_t>(head)]) {
        for (std::size_t i = 0; i < chosen.size(); ++i) f.args.list.index(0, head, static_cast<int>(i)) = chosen[i];
        f.args.list.count(0, head) = static_cast<int>(chosen.size());
      }
    ops::inject_pages(f.args, Stream::cpu());
    for (int head = 0; head < 2; ++head) {
      CAPTURE(head);
      const auto h = static_cast<std::size_t>(head);
      const Ints now = f.of(0, head);
      REQUIRE(now.size() == 10);
      CHECK(ascending(now, 56));
      CHECK(now.front() > 2);
      if (!flags[h])
        CHECK(now == before[h]);
      else if (lists[h]++ > 0)
        CHECK(shared(now, before[h]) == 7);
      else
        CHECK(now == chosen);
      before[h] = now;
    }
  }
  CHECK(lists == std::vector<int>{10, 30});
}

TEST_CASE(
    "with a clock, a head that paused takes the overlap of reranks, and one that chooses in each step the other") {
  InjectFixture f(1, 2, 4, 64);
  f.lengths(60 * 4);
  f.args.overlap = 700'000, f.args.rerank_overlap = 300'000;
  const Ints chosen{5, 6, 7, 8, 20, 21, 30, 33, 38, 39};
  std::vector<std::uint8_t> flags(2, 1);
  const auto marks = View<const std::uint8_t, 2>::dense(flags.data(), {1, 2});
  f.choose(chosen);
  ops::inject_pages(f.args, Stream::cpu());  // the prompt's lists
  f.args.heads = Heads::flagged(marks);
  std::int32_t steps = 0;
  f.args.clock = &steps;
  std::vector<Ints> before{f.of(0, 0), f.of(0, 1)};
  for (; steps < 30; ++steps) {
    CAPTURE(steps);
    flags[0] = steps % 3 == 0;
    for (int head = 0; head < 2; ++head)
      for (std::size_t i = 0; flags[static_cast<std::size_t>(head)] && i < chosen.size(); ++i)
        f.args.list.index(0, head, static_cast<int>(i)) = chosen[i];
    ops::inject_pages(f.args, Stream::cpu());
    for (int head = 0; head < 2; ++head) {
      const Ints now = f.of(0, head), last = std::exchange(before[static_cast<std::size_t>(head)], now);
      if (flags[static_cast<std::size_t>(head)]) CHECK(shared(now, last) == (head == 0 && steps > 0 ? 3 : 7));
    }
  }
  f.args.clock = nullptr;  // a further prompt, whose lists the next step follows
  flags[0] = 1;
  for (const int wanted : {7, 7}) {
    const Ints last = f.of(0, 0);
    f.choose(chosen);
    ops::inject_pages(f.args, Stream::cpu());
    CHECK(shared(f.of(0, 0), last) == wanted);
    steps = 90, f.args.clock = &steps;
  }
}

TEST_CASE("with the steps of the sequence, a head that chooses now and then takes the list of its step") {
  const Ints first = {0, 4}, steps = {4, 2}, pages = {10, 11, 12, 13, 20, 21};
  const std::vector<std::int64_t> begin = {0, 1, 2, 3, 4, 5, 6};
  InjectFixture f(1, 1, 4, 64);
  f.lengths(60 * 4);
  f.args.recorded = {first.data(), steps.data(), begin.data(), pages.data(), 2, 1, 1, 0};
  std::int32_t taken = 17;  // of earlier questions
  f.args.steps = &taken;
  std::uint8_t flag = 1;
  const auto marks = View<const std::uint8_t, 2>::dense(&flag, {1, 1});
  f.args.heads = Heads::flagged(marks);
  const auto next = [&](std::uint32_t question, bool chooses) {
    f.question[0] = question;
    flag = chooses;
    f.choose({5});
    ops::inject_pages(f.args, Stream::cpu());
    ++taken;
    return f.of(0, 0)[0];
  };
  CHECK(next(0, true) == 10);
  CHECK(next(0, false) == 5);
  CHECK(next(0, true) == 12);
  CHECK(next(1, false) == 5);  // the question's first step counts, though the head does not choose
  CHECK(next(1, true) == 21);
  CHECK(next(1, true) == 20);
}

TEST_CASE("inject_pages refuses what does not fit") {
  InjectFixture f(1, 1, 4, 8);
  f.lengths(20);
  f.choose({5});
  CHECK_THROWS_AS(ops::inject_pages(f.args, Stream::cpu()), Error);
  f.choose({-1});
  CHECK_THROWS_AS(ops::inject_pages(f.args, Stream::cpu()), Error);
  f.choose({1});
  f.args.overlap = 1'000'001;
  CHECK_THROWS_AS(ops::inject_pages(f.args, Stream::cpu()), Error);
  f.args.overlap = 0;
  f.args.rerank_overlap = -1;
  CHECK_THROWS_AS(ops::inject_pages(f.args, Stream::cpu()), Error);
  f.args.rerank_overlap = 0;
  f.args.state.extent[2] = 1;
  CHECK_THROWS_AS(ops::inject_pages(f.args, Stream::cpu()), Error);
}
