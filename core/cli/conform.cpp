#include "cli/conform.hpp"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <kvlab/error.hpp>
#include <vector>

#include "base/backend.hpp"
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

// Runs the suite. Returns whether it ended without a failure.
bool run_suite(const fs::path& program, const std::vector<std::string>& words) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  std::fflush(stdout);
  pid_t child = 0;
  if (const int error = posix_spawn(&child, program.c_str(), nullptr, nullptr, argv.data(), environ))
    throw Error(Errc::io, fmt::format("got '{}', wanted to start it", std::strerror(error)), program.string());
  int status = 0;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return false;
  if (WIFSIGNALED(status)) fmt::print("FAIL   the suite was ended by signal {}\n", WTERMSIG(status));
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
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
    run_suite(program, {program, "--list-test-names-only"});
    return 0;
  }
  if (options.library.empty()) throw Error(Errc::config, "got no library, wanted one: kvlab conform build/libmine.so");
  load_library(options.library);  // its refusal says more than a failed promise
  const fs::path library = fs::canonical(options.library);
  const bool cpu = options.backend != "cuda";
  const bool cuda = choose_device(options.backend, {}, "kvlab conform") == Device::cuda;
  setenv("KVLAB_CONTRACT_LIBRARY", library.c_str(), 1);
  bool kept = true;
  for (const auto& [wanted, device] : {std::pair{cpu, "cpu"}, {cuda, "cuda"}}) {
    if (!wanted) continue;
    fmt::print("{} on {}\n", library.string(), device);
    setenv("KVLAB_CONTRACT_DEVICE", device, 1);
    kept &= run_suite(program, {program, names_with(options.part), "-r", "promises", "-w", "NoTests"});
  }
  if (!cuda && options.backend == "auto") fmt::print("skip   all of it on CUDA: {}\n", cuda_state());
  return kept ? 0 : 1;
}

}  // namespace kvlab
