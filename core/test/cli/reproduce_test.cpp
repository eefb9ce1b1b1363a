// `kvlab reproduce` as a user meets it, on the papers of this tree.
#include <catch2/catch.hpp>

#include "support/child.hpp"

using namespace kvlab;
using Catch::Contains;
using test::Ended;
using test::run_kvlab;

TEST_CASE("reproduce lists every paper, or one, with what an item needs") {
  const Ended all = run_kvlab({"reproduce"});
  CHECK(all.code == 0);
  for (const char* name : {"flexicache/table2", "freekv/table2", "heterocache/table1", "leankv/table1"})
    CHECK_THAT(all.said, Contains(name));
  const Ended one = run_kvlab({"reproduce", "freekv"});
  CHECK(one.code == 0);
  CHECK_THAT(one.said, Contains("freekv/table2") && !Contains("leankv/table1"));
}

TEST_CASE("reproduce names what it knows in place of a misspelt item") {
  const Ended ended = run_kvlab({"reproduce", "freekv/tabel2"});
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Contains("got 'freekv/tabel2'") && Contains("did you mean 'freekv/table2'"));
}

TEST_CASE("reproduce says what an item needs where its model is not here") {
  const Ended ended = run_kvlab({"reproduce", "freekv/table2", "--check"});
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Contains("freekv/table2 needs "));
}
