#include "test/support/metric_fixture.hpp"

using namespace kvlab;
using test::check_golden;
using test::score;
using List = std::vector<std::string>;

TEST_CASE("rouge counts as the package rouge-score does") {
  for (const char* name : {"rouge_1", "rouge_2", "rouge_l", "rouge_lsum"}) check_golden(name);
}

TEST_CASE("rouge_l is the F1 of the longest common subsequence") {
  // police killed the gunman / police kill the gunman: LCS 3 of 4 and 4.
  CHECK(score("rouge_l", "police killed the gunman", List{"police kill the gunman"}) == Approx(0.75));
  CHECK(score("rouge_l", "the gunman kill police", List{"police kill the gunman"}) == Approx(0.5));
  CHECK(score("rouge_l", "a b c", List{"x y", "c b a d e"}) == Approx(2 * (1. / 3) * 0.2 / (1. / 3 + 0.2)));
}

TEST_CASE("rouge_lsum takes the common subsequences of lines together") {
  // Lin 2004, 3.2: w1 w2 and w1 w3 w5 are common with w1 w2 w3 w4 w5: 4 of 5 words, and 4 of 10.
  CHECK(score("rouge_lsum", "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", List{"w1 w2 w3 w4 w5"}) == Approx(2 * 0.8 * 0.4 / 1.2));
  CHECK(score("rouge_lsum", "b\na", List{"a\nb"}) == 1);  // in any order of lines
  CHECK(score("rouge_lsum", "b a", List{"a b"}) == 0.5);
  CHECK(score("rouge_lsum", "\n", List{"a"}) == 0);
}

TEST_CASE("rouge_1 and rouge_2 count each n-gram as often as both have it") {
  // 2 of 3 words and 2 of 2; 1 of 2 pairs and 1 of 1.
  CHECK(score("rouge_1", "the cat. The", List{"the cat"}) == Approx(2 * (2. / 3) / (2. / 3 + 1)));
  CHECK(score("rouge_2", "the cat. The", List{"the cat"}) == Approx(2 * 0.5 / 1.5));
  CHECK(score("rouge_2", "cat", List{"cat"}) == 0);
}

TEST_CASE("longbench_rouge counts distinct words over sentences") {
  check_golden("longbench_rouge");
  // The sentence's end is a sentence of one empty word: 3 of 4 words, and 3 of 3.
  CHECK(score("longbench_rouge", "a b. a c. ", {"a b. a c"}) == Approx(2 * 0.75 / 1.75).epsilon(1e-7));
  CHECK(score("longbench_rouge_first_line", "\na b\nc d", {"a b"}) == score("longbench_rouge", "a b", {"a b"}));
}

TEST_CASE("longbench_rouge reads long sentences, where the scorer has no stack left") {
  // 9000 different words, the same ones but the last: F1 of 8999 of 9000.
  std::string answer, reference;
  for (int i = 0; i < 9000; ++i) {
    answer += std::to_string(i) + " ";
    reference += (i == 8999 ? "x" : std::to_string(i)) + " ";
  }
  CHECK(score("longbench_rouge", answer, List{reference}) == Approx(8999. / 9000).epsilon(1e-7));
}
