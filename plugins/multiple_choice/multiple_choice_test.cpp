#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::metric;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("choice takes the first letter that stands alone") {
  check_golden("choice");
  CHECK(score("choice", "B", List{"B"}) == 1);
  CHECK(score("choice", " (c) because", List{"C"}) == 1);
  CHECK(score("choice", "The answer is D.", List{"d"}) == 1);
  CHECK(score("choice", "Because of A, not B", List{"A"}) == 1);
  CHECK(score("choice", "It is a case of B", List{"B"}) == 1);
  CHECK(score("choice", "Dogs", List{"D"}) == 0);
  CHECK(score("choice", "", List{"A"}) == 0);
}

TEST_CASE("longbench_v2_choice reads the phrase that the prompt asks for") {
  check_golden("longbench_v2_choice");
  CHECK(score("longbench_v2_choice", "The correct answer is A, or: The correct answer is (B).", List{"B"}) == 1);
  CHECK_THROWS_WITH(metric("longbench_v2_choice")->check({"E"}, {}), Catch::Contains("wanted A, B, C or D"));
}

TEST_CASE("gpqa_choice tries one phrase after the other, and of each its first place") {
  check_golden("gpqa_choice");
  CHECK(score("gpqa_choice", "(A) is wrong. The correct answer is (B).", List{"B"}) == 1);
  CHECK(score("gpqa_choice", "answer is (X), or Answer: (C)", List{"C"}) == 1);
  CHECK(score("gpqa_choice", "The correct answer is C", List{"C"}) == 0);  // the scorer wants brackets
}

TEST_CASE("choice_pro has ten letters and three rules") {
  check_golden("choice_pro");
  CHECK(score("choice_pro", "A is wrong. The answer is (J).", List{"J"}) == 1);
  CHECK(score("choice_pro", "The answer is (C). Or is it D", List{"D"}) == 0);
  CHECK(score("choice_pro", "Answer: E", List{"E"}) == 1);
  CHECK(score("choice_pro", "Not B, so I take F", List{"F"}) == 1);
  CHECK(score("choice_pro", "no letter", List{"A"}) == 0);
  CHECK(score("choice_pro", "no letter", List{"G"}) == 1);
  CHECK(metric("choice_pro", {{"guess", false}})->score("no letter", List{"G"}, {}) == 0);
  CHECK_THROWS_WITH(metric("choice_pro")->check({"K"}, {}), Catch::Contains("wanted a letter A to J"));
}
