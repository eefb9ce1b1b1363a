#include "run/metrics.hpp"

#include <kvlab/error.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

using namespace kvlab;
using List = std::vector<std::string>;

TEST_CASE("contains folds case and white space and takes the best reference") {
  CHECK(score("contains", "It is  1234567.\n", List{"1234567"}) == 1);
  CHECK(score("contains", "the\nRED  fox", List{"cat", "red fox"}) == 1);
  CHECK(score("contains", "1 234567", List{"1234567"}) == 0);
  CHECK(score("contains", "", List{"a"}) == 0);
  CHECK(score("contains_all", "one and three", List{"one", "two", "Three", "four"}) == 0.5);
}

TEST_CASE("exact looks at the answer's first line, prefix at its beginning") {
  CHECK(score("exact", "\n  Paris \nand more", List{"paris"}) == 1);
  CHECK(score("exact", "Paris, France", List{"paris"}) == 0);
  CHECK(score("exact", "", List{"paris"}) == 0);
  CHECK(score("prefix", " Paris, France", List{"paris"}) == 1);
  CHECK(score("prefix", "In Paris", List{"paris"}) == 0);
}

TEST_CASE("f1 counts words as SQuAD does") {
  // Answer: cat sat on mat (4 words without the article), reference: cat on mat (3); 3 in common: P 3/4, R 1.
  CHECK(score("f1", "The cat sat on a mat.", List{"cat on the mat"}) == Approx(2 * 0.75 / 1.75));
  CHECK(score("f1", "cat cat", List{"cat"}) == Approx(2 * 0.5 / 1.5));
  CHECK(score("f1", "dog", List{"cat", "dog!"}) == 1);
  CHECK(score("f1", "dog", List{"cat"}) == 0);
  CHECK(score("f1", "", List{"the"}) == 1);  // both are empty without articles
  CHECK(score("f1", "", List{"cat"}) == 0);
}

TEST_CASE("rouge_l is the F1 of the longest common subsequence") {
  // police killed the gunman / police kill the gunman: LCS 3 of 4 and 4.
  CHECK(score("rouge_l", "police killed the gunman", List{"police kill the gunman"}) == Approx(0.75));
  CHECK(score("rouge_l", "the gunman kill police", List{"police kill the gunman"}) == Approx(0.5));
  CHECK(score("rouge_l", "a b c", List{"x y", "c b a d e"}) == Approx(2 * (1. / 3) * 0.2 / (1. / 3 + 0.2)));
}

TEST_CASE("choice takes the first letter that stands alone") {
  CHECK(score("choice", "B", List{"B"}) == 1);
  CHECK(score("choice", " (c) because", List{"C"}) == 1);
  CHECK(score("choice", "The answer is D.", List{"d"}) == 1);
  CHECK(score("choice", "Because of A, not B", List{"A"}) == 1);
  CHECK(score("choice", "It is a case of B", List{"B"}) == 1);
  CHECK(score("choice", "Dogs", List{"D"}) == 0);
  CHECK(score("choice", "", List{"A"}) == 0);
}

TEST_CASE("first_integer and word are InfiniteBench's rules") {
  CHECK(score("first_integer", " 71432. Remember it. 71432", List{"71432"}) == 1);
  CHECK(score("first_integer", "key 7143 2", List{"71432"}) == 0);
  CHECK(score("first_integer", "none", List{"71432"}) == 0);
  CHECK(score("word", "\"ab-1\".", List{"ab-1"}) == 1);
  CHECK(score("word", "it is {x:ab-1}, I think", List{"ab-1"}) == 1);
  CHECK(score("word", "ab-12", List{"ab-1"}) == 0);
}

TEST_CASE("no reference is no score; an unknown metric is refused") {
  CHECK(std::isnan(score("contains", "x", {})));
  CHECK_THROWS_WITH(score("rouge", "x", List{"x"}),
                    Catch::Contains("got metric 'rouge'") && Catch::Contains("rouge_l"));
  for (const std::string& name : metric_names()) CHECK(std::isfinite(score(name, "b", List{"B"})));
}

TEST_CASE("means and percentiles") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(mean({1, nan, 2}) == 1.5);
  CHECK(std::isnan(mean({nan})));
  CHECK(percentile({4, 1, 3, 2}, 0.5) == 2);
  CHECK(percentile({4, 1, 3, 2}, 0.95) == 4);
  CHECK(percentile({7}, 0.01) == 7);
  CHECK(std::isnan(percentile({}, 0.5)));
  // NaN means not measured and is left out at any place. Infinite values are measured and count.
  const double inf = std::numeric_limits<double>::infinity();
  for (const std::vector<double>& v : {std::vector{nan, 1., 2., 3.}, {1., 2., nan, 3.}, {3., 2., 1., nan}}) {
    CHECK(percentile(v, 0.5) == 2);
    CHECK(percentile(v, 1) == 3);
  }
  CHECK(std::isnan(percentile({nan, nan}, 0.5)));
  CHECK(mean({1, inf, nan}) == inf);
  CHECK(percentile({1, inf, 2}, 1) == inf);
}
