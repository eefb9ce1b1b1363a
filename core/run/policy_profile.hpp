// Reads the profile file that a policy's entry names.
#pragma once
#include <kvlab/profile.hpp>

#include <string>

#include "model/model.hpp"

namespace kvlab {

// The arrays of all profilers in the file, without those in which nothing was measured. Needs no weights.
// Errc::result_file where the file is damaged, or an array does not fit the model's layers and heads; Errc::config
// where it is of another model or page size, or two profilers wrote an array of the same name. Errors name the file. A
// file of an earlier version has no page size, and passes.
Profile read_policy_profile(const std::string& file, const Model& model, int page_size);

}  // namespace kvlab
