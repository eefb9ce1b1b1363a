// Profile files: the calibration of one model, in sealed HDF5. Root attributes are those of a result file, `kind`,
// `model`, `model_fingerprint` and `page_size`. The table `plugins` names the plugins that wrote the file. Each
// profiler has a group with its arrays (f32, attribute `units`) and `params` (JSON).
#pragma once
#include <kvlab/profiler.hpp>

#include <string>
#include <vector>

#include "result/results.hpp"

namespace kvlab::results {

struct ProfilerOutput {
  std::string name, params;
  Profile profile;
};

struct ProfileFile {
  std::string model, model_fingerprint;
  std::vector<ProfilerOutput> profilers;
  std::vector<PluginRow> plugins;  // the tasks', then the profilers'; empty in files of earlier versions
  std::int64_t page_size = 0;      // tokens of a page while it was measured; 0: no array depends on it, or not known
};

void write_profile(const std::string& path, const RunInfo& info, const ProfileFile& profile);
bool is_profile(const std::string& path);           // false for any other file
ProfileFile read_profile(const std::string& path);  // Errc::result_file for any other file
// The text of the experiment that made it, with a "# --set" line per override; "" in files of another schema version.
std::string experiment_of_profile(const std::string& path);

}  // namespace kvlab::results
