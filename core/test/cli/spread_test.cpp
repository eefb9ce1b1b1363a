// --jobs, --worker: several processes run the cells, and the result is that of one.
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "base/threads.hpp"
#include "result/results.hpp"
#include "result/rows.hpp"
#include "run/claims.hpp"
#include "support/child.hpp"

using namespace kvlab;
using test::Child;
using test::Ended;
using test::Folder;
using Words = std::vector<std::string>;

namespace {

const char* six_cells =
    "model: {synthetic: tiny}\n"
    "tasks: [random_prompts: {prompt: [40, 60], answer: 4, samples: 2}]\n"
    "policies: [full, streaming_llm: {budget: {tokens: [16, 24]}}]\n"
    "metrics: [score, memory, fidelity, trace]\nbackend: cpu\nthreads: 1\npage_size: 4\n";

// Six cells of some tenths of a second each.
const char* slow_cells =
    "model: {path: bundled/recall}\n"
    "tasks: [niah: {context: 256, samples: 1, max_new_tokens: 8}]\n"
    "policies: [full, streaming_llm: {budget: {tokens: [32, 40, 48, 56, 64]}}]\n"
    "metrics: [score]\nbackend: cpu\nthreads: 1\n";
constexpr std::size_t slow = 6;

Ended run(const Folder& folder, const char* experiment, const std::string& out, const Words& more = {},
          const std::function<void()>& setup = {}) {
  Words words{"run", folder.write("e.yaml", experiment), "-o", folder / out};
  words.insert(words.end(), more.begin(), more.end());
  return test::run_kvlab(words, setup);
}

template <class Row>
std::string text_of(const std::vector<Row>& rows) {
  std::ostringstream text;
  for (const h5::Column& column : results::columns_of(rows)) {
    if (column.unit == "ms" || column.unit == "tokens/s") continue;  // times
    text << column.name << ":";
    for (const auto x : column.i32) text << " " << x;
    for (const auto x : column.i64) text << " " << x;
    for (const auto x : column.f64) text << " " << x;
    for (const auto& x : column.text) text << " " << x;
    text << "\n";
  }
  return text.str();
}

// Everything about a file's cells but times.
std::string contents(const std::string& out) {
  const auto rows = results::read_summary(out).rows;
  std::string text = text_of(rows);
  for (const results::SummaryRow& row : rows) {
    const results::CellResult cell = results::read_cell(out, row.cell);
    text += text_of(cell.samples) + text_of(cell.ledger) + text_of(cell.plugins) + text_of(cell.trace.events);
    std::ostringstream more;
    for (const float x : cell.fidelity.kl) more << x << " ";
    for (const auto x : cell.trace.tokens) more << x << " ";
    for (const auto x : cell.trace.kept) more << x << " ";
    for (const auto x : cell.trace.selected) more << x << " ";
    text += more.str() + "\n";
  }
  return text;
}

// How often each cell was written, by the debug messages of all processes in a log file.
std::map<std::string, int> times_written(const std::string& log) {
  std::map<std::string, int> times;
  std::ifstream in(log);
  for (std::string line; std::getline(in, line);) {
    const std::size_t cell = line.find("cell "), written = line.find(": written to ");
    if (cell != line.npos && written != line.npos) ++times[line.substr(cell + 5, written - cell - 5)];
  }
  return times;
}

void check_each_once(const std::string& log, std::size_t cells) {
  const auto times = times_written(log);
  CHECK(times.size() == cells);
  for (const auto& [cell, count] : times) {
    CAPTURE(cell);
    CHECK(count == 1);
  }
}

void check_good(const std::string& out, std::size_t cells) {
  const auto rows = results::read_summary(out).rows;
  CHECK(rows.size() == cells);
  for (const auto& row : rows) {
    CAPTURE(row.error);
    CHECK(row.status == "ok");
  }
}

// A worker that runs a cell now, as its claim names it; 0 = none. It has told of the cells before that one.
pid_t worker_in_a_cell(const Folder& folder) {
  for (const ClaimSeen& claim : claims_in(folder / "out.h5.parts"))
    if (lives(claim.owner) && !std::filesystem::exists(folder / ("out.h5.parts/" + claim.id + ".h5")))
      return static_cast<pid_t>(claim.owner.process);
  return 0;
}

// Such a worker, stopped, if a cell is finished. One that has finished its own at this moment goes on, and tells of it.
pid_t stopped_in_a_cell(const Folder& folder) {
  const pid_t worker = worker_in_a_cell(folder);
  if (worker == 0 || folder.files("out.h5.parts", ".h5") == 0) return 0;
  kill(worker, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (worker_in_a_cell(folder) == worker) return worker;
  kill(worker, SIGCONT);
  return 0;
}

}  // namespace

TEST_CASE("--jobs 2 gives the result of one process, in its order, and leaves no claims") {
  const Folder folder;
  const Ended one = run(folder, six_cells, "one.h5");
  INFO(one.said);
  REQUIRE(one.code == 0);
  const Words how = GENERATE(Words{}, Words{"--isolate"});
  const Ended two = run(folder, six_cells, "two.h5", [&] {
    Words words{"--jobs", "2", "-v", "--log", folder / "log"};
    words.insert(words.end(), how.begin(), how.end());
    return words;
  }());
  INFO(two.said);
  CHECK(two.code == 0);
  CHECK(results::read_summary(folder / "two.h5").rows.size() == 6);
  CHECK(contents(folder / "two.h5") == contents(folder / "one.h5"));
  check_each_once(folder / "log", 6);
  CHECK(folder.files("two.h5.parts", ".claim") == 0);
  CHECK_THAT(two.said, Catch::Contains("[6/6]"));

  const Ended again = run(folder, six_cells, "two.h5", {"--jobs", "2"});
  CHECK(again.code == 0);
  CHECK_THAT(again.said, Catch::Contains("6 of 6 cells were finished already"));
}

TEST_CASE("--jobs records the command that the user gave, and --fresh replaces every part once") {
  const Folder folder;
  REQUIRE(run(folder, six_cells, "out.h5").code == 0);
  std::map<std::string, std::filesystem::file_time_type> before;
  for (const auto& row : results::read_summary(folder / "out.h5").rows)
    before[row.cell] = std::filesystem::last_write_time(results::part_path(folder / "out.h5", row.cell));
  const Ended fresh = run(folder, six_cells, "out.h5", {"--jobs", "2", "--fresh", "-v", "--log", folder / "log"});
  INFO(fresh.said);
  CHECK(fresh.code == 0);
  check_each_once(folder / "log", 6);
  for (const auto& [cell, time] : before)
    CHECK(std::filesystem::last_write_time(results::part_path(folder / "out.h5", cell)) > time);
  std::filesystem::remove(folder / "out.h5");
  CHECK(results::read_summary(folder / "out.h5").info.command == "kvlab run " + (folder / "e.yaml") + " -o " +
                                                                     (folder / "out.h5") +
                                                                     " --jobs 2 --fresh -v --log " + (folder / "log"));
}

TEST_CASE("--jobs: a killed worker's cell is run by another worker, and no cell is run twice") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", slow_cells);
  Child parent(
      test::kvlab_command({"run", file, "-o", folder / "out.h5", "--jobs", "2", "-v", "--log", folder / "log"}));
  pid_t worker = 0;
  REQUIRE(parent.reaches([&] { return (worker = stopped_in_a_cell(folder)) != 0; }));
  kill(worker, SIGKILL);
  const Ended ended = parent.wait();
  INFO(ended.said);
  CHECK(ended.code == 0);
  check_good(folder / "out.h5", slow);
  check_each_once(folder / "log", slow);
  CHECK_THAT(ended.said, Catch::Contains("got signal 9 (Killed) for a worker"));
}

TEST_CASE("--jobs: after the run was killed its workers end, and the next run loses nothing and repeats nothing") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", slow_cells);
  {
    Child parent(
        test::kvlab_command({"run", file, "-o", folder / "out.h5", "--jobs", "2", "-v", "--log", folder / "log"}));
    REQUIRE(parent.reaches([&] { return folder.files("out.h5.parts", ".h5") >= 1 && worker_in_a_cell(folder); }));
    parent.kill(SIGKILL);
    CHECK(parent.wait().signal == SIGKILL);
  }
  const Ended again = run(folder, slow_cells, "out.h5", {"--jobs", "2", "-v", "--log", folder / "log"});
  INFO(again.said);
  CHECK(again.code == 0);
  check_good(folder / "out.h5", slow);
  check_each_once(folder / "log", slow);
  CHECK(folder.files("out.h5.parts", ".claim") == 0);
}

TEST_CASE("--jobs: a signal stops the workers, the finished cells stay, and the next run goes on") {
  std::optional<Folder> place;
  Ended ended;
  for (int i = 0; i < test::attempts && (i == 0 || ended.code == 0); ++i) {
    place.emplace();
    Child parent(test::kvlab_command({"run", place->write("e.yaml", slow_cells), "-o", *place / "out.h5", "--jobs", "2",
                                      "-v", "--log", *place / "log"}));
    REQUIRE(parent.reaches([&] { return place->files("out.h5.parts", ".h5") >= 1 && worker_in_a_cell(*place); }));
    parent.kill(SIGTERM);
    ended = parent.wait();
  }
  const Folder& folder = *place;
  INFO(ended.said);
  CHECK(ended.code == 128 + SIGTERM);
  CHECK(folder.files("out.h5.parts", ".claim") == 0);
  CHECK(results::read_summary(folder / "out.h5").rows.size() == folder.files("out.h5.parts", ".h5"));
  CHECK(run(folder, slow_cells, "out.h5", {"-v", "--log", folder / "log"}).code == 0);
  check_good(folder / "out.h5", slow);
  check_each_once(folder / "log", slow);
}

TEST_CASE("--worker: a run joins in, waits for the worker's cell, and makes the result file") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", slow_cells);
  Child worker(test::kvlab_command({"run", file, "-o", folder / "out.h5", "--worker", "-v", "--log", folder / "log"}));
  REQUIRE(worker.reaches([&] { return worker_in_a_cell(folder) != 0; }));
  const Ended joined = run(folder, slow_cells, "out.h5", {"-v", "--log", folder / "log"});
  INFO(joined.said);
  CHECK(joined.code == 0);
  check_good(folder / "out.h5", slow);
  const Ended ended = worker.wait();
  INFO(ended.said);
  CHECK(ended.code == 0);
  check_each_once(folder / "log", slow);
}

TEST_CASE("--worker: a killed worker's claim stays behind, and a run takes its cell over") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", slow_cells);
  Child worker(test::kvlab_command({"run", file, "-o", folder / "out.h5", "--worker", "-v", "--log", folder / "log"}));
  REQUIRE(worker.reaches([&] { return stopped_in_a_cell(folder) != 0; }));
  worker.kill(SIGKILL);
  worker.wait();
  CHECK(folder.files("out.h5.parts", ".claim") <= 1);
  const Ended after = run(folder, slow_cells, "out.h5", {"-v", "--log", folder / "log"});
  INFO(after.said);
  CHECK(after.code == 0);
  check_good(folder / "out.h5", slow);
  check_each_once(folder / "log", slow);
  CHECK(folder.files("out.h5.parts", ".claim") == 0);
}

TEST_CASE("--jobs: a cell that ends its workers is a failed cell after two of them, and the others are run") {
  const Folder folder;
  const std::string library = (test::build_root() / "lib" / "bad_plugins" / "libmisbehaving.so").string();
  const std::string deed = GENERATE("segv", "_exit");
  const std::string experiment =
      "model: {synthetic: tiny}\nplugin_path: " + library +
      "\ntasks: [random_prompts: {prompt: 40, answer: 4, samples: 1}]\n"
      "metrics: [score]\nbackend: cpu\nthreads: 1\npage_size: 4\npolicies:\n"
      "  - {name: bad, scorer: {bad_scorer: {in: score, deed: " +
      deed + "}}, budget: {tokens: 16}}\n  - full\n  - streaming_llm: {budget: {tokens: [16, 24]}}\n";
  const Ended ended = run(folder, experiment.c_str(), "out.h5", {"--jobs", "2"});
  INFO(ended.said);
  CHECK(ended.code == 1);
  const auto rows = results::read_summary(folder / "out.h5").rows;
  REQUIRE(rows.size() == 4);
  for (const auto& row : rows) {
    CAPTURE(row.policy, row.error);
    CHECK(row.status == (row.policy == "bad" ? "failed" : "ok"));
    if (row.policy == "bad")
      CHECK_THAT(row.error, Catch::Contains("got the end of 2 workers while they ran this cell"));
  }
}

TEST_CASE("--jobs is refused where workers would lengthen each other's times, which are measured") {
  const Folder folder;
  const std::string timed =
      "model: {synthetic: tiny}\ntasks: [random_prompts: {prompt: [40, 60], answer: 4, samples: 1}]\n"
      "policies: [full]\nmetrics: [latency]\nbackend: cpu\n";
  const Ended open = run(folder, timed.c_str(), "out.h5", {"--jobs", "2"});
  INFO(open.said);
  CHECK(open.code == 2);
  CHECK_THAT(open.said, Catch::Contains("got 2 workers and") && Catch::Contains("wanted `threads` in the file"));
  const std::string wide = timed + "threads: " + std::to_string(usable_cores()) + "\n";
  CHECK(run(folder, wide.c_str(), "out.h5", {"--jobs", "2"}).code == 2);
  CHECK_FALSE(std::filesystem::exists(folder / "out.h5.parts"));
  if (usable_cores() < 2) return;
  const std::string narrow = timed + "threads: 1\n";
  const Ended fits = run(folder, narrow.c_str(), "out.h5", {"--jobs", "2"});
  INFO(fits.said);
  CHECK(fits.code == 0);
}

TEST_CASE("--on: without its programs a run is refused, and nothing is written") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", six_cells);
  for (const std::string on : {"mpi", "slurm"}) {
    const Ended ended = test::run_kvlab({"run", file, "-o", folder / "out.h5", "--on", on, "--jobs", "2"},
                                        [&] { setenv("PATH", (folder / ".").c_str(), 1); });
    INFO(ended.said);
    CHECK(ended.code == 2);
    CHECK_THAT(ended.said, Catch::Contains("--on " + on + ": got no program " + (on == "mpi" ? "mpirun" : "sbatch")));
  }
  CHECK(folder.files(".", ".h5") == 0);
  CHECK_FALSE(std::filesystem::exists(folder / "out.h5.parts"));
}

namespace {

// Programs in place of Slurm's. Each waits for nothing but what its text says.
class FakeSlurm {
 public:
  FakeSlurm(const std::string& sbatch, const std::string& squeue, const std::string& scancel) {
    for (const auto& [name, text] : {std::pair{"sbatch", sbatch}, {"squeue", squeue}, {"scancel", scancel}})
      std::filesystem::permissions(folder_.write(name, "#!/bin/sh\n" + text + "\n"), std::filesystem::perms::owner_all);
  }
  // seconds: after which a program of Slurm counts as one that hangs.
  std::function<void()> setup(const char* seconds = "60") const {
    return [seconds, path = (folder_ / ".") + ":" + std::getenv("PATH")] {
      setenv("PATH", path.c_str(), 1);
      setenv("KVLAB_SLURM_SECONDS", seconds, 1);
    };
  }

 private:
  Folder folder_;
};

const std::string hangs = "exec sleep 1000";

}  // namespace

TEST_CASE("--on slurm: sbatch that hangs or refuses ends the run with 2, and nothing is left") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", six_cells);
  const auto [sbatch, says] = GENERATE(table<std::string, std::string>(
      {{hangs, "got no answer of sbatch within 1 s, wanted a job"},
       {"echo 'no such partition' >&2; exit 1", "got 'no such partition' of sbatch, wanted a job"},
       {"echo soon", "got 'soon' of sbatch, wanted a job's number"}}));
  const FakeSlurm slurm(sbatch, "exit 1", "exit 1");
  const Ended ended = test::run_kvlab({"run", file, "-o", folder / "out.h5", "--on", "slurm"},
                                      slurm.setup(sbatch == hangs ? "1" : "60"));
  INFO(ended.said);
  CHECK(ended.code == 2);
  CHECK_THAT(ended.said, Catch::Contains(says));
  CHECK_FALSE(std::filesystem::exists(folder / "out.h5"));
  CHECK_FALSE(std::filesystem::exists(folder / "out.h5.parts"));
}

TEST_CASE("--on slurm: a later sbatch that is refused ends the run with 1: a worker ran a cell") {
  const Folder folder;
  const std::string library = (test::build_root() / "lib" / "bad_plugins" / "libmisbehaving.so").string();
  const std::string experiment =
      "model: {synthetic: tiny}\nplugin_path: " + library +
      "\ntasks: [random_prompts: {prompt: 40, answer: 4, samples: 1}]\n"
      "metrics: [score]\nbackend: cpu\nthreads: 1\npage_size: 4\npolicies:\n"
      "  - {name: bad, scorer: {bad_scorer: {in: score, deed: _exit}}, budget: {tokens: 16}}\n";
  const std::string once = folder / "once", over = folder / "over";
  const FakeSlurm slurm("test -e " + once + " && { echo 'no such partition' >&2; exit 1; }\ntouch " + once +
                            "\nfor script; do :; done\n(sh \"$script\"; touch " + over + ") >/dev/null 2>&1 & echo 7",
                        "test -e " + over + " || echo RUNNING", "exit 0");
  const Ended ended = run(folder, experiment.c_str(), "out.h5", {"--on", "slurm", "--jobs", "1"}, slurm.setup());
  INFO(ended.said);
  CHECK(ended.code == 1);
  CHECK_THAT(ended.said, Catch::Contains("the run stops here: ") &&
                             Catch::Contains("got 'no such partition' of sbatch, wanted a job"));
}

TEST_CASE("--on slurm: with all cells there a run ends, though squeue and scancel hang") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", six_cells);
  const FakeSlurm slurm("for script; do :; done; sh \"$script\" >/dev/null 2>&1 & echo 7", hangs, hangs);
  const Ended ended =
      test::run_kvlab({"run", file, "-o", folder / "out.h5", "--on", "slurm", "--jobs", "1"}, slurm.setup("3"));
  INFO(ended.said);
  CHECK(ended.code == 0);
  check_good(folder / "out.h5", 6);
  CHECK_THAT(ended.said, Catch::Contains("got no answer of squeue within"));
  CHECK(folder.files("out.h5.parts", ".h5") == 6);
  for (const char* name : {"slurm.sh", "slurm.job", "old_parts", "gpus"})
    CHECK_FALSE(std::filesystem::exists(folder / ("out.h5.parts/" + std::string(name))));
}

TEST_CASE("--on slurm: a signal ends the run, though scancel hangs, and the error names the job") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", six_cells);
  const FakeSlurm slurm("echo 7", "echo RUNNING", hangs);
  Child run(test::kvlab_command({"run", file, "-o", folder / "out.h5", "--on", "slurm"}), slurm.setup("5"));
  REQUIRE(run.reaches([&] { return std::filesystem::exists(folder / "out.h5.parts/slurm.job"); }));
  run.kill(SIGTERM);
  const Ended ended = run.wait();
  INFO(ended.said);
  CHECK(ended.code == 128 + SIGTERM);
  CHECK_THAT(ended.said, Catch::Contains("got no answer of scancel within 5 s, wanted the end of job 7"));
}

TEST_CASE("options of workers that do not fit together are refused") {
  const Folder folder;
  for (const Words& words :
       {Words{"--worker", "--jobs", "2"}, Words{"--worker", "--fresh"}, Words{"--no-wait"},
        Words{"--slurm-args", "-n 1"}, Words{"--on", "mpi", "--slurm-args", "-n 1"}, Words{"--on", "cloud"},
        Words{"--jobs", "0"}, Words{"--on", "slurm", "--no-wait", "--fresh"}}) {
    CAPTURE(words);
    CHECK(run(folder, six_cells, "out.h5", words).code == 2);
  }
  const Ended other =
      test::run_kvlab({"run", "--worker-of", "here:cpu:0123456789abcdef", folder / "e.yaml", "-o", folder / "out.h5"});
  INFO(other.said);
  CHECK(other.code == 2);
  CHECK_THAT(other.said, Catch::Contains("got other cells than the run that started this worker"));
  CHECK_FALSE(std::filesystem::exists(folder / "out.h5"));
}
