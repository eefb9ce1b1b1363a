// The log's options on the command line, and a cell's warnings in the report.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "base/log.hpp"
#include "cli/cli.hpp"
#include "result/results.hpp"
#include "support/cell_fixture.hpp"
#include "support/golden.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
using Catch::Contains;

namespace {

std::string text_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::stringstream all;
  all << in.rdbuf();
  return all.str();
}

// Sends a stream of this process to a file while it lives.
class Redirected {
 public:
  Redirected(FILE* stream, const std::filesystem::path& file) : stream_(stream), before_(dup(fileno(stream))) {
    std::fflush(stream_);
    const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(fd, fileno(stream_));
    close(fd);
  }
  ~Redirected() {
    std::fflush(stream_);
    dup2(before_, fileno(stream_));
    close(before_);
  }

 private:
  FILE* stream_;
  int before_;
};

struct Ended {
  int code = 0;
  std::string out, err;
};

// A folder with an experiment of two cells and the command line. equal_bytes warns of both.
struct Folder {
  test::TempDir dir;
  std::string experiment = (dir / "e.yaml").string(), result = (dir / "o.h5").string();

  Folder() {
    test::write_file(experiment, "model: {path: " + test::golden("tiny/llama-gqa3").string() +
                                     ", dtype: f32}\n"
                                     "tasks: [text: {prefix: 150, forced: 4, samples: 1}]\n"
                                     "policies: [full, quest: {dense_layers: 0}]\nequal_bytes: 40KB\n"
                                     "metrics: [score, memory]\npage_size: 8\nbackend: cpu\noutput: " +
                                     result + "\n");
  }
  ~Folder() { log::start({}); }

  Ended kvlab(std::vector<std::string> words) const {
    words.insert(words.begin(), "kvlab");
    std::vector<char*> arguments;
    for (std::string& w : words) arguments.push_back(w.data());
    Ended ended;
    {
      const Redirected out(stdout, dir / "stdout"), err(stderr, dir / "stderr");
      ended.code = run_cli(static_cast<int>(arguments.size()), arguments.data());
    }
    ended.out = text_of(dir / "stdout");
    ended.err = text_of(dir / "stderr");
    return ended;
  }
};

}  // namespace

TEST_CASE("a cell's warnings are said, kept in the result file and reported, again by a run that resumes", "[log]") {
  const Folder folder;
  const Ended run = folder.kvlab({"run", folder.experiment});
  INFO(run.err);
  CHECK(run.code == 0);
  CHECK_THAT(run.err,
             Contains("[2/2] text quest 40000 B: ok in ") && Contains("\nwarning: equal_bytes: 'quest' evicts "));
  CHECK(run.err.find("debug") == std::string::npos);
  CHECK(run.err.find('\x1b') == std::string::npos);
  const auto rows = results::read_summary(folder.result).rows;
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].warnings == "equal_bytes leaves 'full' as it is: it takes no budget");
  CHECK_THAT(rows[1].warnings, Catch::StartsWith("equal_bytes: 'quest' evicts nothing") && !Contains("\n"));
  const std::string line = "warning: " + rows[1].warnings + " (cell " + rows[1].cell + ")\n";
  CHECK_THAT(run.out, Contains(line));

  const Ended again = folder.kvlab({"run", folder.experiment});
  CHECK(again.code == 0);
  CHECK_THAT(again.err, Contains("2 of 2 cells were finished already") && !Contains("equal_bytes"));
  CHECK_THAT(again.out, Contains(line));
  CHECK_THAT(folder.kvlab({"report", folder.result}).out, Contains(line));
}

// The rows of an experiment with one text, whose command ends with this code. policies: YAML; more: further keys.
static std::vector<results::SummaryRow> rows_of(const Folder& folder, const std::string& policies,
                                                const std::string& more, int code) {
  test::write_file(folder.experiment, "model: {path: " + test::golden("tiny/llama-gqa3").string() +
                                          ", dtype: f32}\ntasks: [text: {prefix: 150, forced: 4, samples: 1}]\n" +
                                          "policies:" + policies +
                                          "metrics: [score, memory]\npage_size: 8\nbackend: cpu\n" + more +
                                          "output: " + folder.result + "\n");
  const Ended run = folder.kvlab({"run", folder.experiment});
  INFO(run.err);
  CHECK(run.code == code);
  return results::read_summary(folder.result).rows;
}

TEST_CASE("a method that never acts under a budget that binds fails its cell", "[log]") {
  const Folder folder;
  const auto rows = rows_of(folder,
                            " [full, snapkv: {budget: {tokens: 40}, schedule: {prefill: false}},\n"
                            "  snapkv: {window: 8, budget: {bytes: 40000}, schedule: {prefill: false}}]\n",
                            "", 1);
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].status == "ok");
  CHECK(rows[1].status == "failed");
  CHECK_THAT(rows[1].error, Catch::StartsWith("snapkv never acted in ") && Contains("budget 40 of 154 tokens"));
  const auto& c = test::tiny_model("llama-gqa3")->config;
  CHECK(rows[2].status == "failed");
  CHECK_THAT(rows[2].error,
             Contains("budget 40000 of " + std::to_string(154 * c.layers * c.kv_heads * c.head_dim * 8) + " bytes"));
  CHECK(std::isnan(rows[1].score));
}

// Each kind of plugin twice: as it acts, and in a setting in which it has nothing to do.
TEST_CASE("a method of any kind that does nothing fails its cell, and one that acts does not", "[log]") {
  const Folder folder;
  const auto rows = rows_of(
      folder,
      "\n"
      "  - {name: scorer acts, scorer: snapkv, window: 8, budget: {tokens: 40}}\n"
      "  - {name: scorer idle, scorer: snapkv, window: 8, budget: {tokens: 40}, schedule: {prefill: false}}\n"
      "  - {name: division acts, scorer: snapkv, window: 8, budget: {tokens: 40, split: adakv}}\n"
      "  - {name: division idle, scorer: snapkv, window: 8, budget: {tokens: 40, split: adakv}, schedule: "
      "{prefill: "
      "false}}\n"
      "  - {name: selector acts, selector: quest, budget: {tokens: 40}, dense_layers: 0}\n"
      "  - {name: selector idle, selector: quest, budget: {tokens: 40}, dense_layers: 99}\n"
      "  - {name: policy acts, policy: sparq, budget: {tokens: 40}}\n"
      "  - {name: policy idle, policy: sparq, budget: {tokens: 40}, dense_layers: 99}\n"
      "  - {name: codec acts, policy: full, codec: int8}\n"
      "  - {name: codec of values acts, policy: full, codec: k16v8}\n"
      "  - {name: rows acts, policy: full, codec: {kivi2: {residual: 16}}}\n"
      "  - {name: rows idle, policy: full, codec: {kivi2: {residual: 4096}}}\n"
      "  - {name: coded acts, scorer: snapkv, window: 8, budget: {tokens: 40}, codec: int4}\n"
      "  - {name: coded idle, scorer: snapkv, window: 8, budget: {tokens: 40}, codec: int4, schedule: {prefill: "
      "false}}\n"
      "  - {name: merging acts, policy: minicache}\n"
      "  - {name: merging idle, policy: minicache, exact: 1, retained: count}\n"
      "  - {name: pruning acts, policy: think, recent: 8}\n"
      "  - {name: pruning idle, policy: think, recent: 1000}\n"
      "  - {name: tiers acts, selector: quest, budget: {tokens: 40}, dense_layers: 0, placement: {tier: host, "
      "resident: 48}}\n"
      "  - {name: tiers idle, selector: quest, budget: {tokens: 40}, dense_layers: 99, placement: {tier: host, "
      "resident: 4096}}\n"
      "  - {name: places acts, policy: arkvale, budget: {tokens: 40}, dense_layers: 0, sinks: 8, window: 8}\n",
      "spill: always\nablate: {codec of values acts: all}\n", 1);
  CHECK(rows.size() == 22);
  for (const auto& row : rows) {
    CAPTURE(row.policy, row.error, row.fired, row.compression);
    const bool idle = row.policy.ends_with("idle") || row.ablated == "values";
    CHECK(row.status == (idle ? "failed" : "ok"));
    if (idle) CHECK_THAT(row.error, Contains("such a row would be the full cache's under another name"));
  }
}

TEST_CASE("a method without a budget that leaves nothing out says so in its cell", "[log]") {
  const Folder folder;
  const auto rows = rows_of(
      folder,
      "\n"
      "  - full\n"
      "  - {name: window acts, policy: duo_attention, retrieval_heads: false, window: 20}\n"
      "  - {name: window idle, policy: duo_attention, retrieval_heads: false, window: 256}\n"
      "  - {name: mean acts, policy: razor_attention, retrieval_heads: false, window: 20, window_share: 0}\n"
      "  - {name: mean idle, policy: razor_attention, retrieval_heads: false}\n"
      "  - {name: pages acts, policy: lserve, retrieval_heads: false, sinks: 8, window: 20}\n"
      "  - {name: pages idle, policy: lserve, retrieval_heads: false}\n"
      "  - {name: share acts, policy: twilight, dense_layers: 0, p: 0.5}\n"
      "  - {name: share idle, policy: twilight, dense_layers: 99}\n"
      "  - {name: all of it idle, policy: twilight, dense_layers: 0, p: 1, tokens: 256}\n"
      "  - {name: hashes idle, policy: magicpig, bits: 0}\n"
      "  - {name: sketch idle, policy: subgen, window: 256}\n"
      "  - {name: no budget idle, policy: sparq}\n"
      "  - {name: no roles idle, policy: heterocache, clustering: false, allocation: false}\n"
      "  - {name: codes idle in codes, policy: leankv, window: 256}\n"
      "  - {name: share idle in codes, policy: twilight, dense_layers: 99, codec: k4v2}\n"
      "  - {name: old pages in codes, policy: twilight, dense_layers: 99, codec: {kivi2_pages: {residual: 32}}}\n"
      "  - {name: new pages idle, policy: twilight, dense_layers: 99, codec: {kivi2_pages: {residual: 256}}}\n",
      "", 0);
  CHECK(rows.size() == 18);
  for (const auto& row : rows) {
    CAPTURE(row.policy, row.error, row.fired, row.compression, row.warnings);
    CHECK(row.status == "ok");
    const std::string said = row.policy + " left nothing out of 154 tokens: fired 0, so its row is ";
    CHECK(row.warnings == (row.policy.ends_with("idle")            ? said + "the full cache's"
                           : row.policy.ends_with("idle in codes") ? said + "that of the full cache in its first codec"
                                                                   : ""));
  }
}

TEST_CASE("-v, -q, --log and KVLAB_LOG choose what is said and where", "[log]") {
  const Folder folder;
  const std::string log = (folder.dir / "run.log").string();
  const Ended quiet = folder.kvlab({"run", folder.experiment, "-q", "--log", log});
  CHECK(quiet.code == 0);
  CHECK(quiet.out.empty());
  CHECK_THAT(quiet.err, Catch::StartsWith("warning: equal_bytes leaves 'full' ") && !Contains("[1/2]"));
  CHECK_THAT(text_of(log), Contains("Z debug kvlab ") && Contains("Z info [1/2] text full: ok in ") &&
                               Contains("Z warning equal_bytes: 'quest' ") && Contains(": plain pass: "));

  const std::string before = text_of(log);
  const Ended verbose = folder.kvlab({"run", folder.experiment, "-v", "--log", log});
  CHECK_THAT(verbose.err, Contains("debug: kvlab ") && Contains("debug: model ") && Contains("debug: plugins from "));
  CHECK_THAT(text_of(log), Catch::StartsWith(before));
  CHECK(text_of(log).size() > before.size());

  setenv("KVLAB_LOG", "off", 1);
  const Ended off = folder.kvlab({"run", folder.experiment, "--set", "no.such=1"});
  CHECK(off.code == 2);
  CHECK(off.err.empty());
  setenv("KVLAB_LOG", "loud", 1);
  const Ended loud = folder.kvlab({"list", "models"});
  unsetenv("KVLAB_LOG");
  CHECK(loud.code == 2);
  CHECK(loud.err == "error: KVLAB_LOG: got the level 'loud', wanted debug, info, warning, error or off\n");
  CHECK(loud.out.empty());
}

TEST_CASE("a log file that would harm another file, or cannot be written, is an error before any work", "[log]") {
  const Folder folder;
  REQUIRE(folder.kvlab({"run", folder.experiment, "-q"}).code == 0);
  const std::string result = text_of(folder.result), fifo = (folder.dir / "fifo").string();
  mkfifo(fifo.c_str(), 0600);
  for (const std::string& file : {folder.result, folder.experiment, fifo, folder.dir.path().string(),
                                  (folder.dir / "none/x.log").string(), std::string("/dev/null"), std::string()}) {
    CAPTURE(file);
    const Ended ended = folder.kvlab({"run", folder.experiment, "--fresh", "--log", file});
    CHECK(ended.code == 2);
    CHECK_THAT(ended.err, Catch::StartsWith("error: ") && Contains("wanted"));
    CHECK(ended.out.empty());
    CHECK(text_of(folder.result) == result);
  }
}

TEST_CASE("a cell has the warnings of its own run, of any thread, failed or not", "[log]") {
  test::CellFixture f(test::tiny_model("llama-gqa3"), test::full_spec(), {Metric::score});
  for (unsigned i = 0; i < 2; ++i) f.add(test::test_text(20, f.model->config.vocab, i), {}, 3);
  CellInput in;
  in.experiment = &f.experiment;
  in.cell = &f.cell;
  in.model = f.model;
  in.items = &f.items;
  in.catalog = &test::built_catalog();
  in.references = &f.references;
  log::start({log::Level::off, ""});
  log::warn("before it");
  std::string outcome = "ok";
  in.progress = [&](const std::string&, int, int) {
    std::thread([] { log::warn("of a thread\nin two lines"); }).join();
    log::warn("of the cell");
    if (outcome == "failed") throw Error(Errc::plugin, "planned");
  };
  for (const char* wanted : {"ok", "ok", "failed"}) {  // every cell has the warnings, not only the first
    outcome = wanted;
    const results::CellResult cell = run_cell(in);
    CHECK(cell.summary.status == wanted);
    CHECK(cell.summary.warnings == "of a thread in two lines\nof the cell");
  }
  log::start({});
}
