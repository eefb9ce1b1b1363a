#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::metric;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("code_sim compares the first line of code") {
  check_golden("code_sim");
  CHECK(score("code_sim", "\n# x\nreturn a\nreturn b", List{"return b", "return a"}) == 1);
  CHECK(score("code_sim", "`a`\n# b\n// c", List{"a"}) == 0);
}

TEST_CASE("code_sim: the two ratios of fuzzywuzzy") {
  // difflib takes the first of the longest runs, "t", and has nothing left beside it. The longest common subsequence
  // has two characters.
  CHECK(score("code_sim", "tide", List{"diet"}) == 0.25);
  CHECK(metric("code_sim", {{"ratio", std::string("levenshtein")}})->score("tide", List{"diet"}, {}) == 0.5);
}
