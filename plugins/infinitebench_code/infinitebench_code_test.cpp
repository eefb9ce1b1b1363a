#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("leading_numbers counts up to the first wrong number") {
  check_golden("leading_numbers");
  CHECK(score("leading_numbers", "[1, 5, 9]", List{"[1, 5, 8, 9]"}) == 0.5);
  CHECK(score("leading_numbers", "1, 5, 8, 9, 9", List{"[1, 5, 8, 9]"}) == 1);
  CHECK(score("leading_numbers", "8, -5", List{"[8, -5]"}) == 0.5);  // the scorer reads no signs of an answer
  CHECK_THROWS_WITH(test::metric("leading_numbers")->check({"[]"}, {}), Catch::Contains("wanted numbers"));
}

TEST_CASE("first_number reads a fraction") {
  check_golden("first_number");
  CHECK(score("first_number", "about 3.50, or 4", List{"3.5"}) == 1);
  CHECK(score("first_number", "It is 42.", List{"42"}) == 1);
  CHECK(score("first_number", "42.7", List{"42"}) == 0);
  CHECK_THROWS_WITH(test::metric("first_number")->check({"none"}, {}), Catch::Contains("wanted numbers"));
}

TEST_CASE("last_integer is the last word") {
  check_golden("last_integer");
  CHECK(score("last_integer", "The value of func_1(-2) is: -7.", List{"-7"}) == 1);
  CHECK(score("last_integer", "It is 7 apples", List{"7"}) == 0);
}

TEST_CASE("infinitebench_option takes the letter, or the text behind a phrase") {
  check_golden("infinitebench_option");
  CHECK(score("infinitebench_option", "B. g crashes", List{"B", "g"}) == 1);
  CHECK(score("infinitebench_option", "\nB: g", List{"B", "g"}) == 1);
  CHECK(score("infinitebench_option", "  B.", List{"B", "g"}) == 1);
  CHECK(score("infinitebench_option", "answer is:\u2014g", List{"B", "g"}) == 1);  // one character, of three bytes
  CHECK(score("infinitebench_option", "The answer is: `g`", List{"B", "g"}) == 1);
  CHECK(score("infinitebench_option", "B", List{"B", "g"}) == 0);  // the scorer wants a dot, a colon or the phrase
}
