// `kvlab profile` runs the full cache over the tasks' samples, on either backend, and lets profilers watch.
#pragma once
#include "experiment/experiment.hpp"
#include "run/runner.hpp"

namespace kvlab {

// Writes experiment.output (a profile file, result/profile_file.hpp) and prints its table. Returns exit code 0, or 1
// when a sample does not fit in memory, its numbers are not finite, or the file cannot be written. It checks everything
// else first and throws.
int run_profile(const Experiment& experiment, const PluginCatalog& catalog, const RunOptions& options);

// Makes these checks alone, without reading weights.
void check_profile(const Experiment& experiment, const PluginCatalog& catalog);

}  // namespace kvlab
