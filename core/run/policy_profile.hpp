// Reads the profile file that a policy's entry names.
#pragma once
#include <kvlab/profile.hpp>

#include <string>

#include "model/model.hpp"

namespace kvlab {

// The arrays of all profilers in the file, without those in which nothing was measured. Needs no weights.
// Errc::result_file where the file is damaged, or an array does not fit the model's layers and heads; Errc::config
// where it is of another model or two profilers wrote an array of the same name. Errors name the file.
Profile read_policy_profile(const std::string& file, const Model& model);

}  // namespace kvlab
