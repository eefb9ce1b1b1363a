#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("gsm8k wants the mark, last_number any number") {
  check_golden("gsm8k");
  check_golden("last_number");
  CHECK(score("gsm8k", "It is\n#### 1,234", List{"4\n#### 1234"}) == 1);
  CHECK(score("gsm8k", "It is 1234", List{"#### 1234"}) == 0);
  CHECK(score("last_number", "5 and then $1,234.", List{"#### 1234"}) == 1);
  CHECK(score("last_number", "none", List{"#### 1234"}) == 0);
}
