// `kvlab reproduce` as a user meets it, on the papers of this tree.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "papers/paper.hpp"
#include "result/profile_file.hpp"
#include "result/results.hpp"
#include "support/child.hpp"
#include "support/places.hpp"

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
  CHECK_THAT(ended.said, Contains("freekv/table3 needs ") && !Contains(": makes "));  // it begins with a profile
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

TEST_CASE("reproduce --small sets what the paper has before its own tables") {
  const test::Folder folder;
  std::vector<std::string> words{"reproduce",
                                 "leankv/figure11",
                                 "--small",
                                 "--model",
                                 "synthetic/tiny",
                                 "--set",
                                 "backend=cpu",
                                 "--set",
                                 "tasks=[{random_prompts: {prompt: 64, samples: 1, answer: 2}}]",
                                 "--set",
                                 "policies=[full, leankv]",
                                 "-o",
                                 folder / "out"};
  const Ended ran = run_kvlab(words);
  CAPTURE(ran.said);
  REQUIRE(ran.code == 0);
  const auto place = [&](const std::string& text) {
    const std::size_t at = ran.said.find(text);
    CAPTURE(text);
    REQUIRE(at != std::string::npos);
    return at;
  };
  const std::size_t title = place("leankv/figure11: Latency of parallel KV compaction");
  CHECK(title < place("sequences of 1024 tokens, several batch sizes"));
  CHECK(title < place("(small: another model and task)"));
  CHECK(title < place("up to three orders of magnitude"));
  CHECK(place("Both sides are kvlab.") < place("synthetic/tiny, random_prompts, context "));
  words.insert(words.end(), {"--report", "--format", "csv"});
  CHECK_THAT(run_kvlab(words).said, !Contains("what may differ"));
}

namespace {

// Lines of a log that have the text.
int lines_with(const std::string& log, const std::string& text) {
  std::ifstream in(log);
  int count = 0;
  for (std::string line; std::getline(in, line);) count += line.find(text) != line.npos;
  return count;
}

}  // namespace

TEST_CASE("reproduce --jobs 2: the same two workers run the cells of every experiment, each once") {
  const test::Folder folder;
  // An item that is named twice is run once.
  const std::vector<std::string> items = GENERATE(std::vector<std::string>{"freekv/figure8"},
                                                  std::vector<std::string>{"freekv/figure8", "freekv/figure8"});
  std::vector<std::string> words{"reproduce"};
  words.insert(words.end(), items.begin(), items.end());
  words.insert(words.end(), {"--model", "synthetic/tiny", "--jobs", "2"});
  for (const char* set : {"backend=cpu", "threads=1", "metrics=[score]",
                          "tasks=[{random_prompts: {prompt: [64, 100], samples: 1, answer: 4}}]"})
    words.insert(words.end(), {"--set", set});
  words.insert(words.end(), {"-o", folder / "out", "-v", "--log", folder / "log"});
  const Ended ran = run_kvlab(words);
  INFO(ran.said);
  CHECK(ran.code == 0);
  std::map<std::string, int> written;  // by the messages of all processes
  std::ifstream log(folder / "log");
  for (std::string line; std::getline(log, line);)
    if (const std::size_t to = line.find(": written to "); to != line.npos) ++written[line.substr(to)];
  std::size_t cells = 0, files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "out")) {
    if (entry.path().extension() != ".h5") {
      for (const auto& left : std::filesystem::directory_iterator(entry)) CHECK(left.path().extension() == ".h5");
      continue;
    }
    const results::Summary summary = results::read_summary(entry.path().string());
    CHECK(summary.info.command.find("kvlab reproduce freekv/figure8") == 0);
    CHECK_THAT(summary.info.command, Contains("--jobs 2"));
    for (const results::SummaryRow& row : summary.rows) CHECK(row.status == "ok");
    const std::string stem = entry.path().stem().string().substr(std::string("freekv-").size());
    CHECK_THAT(ran.said, Contains("] " + stem + ": random_prompts"));
    cells += summary.rows.size();
    ++files;
  }
  CHECK(files == 2);  // that the paper's file names
  CHECK(written.size() == cells);
  for (const auto& [part, times] : written) CHECK(times == 1);
  CHECK_THAT(ran.said, Contains("[" + std::to_string(cells) + "/" + std::to_string(cells) + "] "));
  CHECK(lines_with(folder / "log", "): kvlab reproduce freekv/figure8") == 3);  // this process and two workers

  const Ended again = run_kvlab(words);
  CHECK(again.code == 0);
  CHECK_THAT(again.said, Contains("cells were finished already"));
  CHECK(lines_with(folder / "log", ": written to ") == static_cast<int>(cells));
}

namespace {

// kvlab with a small tree of its own, whose item `paper/table1` has two profiles and a run for each.
class OwnTree {
 public:
  enum class Experiments { folder, link };  // link: they lie above share, as in a bundle
  explicit OwnTree(Experiments experiments = Experiments::folder) {
    namespace fs = std::filesystem;
    for (const char* name : {"bin", "share/kvlab/analysis/papers"}) fs::create_directories(folder_ / name);
    if (experiments == Experiments::folder) {
      fs::create_directory(folder_ / "share/kvlab/experiments");
    } else {
      fs::create_directory(folder_ / "experiments");
      fs::create_directory_symlink("../../experiments", folder_ / "share/kvlab/experiments");
    }
    fs::copy_file(test::build_root() / "bin/kvlab", folder_ / "bin/kvlab");
    fs::create_directory_symlink(test::build_root() / "lib", folder_ / "lib");
    std::string run;
    for (const std::string name : {"one", "two"}) {
      const std::string tasks = "backend: cpu\nthreads: 1\npage_size: 4\ntasks: [random_prompts: {prompt: " +
                                std::string(name == "one" ? "64" : "72") + ", samples: 1, answer: 20}]\n";
      write("heads_" + name, "model: {synthetic: tiny-deep}\n" + tasks +
                                 "profilers: [flexicache_heads: {top_pages: 4, window: 4}]\noutput: results/" + name +
                                 ".h5\n");
      write("run_" + name, "model: {synthetic: tiny-deep}\n" + tasks +
                               "metrics: [score]\npolicies: [full, flexicache: " +
                               "{budget: {tokens: 24}, profile: ../results/" + name + ".h5}]\n");
      run += "experiments/heads_" + name + ".yaml, experiments/run_" + name + ".yaml, ";
    }
    std::ofstream(folder_ / "share/kvlab/analysis/papers/paper.yaml")
        << "title: T\nsource: S\nsetting: {model: tiny}\nitems:\n  table1:\n    title: T\n    kind: speed\n    run: ["
        << run << "]\n  figure1:\n    title: T\n    kind: speed\n    run: [experiments/heads_one.yaml]\n";
  }
  // Puts a line in place of the experiment's line that begins with the same key.
  void change(const std::string& name, const std::string& line) const {
    const std::string file = experiment(name);
    std::ifstream in(file);
    std::string text;
    for (std::string old; std::getline(in, old);)
      text += (old.starts_with(line.substr(0, line.find(':') + 1)) ? line : old) + "\n";
    std::ofstream(file) << text;
  }
  Ended reproduce(std::vector<std::string> words, const std::string& item = "paper/table1") const {
    std::vector<std::string> all{folder_ / "bin/kvlab", "reproduce", item, "-o", folder_ / "out"};
    all.insert(all.end(), words.begin(), words.end());
    return test::Child(all).wait();
  }
  std::string experiment(const std::string& name) const {
    return folder_ / ("share/kvlab/experiments/" + name + ".yaml");
  }
  std::string profile(const std::string& name) const { return folder_ / ("share/kvlab/results/" + name + ".h5"); }
  std::string profile_above(const std::string& name) const { return folder_ / ("results/" + name + ".h5"); }
  std::string in_folder(const std::string& stem) const { return folder_ / ("out/paper-" + stem + ".h5"); }
  std::string log() const { return folder_ / "log"; }

 private:
  void write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / ("share/kvlab/experiments/" + name + ".yaml")) << text;
  }
  test::Folder folder_;
};

}  // namespace

TEST_CASE("reproduce --small --report names the call that leaves what it lacks, and profiles are no csv") {
  const test::Folder folder;
  const auto fails = [&](const std::string& item, std::vector<std::string> more, const std::string& message) {
    std::vector<std::string> words{"reproduce", item, "--small", "-o", folder / "out"};
    words.insert(words.end(), more.begin(), more.end());
    const Ended ended = run_kvlab(words);
    CHECK(ended.code == 2);
    CHECK_THAT(ended.said, Contains(message));
  };
  for (const auto& [item, file] : {std::pair{"leankv/table2", "leankv-quality_small.h5"},
                                   {"flexicache/figure1", "flexicache-small_lists.h5"},
                                   {"flexicache/table4", "flexicache-small_facts.h5"}})
    fails(item, {"--report"},
          file + std::string(": got no such file, wanted what `kvlab reproduce ") + item + " --small` leaves there");
  fails("flexicache/figure1", {"--format", "csv"}, "got --format csv for flexicache/figure1 --small");
  CHECK_FALSE(std::filesystem::exists(folder / "out"));
}

TEST_CASE("reproduce --jobs 2: processes make the profiles that an item needs, then workers run its cells") {
  const OwnTree tree;
  const Ended ran = tree.reproduce({"--jobs", "2", "-v", "--log", tree.log()});
  INFO(ran.said);
  CHECK(ran.code == 0);
  CHECK_THAT(ran.said, Contains("2 profiles, 2 at a time") && Contains("[4/4] "));
  CHECK(lines_with(tree.log(), "): kvlab reproduce paper/table1") == 5);  // this process, two for profiles, two workers
  for (const char* name : {"one", "two"}) CHECK(std::filesystem::exists(tree.profile(name)));
  CHECK(lines_with(tree.log(), ": written to ") == 4);

  const auto before = std::filesystem::last_write_time(tree.profile("one"));
  const Ended again = tree.reproduce({"--jobs", "2"});
  INFO(again.said);
  CHECK(again.code == 0);
  CHECK_THAT(again.said, Contains("one.h5 is there") && !Contains("at a time"));
  CHECK(std::filesystem::last_write_time(tree.profile("one")) == before);
  const Ended fresh = tree.reproduce({"--jobs", "2", "--fresh"});
  INFO(fresh.said);
  CHECK(fresh.code == 0);
  CHECK(std::filesystem::last_write_time(tree.profile("one")) > before);
}

TEST_CASE("reproduce warns of a profile that is there by other settings of its experiment") {
  const OwnTree tree;
  const auto reproduce = [&](std::vector<std::string> words) {
    return tree.reproduce(std::move(words), "paper/figure1");
  };
  const std::string other = "one.h5 is there, made by other settings of its experiment; --fresh makes it anew";
  CHECK(reproduce({"--set", "random_prompts.prompt=80"}).code == 0);
  CHECK_THAT(reproduce({"--set", "random_prompts.prompt=80"}).said,
             Contains("one.h5 is there; --fresh") && !Contains("warning: "));
  CHECK_THAT(reproduce({}).said, Contains("warning: ") && Contains(other));
  CHECK_THAT(reproduce({"--check"}).said, Contains("one.h5 is there, made by other settings"));
  CHECK(reproduce({"--fresh"}).code == 0);
  std::ofstream(tree.experiment("heads_one"), std::ios::app) << "\n# a comment\n  # another\n";
  CHECK_THAT(reproduce({}).said, Contains("one.h5 is there; --fresh") && !Contains("warning: "));
}

TEST_CASE("reproduce makes profiles where policies look for them, also where the experiments' folder is a link") {
  const OwnTree tree(OwnTree::Experiments::link);
  const Ended checked = tree.reproduce({"--check"});
  INFO(checked.said);
  CHECK(checked.code == 0);
  CHECK_THAT(checked.said, Contains(": makes " + tree.profile_above("one")));
  const Ended ran = tree.reproduce({});
  INFO(ran.said);
  CHECK(ran.code == 0);
  for (const char* name : {"one", "two"}) {
    CHECK(results::is_profile(tree.profile_above(name)));
    CHECK_FALSE(std::filesystem::exists(tree.profile(name)));
  }
}

TEST_CASE("reproduce -o: a profile is made in the folder, and where policies look for it if any does") {
  const OwnTree alone;
  const Ended made = alone.reproduce({}, "paper/figure1");
  INFO(made.said);
  CHECK(made.code == 0);
  CHECK(results::is_profile(alone.in_folder("heads_one")));
  CHECK_FALSE(std::filesystem::exists(alone.profile("one")));
  CHECK_THAT(alone.reproduce({}, "paper/figure1").said, Contains("out/paper-heads_one.h5 is there"));

  const OwnTree both;
  const Ended ran = both.reproduce({"paper/table1"}, "paper/figure1");
  INFO(ran.said);
  CHECK(ran.code == 0);
  CHECK_FALSE(std::filesystem::exists(both.in_folder("heads_one")));
  const auto before = std::filesystem::last_write_time(both.profile("one"));
  CHECK_THAT(both.reproduce({}, "paper/figure1").said, Contains("results/one.h5 is there"));
  CHECK(std::filesystem::last_write_time(both.profile("one")) == before);
  CHECK(both.reproduce({"--fresh"}, "paper/figure1").code == 0);
  CHECK(results::is_profile(both.in_folder("heads_one")));
  CHECK_THAT(both.reproduce({}, "paper/figure1").said, Contains("out/paper-heads_one.h5 is there"));
  CHECK(std::filesystem::last_write_time(both.profile("one")) == before);
}

TEST_CASE("reproduce --check before the profiles are made: models and data of all experiments are checked") {
  const OwnTree tree;
  const Ended good = tree.reproduce({"--check"});
  INFO(good.said);
  CHECK(good.code == 0);
  CHECK_THAT(good.said, Contains("heads_one.yaml: makes ") && Contains("heads_two.yaml: makes ") &&
                            Contains("not checked: budgets of 1 cell, whose profiles are still to be made"));
  const auto refused = [&](const std::string& name, const std::string& line, int code, const std::string& why) {
    CAPTURE(name, line);
    const OwnTree other;
    other.change(name, line);
    const Ended ended = other.reproduce({"--check"});
    INFO(ended.said);
    CHECK(ended.code == code);
    CHECK_THAT(ended.said, Contains(why));
    // A run finds it before it makes the first profile.
    CHECK(other.reproduce({}).code == code);
    CHECK_FALSE(std::filesystem::exists(other.profile("one")));
  };
  for (const char* name : {"heads_two", "run_one"}) {
    refused(name, "model: {path: ../models/absent}", 2, "models/absent");
    refused(name, "tasks: [jsonl: {data: ../data/absent.jsonl}]", 2, "data/absent.jsonl");
  }
  setenv("CUDA_VISIBLE_DEVICES", "-1", 1);
  refused("run_two", "backend: cuda", 3, "GPU");
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST_CASE("reproduce --check once the profiles are there: nothing is left unchecked") {
  const OwnTree tree;
  REQUIRE(tree.reproduce({}).code == 0);
  const Ended again = tree.reproduce({"--check"});
  INFO(again.said);
  CHECK(again.code == 0);
  CHECK_THAT(again.said, Contains("one.h5 is there") && !Contains("makes ") && !Contains("not checked"));
  CHECK_THAT(tree.reproduce({"--check", "--fresh"}).said, Contains("makes ") && Contains("not checked: budgets"));
}

TEST_CASE("a worker of reproduce refuses cells that are not those of its run") {
  const test::Folder folder;
  std::vector<std::string> words{"reproduce", "--worker-of",    "",   "freekv/figure8",
                                 "--model",   "synthetic/tiny", "-o", folder / "out"};
  for (const char* set : {"backend=cpu", "metrics=[score]", "tasks=[{random_prompts: {prompt: 64, answer: 4}}]"})
    words.insert(words.end(), {"--set", set});
  words[2] = "here:cpu:01";
  const Ended other = run_kvlab(words);
  CHECK(other.code == 2);
  CHECK_THAT(other.said, Contains("got 1 experiments from the run that started this worker, wanted 2"));
  words[2] = "mpi:cpu:01+mpi:cpu:02";
  const Ended cells = run_kvlab(words);
  CHECK(cells.code == 2);
  CHECK_THAT(cells.said, Contains("got other cells than the run that started this worker"));
  CHECK_FALSE(std::filesystem::exists(folder / "out"));
}

TEST_CASE("reproduce --jobs is refused for every experiment that measures times before one is run") {
  const test::Folder folder;
  const Ended ended = run_kvlab({"reproduce", "freekv/figure8", "--model", "synthetic/tiny", "--set", "backend=cpu",
                                 "--jobs", "2", "-o", folder / "out"});
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Contains("--jobs: got 2 workers") && Contains("the metrics measure times"));
  CHECK_FALSE(std::filesystem::exists(folder / "out"));
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

namespace {

std::string text_of(const std::filesystem::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Whether one of the experiments has the word.
bool any_has(const std::vector<std::string>& files, const std::string& word) {
  return std::any_of(files.begin(), files.end(), [&](const std::string& file) {
    return text_of(test::source_root() / file).find(word) != std::string::npos;
  });
}

// A random model of three layers with the architecture of the experiments' models. Where a method's published setting
// takes more layers or more elements of a key, a model's own shape, whose weights a check does not make.
std::string model_for(const std::vector<std::string>& files) {
  if (any_has(files, "omnikv:") || any_has(files, "shadowkv:")) return "synthetic/llama-3.1-8b";
  const char* name = any_has(files, "Mistral") ? "mistral-window32" : any_has(files, "Qwen") ? "qwen2" : "llama-gqa3";
  return (test::source_root() / "core/test/golden/tiny" / name).string();
}

}  // namespace

// What needs weights or data that are not here still has to start with those who have them. A share of a prompt pays
// for the tokens that methods always keep, if the prompt is long.
TEST_CASE("reproduce --check: the experiments of every table and figure suit a tiny model of their architecture") {
  int items = 0;
  for (const papers::Paper& paper : papers::read_papers(test::source_root() / "analysis/papers"))
    for (const papers::Item& item : paper.items) {
      if (item.run.empty()) continue;
      CAPTURE(paper.name, item.name);
      const std::string model = model_for(item.run), tokens = model.starts_with("synthetic/") ? "2000" : "480";
      std::vector<std::string> words{"reproduce", paper.name + "/" + item.name, "--check", "--model", model};
      for (const std::string& set :
           {std::string("backend=cpu"), "tasks=[{random_prompts: {prompt: " + tokens + ", samples: 1, answer: 4}}]"})
        words.insert(words.end(), {"--set", set});
      const Ended ended = run_kvlab(words);
      INFO(ended.said);
      CHECK(ended.code == 0);
      CHECK_THAT(ended.said, Contains(" cells\n") || Contains(" cell\n") || Contains("makes ") || Contains("is there"));
      ++items;
    }
  CHECK(items > 40);
}
