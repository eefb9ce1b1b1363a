// What can be known of a library file without running it.
#pragma once
#include <filesystem>

namespace kvlab {

// Errc::plugin unless the file is a whole shared library for this kind of machine. The system's loader would crash on a
// file that was cut short, so the extents of segments and sections are compared with the file's length.
void check_library_file(const std::filesystem::path& path);

}  // namespace kvlab
