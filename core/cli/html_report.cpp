#include "cli/html_report.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <kvlab/error.hpp>
#include <optional>
#include <system_error>

#include "base/log.hpp"
#include "base/program.hpp"
#include "base/text.hpp"
#include "cli/shared_files.hpp"
#include "result/cell_file.hpp"
#include "result/sealed.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

constexpr const char* where = "kvlab report --html";
constexpr const char* packages = "python3 python3-h5py python3-matplotlib python3-numpy python3-pandas python3-yaml";

// The package as a folder that Python runs.
fs::path package() {
  const fs::path folder = fs::path("analysis") / "kvlab_results";
  return shared_files(folder, where) / folder;
}

// Whether the interpreter has what a report needs; nothing where it cannot be started.
std::optional<bool> is_complete(const std::string& python, const std::string& program) {
  const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nowhere < 0) throw std::system_error(errno, std::generic_category(), "/dev/null");
  std::optional<bool> complete;
  try {
    complete = wait_for(start_program({python, "-B", program, "packages"}, {.descriptors = {{nowhere, STDOUT_FILENO}}}))
                   .good();
  } catch (const Error& e) {
    log::debug(e.what());
  }
  close(nowhere);
  return complete;
}

// One that has the packages. Where none has, the first one: it says what is missing.
std::string interpreter(const std::string& program) {
  const char* own = std::getenv("KVLAB_PYTHON");
  const std::vector<std::string> candidates =
      own && *own ? std::vector<std::string>{own} : std::vector<std::string>{"python3", "/usr/bin/python3"};
  std::string first;
  for (const std::string& python : candidates) {
    const std::optional<bool> complete = is_complete(python, program);
    if (complete.value_or(false)) return python;
    if (complete && first.empty()) first = python;
  }
  if (!first.empty()) return first;
  throw Error(Errc::network,
              fmt::format("got no Python as {}, wanted one with its packages: apt-get install {}",
                          join(candidates, " or "), packages),
              where);
}

}  // namespace

int html_report(const std::vector<std::string>& files, const std::string& out) {
  if (out.empty()) throw Error(Errc::config, "got an empty name, wanted a folder or a file", "--html");
  for (const std::string& file : files) {
    const auto lock = h5::lock();
    results::refuse_recording(results::open_sealed(file));
  }
  const std::string program = package().string();
  std::vector<std::string> words{interpreter(program), "-B", program, "report", "--output=" + out, "--"};
  words.insert(words.end(), files.begin(), files.end());
  const ProgramEnd end = wait_for(start_program(words));
  if (end.signal) throw Error(Errc::io, fmt::format("got signal {}, wanted a page", end.signal), words[0]);
  return end.code;
}

}  // namespace kvlab
