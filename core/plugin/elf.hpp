// Reads a library file without running it.
#pragma once
#include <filesystem>
#include <optional>
#include <string>

namespace kvlab {

// Returns the content of the library's first ELF note of owner "kvlab" and type 1, or nothing if it has none.
// Errc::plugin unless the file is a whole shared library for this kind of machine. It compares the extents of segments
// and sections with the file's length, because the system's loader would crash on a file that was cut short.
std::optional<std::string> read_note(const std::filesystem::path& path);

}  // namespace kvlab
