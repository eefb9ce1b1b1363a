#include "run/workers.hpp"

#include <fmt/format.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "base/log.hpp"
#include "base/new_file.hpp"
#include "base/program.hpp"
#include "base/sha256.hpp"
#include "base/stop.hpp"
#include "base/threads.hpp"
#include "run/claims.hpp"
#include "run/gpus.hpp"
#include "run/slurm.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr const char *visible = "CUDA_VISIBLE_DEVICES", *omp_threads = "OMP_NUM_THREADS";
constexpr const char *local_rank = "OMPI_COMM_WORLD_LOCAL_RANK", *local_ranks = "OMPI_COMM_WORLD_LOCAL_SIZE";

// What the experiments of a pool leave to the workers' variables.
struct Shares {
  bool gpus = false, cores = false;

  void add(const Experiment& e) {
    gpus |= e.backend != "cpu";
    cores |= e.threads == 0;
  }
};

Environment share(const Shares& shares, int index, int count) {
  return share_of_machine(shares.gpus, shares.cores, index, count);
}

// The words of a worker: `kvlab run --worker-of X ...`.
std::vector<std::string> worker_words(const Spread& spread, const std::string& of) {
  std::vector<std::string> words = spread.command;
  words.insert(words.begin() + 2, {"--worker-of", of});
  return words;
}

std::string own_program() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).string();
}

// The same words for another process's command line.
std::vector<std::string> started_elsewhere(const Spread& spread, const std::string& of) {
  std::vector<std::string> words = worker_words(spread, of);
  words.front() = own_program();
  return words;
}

class Here final : public Workers {
 public:
  Here(const Spread& spread, const std::string& of, const std::vector<Pooled>& all, int count)
      : words_(worker_words(spread, of)) {
    Shares shares;
    for (const Pooled& one : all) {
      shares.add(*one.experiment);
      folders_.push_back(one.folder);
    }
    for (int i = 0; i < count; ++i) all_.push_back({share(shares, i, count), -1});
    for (Worker& worker : all_) start(worker);
  }
  ~Here() override {
    for (const Worker& worker : all_)
      if (worker.process > 0) kill(worker.process, SIGTERM);
  }
  bool any() override {
    bool some = false;
    for (Worker& worker : all_) {
      ProgramEnd end;
      if (worker.process > 0 && has_ended(worker.process, end)) ended(worker, end);
      some |= worker.process > 0;
    }
    return some;
  }
  void stop(int signal) override {
    stopping_ = true;
    for (const Worker& worker : all_)
      if (worker.process > 0) kill(worker.process, signal);
  }
  std::string name() const override { return all_.size() == 1 ? "1 worker" : fmt::format("{} workers", all_.size()); }
  std::string messages() const override { return ""; }

 private:
  struct Worker {
    Environment set;
    pid_t process;
  };

  void start(Worker& worker) { worker.process = start_program(words_, {.file = "/proc/self/exe", .set = worker.set}); }

  // Starts a worker in place of one that ended in a cell. Its claim counts such ends, so this ends, too.
  void ended(Worker& worker, const ProgramEnd& end) {
    const long process = worker.process;
    worker.process = -1;
    if (stopping_) return;
    const std::string how = end.signal ? fmt::format("signal {} ({})", end.signal, strsignal(end.signal))
                                       : fmt::format("exit code {}", end.code);
    if (const std::string cell = cell_of(process); !cell.empty()) {
      log::warn(
          fmt::format("got {} for a worker (process {}) in cell {}; another one takes its place", how, process, cell));
      start(worker);
    } else if (end.signal) {
      log::error(fmt::format("got {} for a worker (process {}) outside of a cell", how, process));
    }
  }

  // The cell that a process held when it ended. "" = none.
  std::string cell_of(long process) const {
    for (const std::string& folder : folders_)
      for (const ClaimSeen& c : claims_in(folder))
        if (c.owner.process == process && c.owner.host == host_name() && !lives(c.owner)) return c.id;
    return "";
  }

  std::vector<std::string> words_, folders_;
  std::vector<Worker> all_;
  bool stopping_ = false;
};

// mpirun ends all ranks when one of them ends badly. A rank is therefore a shell that ends well.
std::string mpi_script(const Spread& spread, const std::string& of) {
  const std::string count = spread.jobs > 0 ? fmt::format(" -n {}", spread.jobs) : "";
  const std::string args = spread.mpi_args.empty() ? "" : " " + spread.mpi_args;
  return fmt::format("#!/bin/sh\nexec mpirun{} --bind-to none{} sh -c '\"$@\"; exit 0' worker {}\n", count, args,
                     shell_quoted(started_elsewhere(spread, of)));
}

class Mpi final : public Workers {
 public:
  Mpi(const Spread& spread, const std::string& of, const std::string& folder) {
    const std::string script = folder + "/mpi.sh";
    write_text(script, mpi_script(spread, of));
    process_ = start_program({"sh", script}, {.at_our_end = SIGTERM});  // mpirun then ends its ranks
  }
  ~Mpi() override {
    if (process_ > 0) kill(process_, SIGTERM);
  }
  bool any() override {
    ProgramEnd end;
    if (process_ > 0 && has_ended(process_, end)) {
      process_ = -1;
      if (end.signal || end.code)
        log::warn(end.signal ? fmt::format("got signal {} for mpirun, wanted its end", end.signal)
                             : fmt::format("got exit code {} of mpirun, wanted 0", end.code));
    }
    return process_ > 0;
  }
  void stop(int) override {
    if (process_ > 0) kill(process_, SIGTERM);
  }
  std::string name() const override { return "mpirun"; }
  std::string messages() const override { return ""; }

 private:
  pid_t process_ = -1;
};

void need_program(const std::string& name, const std::string& whose, const std::string& option) {
  if (!path_of_program(name).empty()) return;
  throw Error(Errc::config, fmt::format("got no program {}, wanted {} in a folder of PATH", name, whose), option);
}

}  // namespace

Environment share_of_machine(bool gpus, bool cores, int index, int count) {
  Environment set;
  if (gpus)
    if (const auto names = gpu_names(); !names.empty())
      set[visible] = names[static_cast<std::size_t>(index) % names.size()];
  if (cores && !std::getenv(omp_threads)) set[omp_threads] = std::to_string(std::max(1, usable_cores() / count));
  return set;
}

void check_spread(const Spread& spread, const Experiment& e) {
  if (spread.on == WorkersOn::here) check_beside(e, spread.jobs, usable_cores(), "--jobs");
  if (spread.on == WorkersOn::mpi) need_program("mpirun", "OpenMPI's", "--on mpi");
  if (spread.on == WorkersOn::slurm)
    for (const char* name : {"sbatch", "squeue", "scancel"}) need_program(name, "Slurm's", "--on slurm");
}

WorkerOf WorkerOf::parse(const std::string& word) {
  const std::size_t first = word.find(':'), second = word.find(':', first + 1);
  if (first == word.npos || second == word.npos)
    throw Error(Errc::config, "got '" + word + "', wanted ENGINE:BACKEND:HASH", "--worker-of");
  return {word.substr(0, first), word.substr(first + 1, second - first - 1), word.substr(second + 1)};
}

std::string pool_word(const std::vector<WorkerOf>& all) {
  std::string text;
  for (const WorkerOf& of : all) text += (text.empty() ? "" : "+") + of.word();
  return text;
}

std::vector<std::string> words_of_pool(const std::string& word) {
  std::vector<std::string> words;
  std::istringstream in(word);
  for (std::string one; std::getline(in, one, '+');) words.push_back(one);
  return words;
}

Experiment as_run_says(Experiment e, const std::string& worker_of) {
  if (worker_of.empty()) return e;
  e.backend = WorkerOf::parse(worker_of).backend;
  return e;
}

std::string hash_of(const std::vector<Cell>& cells) {
  Sha256 hash;
  for (const Cell& cell : cells) hash.add(cell.id + "\n");
  return hash.hex().substr(0, 16);
}

void check_beside(const Experiment& e, int count, int cores, const std::string& option) {
  if (count <= 1 || !measures_times(e)) return;
  const auto gpus = e.backend == "cpu" ? std::vector<std::string>() : gpu_names();
  if (e.backend == "cuda" || !gpus.empty()) {
    const int most = std::max(1, static_cast<int>(gpus.size()));
    if (count <= most) return;
    throw Error(Errc::config,
                fmt::format("got {} workers and {} GPU{} on one machine, wanted a GPU for each worker: the metrics "
                            "measure times",
                            count, most, most == 1 ? "" : "s"),
                option);
  }
  if (e.threads > 0 && count * e.threads <= cores) return;
  throw Error(
      Errc::config,
      fmt::format("got {} workers{} and {} cores on one machine, wanted `threads` in the file and so many cores "
                  "for each worker: the metrics measure times",
                  count, e.threads > 0 ? fmt::format(" of {} threads", e.threads) : "", cores),
      option);
}

void place_rank(const std::vector<Experiment>& all) {
  const char *rank = std::getenv(local_rank), *ranks = std::getenv(local_ranks);
  if (!rank || !ranks) return;
  const int count = std::max(1, std::atoi(ranks));
  const bool bound = std::getenv("OMPI_MCA_orte_bound_at_launch") != nullptr;  // its cores are its own already
  Shares shares;
  for (const Experiment& e : all) {
    check_beside(e, count, bound ? count * usable_cores() : usable_cores(), "mpirun");
    shares.add(e);
  }
  shares.cores &= !bound;
  for (const auto& [name, value] : share(shares, std::atoi(rank), count)) setenv(name.c_str(), value.c_str(), 1);
  unsetenv(local_rank);  // the process that follows is placed
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  const std::string line{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::string> words;
  for (std::size_t at = 0; at < line.size(); at += words.back().size() + 1) words.emplace_back(line.c_str() + at);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execv("/proc/self/exe", argv.data());
  throw Error(Errc::io, fmt::format("got '{}', wanted to start kvlab again", std::strerror(errno)), "mpirun");
}

int run_beside(int jobs, const std::vector<std::vector<std::string>>& commands,
               const std::vector<const Experiment*>& all) {
  Shares shares;
  for (const Experiment* e : all) shares.add(*e);
  const int count = std::min(jobs, static_cast<int>(commands.size()));
  std::vector<pid_t> running(static_cast<std::size_t>(count), -1);
  std::size_t next = 0;
  int code = 0, handed_on = 0;
  for (;; usleep(50'000)) {
    const int signal = stop::requested();
    bool some = false;
    for (int i = 0; i < count; ++i) {
      pid_t& process = running[static_cast<std::size_t>(i)];
      ProgramEnd end;
      if (process > 0 && has_ended(process, end)) {
        process = -1;
        code = std::max(code, end.signal ? 1 : end.code);
        if (end.signal && !signal) log::error(fmt::format("got signal {} for a process, wanted its end", end.signal));
      }
      if (process < 0 && next < commands.size() && !signal)
        process = start_program(commands[next++],
                                {.file = "/proc/self/exe", .set = share(shares, i, count), .at_our_end = SIGTERM});
      if (process > 0 && signal && !handed_on) kill(process, signal);
      some |= process > 0;
    }
    handed_on = signal;
    if (!some) return code;
  }
}

std::unique_ptr<Workers> start_workers(const Spread& spread, const std::vector<Pooled>& all, std::size_t cells) {
  const auto of = [&](const char* engine) {
    std::vector<WorkerOf> words;
    for (const Pooled& one : all) words.push_back({engine, one.experiment->backend, one.cells_hash});
    return pool_word(words);
  };
  const std::string& folder = all.front().folder;
  switch (spread.on) {
    case WorkersOn::mpi: return std::make_unique<Mpi>(spread, of("mpi"), folder);
    case WorkersOn::slurm:
      return start_slurm(spread, of("slurm"), started_elsewhere(spread, of("slurm")), cells, folder);
    default: {
      const int count = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(spread.jobs), cells));
      return std::make_unique<Here>(spread, of("here"), all, count);
    }
  }
}

}  // namespace kvlab
