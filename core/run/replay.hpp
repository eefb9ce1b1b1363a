// Runs policies over a recording of the full cache, without the model: `kvlab replay`. A recording takes the place of
// the model and of the tasks' prompts. Policies, budgets, store and engine are those of a run.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "experiment/experiment.hpp"
#include "replay/replayed_rows.hpp"
#include "run/cell_input.hpp"

namespace kvlab {

// The experiment that replays it. file: an experiment file, "" = the one that was recorded. It takes the model, the
// tasks and the seeds that the file does not name from the recording. Errc::config for keys that ask for a model's
// work.
Experiment replayed_experiment(const Recording& recording, const std::string& file,
                               const std::vector<std::string>& sets, const PluginCatalog& catalog);

// Errc::config unless the experiment's only model is that of the recording.
void check_model(const Experiment& experiment, const Recording& recording);
// Errc::config where the recording has no case of this task and seed.
TaskItems recorded_items(const Recording& recording, const TaskSpec& task, std::int64_t seed);
std::shared_ptr<ReplayedRows> replayed_rows(std::shared_ptr<const Recording> recording, const TaskSpec& task,
                                            std::int64_t seed);

// The cell's result: mass, page recall and output error as fidelity measures them, the ledger, and the tokens kept.
// Each step has the full cache's queries, keys and values.
results::CellResult replay(const CellInput& in);

}  // namespace kvlab
