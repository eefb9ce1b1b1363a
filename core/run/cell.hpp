// Runs one cell: a plain pass over all items (answers, times, ledger, trace), then, when fidelity is asked for, an
// instrumented pass on the full cache's tokens.
#pragma once
#include "result/results.hpp"
#include "run/cell_input.hpp"

namespace kvlab {

// Everything that can be wrong before work starts: roles, budget, needs, context. Throws as Engine does.
void check_cell(const CellInput& in);

// Never throws for what happens inside the cell: an Error becomes status "failed", not fitting "oom". CannotGoOn where
// kvlab's own files are the trouble.
results::CellResult run_cell(const CellInput& in);

// What a cell leaves that could not run. status: "failed" or "oom".
results::CellResult broken_cell(const CellInput& in, const std::string& status, const std::string& error);
results::CellResult broken_cell(const CellInput& in, const NonFinite& error);

}  // namespace kvlab
