#include "run/slurm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/log.hpp"
#include "base/new_file.hpp"
#include "base/program.hpp"
#include "base/text.hpp"

namespace kvlab {
namespace {

std::chrono::seconds limit() {
  const char* own = std::getenv("KVLAB_SLURM_SECONDS");
  if (!own) return std::chrono::seconds(60);
  const std::string text = own;
  if (text.empty() || text.size() > 6 || text.find_first_not_of("0123456789") != text.npos || std::stoi(text) == 0)
    throw CannotStart(fmt::format("got KVLAB_SLURM_SECONDS={}, wanted whole seconds from 1 to 999999", text));
  return std::chrono::seconds(std::stoi(text));
}

ProgramEnd ask(const std::vector<std::string>& words) { return run_program(words, limit()); }

// What a program said in place of what it should do.
std::string said_by(const ProgramEnd& end, const std::string& name) {
  if (!end.in_time) return fmt::format("got no answer of {} within {} s", name, limit().count());
  const std::size_t last = end.said.find_last_not_of(" \n");
  return fmt::format("got '{}' of {}", one_line(end.said.substr(0, last + 1)), name);
}

bool is_number(const std::string& job) { return !job.empty() && job.find_first_not_of("0123456789") == job.npos; }

// slurm_args stand in the script: a shell would have to quote them.
std::string slurm_script(const Spread& spread, const std::vector<std::string>& words) {
  const std::string args = spread.slurm_args.empty() ? "" : "#SBATCH " + spread.slurm_args + "\n";
  return fmt::format("#!/bin/sh\n#SBATCH --job-name=kvlab\n{}exec {}\n", args, shell_quoted(words));
}

// Slurm reads %x in a file's name as a pattern.
std::string without_patterns(const std::string& path) {
  std::string text;
  for (const char c : path) text += c == '%' ? "%%" : std::string(1, c);
  return text;
}

// Slurm's default for MaxArraySize allows no more.
constexpr std::size_t longest_array = 1000;

class Slurm final : public Workers {
 public:
  Slurm(const Spread& spread, const std::string& of, const std::vector<std::string>& words, std::size_t cells,
        const std::string& folder)
      : folder_(folder) {
    if (go_on(of)) return;
    const std::size_t count = spread.jobs > 0 ? static_cast<std::size_t>(spread.jobs) : std::min(cells, longest_array);
    const std::string script = folder + "/slurm.sh";
    write_text(script, slurm_script(spread, words));
    const ProgramEnd end = ask({"sbatch", "--parsable", fmt::format("--array=0-{}", count - 1),
                                "--output=" + without_patterns(folder) + "/slurm-%A_%a.log", script});
    if (!end.in_time)
      throw CannotStart(said_by(end, "sbatch") + ", wanted a job: `squeue --name=kvlab` shows whether there is one");
    if (!end.good()) throw CannotStart(said_by(end, "sbatch") + ", wanted a job");
    // "12", or "12;CLUSTER", behind warnings.
    std::istringstream lines(end.said);
    for (std::string line; std::getline(lines, line);)
      if (!line.empty()) job_ = line.substr(0, line.find(';'));
    if (!is_number(job_)) throw CannotStart(said_by(end, "sbatch") + ", wanted a job's number");
    write_text(job_file(), job_ + " " + of + "\n");
    log::info(fmt::format("job {} of Slurm: {} {}", job_, count, count == 1 ? "worker" : "workers"));
  }
  // Asks every few seconds: squeue is work for Slurm's controller.
  bool any() override {
    const auto now = std::chrono::steady_clock::now();
    if (over_ || now < next_) return !over_;
    const State state = state_of(job_);
    over_ = state == State::gone || (state == State::unknown && nothing_to_wait_for_);
    next_ = std::chrono::steady_clock::now() + std::chrono::seconds(state == State::unknown ? 30 : 2);
    return !over_;
  }
  void stop(int) override {
    nothing_to_wait_for_ = true;
    next_ = {};
    const ProgramEnd end = ask({"scancel", job_});
    if (end.good()) return;
    over_ = true;
    log::error(fmt::format("{}, wanted the end of job {}: `scancel {}` ends it", said_by(end, "scancel"), job_, job_));
  }
  void no_cells_left() override {
    if (std::exchange(told_, true)) return;
    nothing_to_wait_for_ = true;
    next_ = {};
    const ProgramEnd end = ask({"scancel", "--state=PENDING", job_});
    if (!end.in_time)
      log::warn(said_by(end, "scancel") + fmt::format(", wanted to end what job {} has not begun", job_));
  }
  std::string name() const override { return fmt::format("job {} of Slurm", job_); }
  std::string messages() const override { return fmt::format("{}/slurm-{}_*.log", folder_, job_); }

 private:
  enum class State : std::uint8_t { queued, gone, unknown };

  std::string job_file() const { return folder_ + "/slurm.job"; }

  // Waits for the job of a run that did not wait, or that was killed, if its workers run the same cells. A controller
  // that does not answer has not forgotten the job.
  bool go_on(const std::string& of) {
    std::ifstream in(job_file());
    std::string job, word;
    if (!(in >> job >> word) || word != of || !is_number(job) || state_of(job) == State::gone) return false;
    job_ = job;
    log::info(fmt::format("job {} of Slurm, which an earlier run submitted, is not over", job_));
    return true;
  }

  static State state_of(const std::string& job) {
    const ProgramEnd end = ask({"squeue", "--noheader", "--format=%T", "--jobs=" + job});
    if (end.good()) return end.said.find_first_not_of(" \n") != std::string::npos ? State::queued : State::gone;
    if (end.said.find("Invalid job id") != std::string::npos) return State::gone;
    log::warn(fmt::format("{}, wanted the state of job {}", said_by(end, "squeue"), job));
    return State::unknown;
  }

  std::string folder_, job_;
  std::chrono::steady_clock::time_point next_{};
  bool over_ = false, told_ = false;
  bool nothing_to_wait_for_ = false;  // but for the job's own end
};

}  // namespace

std::unique_ptr<Workers> start_slurm(const Spread& spread, const std::string& of, const std::vector<std::string>& words,
                                     std::size_t cells, const std::string& folder) {
  return std::make_unique<Slurm>(spread, of, words, cells, folder);
}

}  // namespace kvlab
