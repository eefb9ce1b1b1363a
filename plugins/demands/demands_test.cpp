#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::metric;
using test::score;
using List = std::vector<std::string>;

namespace {

const List wanted{"1: library", "3: yoga studio", "10: library"};

}  // namespace

TEST_CASE("demands: the text is looked for in the entry of its number") {
  CHECK(score("demands", " a Library.\n#*# Floor 2: x\n#*# Floor 3: A yoga\nstudio\n#*# Floor 10: library", wanted) ==
        1);
  CHECK(score("demands", "lobby\n#*# Floor 3: library, 10 rooms", wanted) == 0);
  CHECK(score("demands", "library\n#*# Floor 10 (top): yoga studio", wanted) == Approx(1. / 3));
  CHECK(score("demands", "x\n#*# Week 3 (May 1st - 7th): Yoga  studio. *** finished ***", wanted) == Approx(1. / 3));
  CHECK(score("demands", "", wanted) == 0);
}

TEST_CASE("listed_demands: the text is looked for in the line of its number") {
  CHECK(score("listed_demands", "1. Library\n2. x\n3. a yoga studio and a bakery\n10. library", wanted) == 1);
  CHECK(score("listed_demands", "1. x\n1. library\n 3) yoga studio\n4. library", wanted) == Approx(1. / 3));
  CHECK(score("listed_demands", "library\nyoga studio", wanted) == 0);
  CHECK(score("listed_demands", "", wanted) == 0);
}

TEST_CASE("demands: a reference without a number is refused") {
  for (const char* name : {"demands", "listed_demands"}) {
    CHECK_NOTHROW(metric(name)->check(wanted, {}));
    for (const char* bad : {"library", ": library", "x1: library", "1:", "1: ", "1 library"})
      CHECK_THROWS_WITH(metric(name)->check({"1: a", bad}, {}),
                        Catch::Contains("got the reference '" + std::string(bad) + "', wanted 'N: text'"));
  }
}
