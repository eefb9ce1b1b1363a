#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("first_integer and word are InfiniteBench's rules") {
  check_golden("first_integer");
  check_golden("word");
  CHECK(score("first_integer", " 71432. Remember it. 71432", List{"71432"}) == 1);
  CHECK(score("first_integer", "key 7143 2", List{"71432"}) == 0);
  CHECK(score("first_integer", "none", List{"71432"}) == 0);
  CHECK(score("word", "\"ab-1\".", List{"ab-1"}) == 1);
  CHECK(score("word", "it is {x:ab-1}, I think", List{"ab-1"}) == 1);
  CHECK(score("word", "ab-12", List{"ab-1"}) == 0);
}

TEST_CASE("infinitebench_name wants the first name as a word, in capitals") {
  check_golden("infinitebench_name");
  CHECK(score("infinitebench_name", "Is it \"Ann\"?", List{"ANN"}) == 1);
  CHECK(score("infinitebench_name", "Anna", List{"ANN"}) == 0);
  CHECK(score("infinitebench_name", "Ann", List{"Ann"}) == 0);  // the scorer's names are capitals
  CHECK(score("infinitebench_name", "Ann", List{"BOB", "ANN"}) == 0);
}

TEST_CASE("infinitebench_choice takes the letter or its text") {
  check_golden("infinitebench_choice");
  CHECK(score("infinitebench_choice", "the answer is: Ann", List{"C", "Ann"}) == 1);
  CHECK(score("infinitebench_choice", "", List{"C", "Ann"}) == 0);
}

TEST_CASE("f1_characters counts characters, without spaces and marks") {
  check_golden("f1_characters");
  CHECK(score("f1_characters", "\u5f20\u4e09\u3002", List{" \u5f20 \u4e09"}) == 1);
  CHECK(score("f1_characters", "\u5f20\u4e09\u662f", List{"\u5f20\u4e09"}) == Approx(0.8));  // precision 2/3, recall 1
  CHECK(score("f1_characters", "\u3002", List{"\u3002"}) == 0);
}
