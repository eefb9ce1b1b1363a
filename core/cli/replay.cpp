#include "cli/replay.hpp"

#include <algorithm>
#include <filesystem>
#include <kvlab/error.hpp>

#include "experiment/catalog.hpp"
#include "result/results.hpp"
#include "run/replay.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

// "results/exp.rec.h5" -> "results/exp.rec.replay.h5"
std::string output_of(const ReplayWords& words) {
  if (!words.output.empty()) return words.output;
  fs::path path = words.recording;
  return path.replace_extension(".replay.h5").string();
}

// A run's result has scores, which a replay cannot make again. Whatever cannot be read is left to run_experiment().
void refuse_run_result(const std::string& file) {
  results::Summary there;
  try {
    if (!results::is_there(file)) return;
    there = results::read_summary(file);
  } catch (const Error&) {
    return;
  }
  const auto of_run = [](const results::SummaryRow& row) {
    return row.status == "ok" && !results::has_label(row, "replayed");
  };
  if (std::ranges::any_of(there.rows, of_run))
    throw Error(Errc::result_file,
                "got the result of a run as the output of a replay, wanted a new name: it would be overwritten", file);
}

}  // namespace

void add_record_options(CLI::App* command, RecordOptions& options) {
  command->add_option("-o,--output", options.output, "recording (HDF5)")->required();
  command->add_option("--samples", options.samples, "record the first so many samples of each task and seed")
      ->check(CLI::Range(1, 1 << 20));
}

void add_replay_options(CLI::App* command, ReplayWords& words) {
  command->add_option("RECORDING", words.recording, "file that `kvlab record` wrote")->required();
  command->add_option("FILE", words.file,
                      "experiment file (YAML) whose policies are replayed; it needs neither model nor tasks. Nothing = "
                      "the recorded experiment");
  command->add_option("--set", words.sets, "key=value in place of the file's; repeatable")->allow_extra_args(false);
  command->add_option("-o,--output", words.output, "result file; without it RECORDING with .replay.h5");
  command->add_option("--plugin-path", words.plugin_path, "folder or library of plugins, searched first; repeatable")
      ->allow_extra_args(false);
}

int replay_recording(const ReplayWords& words, const RunOptions& options) {
  const Recording recording(words.recording);
  std::vector<fs::path> places(words.plugin_path.begin(), words.plugin_path.end());
  if (!words.file.empty())
    for (const std::string& place : plugin_path_of(words.file, words.sets)) places.emplace_back(place);
  Registry registry(places);
  const RegistryCatalog catalog(registry);
  Experiment e = replayed_experiment(recording, words.file, words.sets, catalog);
  e.output = output_of(words);
  refuse_run_result(e.output.string());
  return run_experiment(e, catalog, options);
}

}  // namespace kvlab
