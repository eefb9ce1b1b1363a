#include "cli/conform.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <kvlab/error.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/backend.hpp"
#include "base/program.hpp"
#include "plugin/loader.hpp"
#include "run/device.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

// Returns the suite's program. An installed one gets its models and vocabularies from share/kvlab/conform, a build's
// from the source tree.
fs::path suite() {
  const fs::path bin = fs::read_symlink("/proc/self/exe").parent_path(), prefix = bin.parent_path();
  const fs::path installed = prefix / "libexec" / "kvlab" / "conform", built = bin / "test_contract";
  if (fs::exists(installed)) {
    setenv("KVLAB_TEST_ROOT", (prefix / "share" / "kvlab" / "conform").c_str(), 1);
    return installed;
  }
  if (fs::exists(built)) return built;
  const bool build = fs::exists(prefix / "CMakeCache.txt");
  throw Error(Errc::config,
              fmt::format("got no {}, wanted the conformance suite; {}", (build ? built : installed).string(),
                          build ? "build it: cmake --build \"" + prefix.string() + "\" --target test_contract"
                                : "install a kvlab that was built with its tests (KVLAB_TESTS=ON)"),
              "kvlab conform");
}

// Starts the suite. out: takes its standard output; -1 = ours does.
pid_t start(const fs::path& program, std::vector<std::string> words, int out = -1) {
  words.insert(words.begin(), program.string());
  ProgramStart how{.file = "", .reads = true};
  if (out >= 0) how.descriptors = {{out, STDOUT_FILENO}};
  return start_program(std::move(words), how);
}

// Returns whether the suite ended without a failure.
bool succeeded(pid_t child) {
  const ProgramEnd end = wait_for(child);
  if (end.signal) fmt::print("FAIL   the suite was ended by signal {}\n", end.signal);
  return end.good();
}

// The names of the promises, a line each.
std::string promises(const fs::path& program) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC)) throw std::system_error(errno, std::generic_category(), "a pipe");
  const pid_t child = start(program, {"--list-test-names-only"}, ends[1]);
  close(ends[1]);
  std::string names;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
    names.append(buffer, static_cast<std::size_t>(n));
  close(ends[0]);
  succeeded(child);  // the exit code is the number of names
  return names;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Errc::config unless a promise's name contains `part`; Catch2 ignores the case of letters too.
void check_part(const std::string& part, const std::string& names) {
  std::string lines;
  for (std::size_t begin = 0; begin < names.size();) {
    const std::size_t end = std::min(names.find('\n', begin), names.size());
    const std::string name = names.substr(begin, end - begin);
    if (lower(name).find(lower(part)) != std::string::npos) return;
    lines += "\n" + name;
    begin = end + 1;
  }
  throw Error(Errc::config, fmt::format("got '{}', wanted words that stand in the name of a promise:{}", part, lines),
              "--case");
}

// A pattern of Catch2 for names that contain `part`, with Catch2's special characters escaped.
std::string names_with(const std::string& part) {
  std::string pattern = "*";
  for (const char c : part) pattern += (std::strchr("\\,[]\"", c) ? "\\" : "") + std::string(1, c);
  return pattern + (part.empty() ? "" : "*");
}

}  // namespace

int conform(const ConformOptions& options) {
  const fs::path program = suite();
  if (options.list) {
    fmt::print("{}", promises(program));
    return 0;
  }
  if (options.library.empty()) throw Error(Errc::config, "got no library, wanted one: kvlab conform build/libmine.so");
  load_library(options.library);  // its refusal says more than a failed promise
  if (!options.part.empty()) check_part(options.part, promises(program));
  const fs::path library = fs::canonical(options.library);
  const bool cpu = options.backend != "cuda";
  const bool cuda = choose_device(options.backend, {}, "kvlab conform") == Device::cuda;
  setenv("KVLAB_CONTRACT_LIBRARY", library.c_str(), 1);
  bool kept = true;
  for (const auto& [wanted, device] : {std::pair{cpu, "cpu"}, {cuda, "cuda"}}) {
    if (!wanted) continue;
    fmt::print("{} on {}\n", library.string(), device);
    setenv("KVLAB_CONTRACT_DEVICE", device, 1);
    kept &= succeeded(start(program, {names_with(options.part), "-r", "promises", "-w", "NoTests", "-v",
                                      options.verbose ? "high" : "normal"}));
  }
  if (!cuda && options.backend == "auto") fmt::print("skip   all of it on CUDA: {}\n", cuda_state());
  return kept ? 0 : 1;
}

}  // namespace kvlab
