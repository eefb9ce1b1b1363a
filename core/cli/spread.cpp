#include "cli/spread.hpp"

#include <kvlab/error.hpp>

namespace kvlab {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(Errc::config, what, "kvlab"); }

}  // namespace

void SpreadWords::add_starters_to(CLI::App* command) {
  command
      ->add_option("--jobs", jobs_,
                   "so many workers run cells beside each other, on a GPU each; with --on: workers on other machines")
      ->check(CLI::Range(1, 1000));
  command->add_option("--on", on_, "who starts the workers: mpi (mpirun of OpenMPI), slurm (a job array)")
      ->check(CLI::IsMember({"mpi", "slurm"}));
  command->add_option("--mpi-args", mpi_args_, "words for mpirun, e.g. '--hostfile hosts'");
  command->add_option("--slurm-args", slurm_args_, "options of sbatch, e.g. '--gres=gpu:1 --time=2:00:00'");
  command->add_option("--worker-of", worker_of_, "what --jobs and --on start")->group("");
}

void SpreadWords::add_to(CLI::App* run) {
  add_starters_to(run);
  run->add_flag("--no-wait", no_wait_, "with --on slurm: submit the job and end");
  run->add_flag("--worker", worker_,
                "be a worker: run the cells that no other worker runs, make no result file; the same command without "
                "this makes it");
}

void SpreadWords::apply(RunOptions& options, const std::vector<std::string>& typed) const {
  if (!worker_of_.empty()) {  // the other options are those of the run that started this worker
    options.worker = true;
    options.worker_of = worker_of_;
    return;
  }
  if (worker_ && (jobs_ || !on_.empty() || options.fresh))
    refuse("got --worker with --jobs, --on or --fresh, wanted one of them");
  if (no_wait_ && options.fresh)
    refuse("got --no-wait with --fresh, wanted one of them: the run must remember which parts are old");
  options.worker = worker_;
  options.spread = spread();
  options.spread.command = typed;
}

Spread SpreadWords::spread() const {
  if (!mpi_args_.empty() && on_ != "mpi") refuse("got --mpi-args, wanted --on mpi beside it");
  if ((!slurm_args_.empty() || no_wait_) && on_ != "slurm")
    refuse("got --slurm-args or --no-wait, wanted --on slurm beside it");
  if (slurm_args_.find('\n') != std::string::npos) refuse("got --slurm-args of several lines, wanted one");
  if (on_.empty() && jobs_ == 0) return {};
  const WorkersOn on = on_ == "mpi" ? WorkersOn::mpi : on_ == "slurm" ? WorkersOn::slurm : WorkersOn::here;
  return {on, jobs_, !no_wait_, mpi_args_, slurm_args_, {}};
}

std::vector<std::string> as_typed(std::vector<std::string> words) {
  for (const char* own : {"--isolated-cell", "--worker-of"})
    if (words.size() > 3 && words[2] == own) words.erase(words.begin() + 2, words.begin() + 4);
  return words;
}

}  // namespace kvlab
