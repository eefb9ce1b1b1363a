#include <kvlab/spread.hpp>

#include <catch2/catch.hpp>
#include <vector>

#include "cases/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// One sequence of four KV heads whose places are 0 to 3.
struct FourHeads {
  LengthsOnly memory{1, 4, 16, {5, 5, 5, 5}};
  PagedKv kv = memory.view();
  std::vector<std::uint8_t> marked = std::vector<std::uint8_t>(4), waits = marked,
                            due = std::vector<std::uint8_t>(4, 7);
  std::vector<std::int32_t> places{0, 1, 2, 3};
  std::int32_t count = 0;
  ops::SpreadRule rule{.steps = 3, .lead = 1, .places = places.data(), .counts = &count};

  static HeadFlags flags(std::vector<std::uint8_t>& of) { return HeadFlags::dense(of.data(), {1, 4}); }
  std::vector<int> step(const std::vector<std::uint8_t>& now) {
    marked = now;
    ops::spread_heads(kv, flags(marked), rule, flags(waits), flags(due), Stream::cpu());
    ++count;
    std::vector<int> out;
    for (int h = 0; h < 4; ++h)
      if (due[static_cast<std::size_t>(h)]) out.push_back(h);
    return out;
  }
};

}  // namespace

// Turns: (count + 1 + place) % 3 == 0, so head 2 in step 0, heads 1 in step 1, heads 0 and 3 in step 2.
TEST_CASE("spread_heads: heads that are marked at once act in turn, each once") {
  FourHeads x;
  CHECK(x.step({1, 1, 1, 1}) == std::vector<int>{2});
  CHECK(x.step({0, 0, 0, 0}) == std::vector<int>{1});
  CHECK(x.step({0, 0, 0, 0}) == std::vector<int>{0, 3});
  for (int i = 0; i < 3; ++i) CHECK(x.step({0, 0, 0, 0}).empty());
}

TEST_CASE("spread_heads: a head that is marked again while it waits acts once, and one step means at once") {
  FourHeads x;
  CHECK(x.step({1, 0, 0, 0}).empty());
  CHECK(x.step({1, 0, 0, 0}).empty());
  CHECK(x.step({0, 0, 0, 0}) == std::vector<int>{0});
  CHECK(x.step({0, 0, 0, 0}).empty());
  x.rule.steps = 1;
  CHECK(x.step({0, 1, 0, 1}) == std::vector<int>{1, 3});
  CHECK(x.step({0, 0, 0, 0}).empty());
}

TEST_CASE("forget_waiting: no head has a turn to come") {
  FourHeads x;
  CHECK(x.step({1, 1, 0, 1}).empty());
  ops::forget_waiting(x.kv, FourHeads::flags(x.waits), Stream::cpu());
  for (int i = 0; i < 3; ++i) CHECK(x.step({0, 0, 0, 0}).empty());
}

TEST_CASE("spread_heads refuses rules and flags that do not fit") {
  FourHeads x;
  x.rule.steps = 0;
  CHECK_THROWS_WITH(x.step({0, 0, 0, 0}), Catch::Contains("got 0 steps"));
  x.rule.steps = 2, x.rule.places = nullptr;
  CHECK_THROWS_WITH(x.step({0, 0, 0, 0}), Catch::Contains("or no places"));
  x.rule.places = x.places.data();
  CHECK_THROWS_WITH(
      ops::spread_heads(x.kv, {}, x.rule, FourHeads::flags(x.waits), FourHeads::flags(x.due), Stream::cpu()),
      Catch::Contains("'marked'"));
}
