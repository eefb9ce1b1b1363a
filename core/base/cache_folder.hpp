// Where kvlab keeps what it may fetch or compute again.
#pragma once
#include <filesystem>

namespace kvlab {

// ${XDG_CACHE_HOME:-$HOME/.cache}/kvlab; not created here.
std::filesystem::path cache_folder();

}  // namespace kvlab
