// `kvlab reproduce targets/NAME`: tables of what kvlab is to reach on a GPU, each by one command.
#pragma once
#include <filesystem>
#include <vector>

#include "cli/reproduce.hpp"
#include "papers/targets.hpp"

namespace kvlab {

// Runs what the tables' rows read, each command as a process of its own, and prints what was measured beside the
// targets. With --jobs so many commands run at a time, each on a GPU of its own; what a row compares shares one. A run
// that fails is noted in its rows, and the others go on. What ended is not run again. tree: has analysis/. Returns 0; 1
// where a run failed or was left for the next call; 128 + the signal that stopped it.
int run_targets(const ReproduceOptions& options, const std::vector<const papers::TargetTable*>& tables,
                const std::filesystem::path& tree);

}  // namespace kvlab
