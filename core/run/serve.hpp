// A cell with a workload: requests arrive, are batched continuously and answered. The result has the times of each.
#pragma once
#include "result/results.hpp"
#include "run/cell_input.hpp"

namespace kvlab {

// Fills samples (one for each request), tokens, steps, ledger and the summary of `out`. Throws OutOfMemory.
void serve(const CellInput& in, results::CellResult& out);

}  // namespace kvlab
