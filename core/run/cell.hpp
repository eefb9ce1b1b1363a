// Runs one cell: a plain pass over all items gives answers, times, ledger and trace. With the metric fidelity a second
// pass follows on the full cache's tokens.
#pragma once
#include "result/results.hpp"
#include "run/cell_input.hpp"

namespace kvlab {

// Checks roles, budget, needs and context before work starts. Throws as Engine does.
void check_cell(const CellInput& in);

// An Error inside the cell becomes its status "failed", missing memory the status "oom". Throws CannotGoOn where
// kvlab's own files are the trouble.
results::CellResult run_cell(const CellInput& in);

// The result of a cell that could not run. status: "failed" or "oom".
results::CellResult broken_cell(const CellInput& in, const std::string& status, const std::string& error);
results::CellResult broken_cell(const CellInput& in, const NonFinite& error);

}  // namespace kvlab
