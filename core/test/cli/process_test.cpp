// The process as others see it: its name, its exit codes, and the command in its parts.
#include <algorithm>
#include <catch2/catch.hpp>
#include <sstream>

#include "result/results.hpp"
#include "support/child.hpp"

using namespace kvlab;
using Catch::Contains;
using test::Child;
using test::Ended;
using test::Folder;

namespace {

std::string first_line(const std::string& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

std::string name_of(const std::string& process) { return first_line("/proc/" + process + "/comm"); }

// The child that runs a cell. A run has other children for a moment.
std::string cell_of(pid_t process) {
  const std::string id = std::to_string(process);
  std::istringstream children(first_line("/proc/" + id + "/task/" + id + "/children"));
  for (std::string child; children >> child;)
    if (first_line("/proc/" + child + "/cmdline").find("--isolated-cell") != std::string::npos) return child;
  return "";
}

const char* slow_cells =
    "model: {path: bundled/recall}\n"
    "tasks: [niah: {context: 256, samples: 8, max_new_tokens: 8}]\n"
    "policies: [full]\nmetrics: [score]\nbackend: cpu\nthreads: 1\n";

// The text with one space between words.
std::string plain(const std::string& text) {
  std::istringstream in(text);
  std::string all;
  for (std::string word; in >> word;) all += (all.empty() ? "" : " ") + word;
  return all;
}

std::string between(const std::string& text, const std::string& begin, const std::string& end) {
  const std::size_t from = text.find(begin), to = text.find(end, from);
  return from == text.npos || to == text.npos ? "" : text.substr(from, to + end.size() - from);
}

}  // namespace

TEST_CASE("the process of a run and that of a cell are named kvlab, whatever they exec") {
  const Folder folder;
  const std::string file = folder.write("e.yaml", slow_cells);
  Child run(test::kvlab_command({"run", file, "-o", folder / "out.h5", "--isolate"}), [] {
    unsetenv("OMP_WAIT_POLICY");
    unsetenv("GOMP_SPINCOUNT");
  });
  std::string cell;
  REQUIRE(run.reaches([&] { return !(cell = cell_of(run.pid())).empty(); }));
  CHECK(name_of(std::to_string(run.pid())) == "kvlab");
  CHECK(run.reaches([&] { return name_of(cell) == "kvlab"; }, 10));
}

TEST_CASE("parts of --isolate record the command that the user gave") {
  const Folder folder;
  const std::string file = folder.write("e.yaml",
                                        "model: {synthetic: tiny}\n"
                                        "tasks: [random_prompts: {prompt: 40, answer: 4, samples: 1}]\n"
                                        "policies: [full]\nmetrics: [score]\nbackend: cpu\nthreads: 1\n");
  const std::string out = folder / "out.h5";
  REQUIRE(test::run_kvlab({"run", file, "-o", out, "--isolate", "--fresh"}).code == 0);
  const std::string id = results::read_summary(out).rows.at(0).cell;
  const std::string wanted = "kvlab run " + file + " -o " + out + " --isolate --fresh";
  CHECK(results::read_summary(out).info.command == wanted);
  std::filesystem::remove(out);
  CHECK(results::read_summary(out).info.command == wanted);  // read from the part

  // A shell reads the quoted word as it was.
  const std::string odd = folder / "it's $HOME.h5";
  REQUIRE(test::run_kvlab({"run", file, "-o", odd, "--isolate"}).code == 0);
  const std::string quoted = "'" + (folder / "it'\\''s $HOME.h5") + "'";
  CHECK(results::read_summary(odd).info.command == "kvlab run " + file + " -o " + quoted + " --isolate");

  // No word after `--` is an option.
  const Ended last = test::run_kvlab({"run", "-o", out, "--isolate", "--fresh", "--", file});
  INFO(last.said);
  CHECK(last.code == 0);
  CHECK(results::read_summary(out).info.command == "kvlab run -o " + out + " --isolate --fresh -- " + file);
}

TEST_CASE("the exit codes of --help and of its page are the same, in three lines of at most 120 characters") {
  const std::string help = test::run_kvlab({"--help"}).said;
  std::ifstream in(test::source_root() / "experiments/README.md");
  const std::string readme{std::istreambuf_iterator<char>(in), {}};
  const std::string begin = "Exit codes:", end = "SIGTERM.";
  const std::string codes = between(help, begin, end);
  for (const char* what :
       {"0 done", "1 a cell failed or did not fit in memory, or the run had to stop before its end",
        "no memory to prepare", "nothing was run", "3 no network, device, driver or Python package", "129, 130, 143"})
    CHECK_THAT(plain(codes), Contains(what));
  CHECK(plain(codes) == plain(between(readme, begin, end)));
  std::istringstream lines(help.substr(std::min(help.size(), help.rfind('\n', help.find(begin)) + 1)));
  int count = 0;
  for (std::string line; std::getline(lines, line) && !line.empty(); ++count) CHECK(line.size() <= 120);
  CHECK(count == 3);
}
