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
        "tiny\n\n### voter unstable: share of the row's heads that the column's file has too; ·· 0 to ██ 1\n\n"
        "| heads of | files | a | b | mean of the others | by chance |\n|---|---|---:|---:|---:|---:|\n"
        "| a | ██▒▒ | 1.00 | 0.50 | 0.50 | 0.75 |\n| b | ░░██ | 0.33 | 1.00 | 0.33 | 0.50 |\n\n"
        "### voter unstable: files that have the head; ·· 0 to ██ 2\n\n"
        "| layer | heads | 0 | 1 |\n|---|---|---:|---:|\n"
        "| 0 | ██▒▒ | 2 | 1 |\n| 1 | ▒▒▒▒ | 1 | 1 |\n\n");
  // 3 and 0 of 4 heads are 0.375 in the mean.
  CHECK_THAT(head_overlap({a, b, c}, Format::md), Contains("| a | ██▒▒·· | 1.00 | 0.50 | 0.00 | 0.25 | 0.38 |") &&
                                                      Contains("| c |        | - | - | - | - | 0.62 |"));
  CHECK_THAT(head_overlap({a, b}, Format::latex), !Contains("█") && Contains("a & 1.00 & 0.50 & 0.50 & 0.75"));
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
        "tiny\n\nvoter votes: 1 = unstable; ·· 0 to ██ 8; * unstable\nlayer  heads   0   1\n--------------------\n"
        "0      ·*█*   *0  *8\n1      ▒▒░░    4   2\n");
  CHECK_THAT(head_map(file, "votes", Format::latex), !Contains("█") && Contains("0 & *0 & *8"));
  CHECK_THAT(head_map(file, "unstable", Format::table), Contains("0      ████   1  1\n1      ····   0  0\n"));
  CHECK_THROWS_WITH(head_map(file, "vote", Format::table), Contains("did you mean 'votes'?"));
  CHECK_THROWS_WITH(head_map(file, "windows", Format::table), Contains("unstable, votes"));
}

TEST_CASE("a profile with a set of heads is reported as maps and curves that tell the set's heads apart") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  ProfileFile file;
  file.model = "tiny";
  file.profilers = {{"voter",
                     "{}",
                     {{"drift", {{2, 2, 2}, {1, nan, 3, 4, 5, 6, 9, 10}, "share, of pages, by steps after the first"}},
                      {"stability", {{2, 2}, {0.25, 0.5, 1, nan}, "mean"}},
                      {"unstable", heads({1, 1, 0, 0})},
                      {"entropy", {{2, 4}, {0, 1, 2, 3, 4, 5, 6, 7}, "nats, of query heads"}},
                      {"similar", {{2, 2, 2}, std::vector<float>(8, 0.f), "share"}},
                      {"windows", {{1}, {3}, "windows"}}}}};
  const std::string text = profile_report(file, Format::table);
  // The set has the heads with 1 and 3, then nothing and 4; the others have 5 and 9, then 6 and 10.
  const std::string bar = "█";
  const auto of = [&](int length) {
    std::string line;
    for (int i = 0; i < length; ++i) line += bar;
    return line;
  };
  CHECK_THAT(text, Contains("voter drift: share, of pages, by steps after the first; mean of heads; bars from 0 to 8\n"
                            "steps after the first  unstable            other heads\n") &&
                       Contains("\n1                      " + of(8) + " 2          " + of(28) + " 7\n") &&
                       Contains("\n2                      " + of(16) + " 4  " + of(32) + " 8\n"));
  CHECK_THAT(text, Contains("voter stability: mean; ·· 0.25 to ██ 1; * unstable\n") &&
                       Contains("0      ·*░*   *0.25  *0.5\n1      ██         1     -\n"));
  CHECK_THAT(text, Contains("voter {}\n") && Contains("\nwindows         1  3.000"));
  CHECK_THAT(text, Contains("voter similar: share; mean of heads; bars from 0 to 0\nentry  unstable  other heads\n") &&
                       Contains("1      0         0\n"));
  CHECK_THAT(text, !Contains("voter unstable") && !Contains("voter entropy") && !Contains("voter windows"));
  const std::string latex = profile_report(file, Format::latex);
  CHECK_THAT(latex, !Contains(bar) && Contains("steps after the first & unstable & other heads") &&
                        Contains("1 & 2 & 7") && Contains("0 & *0.25 & *0.5"));
  CHECK_THROWS_WITH(profile_report(file, Format::csv), Contains("csv"));
}

TEST_CASE("classes of heads are drawn by their first letters and counted") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  ProfileFile file;
  file.model = "tiny";
  file.profilers = {{"grouper",
                     "{}",
                     {{"role", {{2, 3}, {0, 1, 1, 1, nan, 2}, "role of a head, one of full, small, none"}},
                      {"zeros", {{2, 3}, std::vector<float>(6, 0.f), "role of a head, one of full, small, none"}}}}};
  const std::string map =
      "grouper role: role of a head, one of full, small, none\n"
      "layer  heads  full  small  none\n-------------------------------\n"
      "0      fss       1      2     0\n1      s-n       0      1     1\nall              1      3     1\n";
  CHECK_THAT(profile_report(file, Format::table), Contains(map));
  CHECK(head_map(file, "role", Format::table) == "tiny\n\n" + map);
  CHECK_THAT(head_map(file, "role", Format::latex), Contains("1 & s-n & 0 & 1 & 1"));
  // Classes 0 and 1 are no set of heads.
  CHECK_THAT(profile_report(file, Format::table), !Contains("* zeros"));
}

TEST_CASE("a profile without a set of heads is reported by its quantiles alone") {
  ProfileFile file;
  file.profilers = {{"counter", "{}", {{"votes", heads({0, 8, 4, 2})}, {"ties", {{4}, {0, 1, 0, 1}, ""}}}}};
  const std::string text = profile_report(file, Format::table);
  CHECK_THAT(text, Contains("votes       4  0.000") && !Contains("layer") && !Contains("█"));
}

TEST_CASE("arrays by layer, by entry and by row and column are drawn without a set of heads") {
  const TemporaryFolder dir;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  ProfileFile file;
  file.model = "tiny";
  kvlab::ProfileArray map{{1, 2, 3, 2}, {}, "share, by 4 steps and 4 tokens"};
  map.values = {0.5f, 0.1f, 0.0005f, 1, nan, nan, 0.25f, nan, 0.0005f, 1, nan, nan};
  file.profilers = {{"watch",
                     "{}",
                     {{"bars", {{2}, {4, 2}, "tokens, by layer"}},
                      {"curve", {{1, 2, 2}, {0.5f, 0.5f, 0, 1}, "share of tokens, by N"}},
                      {"map", map},
                      {"plain", {{2}, {1, 2}, "no axis"}}}}};
  write_profile(dir / "p.h5", sample_info(), file);
  const std::string text = profile_report(read_profile(dir / "p.h5"), Format::md);
  CHECK_THAT(text, Contains("### watch bars: tokens, by layer; bars from 0 to 4\n\n| layer | value |\n"));
  CHECK_THAT(text, Contains("| 0 | ████████████████████████████████ 4 |\n| 1 | ████████████████ 2 |\n"));
  // Means of both heads: 0.25 and 0.75.
  CHECK_THAT(text, Contains("| N | all heads |\n"));
  CHECK_THAT(text, Contains("| 1 | ███████████ 0.25 |\n| 2 | ████████████████████████████████ 0.75 |\n"));
  // 0.375 and 0.1; 0.0005 and 1; no step in the third row.
  CHECK_THAT(text, Contains("mean of heads; ░ from 0.001 ▒ from 0.01 ▓ from 0.05 █ from 0.2\n\n| row | columns |\n"));
  CHECK_THAT(text, Contains("| 0 | █▓ |\n| 1 | ·█ |\n") && !Contains("| 2 |  "));
  CHECK_THAT(text, !Contains("watch plain"));
  CHECK_THAT(profile_report(file, Format::latex), !Contains("█") && Contains("0 & 4"));
}
