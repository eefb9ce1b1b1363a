// Reads the profile file that a policy's entry names.
#pragma once
#include <kvlab/profile.hpp>

#include <string>

#include "experiment/catalog.hpp"
#include "model/model.hpp"

namespace kvlab {

// The arrays of all profilers in the file, without those in which nothing was measured. Needs no weights.
// Errc::result_file where the file is damaged, or an array does not fit the model's layers and heads; Errc::config
// where it is of another model, or of another page size and a profiler of it says that this matters or is not in the
// catalog, or where two profilers wrote an array of the same name. Errors name the file. A file without a page size
// passes.
Profile read_policy_profile(const std::string& file, const Model& model, int page_size, const PluginCatalog& catalog);

}  // namespace kvlab
