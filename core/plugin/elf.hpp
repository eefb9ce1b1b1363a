// What can be known of a library file without running it.
#pragma once
#include <filesystem>
#include <optional>
#include <string>

namespace kvlab {

// The content of the library's first ELF note of the owner "kvlab" and type 1, or nothing where it has none.
// Errc::plugin unless the file is a whole shared library for this kind of machine. The system's loader would crash on a
// file that was cut short, so the extents of segments and sections are compared with the file's length.
std::optional<std::string> read_note(const std::filesystem::path& path);

}  // namespace kvlab
