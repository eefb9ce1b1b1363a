// Files that come with kvlab and are no part of its libraries.
#pragma once
#include <filesystem>

namespace kvlab {

// The folder that has analysis/ and experiments/: share/kvlab of an installation or a bundle, else the source tree.
// Errc::config, from `where`, if `needed` is in neither.
std::filesystem::path shared_files(const std::filesystem::path& needed, const char* where);

}  // namespace kvlab
