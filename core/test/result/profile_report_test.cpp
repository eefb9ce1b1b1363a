#include "result/profile_report.hpp"

#include <catch2/catch.hpp>
#include <kvlab/error.hpp>
#include <limits>

#include "result/results_sample.hpp"

using namespace kvlab::results;
using Catch::Contains;

namespace {

kvlab::ProfileArray heads(std::vector<float> values) { return {{2, 2}, std::move(values), "1 = unstable"}; }

std::string write(const TemporaryFolder& dir, const std::string& name, const std::vector<float>& set,
                  const std::string& model = "tiny") {
  ProfileFile file;
  file.model = model;
  file.model_fingerprint = model + "-contents";
  file.profilers = {
      {"voter", "{}", {{"unstable", heads(set)}, {"votes", heads({0, 8, 4, 2})}, {"windows", {{1}, {1}, ""}}}}};
  write_profile(dir / name, sample_info(), file);
  return dir / name;
}

}  // namespace

TEST_CASE("the overlap of head sets is the share of the row's set") {
  const TemporaryFolder dir;
  const std::string a = write(dir, "a.h5", {1, 1, 0, 0}), b = write(dir, "b.h5", {1, 0, 1, 1}),
                    c = write(dir, "c.h5", {0, 0, 0, 0});
  // |A and B| = 1, |A| = 2, |B| = 3.
  CHECK(head_overlap({a, b}, Format::md) ==
        "tiny\n\n### voter unstable: share that the column's file has too\n\n"
        "| heads of | a | b | mean of the others |\n|---|---:|---:|---:|\n"
        "| a | 1.00 | 0.50 | 0.50 |\n| b | 0.33 | 1.00 | 0.33 |\n\n");
  CHECK_THAT(head_overlap({a, b, c}, Format::md),
             Contains("| a | 1.00 | 0.50 | 0.00 | 0.25 |") && Contains("| c | - | - | - | - |"));
}

TEST_CASE("profiles of two models, or without a set of heads, have no overlap") {
  const TemporaryFolder dir;
  const std::string a = write(dir, "a.h5", {1, 1, 0, 0}), other = write(dir, "b.h5", {1, 1, 0, 0}, "large"),
                    nothing = write(dir, "c.h5", {1, 0, 0, std::numeric_limits<float>::quiet_NaN()});
  CHECK_THROWS_WITH(head_overlap({a, other}, Format::table),
                    Contains("b.h5") && Contains("'large'") && Contains("'tiny'"));
  CHECK_THROWS_WITH(head_overlap({a, nothing}, Format::table), Contains("zeros and ones"));
  CHECK_THROWS_WITH(head_overlap({a, dir / "no.h5"}, Format::table), Contains("no.h5"));
  CHECK_THROWS_WITH(head_overlap({a, a}, Format::csv), Contains("csv"));
}

TEST_CASE("a map of heads has a shade and a number for each") {
  const TemporaryFolder dir;
  const ProfileFile file = read_profile(write(dir, "a.h5", {1, 1, 0, 0}));
  CHECK(head_map(file, "votes", Format::table) ==
        "tiny\n\nvoter votes: 1 = unstable\nlayer  heads  0  1\n------------------\n"
        "0      ··██   0  8\n1      ▒▒░░   4  2\n");
  CHECK_THAT(head_map(file, "votes", Format::latex), !Contains("█") && Contains("0 & 0 & 8"));
  CHECK_THROWS_WITH(head_map(file, "vote", Format::table), Contains("did you mean 'votes'?"));
  CHECK_THROWS_WITH(head_map(file, "windows", Format::table), Contains("unstable, votes"));
}
