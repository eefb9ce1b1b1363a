// Profile files: what calibration left behind, keyed by the model. HDF5, sealed: root attributes as in a result file
// and `model`, `model_fingerprint`; one group per profiler with its arrays (f32, attribute `units`) and `params`
// (JSON).
#pragma once
#include <kvlab/profiler.hpp>

#include <string>
#include <vector>

#include "result/report.hpp"

namespace kvlab::results {

struct ProfilerOutput {
  std::string name, params;
  Profile profile;
};

struct ProfileFile {
  std::string model, model_fingerprint;
  std::vector<ProfilerOutput> profilers;
};

void write_profile(const std::string& path, const RunInfo& info, const ProfileFile& profile);
bool is_profile(const std::string& path);           // false for any other file
ProfileFile read_profile(const std::string& path);  // Errc::result_file for a file that is none

// A table of how each array's values spread over the heads.
std::string profile_table(const ProfileFile& profile, Format format = Format::table);

}  // namespace kvlab::results
