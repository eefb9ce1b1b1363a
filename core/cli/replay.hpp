// `kvlab record` and `kvlab replay` (run/record.hpp, run/replay.hpp).
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "run/record.hpp"
#include "run/runner.hpp"

namespace kvlab {

inline constexpr const char* record_help = "run the full cache once and keep its queries, keys and values, for replay";
inline constexpr const char* record_examples =
    "kvlab record exp.yaml -o results/exp.rec.h5 --samples 5\n"
    "kvlab replay results/exp.rec.h5 policies.yaml\n\n"
    "It runs the file's model on its tasks under the full cache, whatever its policies are, and keeps what attention\n"
    "saw: queries, keys and values of each layer and token, and the attention mass of each prompt. It says before the\n"
    "run how large the file may become. The file grows in memory until it is whole. core/replay/README.md has the\n"
    "layout, for h5py.";

inline constexpr const char* replay_help = "run policies over a recording, without the model";
inline constexpr const char* replay_examples =
    "kvlab replay results/exp.rec.h5                                the policies of the recorded experiment\n"
    "kvlab replay results/exp.rec.h5 policies.yaml --jobs 2         those of another file, which needs no model\n"
    "kvlab replay results/exp.rec.h5 --set 'POLICY.window=[8,16,32]'\n\n"
    "Each policy gets the recorded prompts and steps: the same store, engine and policy as in `kvlab run`, but the "
    "full\n"
    "cache's queries, keys and values in place of the model. It measures what a step read of the full attention "
    "(mass),\n"
    "how many of the best pages it read (page recall), tokens kept, bytes held and bytes moved. It measures neither\n"
    "scores nor KL: no text is generated, and an error of one layer does not reach the next. The result is a result\n"
    "file: `kvlab report` reads it.";

struct ReplayWords {
  std::string recording, file, output;
  std::vector<std::string> sets, plugin_path;
};

void add_record_options(CLI::App* command, RecordOptions& options);
void add_replay_options(CLI::App* command, ReplayWords& words);
int replay_recording(const ReplayWords& words, const RunOptions& options);  // the exit code

}  // namespace kvlab
