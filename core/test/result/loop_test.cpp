#include "result/loop.hpp"

#include <catch2/catch.hpp>
#include <string>

using kvlab::ends_in_loop;

TEST_CASE("an answer that ends in a phrase three times in a row loops") {
  CHECK(ends_in_loop("It is. the cat sat the cat sat the cat sat", false));
  CHECK(ends_in_loop("the cat\n the cat\tthe cat ", false));
  CHECK(ends_in_loop("so so so so so so", false));  // the phrase "so so"
  CHECK(ends_in_loop("and so on. cat sat the cat sat the cat sat the", false));
  CHECK(ends_in_loop("好的好的好的", false));
}

TEST_CASE("two times, a single word three times, and repetition before the end are no loop") {
  CHECK(!ends_in_loop("", false));
  CHECK(!ends_in_loop("", true));
  CHECK(!ends_in_loop("the cat sat the cat sat", false));
  CHECK(!ends_in_loop("no no no", false));
  CHECK(!ends_in_loop("a b a b a b and then it ended", false));
  CHECK(!ends_in_loop("1000000 111111", false));
}

TEST_CASE("the last word of an answer that was cut is left out") {
  CHECK(!ends_in_loop("the cat the cat the cat th", false));
  CHECK(ends_in_loop("the cat the cat the cat th", true));
  CHECK(!ends_in_loop("the cat the cat the cat", true));                 // five whole words
  CHECK(ends_in_loop("a b \xff\xfe a b \xff\xfe a b \xff\xfe", false));  // no UTF-8
}
