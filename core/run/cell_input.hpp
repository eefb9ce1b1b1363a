// The input of a cell, and the functions that its passes share.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "compose/injection.hpp"
#include "engine/engine.hpp"
#include "experiment/experiment.hpp"
#include "replay/replayed_rows.hpp"
#include "run/full_runs.hpp"
#include "run/items.hpp"
#include "run/reference.hpp"
#include "run/replay_shared.hpp"

namespace kvlab {

// Pointers are borrowed for the run of the cell.
struct CellInput {
  const Experiment* experiment = nullptr;
  const Cell* cell = nullptr;
  std::shared_ptr<const Model> model;
  const TaskItems* items = nullptr;
  const PluginCatalog* catalog = nullptr;
  ReferenceCache* references = nullptr;
  std::shared_ptr<const Profile> profile;                                      // null without `profile: FILE`
  std::shared_ptr<const RecordedTrace> recorded;                               // null unless inject: {trace: FILE}
  std::shared_ptr<ReplayedRows> rows;                                          // null unless a recording is replayed
  std::shared_ptr<ReplayShared> replay_shared;                                 // null unless one is
  std::shared_ptr<FullRuns> full_runs;                                         // null unless the policy needs them
  std::function<void(const std::string& what, int done, int total)> progress;  // counts the items of a pass
  std::optional<BudgetAmount> found_budget;                                    // by equal_bytes
  bool oracle = false;                                                         // Needs::oracle of the policy
  bool functional = false;                                                     // Needs::functional of the policy

  const PolicySpec& policy() const { return experiment->policies[cell->policy]; }
  const WorkloadSpec* workload() const {  // null = none
    return experiment->workloads.empty() ? nullptr : &experiment->workloads[cell->workload];
  }
  BudgetAmount budget() const { return found_budget.value_or(policy().budget); }
  // An oracle has no times.
  bool wants(Metric metric) const {
    return experiment->metrics.count(metric) != 0 &&
           !(oracle && (metric == Metric::latency || metric == Metric::parts));
  }
};

// Options for the cell's policy, with room for the cell's longest item in each slot.
EngineOptions engine_options(const CellInput& in, int slots);
// The cell's policy, with injected lists and corrections where the experiment wants them.
std::shared_ptr<Policy> cell_policy(const CellInput& in);
// The same within device_memory. Throws NoRoom where that is too small.
EngineOptions limited_options(const CellInput& in, int slots);
// An engine with limited_options and the cell's policy. Throws as Engine does.
Engine make_engine(const CellInput& in, int slots);

// Ends a cell that does not fit; the cell's result reports it.
struct OutOfMemory {
  std::string what;
};
void want_room(Fit fit, const Engine& engine);  // throws OutOfMemory

}  // namespace kvlab
