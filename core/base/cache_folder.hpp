// The folder of files that kvlab can fetch or compute again.
#pragma once
#include <filesystem>

namespace kvlab {

// ${XDG_CACHE_HOME:-$HOME/.cache}/kvlab. The caller creates it.
std::filesystem::path cache_folder();

}  // namespace kvlab
