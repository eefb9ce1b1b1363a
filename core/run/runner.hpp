// Runs an experiment. It checks everything first, then runs cell by cell. A finished cell is on disk before the next
// one starts.
#pragma once
#include <kvlab/error.hpp>

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "experiment/experiment.hpp"
#include "result/results.hpp"
#include "run/workers.hpp"

namespace kvlab {

struct RunOptions {
  std::string command;  // as typed, for the result file
  bool fresh = false;   // run finished cells again; each stays until its new result is on disk
  bool quiet = false;   // no table
  // The command that runs a cell in a process of its own, with `--isolated-cell ID` put behind its first two words.
  // Empty: cells run in this process.
  std::vector<std::string> isolate = {};
  Spread spread = {};  // the workers that run the cells
  // This process is a worker: it runs the cells that it can claim, and makes no result file. worker_of: what the run
  // that started it said, of each experiment; "" = somebody started it by hand.
  bool worker = false;
  std::string worker_of = {};
  // Run a cell again that other programs disturbed (run/disturbance.hpp), and finished ones of runs without this.
  bool strict = false;
};

// Returns exit code 0, or 1 when a cell failed or did not fit, or a result could not be written. Throws before the
// first cell for any error in YAML, model, plugin or data, and then writes nothing.
int run_experiment(const Experiment& experiment, const PluginCatalog& catalog, const RunOptions& options);

// An experiment with the plugins that it names.
struct GivenExperiment {
  const Experiment& experiment;
  const PluginCatalog& catalog;
};
// The same for several, one after the other. With options.spread the same workers run the cells of all of them, and
// nothing is written before all are checked.
int run_experiments(const std::vector<GivenExperiment>& all, const RunOptions& options);

// The work of that process: it runs the cell, writes its part and reports to the run (run/isolated.hpp). The run holds
// the output and makes the result file.
int run_isolated_cell(const Experiment& experiment, const PluginCatalog& catalog, const std::string& id,
                      const RunOptions& options);

// Versions, command and machine, for the head of a result file. models: of run/model_record.hpp.
results::RunInfo run_info(const Experiment& experiment, const std::string& command, const std::string& models = {});

// Makes a run's checks before its first cell, without reading weights. table: the cells, as `kvlab check` prints them.
// absent: why a bundled model is not on this machine; its prompts, budgets and profiles are then not checked. later: as
// for prepare(); models and prompts are checked all the same.
struct Checked {
  std::string table;
  std::optional<Error> absent;
};
Checked check_experiment(const Experiment& experiment, const PluginCatalog& catalog,
                         const std::set<std::filesystem::path>& later = {});

}  // namespace kvlab
