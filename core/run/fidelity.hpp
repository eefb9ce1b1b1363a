// The second pass of a cell: the policy forced through the full cache's tokens, with a shadow store that keeps
// everything.
#pragma once
#include <vector>

#include "result/results.hpp"
#include "run/cell_input.hpp"

namespace kvlab {

// Fills out.fidelity and kl, top1 and first_divergence of out.samples. outputs: [item] the policy's own answers.
void measure_fidelity(const CellInput& in, const std::vector<std::vector<int>>& outputs, results::CellResult& out);

}  // namespace kvlab
