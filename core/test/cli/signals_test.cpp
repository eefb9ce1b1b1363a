// A signal asks a run to stop. The exit code tells the signal, nothing half-written stays, and the next run goes on.
#include <catch2/catch.hpp>
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
