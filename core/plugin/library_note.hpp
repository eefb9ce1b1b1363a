// The note that KVLAB_PLUGIN leaves in a library (kvlab/note.hpp), read without running it.
#pragma once
#include <kvlab/note.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace kvlab {

struct LibraryNote {
  std::uint32_t abi = 0, size = 0;
  std::string build;
  // Nothing if the note does not hold them, or is written for another ABI.
  std::optional<std::vector<RoleDeclaration>> roles;
};

// Errc::plugin for a file that is no whole library of this kind of machine, without a note, or with a damaged one.
LibraryNote library_note(const std::filesystem::path& path);

// The difference ("got plugin ABI 1, wanted 2: ...") if a library was not built with exactly this kvlab, else nothing.
std::optional<std::string> build_problem(std::uint32_t abi, std::uint32_t size, const std::string& build);

// Tells the user what to do in that case.
std::string rebuild_hint();

// Folder of libkvlab.so, symbolic links resolved.
std::filesystem::path own_folder();

}  // namespace kvlab
