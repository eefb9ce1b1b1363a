// The processes that run an experiment's cells beside each other, and what starts them: this process, mpirun or Slurm.
// Each is kvlab again. It claims a cell, runs it, writes its part, and ends when no cell is left to claim. Nothing here
// decides which worker runs which cell.
#pragma once
#include <kvlab/error.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/program.hpp"
#include "experiment/experiment.hpp"

namespace kvlab {

enum class WorkersOn : std::uint8_t { nothing, here, mpi, slurm };  // nothing: the run itself runs the cells

struct Spread {
  WorkersOn on = WorkersOn::nothing;
  int jobs = 0;      // workers; 0 = not said
  bool wait = true;  // for a batch job's end
  std::string mpi_args, slurm_args;
  std::vector<std::string> command;  // `kvlab run ...` or `kvlab reproduce ...`; a worker gets `--worker-of ...` behind
                                     // the first two words
};
// Errc::config where these workers cannot be started here, or would lengthen times that are measured. A run asks before
// it writes anything.
void check_spread(const Spread& spread, const Experiment& e);

// What a run tells its workers, as one word. A worker whose cells are others would do useless work.
struct WorkerOf {
  std::string engine, backend, cells;  // cells: a hash of their ids

  std::string word() const { return engine + ":" + backend + ":" + cells; }
  static WorkerOf parse(const std::string& word);  // Errc::config
};
// The words of a pool's experiments as one word, and apart.
std::string pool_word(const std::vector<WorkerOf>& all);
std::vector<std::string> words_of_pool(const std::string& word);

// The device of a worker is that of its run: a cell of another device is another cell. worker_of: a word(), or "".
Experiment as_run_says(Experiment e, const std::string& worker_of);
std::string hash_of(const std::vector<Cell>& cells);

// Errc::config where `count` workers that share `cores` of one machine would lengthen each other's times, which are
// measured. e: its backend may be auto, then it has the GPUs. option: what asks for so many.
void check_beside(const Experiment& e, int count, int cores, const std::string& option);

// Gives a rank of mpirun its GPU and its share of the machine's cores: kvlab starts itself again with them. Returns in
// every other process. Call it before CUDA is used. all: what the rank will run.
void place_rank(const std::vector<Experiment>& all);

// The variables that give process `index` of `count` on this machine a GPU and its share of the cores. A machine
// without GPUs gives none.
Environment share_of_machine(bool gpus, bool cores, int index, int count);

// What the user gave starts no worker.
class CannotStart final : public Error {
 public:
  explicit CannotStart(const std::string& what, const std::string& where = {}) : Error(Errc::config, what, where) {}
};

// Runs commands of kvlab on this machine, `jobs` at a time, each with a GPU and a share of the cores. all: their
// experiments. A signal of this process is handed on, and no command begins after it. Returns the greatest exit code.
int run_beside(int jobs, const std::vector<std::vector<std::string>>& commands,
               const std::vector<const Experiment*>& all);

// Workers at work.
class Workers {
 public:
  virtual ~Workers() = default;
  virtual bool any() = 0;                    // false once all have ended; called again and again
  virtual void stop(int signal) = 0;         // asks them to
  virtual void no_cells_left() {}            // those that have not begun need not
  virtual std::string name() const = 0;      // "2 workers", "job 12 of Slurm"
  virtual std::string messages() const = 0;  // where they are; "" = among this process's
};

// An experiment as its workers need to know it. folder: OUT.parts.
struct Pooled {
  const Experiment* experiment;
  std::string cells_hash, folder;
};

// all: what the workers run; the first one's folder takes scripts and messages. cells: how many are left to run.
// CannotStart where Slurm refuses the job.
std::unique_ptr<Workers> start_workers(const Spread& spread, const std::vector<Pooled>& all, std::size_t cells);

}  // namespace kvlab
