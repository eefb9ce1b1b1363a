#include "result/attempts.hpp"

#include <bit>
#include <catch2/catch.hpp>

#include "result/results_sample.hpp"

using namespace kvlab::results;
using Catch::Contains;

namespace {

// The share of all choices of k out of n answers that have one of the first `right`.
double counted(int n, int right, int k) {
  int all = 0, good = 0;
  for (unsigned choice = 0; choice < 1u << n; ++choice)
    if (std::popcount(choice) == k) {
      ++all;
      good += (choice & ((1u << right) - 1)) != 0;
    }
  return static_cast<double>(good) / all;
}

// A cell with an answer to each of the questions "a", "b", ...
CellResult answered(const std::string& id, const std::string& policy, std::int64_t seed, std::vector<double> scores) {
  CellResult c;
  c.id = c.summary.cell = id;
  c.summary.model = "m";
  c.summary.task = "quiz";
  c.summary.policy = policy;
  c.summary.params = "{}";
  c.summary.seed = seed;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    c.samples.emplace_back();
    c.samples.back().sample = static_cast<std::int64_t>(i);
    c.samples.back().prompt_sha256 = std::string(64, static_cast<char>('a' + i));
    c.samples.back().score = scores[i];
  }
  c.token_offsets.assign(scores.size() + 1, 0);
  return c;
}

}  // namespace

TEST_CASE("pass@k is the share of choices with a right answer") {
  for (int n = 1; n <= 10; ++n)
    for (int right = 0; right <= n; ++right)
      for (int k = 1; k <= n; ++k) CHECK(pass_at_k(n, right, k) == Approx(counted(n, right, k)).margin(1e-12));
  CHECK(pass_at_k(200, 1, 100) == Approx(0.5));
}

TEST_CASE("attempts: the answers of all seeds to a question count together") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  // "a" is right once in three, "b" never, "c" three times; a partial score counts for avg alone.
  write_part(out, answered("c1", "full", 1, {1, 0.5, 1}), sample_info());
  write_part(out, answered("c2", "full", 2, {0, 0, 1}), sample_info());
  write_part(out, answered("c3", "full", 3, {0, 0, 1}), sample_info());
  write_part(out, answered("c4", "other", 1, {1, 1, 1}), sample_info());
  write_part(out, answered("c5", "other", 2, {1, 1, 1}), sample_info());
  CellResult failed = answered("c6", "full", 4, {0, 0, 0});
  failed.summary.status = "failed";
  write_part(out, failed, sample_info());
  // full: avg (1/3 + 1/6 + 1) / 3; pass@1 (1/3 + 0 + 1) / 3; pass@2 (2/3 + 0 + 1) / 3.
  CHECK(attempts_report(out, Format::csv) ==
        "policy,questions,avg@2,pass@1,pass@2\nfull,3,0.5,0.4444,0.5556\nother,3,1,1,1\n");
  CHECK_THAT(attempts_report(out, Format::md),
             Contains("several answers") && Contains("### m, quiz") && Contains("| full | 3 | 0.5 |"));
}

TEST_CASE("attempts: draws of a cell are answers, and a repeat has the same ones") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  CellResult c = answered("c1", "full", 1, {1, 0, 0, 1, 1, 1});  // three draws each of two questions
  for (std::size_t i = 0; i < 6; ++i) {
    c.samples[i].prompt_sha256 = std::string(64, i < 3 ? 'a' : 'b');
    c.samples[i].draw = static_cast<std::int64_t>(i % 3);
  }
  c.summary.draws = 3;
  write_part(out, c, sample_info());
  c.id = c.summary.cell = "c2";
  c.summary.repeat = 1;
  write_part(out, c, sample_info());
  // "a" is right once in three: pass@2 is 2/3 of it.
  CHECK(attempts_report(out, Format::csv) ==
        "policy,questions,avg@3,pass@1,pass@2,pass@3\nfull,2,0.6667,0.6667,0.8333,1\n");
}

TEST_CASE("attempts: a repeat of the most likely answers is no second draw") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  for (const int repeat : {0, 1, 2}) {
    CellResult c = answered("c" + std::to_string(repeat), "full", 1, {1, 0});
    c.summary.repeat = repeat;
    write_part(out, c, sample_info());
  }
  CHECK(attempts_report(out, Format::csv) == "policy,questions,avg@1,pass@1\nfull,2,0.5,0.5\n");
}

TEST_CASE("attempts: budgets tell rows apart where nothing else does") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  for (const double budget : {64., 128.}) {
    CellResult c = answered("c" + std::to_string(static_cast<int>(budget)), "snap", 1, {budget == 64 ? 0. : 1.});
    c.summary.params = "{\"budget\":{\"tokens\":" + std::to_string(static_cast<int>(budget)) + "}}";
    c.summary.budget_tokens = budget;
    write_part(out, c, sample_info());
  }
  write_part(out, answered("c3", "full", 1, {1}), sample_info());
  CHECK_THAT(attempts_report(out, Format::csv),
             Contains("snap 64,1,0,0\n") && Contains("snap 128,1,1,1\n") && Contains("full,1,1,1\n"));
}

TEST_CASE("attempts: one answer, and none") {
  const TemporaryFolder dir;
  const std::string out = dir / "o.h5";
  write_part(out, answered("c1", "full", 1, {not_measured, 12.5}), sample_info());
  CHECK_THAT(attempts_report(out, Format::table), Contains("no cell has a score from 0 to 1"));
  write_part(out, answered("c2", "full", 2, {1, 0}), sample_info());
  CHECK_THAT(attempts_report(out, Format::table), Contains("pass@1") && Contains("a question has one answer"));
}
