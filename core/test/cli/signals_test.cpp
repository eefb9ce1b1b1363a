// A signal asks a run to stop. The exit code tells the signal, nothing half-written stays, and the next run goes on.
#include <catch2/catch.hpp>
#include <chrono>
#include <map>
#include <optional>

#include "base/stop.hpp"
#include "result/results.hpp"
#include "support/child.hpp"

using namespace kvlab;
using test::Child;
using test::Ended;
using test::Folder;

namespace {

// Four cells of some tenths of a second each.
const char* slow_cells =
    "model: {path: bundled/recall}\n"
    "tasks: [niah: {context: 256, samples: 1, max_new_tokens: 8}]\n"
    "policies: [full, streaming_llm: {budget: {tokens: [32, 48, 64]}}]\n"
    "metrics: [score]\n"
    "backend: cpu\nthreads: 1\n";

std::vector<std::string> words(const Folder& folder, const std::string& file) {
  return test::kvlab_command({"run", file, "-o", folder / "out.h5"});
}

Ended killed_once_it_watches(const std::vector<std::string>& command) {
  Child child(test::kvlab_command(command));
  // The child notes signals once its mask of caught ones (SigCgt, hexadecimal) has SIGTERM.
  REQUIRE(child.reaches([&] {
    std::error_code ended;
    if (std::filesystem::read_symlink("/proc/" + std::to_string(child.pid()) + "/exe", ended).filename() != "kvlab")
      return false;
    std::ifstream status("/proc/" + std::to_string(child.pid()) + "/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("SigCgt:")) return (std::stoull(line.substr(7), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
    return false;
  }));
  child.kill(SIGTERM);
  return child.wait();
}

}  // namespace

TEST_CASE("SIGINT, SIGTERM and SIGHUP drop the cell under way, keep the finished ones and give their own code") {
  const int signal = GENERATE(SIGINT, SIGTERM, SIGHUP);
  std::optional<Folder> place;
  Ended ended;
  for (int i = 0; i < test::attempts && (i == 0 || place->files("out.h5.parts", ".h5") == 4); ++i) {
    place.emplace();
    // These tests may themselves run under nohup.
    Child child(words(*place, place->write("e.yaml", slow_cells)), [&] { ::signal(signal, SIG_DFL); });
    REQUIRE(child.reaches([&] { return place->files("out.h5.parts", ".h5") >= 1; }));
    child.kill(signal);
    ended = child.wait();
  }
  const Folder& folder = *place;
  const std::string file = folder / "e.yaml";
  INFO(ended.said);
  CHECK(ended.code == 128 + signal);
  const std::size_t finished = folder.files("out.h5.parts", ".h5");
  REQUIRE(finished < 4);
  const results::Summary left = results::read_summary(folder / "out.h5");
  CHECK(left.rows.size() == finished);
  for (const auto& row : left.rows) CHECK(row.status == "ok");
  CHECK(folder.files("", ".tmp") + folder.files("out.h5.parts", ".tmp") == 0);
  CHECK_THAT(ended.said, Catch::Contains(std::to_string(finished) + " of 4 cells are finished"));

  const Ended again = Child(words(folder, file)).wait();
  INFO(again.said);
  CHECK(again.code == 0);
  CHECK_THAT(again.said, Catch::Contains(std::to_string(finished) + " of 4 cells were finished already"));
  CHECK(results::read_summary(folder / "out.h5").rows.size() == 4);
}

TEST_CASE("a run that is killed while its cell has pages on the host gives the undisturbed texts when it goes on") {
  const char* cells =
      "model: {path: bundled/recall}\n"
      "page_size: 8\nspill: always\n"
      "tasks: [niah: {context: 128, samples: 2, max_new_tokens: 8, question: decode}]\n"
      "policies:\n"
      "  - full\n"
      "  - freekv: {sinks: 8, window: 8, budget: {tokens: 48}}\n"
      "  - flexicache: {unstable_heads: false, rerank_every: 4, budget: {tokens: 48}}\n"
      "  - quest: {budget: {tokens: 48}, placement: {tier: host}}\n"
      "metrics: [score]\n"
      "backend: cpu\nthreads: 1\n";
  using Clock = std::chrono::steady_clock;
  // The texts of each policy's cell.
  const auto texts = [](const std::string& file) {
    std::map<std::string, std::vector<std::string>> out;
    const auto samples = results::read_samples(file);
    for (const auto& row : results::read_summary(file).rows) {
      CHECK(row.status == "ok");
      if (row.policy != "full") CHECK(row.host_bytes_decode > 0);
      for (const auto& sample : samples.at(row.cell)) out[row.policy].push_back(sample.output);
    }
    return out;
  };
  const auto first_cell = [](Child& child, const Folder& folder) {
    REQUIRE(child.reaches([&] { return folder.files("out.h5.parts", ".h5") >= 1; }));
    return Clock::now();
  };

  const Folder undisturbed;
  Clock::duration of_cell;
  {
    Child child(words(undisturbed, undisturbed.write("e.yaml", cells)));
    const auto begin = first_cell(child, undisturbed);
    REQUIRE(child.reaches([&] { return undisturbed.files("out.h5.parts", ".h5") >= 2; }));
    of_cell = Clock::now() - begin;
    REQUIRE(child.wait().code == 0);
  }
  const auto wanted = texts(undisturbed / "out.h5");
  REQUIRE(wanted.size() == 4);

  for (const int signal : {SIGTERM, SIGKILL}) {  // the second one leaves no time to drop the cell
    CAPTURE(signal);
    std::optional<Folder> place;
    for (int i = 0; i < test::attempts && (i == 0 || place->files("out.h5.parts", ".h5") == 4); ++i) {
      place.emplace();
      Child child(words(*place, place->write("e.yaml", cells)), [] { ::signal(SIGTERM, SIG_DFL); });
      first_cell(child, *place);
      std::this_thread::sleep_for(of_cell / 2);  // in the middle of freekv's cell
      child.kill(signal);
      const Ended ended = child.wait();
      INFO(ended.said);
      CHECK((signal == SIGKILL ? ended.signal == SIGKILL : ended.code == 128 + signal));
    }
    const std::size_t finished = place->files("out.h5.parts", ".h5");
    REQUIRE(finished < 4);
    const Ended again = Child(words(*place, *place / "e.yaml")).wait();
    INFO(again.said);
    CHECK(again.code == 0);
    CHECK_THAT(again.said, Catch::Contains(std::to_string(finished) + " of 4 cells were finished already"));
    CHECK(texts(*place / "out.h5") == wanted);
  }
}

TEST_CASE("a second signal ends a process at once; the same request again does not") {
  const bool later = GENERATE(false, true);
  const auto twice = [&] {
    const pid_t child = fork();
    if (child == 0) {  // it notes the first signal and goes on, as in one layer of a long prompt
      signal(SIGTERM, SIG_DFL);
      stop::watch();
      raise(SIGTERM);
      if (later) std::this_thread::sleep_for(std::chrono::milliseconds(400));
      raise(SIGTERM);
      _exit(stop::requested() == SIGTERM ? 7 : 8);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
  };
  int status = twice();
  for (int i = 1; i < test::attempts && !later && WIFSIGNALED(status); ++i)
    status = twice();  // 0.3 s lay between the signals
  if (later) {
    REQUIRE(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGTERM);
  } else {
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 7);
  }
}

TEST_CASE("nohup: a SIGHUP that was ignored at the start stays ignored") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", slow_cells);
  Child child(words(folder, file), [] { signal(SIGHUP, SIG_IGN); });
  REQUIRE(child.reaches([&] { return folder.files("out.h5.parts", ".h5") >= 1; }));
  child.kill(SIGHUP);
  const Ended ended = child.wait();
  INFO(ended.said);
  CHECK(ended.code == 0);
  CHECK(results::read_summary(folder / "out.h5").rows.size() == 4);
}

TEST_CASE("profile, generate and bench end with the signal's code") {
  const Folder folder;
  const std::string file = folder.write("p.yaml",
                                        "model: {path: bundled/recall}\n"
                                        "tasks: [niah: {context: 1024, samples: 16}]\n"
                                        "profilers: [head_stats]\nbackend: cpu\nthreads: 1\n");
  const std::vector<std::vector<std::string>> commands{
      {"profile", file, "-o", folder / "p.h5"},
      {"generate", "Count.", "--raw", "--model", "bundled/recall", "--max-new", "4000"},
      {"bench", "gemv"}};
  const std::vector<std::string>& command = commands[GENERATE(as<std::size_t>(), 0, 1, 2)];
  Ended ended;
  for (int i = 0; i < test::attempts && (i == 0 || ended.code == 0); ++i) {
    std::filesystem::remove(folder / "p.h5");
    ended = killed_once_it_watches(command);
  }
  INFO(command[0] << ": signal " << ended.signal << ", " << ended.said);
  CHECK(ended.code == 128 + SIGTERM);
  CHECK(!std::filesystem::exists(folder / "p.h5"));
  CHECK(folder.files("", ".tmp") == 0);
}
