// `kvlab reproduce targets/NAME` as a user meets it.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "papers/targets.hpp"
#include "support/child.hpp"
#include "support/places.hpp"

using namespace kvlab;
using Catch::Contains;
using test::Ended;
using test::run_kvlab;

namespace {

int count_of(const std::string& text, const std::string& what) {
  int count = 0;
  for (std::size_t at = 0; (at = text.find(what, at)) != text.npos; at += what.size()) ++count;
  return count;
}

// kvlab with a small tree of its own and one table. The second experiment's model has no room for its prompt.
class OwnTree {
 public:
  OwnTree() {
    namespace fs = std::filesystem;
    for (const char* name :
         {"bin", "share/kvlab/analysis/papers", "share/kvlab/analysis/targets", "share/kvlab/experiments"})
      fs::create_directories(folder_ / name);
    fs::copy_file(test::build_root() / "bin/kvlab", folder_ / "bin/kvlab");
    fs::create_directory_symlink(test::build_root() / "lib", folder_ / "lib");
    fs::copy_file(test::source_root() / "analysis/papers/freekv.yaml", folder_ / "share/kvlab/analysis/papers/p.yaml");
    write("experiments/steps.yaml",
          "model: {synthetic: tiny}\nbackend: cpu\nthreads: 1\n"
          "tasks: [random_prompts: {prompt: 200, samples: 1, answer: 6}]\n"
          "policies: [full, streaming_llm: {budget: {tokens: 64}}]\nmetrics: [latency]\n");
    write("analysis/targets/own.yaml",
          "title: Own\ngpu: no GPU\nruns:\n"
          "  good: {experiment: experiments/steps.yaml, seconds: 4}\n"
          "  bad: {experiment: experiments/steps.yaml, set: [random_prompts.prompt=100000], seconds: 4}\n"
          "  after: {experiment: experiments/steps.yaml, set: [random_prompts.prompt=240], seconds: 4}\n"
          "rows:\n" +
              row("first", "good") + row("second", "bad") + row("third", "after"));
  }
  Ended run(const std::vector<std::string>& words) const {
    std::vector<std::string> all{folder_ / "bin/kvlab", "reproduce", "targets/own", "-o", folder_ / "out"};
    all.insert(all.end(), words.begin(), words.end());
    return test::Child(all).wait();
  }
  std::filesystem::path folder() const { return folder_ / ""; }
  // A row that compares two runs.
  void tie(const std::string& one, const std::string& other) {
    std::ofstream(folder_ / "share/kvlab/analysis/targets/own.yaml", std::ios::app)
        << "  tied: {title: tied, of: {run: " << one << ", policy: full, read: tpot_ms_p50}, against: {run: " << other
        << "}, as: ratio, at_most: 1000}\n";
  }
  std::string left(const std::string& name) const {
    std::ifstream in(folder_ / ("out/" + name));
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  static std::string row(const std::string& name, const std::string& run) {
    return "  " + name + ": {title: steps, of: {run: " + run +
           ", policy: streaming_llm, read: tpot_ms_p50}, against: {policy: full}, as: ratio, at_most: 1000}\n";
  }
  void write(const std::string& name, const std::string& text) { folder_.write("share/kvlab/" + name, text); }
  test::Folder folder_;
};

}  // namespace

TEST_CASE("reproduce lists the tables of targets, and names them in place of a misspelt one") {
  for (const std::vector<std::string>& words : {std::vector<std::string>{"reproduce"}, {"reproduce", "targets"}}) {
    const Ended ended = run_kvlab(words);
    CHECK(ended.code == 0);
    CHECK_THAT(ended.said, Contains("targets/edits") && Contains("targets/codecs"));
  }
  const Ended ended = run_kvlab({"reproduce", "targets/codec"});
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Contains("did you mean 'targets/codecs'"));
}

TEST_CASE("a command of targets that fails is noted in its rows, the others run, and none that ended runs again") {
  const OwnTree tree;
  const Ended ran = tree.run({"--format", "csv"});
  INFO(ran.said);
  CHECK(ran.code == 1);
  CHECK_THAT(ran.said, Contains("[1/3] targets/own: good") && Contains("[3/3] targets/own: after"));
  CHECK_THAT(ran.said, Contains("bad ended with exit code 2") && Contains("wanted at most 4096"));
  CHECK_THAT(ran.said, Contains("second,steps,-,<= 1000,bad ended with exit code 2"));
  CHECK(count_of(ran.said, "<= 1000,met") == 2);
  for (const char* name : {"targets-own.csv", "targets-own.md"}) CHECK_THAT(tree.left(name), Contains("third"));

  const Ended again = tree.run({});
  CHECK(again.code == 1);  // what failed is tried once more
  CHECK_THAT(again.said, Contains("[1/1] targets/own: bad") && !Contains("good, about"));
  const Ended fresh = tree.run({"--fresh", "--only", "first"});
  CHECK(fresh.code == 0);
  CHECK_THAT(fresh.said, Contains("[1/1] targets/own: good") && !Contains("second"));
  const Ended report = tree.run({"--report", "--format", "csv"});
  CHECK(report.code == 0);
  CHECK(count_of(report.said, "<= 1000,met") == 2);
}

TEST_CASE("reproduce targets --report: a command that ended before its first cell has no row to show") {
  const OwnTree tree;
  std::filesystem::create_directories(tree.folder() / "out/targets-own-good.h5.parts");
  const Ended report = tree.run({"--report", "--format", "csv"});
  INFO(report.said);
  CHECK(report.code == 0);
  CHECK_THAT(report.said, Contains("first,steps,-,<= 1000,not run"));
}

TEST_CASE("reproduce targets --within leaves what may end later for the next call") {
  const OwnTree tree;
  const Ended first = tree.run({"--within", "3", "--only", "first", "--only", "third"});
  INFO(first.said);
  CHECK(first.code == 1);
  CHECK_THAT(first.said, Contains("1 commands are left") && Contains("not run"));
  const Ended second = tree.run({"--within", "3", "--only", "first", "--only", "third"});
  INFO(second.said);
  CHECK(second.code == 0);
  CHECK_THAT(second.said, Contains("[1/1] targets/own: after") && !Contains("are left"));
}

TEST_CASE("reproduce targets --jobs: several commands at a time, what a row compares one after another") {
  OwnTree tree;
  tree.tie("good", "after");
  const Ended ran = tree.run({"--small", "--jobs", "3", "--format", "csv"});
  INFO(ran.said);
  CHECK(ran.code == 1);
  CHECK_THAT(ran.said, Contains("bad ended with exit code 2; its rows say so; its messages are in "));
  CHECK_THAT(ran.said, !Contains("wanted at most 4096"));
  CHECK_THAT(tree.left("targets-own-small-bad.log"), Contains("wanted at most 4096"));
  CHECK(count_of(ran.said, ",small,") == 3);
  CHECK(ran.said.find("own: bad, small") < ran.said.find("own: good, ended"));
  CHECK(ran.said.find("own: good, ended") < ran.said.find("own: after, small"));
  const Ended again = tree.run({"--small", "--jobs", "3"});
  CHECK(count_of(again.said, ", small\n") == 1);  // what failed
}

TEST_CASE("reproduce targets --check says what would run and for how long, and runs nothing") {
  const OwnTree tree;
  const Ended ended = tree.run({"--check", "--only", "third"});
  INFO(ended.said);
  CHECK(ended.code == 0);
  CHECK_THAT(ended.said, Contains("after: kvlab run ") && Contains("about 4 s") && Contains("2 cells"));
  CHECK(tree.left("targets-own.csv").empty());
  CHECK(tree.run({"--check"}).code == 2);  // the bad one is found
}

TEST_CASE("reproduce targets refuses what it cannot do before it runs anything") {
  const OwnTree tree;
  const auto said = [&](const std::vector<std::string>& words) {
    const Ended ended = tree.run(words);
    CHECK(ended.code == 2);
    return ended.said;
  };
  CHECK_THAT(said({"--only", "frist"}), Contains("got 'frist', wanted a row of targets/own (did you mean 'first'?)"));
  CHECK_THAT(said({"--jobs", "99"}), Contains("got 99 jobs and ") && Contains("wanted a GPU for each"));
  CHECK_THAT(said({"--on", "mpi"}), Contains("got --on for targets, wanted --jobs"));
  CHECK_THAT(said({"targets/own", "--only", "first"}), Contains("got --only with 2 tables"));
  CHECK_THAT(said({"freekv/figure8"}), Contains("got 'freekv/figure8', wanted targets/own"));
  const Ended paper = run_kvlab({"reproduce", "freekv/figure8", "--only", "x", "-o", "/nonexistent"});
  CHECK(paper.code == 2);
  CHECK_THAT(paper.said, Contains("got --only or --within for a paper"));
  CHECK(tree.left("targets-own.csv").empty());
}

// Whoever has the GPU is to find no command that cannot start.
TEST_CASE("reproduce targets --small: every experiment of the tables runs on the tiny model") {
  for (const papers::TargetTable& table : papers::read_all_targets(test::source_root() / "analysis/targets")) {
    CAPTURE(table.name);
    const test::Folder folder;
    std::vector<std::string> words{
        "reproduce", "targets/" + table.name, "--small", "--format", "csv", "--set", "threads=1", "-o", folder / "out"};
    const auto of_experiment = [&](const papers::TargetTerm& term) { return !table.run(term.run)->experiment.empty(); };
    int rows = 0, parts = 0;
    for (const papers::TargetRow& row : table.rows)
      if (row.why_not.empty() && of_experiment(row.of)) {
        words.insert(words.end(), {"--only", row.name});
        ++rows;
        parts += row.of.reading.read == "part_ms";  // of steps on a GPU
      }
    const Ended ended = run_kvlab(words);
    INFO(ended.said);
    CHECK(ended.code == 0);
    CHECK(count_of(ended.said, ",small,") == rows - parts);
    CHECK(count_of(ended.said, ",not measured,") == parts);
    CHECK(rows > 15);
  }
}
