#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("boxed compares as MATH does") {
  check_golden("boxed");
  CHECK(score("boxed", "so \\boxed{\\frac12}", List{"1", "0.5"}) == 1);
  CHECK(score("boxed", "\\boxed{1} and \\boxed{2}", List{"thus \\boxed{2}."}) == 1);
  CHECK(score("boxed", "2", List{"2"}) == 0);
}
