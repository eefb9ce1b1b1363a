#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("contains folds case and white space and takes the best reference") {
  check_golden("contains");
  check_golden("contains_all");
  CHECK(score("contains", "It is  1234567.\n", List{"1234567"}) == 1);
  CHECK(score("contains", "the\nRED  fox", List{"cat", "red fox"}) == 1);
  CHECK(score("contains", "1 234567", List{"1234567"}) == 0);
  CHECK(score("contains", "", List{"a"}) == 0);
  CHECK(score("contains_all", "one and three", List{"one", "two", "Three", "four"}) == 0.5);
}

TEST_CASE("exact looks at the answer's first line, prefix at its beginning") {
  check_golden("exact");
  check_golden("prefix");
  CHECK(score("exact", "\n  Paris \nand more", List{"paris"}) == 1);
  CHECK(score("exact", "Paris, France", List{"paris"}) == 0);
  CHECK(score("exact", "", List{"paris"}) == 0);
  CHECK(score("prefix", " Paris, France", List{"paris"}) == 1);
  CHECK(score("prefix", "In Paris", List{"paris"}) == 0);
}

TEST_CASE("string_match: RULER's rules, which fold no white space") {
  check_golden("string_match_part");
  check_golden("string_match_all");
  CHECK(score("string_match_part", "a\tB", List{"x", "A\nb"}) == 1);
  CHECK(score("string_match_part", "a  b", List{"a b"}) == 0);
  CHECK(score("string_match_all", "a\tb", List{"A", "b", "c", "a b"}) == 0.5);
}
