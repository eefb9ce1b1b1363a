// Runs the full cache on an experiment's tasks and writes what it computed as a recording: `kvlab record`.
#pragma once
#include <optional>
#include <string>

#include "experiment/experiment.hpp"
#include "replay/recording_file.hpp"

namespace kvlab {

struct RecordOptions {
  std::string command, output;
  std::optional<int> samples;  // of each task and seed, the first ones; nothing = all
  bool quiet = false;
};

// Says how large the recording may become before it loads the model. Returns exit code 0. Throws before that for
// anything wrong with the experiment, and NoRoom where neither memory nor disk has room for the recording. A later turn
// of a conversation is left out, because its prompt is another answer.
int run_record(const Experiment& experiment, const PluginCatalog& catalog, const RecordOptions& options);

}  // namespace kvlab
