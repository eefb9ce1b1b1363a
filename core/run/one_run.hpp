// One run of an experiment: it runs the cells that are not finished, in order, then reports. In a pool workers run
// them.
#pragma once
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "experiment/experiment.hpp"
#include "result/output.hpp"
#include "result/results.hpp"
#include "run/claims.hpp"
#include "run/pool.hpp"
#include "run/prepare.hpp"
#include "run/progress.hpp"
#include "run/run_here.hpp"
#include "run/runner.hpp"
#include "run/shared_cells.hpp"

namespace kvlab {

class Run final : public WorkersHeard {
 public:
  // Locks the output until this object ends. It borrows its arguments. pool: OUT.parts of all experiments whose cells
  // the same workers run, this one's among them.
  Run(const Experiment& e, const PluginCatalog& catalog, const RunOptions& options, Prepared& prepared,
      Progress& progress, const std::vector<std::string>& pool);
  Run(const Run&) = delete;

  void run_cells();  // in this process

  PoolWork work();  // the unfinished cells, for workers
  void finished(const Cell& cell) override;
  void left_over(std::size_t cells);  // by the workers

  // What ended the cells before their end.
  void stopped_by(int signal) { stopped_ = signal; }
  void cannot_go_on() { trouble_ = cannot_go_on_ = true; }
  std::string goes_on() const;
  bool ran_none() const { return new_.empty(); }

  int end();  // makes the result file and reports; the exit code
  bool whole() const { return finished_cells() == all().size(); }
  void tidy() const { shared_.tidy(); }  // once no claim is held any more

 private:
  // A cell's result.
  struct Ran {
    results::CellResult result;
    bool on_disk = false;  // whether its part is
  };

  const std::vector<Cell>& all() const { return prepared_.cells; }
  results::Finished finished_before() const;
  std::size_t finished_cells() const;  // of this experiment's cells, by earlier runs or this one

  std::vector<const Cell*> unfinished();
  bool finished_already(const Cell& cell);
  bool runs_again(const Cell& cell) const;  // though it is finished
  bool run_and_write(const Cell& cell, const Claim& claim);
  Ran run_one(const Cell& cell, const Claim& claim);
  Ran run_apart(const Cell& cell, const CellInput& in) const;
  void stop_at(const Cell& cell, const std::string& name, const std::string& why);
  std::string name_of(const Cell& cell) const;

  bool make_output() const;
  results::RunInfo info_of_cells() const;
  void say_ended(const results::SummaryRow& row, const std::string& elsewhere);
  int say_stopped() const;
  void say_others() const;
  void print_report(bool made) const;

  const Experiment& e_;
  const PluginCatalog& catalog_;
  const RunOptions& options_;
  Prepared& prepared_;
  Progress& progress_;
  ModelInUse models_{e_, prepared_};
  ReferenceCache references_;
  std::string out_;
  std::vector<std::string> ids_;  // of the experiment's cells
  std::unique_ptr<results::OutputLock> held_;
  results::RunInfo info_;
  SharedCells shared_;                // looks at the parts before `before_` does: one that appears in between is new
  std::vector<std::string> folders_;  // of the pool, this one's first
  results::Finished before_;          // by earlier runs
  std::set<std::string> new_;         // cells that this run has finished
  bool trouble_ = false;              // a cell failed, did not fit or could not be written
  bool cannot_go_on_ = false, left_to_workers_ = false;
  int stopped_ = 0;          // by this signal
  int skipped_ = 0;          // cells
  int still_disturbed_ = 0;  // cells, after all reruns of --strict
};

}  // namespace kvlab
