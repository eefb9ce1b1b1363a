// `kvlab verify`: what a result file was made of, against what is here now.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "result/results.hpp"
#include "support/child.hpp"

using namespace kvlab;
using Catch::Contains;
using test::Ended;
using test::Folder;
namespace fs = std::filesystem;

namespace {

std::string prose(int words, int first) {
  std::string out;
  for (int i = 0; i < words; ++i) out += "word" + std::to_string(first + i * 7 % 90) + " ";
  return out;
}

const std::string text_experiment =
    "model: {path: m, dtype: f32}\n"
    "tasks: [text: {file: t.txt, prefix: [24, 32], forced: 4}]\n"
    "policies:\n  - full\n  - {name: newest, scorer: window, budget: {tokens: 8}}\n"
    "metrics: [score]\nbackend: cpu\nthreads: 1\npage_size: 4\n";

// A result of a tiny model on two texts, and a copy of everything that it was made of.
class Result {
 public:
  explicit Result(const std::string& more = "") : Result(text_experiment + more, "text.samples=2") {}
  Result(const std::string& text, const std::string& override) {
    fs::copy(test::source_root() / "core/test/golden/tiny/llama-gqa3", fs::path(folder_ / "m"));
    folder_.write("t.txt", prose(120, 100));
    folder_.write("e.yaml", text);
    REQUIRE(test::run_kvlab({"run", folder_ / "e.yaml", "-o", file(), "--set", override}).code == 0);
  }
  std::string file() const { return folder_ / "o.h5"; }
  const Folder& folder() const { return folder_; }
  Ended verify(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"verify", file()});
    return test::run_kvlab(more);
  }
  // What `verify` says about each thing: "same", "differs" ...
  std::map<std::string, std::string> findings(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words{"-q", "--format", "csv"};
    words.insert(words.end(), more.begin(), more.end());
    std::map<std::string, std::string> out;
    std::istringstream in(verify(words).said);
    for (std::string line; std::getline(in, line);) {
      if (line.empty()) continue;
      const std::size_t first = line.front() == '"' ? line.find('"', 1) + 1 : line.find(',');
      const std::size_t quote = line.front() == '"';
      out[line.substr(quote, first - 2 * quote)] = line.substr(line.rfind(',') + 1);
    }
    return out;
  }
  // Writes a value into a JSON file of the model.
  void set(const std::string& json_file, const std::string& key, const nlohmann::json& value) const {
    std::ifstream in(folder_ / json_file);
    nlohmann::json json = nlohmann::json::parse(in);
    json[key] = value;
    folder_.write(json_file, json.dump());
  }

 private:
  Folder folder_;
};

}  // namespace

TEST_CASE("verify finds nothing that differs where nothing has changed") {
  const Result result;
  const Ended ended = result.verify();
  CAPTURE(ended.said);
  CHECK(ended.code == 0);
  CHECK_THAT(ended.said, !Contains("differs") && !Contains("not recorded") && !Contains("not here"));
  const auto found = result.findings();
  for (const char* what :
       {"experiment e.yaml", "kvlab version", "commit", "m: content", "m: tokenizer", "m: chat template", "m: stop ids",
        "scorer window: version", "scorer window: SHA-256", "task text: SHA-256", "cells", "prompts"}) {
    CAPTURE(what);
    REQUIRE(found.count(what) == 1);
    CHECK(found.at(what) == "same");
  }
  // Two texts of two lengths under two policies.
  CHECK_THAT(result.verify({"--format", "csv"}).said,
             Contains("cells,4,4 with the same id") && Contains("prompts,8,8 the same") && Contains(",[1],[1],same"));
}

TEST_CASE("verify names the prompts and cells that other data make") {
  const Result result;
  result.folder().write("t.txt", prose(120, 101));
  const Ended ended = result.verify();
  CAPTURE(ended.said);
  CHECK(ended.code == 1);
  const auto found = result.findings();
  CHECK(found.at("cells") == "differs");
  CHECK(found.at("prompts") == "differs");
  CHECK(found.at("m: content") == "same");
  CHECK(found.at("task text: SHA-256") == "same");
  CHECK_THAT(ended.said, Contains("0 with the same id") && Contains("0 the same") && Contains("2 of 2 differ"));
  // In full: the hash that the file has.
  const auto samples = results::read_samples(result.file());
  CHECK_THAT(ended.said, Contains(samples.begin()->second.front().prompt_sha256));
}

TEST_CASE(
    "verify tells a model's stop ids, chat template and tokenizer from its content, and still makes its prompts") {
  const Result result;
  result.set("m/config.json", "eos_token_id", nlohmann::json::array({1, 2}));
  auto found = result.findings();
  CHECK(found.at("m: stop ids") == "differs");
  CHECK(found.at("m: content") == "differs");
  CHECK(found.at("m: tokenizer") == "same");
  CHECK(found.at("m: chat template") == "same");
  CHECK(found.at("cells") == "differs");
  CHECK(found.at("prompts") == "same");
  fs::copy(test::source_root() / "core/test/golden/tiny/llama-gqa3/config.json", fs::path(result.folder() / "m"),
           fs::copy_options::overwrite_existing);
  CHECK(result.verify().code == 0);
  result.set("m/tokenizer_config.json", "chat_template", "{{ '<|im_start|>' }}");
  found = result.findings();
  CHECK(found.at("m: chat template") == "differs");
  CHECK(found.at("m: stop ids") == "same");
}

TEST_CASE("verify without the model compares what is left") {
  const Result result;
  fs::rename(result.folder() / "m", result.folder() / "elsewhere");
  const auto found = result.findings();
  CHECK(found.at("m: content") == "not here");
  CHECK(found.at("cells") == "not here");
  CHECK(found.at("prompts") == "not here");
  CHECK(found.at("scorer window: SHA-256") == "same");
  CHECK(result.verify().code == 0);
}

TEST_CASE("verify calls cells whose data file is absent neither the same nor different") {
  const Result result;
  fs::remove(result.folder() / "t.txt");
  const auto found = result.findings();
  CHECK(found.at("cells") == "not here");
  CHECK(found.at("prompts") == "not here");
  const Ended ended = result.verify();
  CHECK_THAT(ended.said, Contains("0 with the same id, 4 not here") && !Contains("differs"));
  CHECK(ended.code == 0);
}

TEST_CASE("verify calls a cell whose profile is absent neither the same nor different") {
  const Folder profiles;
  fs::copy(test::source_root() / "core/test/golden/tiny/llama-gqa3", fs::path(profiles / "m"));
  profiles.write("t.txt", prose(120, 100));
  profiles.write("p.yaml",
                 "model: {path: m, dtype: f32}\ntasks: [text: {file: t.txt, prefix: 24, forced: 40}]\n"
                 "profilers: [flexicache_heads: {window: 4, top_pages: 2}]\nbackend: cpu\nthreads: 1\npage_size: 4\n");
  REQUIRE(test::run_kvlab({"profile", profiles / "p.yaml", "-o", profiles / "p.h5"}).code == 0);
  const Result result(
      "model: {path: m, dtype: f32}\ntasks: [text: {file: t.txt, prefix: 24, forced: 4}]\n"
      "policies: [full, {policy: flexicache, budget: {tokens: 20}, profile: " +
          (profiles / "p.h5") + "}]\nmetrics: [score]\nbackend: cpu\nthreads: 1\n",
      "page_size=4");
  CHECK(result.findings().at("cells") == "same");
  fs::remove(profiles / "p.h5");
  CHECK_THAT(result.verify({"--format", "csv"}).said,
             Contains("cells,2,\"1 with the same id, 1 not here\",same") && !Contains(",differs"));
  CHECK(result.verify().code == 0);
}

TEST_CASE("verify calls a cell whose trace is absent neither the same nor different") {
  const Folder traces;
  std::ofstream(traces / "w.txt") << "0\n0.01\n";
  const Result result(
      "model: {path: m, dtype: f32}\ntasks: [random_prompts: {prompt: 16, answer: 4, samples: 2}]\n"
      "policies: [full]\nbatch: 2\nbackend: cpu\nthreads: 1\n"
      "workload: {arrivals: trace, file: " +
          (traces / "w.txt") + "}\n",
      "page_size=4");
  CHECK(result.findings().at("cells") == "same");
  fs::remove(traces / "w.txt");
  CHECK(result.findings().at("cells") == "not here");
  CHECK(result.findings().at("prompts") == "same");
  CHECK(result.verify().code == 0);
}

TEST_CASE("verify shows another version and commit, which alone are no failure") {
  const Result result;
  const auto summary = results::read_summary(result.file());
  results::RunInfo info = summary.info;
  info.kvlab_version = "0.0.0";
  info.git_commit = "another";
  const std::string other = result.folder() / "other.h5";
  std::vector<std::string> ids;
  for (const auto& row : summary.rows) {
    ids.push_back(row.cell);
    results::write_part(other, results::read_cell(result.file(), row.cell), info);
  }
  results::rebuild(other, info, ids);
  const Ended ended = test::run_kvlab({"verify", other, "--format", "csv"});
  CAPTURE(ended.said);
  CHECK_THAT(ended.said, Contains("kvlab version,0.0.0,") && Contains("commit,another,") && Contains(",differs"));
  CHECK(ended.code == 0);
}

TEST_CASE("verify tells overrides from the author's comments, and needs no final newline") {
  const Result result("# --set text.samples=7");  // run with another override, which adds a newline
  const auto found = result.findings();
  CHECK(found.at("experiment e.yaml") == "same");
  CHECK(found.at("cells") == "same");
  CHECK(result.verify().code == 0);
}

TEST_CASE("verify reads the experiment of the file, and compares the one that stands in its place") {
  const Result result;
  std::ofstream(result.folder() / "e.yaml", std::ios::app) << "# a word more\n";
  auto found = result.findings();
  CHECK(found.at("experiment e.yaml") == "differs");
  CHECK(found.at("cells") == "same");
  // Another folder, as on another machine.
  const Folder other;
  fs::copy(result.folder() / "m", fs::path(other / "m"));
  fs::copy(result.folder() / "t.txt", fs::path(other / "t.txt"));
  fs::copy(result.folder() / "e.yaml", fs::path(other / "mine.yaml"));
  fs::remove_all(result.folder() / "m");
  found = result.findings({"--experiment", other / "mine.yaml"});
  CHECK(found.at("experiment mine.yaml") == "differs");
  CHECK(found.at("cells") == "same");
  CHECK(found.at("prompts") == "same");
}

TEST_CASE("verify sets a paper's values beside those of the experiment that it names: inside the interval or not") {
  const Folder tree;  // kvlab with a paper of its own
  for (const char* name : {"bin", "share/kvlab/analysis/papers", "share/kvlab/experiments"})
    fs::create_directories(tree / name);
  fs::copy_file(test::build_root() / "bin/kvlab", tree / "bin/kvlab");
  fs::create_directory_symlink(test::build_root() / "lib", tree / "lib");
  const fs::path share = tree / "share/kvlab";
  fs::copy(test::source_root() / "core/test/golden/tiny/llama-gqa3", share / "experiments/m");
  std::ofstream(share / "experiments/t.txt") << prose(400, 100);
  for (const char* stem : {"one", "two"})
    std::ofstream(share / "experiments" / (std::string(stem) + ".yaml")) << text_experiment;
  const std::string file = tree / "o.h5";
  const auto kvlab = [&](std::vector<std::string> words) {
    words.insert(words.begin(), tree / "bin/kvlab");
    return test::Child(words).wait();
  };
  // prose() repeats itself, so each text is drawn of its own place; intervals need several.
  const Ended ran = kvlab({"run", (share / "experiments/one.yaml").string(), "-o", file, "--set", "text.samples=6",
                           "--set", "text.prefix=24"});
  CAPTURE(ran.said);
  REQUIRE(ran.code == 0);
  const results::SummaryRow full = results::read_summary(file).rows.front();
  REQUIRE(full.policy == "full");
  REQUIRE(full.score_lo < full.score_hi);
  std::ofstream(share / "analysis/papers/paper.yaml")
      << "title: T\nsource: S\nsetting: {model: theirs}\nitems:\n"
         "  table1:\n    title: Scores\n    kind: quality\n    run: [experiments/one.yaml, experiments/two.yaml]\n"
         "    values:\n      policy: full\n      columns: {t: {}}\n      rows:\n"
      << "        middle: {run: one, values: [" << (full.score_lo + full.score_hi) / 2 << "]}\n"
      << "        far: {run: one, values: [" << full.score_hi * 2 << "]}\n"
      << "        other run: {run: two, values: [1]}\n        no code: {missing: unknown, values: [1]}\n"
         "  table2:\n    title: Others\n    kind: quality\n    run: [experiments/two.yaml]\n"
         "    values: {policy: full, columns: {t: {}}, rows: {r: {run: two, values: [1]}}}\n";
  const Ended table = kvlab({"verify", file});
  CAPTURE(table.said);
  CHECK(table.code == 0);  // the published values are no part of the tree's sameness
  CHECK_THAT(table.said, Contains("paper/table1: Scores") && Contains("theirs") && Contains("inside") &&
                             Contains("ours is lower") && !Contains("other run") && !Contains("no code") &&
                             !Contains("paper/table2"));
  const Ended csv = kvlab({"verify", file, "--format", "csv"});
  CAPTURE(csv.said);
  CHECK_THAT(csv.said, Contains("\n\"paper/table1: middle, t\",") && Contains(",inside\n") &&
                           Contains("\n\"paper/table1: far, t\",") && Contains(",ours is lower\n"));
  CHECK(kvlab({"verify", file, "--paper", "paper/table1"}).said == table.said);
  const Ended none = kvlab({"verify", file, "--paper", "paper/table2"});
  CHECK(none.code == 2);
  CHECK_THAT(none.said, Contains("wanted that of experiments/two.yaml"));
  const Ended misspelt = kvlab({"verify", file, "--paper", "paper/tabel1"});
  CHECK(misspelt.code == 2);
  CHECK_THAT(misspelt.said, Contains("did you mean 'paper/table1'"));
}

TEST_CASE("verify says what an earlier file does not record, and refuses what is no result file") {
  const fs::path data = test::source_root() / "analysis/testdata";
  const Ended earlier = test::run_kvlab({"verify", (data / "small.h5").string()});
  CAPTURE(earlier.said);
  CHECK_THAT(earlier.said, Contains("bundled/recall: stop ids") && Contains("not recorded") &&
                               Contains("--experiment FILE gives another one"));
  CHECK(test::run_kvlab({"verify", (data / "heads.h5").string()}).code == 2);
  CHECK(test::run_kvlab({"verify", (data / "small.yaml").string()}).code == 2);
  CHECK(test::run_kvlab({"verify", "none.h5"}).code == 2);
}
