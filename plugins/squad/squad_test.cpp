#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::metric;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("f1 counts words as SQuAD does") {
  check_golden("f1");
  // Answer: cat sat on mat (4 words without the article), reference: cat on mat (3); 3 in common: P 3/4, R 1.
  CHECK(score("f1", "The cat sat on a mat.", List{"cat on the mat"}) == Approx(2 * 0.75 / 1.75));
  CHECK(score("f1", "cat cat", List{"cat"}) == Approx(2 * 0.5 / 1.5));
  CHECK(score("f1", "dog", List{"cat", "dog!"}) == 1);
  CHECK(score("f1", "dog", List{"cat"}) == 0);
  CHECK(score("f1", "", List{"the"}) == 1);  // both are empty without articles
  CHECK(score("f1", "", List{"cat"}) == 0);
}

TEST_CASE("longbench_f1 gives nothing for nothing, and may look at the first line alone") {
  check_golden("longbench_f1");
  CHECK(score("longbench_f1", "", List{"the"}) == 0);
  const auto first = metric("longbench_f1", {{"first_line", true}});
  CHECK(first->score("\n\ncat\ndog", List{"the cat"}, {}) == 1);
  CHECK(first->score("\n", List{"cat"}, {}) == 0);
  CHECK(score("longbench_f1_first_line", "\n\ncat\ndog", List{"the cat"}) == 1);
}

TEST_CASE("exact_match wants the same words in the same order") {
  check_golden("exact_match");
  CHECK(score("exact_match", "The Cat, sat!", List{"dog", "cat sat"}) == 1);
  CHECK(score("exact_match", "sat cat", List{"cat sat"}) == 0);
  CHECK(score("exact_match", "\xff", List{"cat"}) == 0);  // no UTF-8
}
