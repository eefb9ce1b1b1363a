// `kvlab report` on result files: several of them, and two rows by name.
#include <catch2/catch.hpp>

#include "result/results_sample.hpp"
#include "support/child.hpp"

using namespace kvlab;
using Catch::Contains;

namespace {

// A file whose cell of `policy` answered six contexts rightly.
void write_file(const std::string& file, const std::string& policy) {
  results::CellResult cell;
  cell.id = policy;
  cell.summary.cell = cell.summary.policy = policy;
  cell.summary.params = policy == "everything" ? "{}" : R"({"policy": {"some": {}}})";
  cell.summary.model = "m";
  cell.summary.task = "t";
  for (int i = 0; i < 6; ++i) {
    results::SampleRow& s = cell.samples.emplace_back();
    s.sample = s.task_sample = i;
    s.question = 0;
    s.score = 1;
    s.stop = "eos";
  }
  results::write_part(file, cell, results::sample_info());
}

}  // namespace

TEST_CASE("several result files are reported together, and two rows of them by name") {
  const test::TemporaryFolder dir;
  const std::string one = dir / "one.h5", two = dir / "two.h5";
  write_file(one, "everything");
  write_file(one, "some");
  write_file(two, "some");
  const auto both = test::run_kvlab({"report", one, two});
  CHECK(both.code == 0);
  CHECK_THAT(both.said, Contains("against one:everything") && Contains("two:some") && !Contains("\x1b"));
  const auto compared = test::run_kvlab({"report", one, two, "--compare", "two:some", "one:some"});
  CHECK(compared.code == 0);
  CHECK_THAT(compared.said, Contains("two:some against one:some [1]: 6 questions in 6 contexts"));
  const auto names = test::run_kvlab({"report", one, "--compare", "some", "other"});
  CHECK(names.code == 2);
  CHECK_THAT(names.said, Contains("wanted two of: everything, some"));
  CHECK(test::run_kvlab({"report", one, "--compare", "some"}).code == 2);
  CHECK(test::run_kvlab({"report", one, "--compare", "some", "everything", "--format", "csv"}).code == 2);
  CHECK(test::run_kvlab({"report", one, "--compare", "some", "everything", "--plugins"}).code == 2);
}

TEST_CASE("a report takes each file once, and compares two rows") {
  const test::TemporaryFolder dir;
  const std::string file = dir / "one.h5";
  write_file(file, "everything");
  write_file(file, "some");
  for (const char* other : {"one.h5", "./one.h5"}) {
    const auto ended = test::run_kvlab({"report", file, dir / other});
    CHECK(ended.code == 2);
    CHECK_THAT(ended.said, Contains("one.h5: got this file twice, wanted each file once"));
  }
  const auto compared = test::run_kvlab({"report", file, "--compare", "some", "some"});
  CHECK(compared.code == 2);
  CHECK_THAT(compared.said, Contains("got the row 'some' twice, wanted two rows"));
}

TEST_CASE("a ladder is one of the reports that stand in place of the tables") {
  const test::TemporaryFolder dir;
  const std::string file = dir / "one.h5";
  write_file(file, "everything");
  const auto ladder = test::run_kvlab({"report", file, "--ladder"});
  CHECK(ladder.code == 0);
  CHECK_THAT(ladder.said, Contains("m, t: no ladder: wanted a finished row of the policy random"));
  CHECK_THAT(test::run_kvlab({"report", file, "--ladder", "--format", "csv"}).said,
             Contains("place,place_lo,place_hi"));
  for (const std::vector<std::string>& other : std::vector<std::vector<std::string>>{
           {"--plugins"}, {"--attempts"}, {"--array", "x"}, {"--html", "page"}, {"--compare", "a", "b"}}) {
    std::vector<std::string> words{"report", file, "--ladder"};
    words.insert(words.end(), other.begin(), other.end());
    CAPTURE(other.front());
    CHECK(test::run_kvlab(words).code == 2);
  }
}
