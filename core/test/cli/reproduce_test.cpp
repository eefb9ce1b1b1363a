// `kvlab reproduce` as a user meets it, on the papers of this tree.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>

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
  const Ended ended = run_kvlab({"reproduce", "freekv/tabel3"});
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Contains("got 'freekv/tabel3'") && Contains("did you mean 'freekv/table3'"));
}

TEST_CASE("reproduce says what an item needs where its model is not here") {
  const Ended ended = run_kvlab({"reproduce", "freekv/table3", "--check"});
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Contains("freekv/table3 needs "));
}

TEST_CASE("reproduce runs an item's experiments and sets the published values beside what it measured") {
  const test::Folder folder;
  const std::vector<std::string> words{
      "reproduce", "freekv/figure8", "--model", "synthetic/tiny",
      "--set",     "backend=cpu",    "--set",   "tasks=[{random_prompts: {prompt: 100, samples: 4, answer: 6}}]",
      "-o",        folder / "out"};
  const Ended ran = run_kvlab(words);
  CHECK(ran.code == 0);
  CHECK_THAT(ran.said, Contains("model") && Contains("synthetic/tiny") && Contains("cannot run"));
  std::vector<std::string> again = words;
  again.insert(again.end(), {"--report", "--format", "csv"});
  const Ended csv = run_kvlab(again);
  CHECK(csv.code == 0);
  CHECK_THAT(csv.said, Contains("row,column,published,ours,95 %,verdict\n"));
  const std::size_t row = csv.said.find("speculative retrieval,long input [x],1.9,");
  REQUIRE(row != std::string::npos);
  CHECK(std::atof(csv.said.c_str() + csv.said.find("1.9,", row) + 4) > 0);  // a ratio of two measured times
  CHECK_THAT(csv.said, !Contains(",not run"));
}

TEST_CASE("reproduce refuses what it cannot do before it runs anything") {
  const test::Folder folder;
  const auto said = [&](std::vector<std::string> words) {
    words.insert(words.end(), {"-o", folder / "out"});
    const Ended ended = run_kvlab(words);
    CHECK(ended.code == 2);
    return ended.said;
  };
  CHECK_THAT(said({"reproduce", "freekv/figure8", "--format", "word"}), Contains("wanted table, md, csv or latex"));
  CHECK_THAT(said({"reproduce", "freekv/figure8", "--adapter", "x"}), Contains("wanted --model beside it"));
  CHECK_THAT(said({"reproduce", "freekv/figure8", "freekv/table1"}), Contains("it shows no measurement"));
  CHECK_FALSE(std::filesystem::exists(folder / "out"));
}
