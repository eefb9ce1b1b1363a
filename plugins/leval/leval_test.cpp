#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("leval_choice takes the first letter A to D, wherever it stands") {
  check_golden("leval_choice");
  CHECK(score("leval_choice", "I think C, not A", List{"C"}) == 1);
  CHECK(score("leval_choice", "But D", List{"B"}) == 1);         // the scorer takes the B of But
  CHECK(score("leval_choice", "none of them", List{"A"}) == 1);  // and A where there is none
  CHECK(score("leval_choice", " ", List{"A"}) == 0);
}

TEST_CASE("leval_letters gives a quarter for some of the right letters and no other") {
  check_golden("leval_letters");
  CHECK(score("leval_letters", "CA", List{"AC"}) == 1);
  CHECK(score("leval_letters", "A. and C. are right", List{"AC"}) == 1);
  CHECK(score("leval_letters", "A", List{"AC"}) == 0.25);
  CHECK(score("leval_letters", "AB", List{"AC"}) == 0);
}

TEST_CASE("leval_math reads digits before the first dot") {
  check_golden("leval_math");
  CHECK(score("leval_math", "The answer is $1,234.50", List{"1234"}) == 1);
  CHECK(score("leval_math", "So 5 and 7 apples\n\nThen 8", List{"7"}) == 1);
  CHECK(score("leval_math", "none", List{"7"}) == 0);
}

TEST_CASE("leval_code looks into the last words") {
  check_golden("leval_code");
  CHECK(score("leval_code", "the output is [1, 2]", List{"[1, 2]"}) == 1);
  CHECK(score("leval_code", "It is 5 and then comes a lot of text", List{"5"}) == 0);
  CHECK(score("leval_code", "the final output is 5 and then comes a lot", List{"5"}) == 1);
}

TEST_CASE("leval_judgment is the first true or false") {
  check_golden("leval_judgment");
  CHECK(score("leval_judgment", "True.", List{"True"}) == 1);
  CHECK(score("leval_judgment", "Not [fact: True]", List{"True"}) == 0);
}

TEST_CASE("leval_part takes a part of the answer, case and spaces apart, or an equal number") {
  check_golden("leval_part");
  CHECK(score("leval_part", "It was The History  of tea.", List{"the history of Tea"}) == 1);
  CHECK(score("leval_part", "5.0", List{"5"}) == 1);
}
