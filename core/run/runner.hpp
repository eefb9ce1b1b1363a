// Runs an experiment: checks everything first, then cell by cell; every finished cell is on disk before the next one
// starts.
#pragma once
#include <kvlab/error.hpp>

#include <optional>
#include <string>
#include <vector>

#include "experiment/experiment.hpp"
#include "result/results.hpp"

namespace kvlab {

struct RunOptions {
  std::string command;  // as typed, for the result file
  bool fresh = false;   // run finished cells again; each stays until its new result is on disk
  bool quiet = false;   // no table
  // How a cell gets a process of its own: this command, and `--isolated-cell ID` behind its first two words. Empty:
  // cells run in this process.
  std::vector<std::string> isolate = {};
};

// Exit code: 0, or 1 when a cell failed or did not fit, or a result could not be written. Throws before the first cell
// for anything wrong with YAML, model, plugin or data; nothing is written then.
int run_experiment(const Experiment& experiment, const PluginCatalog& catalog, const RunOptions& options);

// That process: runs the cell, writes its part and tells the run how it goes (run/isolated.hpp). The run holds the
// output and makes OUT.
int run_isolated_cell(const Experiment& experiment, const PluginCatalog& catalog, const std::string& id,
                      const std::string& command);

// What ran where, for the head of a file.
results::RunInfo run_info(const Experiment& experiment, const std::string& command);

// What `kvlab check` prints: the cells, once everything holds that a run checks before its first cell (weights are not
// read). absent: why a bundled model is not on this machine; then its prompts and budgets are not checked.
struct Checked {
  std::string table;
  std::optional<Error> absent;
};
Checked check_experiment(const Experiment& experiment, const PluginCatalog& catalog);

}  // namespace kvlab
