#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::metric;

TEST_CASE("longbench: the metrics of its metrics.py") {
  for (const char* name : {"classification", "count", "retrieval", "retrieval_zh"}) check_golden(name);
}

TEST_CASE("classification passes over the class after one that it removes") {
  const auto one = metric("classification");
  // "Ci" is a part of the right class and goes; "Town", after it, is not looked at and stays.
  const Record record{{"all_classes", {"Ci", "Town", "City"}}};
  CHECK(one->score("City or Town", {"City"}, record) == 0.5);
  // "Ci" goes and "it" is passed over, so it counts.
  CHECK(one->score("City", {"City"}, {{"all_classes", {"Ci", "it", "City"}}}) == 0.5);
  CHECK(one->score("City\nTown", {"City"}, record) == 0.5);
  CHECK(metric("classification_first_line")->score("City\nTown", {"City"}, record) == 1);
}

TEST_CASE("longbench: questions that cannot be scored are refused") {
  const auto kinds = metric("classification", {{"classes", std::string("kinds")}});
  CHECK_THROWS_WITH(kinds->check({"a"}, {}), Catch::Contains("got no texts in the field 'kinds'"));
  CHECK_THROWS_WITH(kinds->check({"a"}, {{"kinds", {}}}), Catch::Contains("wanted the classes"));
  CHECK_NOTHROW(kinds->check({"a"}, {{"kinds", {"a"}}}));
  CHECK_THROWS_WITH(metric("retrieval")->check({"Paragraph 3", "Paragraph x"}, {}),
                    Catch::Contains("got the reference 'Paragraph x'"));
  CHECK_THROWS_WITH(metric("retrieval_zh")->check({"Paragraph 3"}, {}), Catch::Contains("wanted a paragraph"));
}
