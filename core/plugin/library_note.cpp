#include "plugin/library_note.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include "plugin/elf.hpp"

namespace fs = std::filesystem;

namespace kvlab {

fs::path own_folder() {
  Dl_info self{};
  std::error_code ec;
  if (!dladdr(reinterpret_cast<void*>(&own_folder), &self) || !self.dli_fname) return {};
  return fs::canonical(self.dli_fname, ec).parent_path();
}

std::string rebuild_hint() {
  const fs::path installed = own_folder() / "cmake" / "kvlab";
  std::error_code ec;
  const std::string package =
      fs::exists(installed / "kvlabConfig.cmake", ec) ? installed.string() : "the folder of kvlabConfig.cmake";
  return "rebuild the plugin with this kvlab (" KVLAB_VERSION "): cmake -B build -Dkvlab_DIR=\"" + package +
         "\" && cmake --build build";
}

std::optional<std::string> build_problem(std::uint32_t abi, std::uint32_t size, const std::string& build) {
  if (abi != KVLAB_ABI)
    return fmt::format("got plugin ABI {}, wanted {}: the plugin was built with {} kvlab; {}", abi, KVLAB_ABI,
                       abi < KVLAB_ABI ? "an older" : "a newer", rebuild_hint());
  if (size != sizeof(kvlab_plugin))
    return fmt::format("got a plugin description of {} bytes, wanted {}: the plugin was built with another kvlab; {}",
                       size, sizeof(kvlab_plugin), rebuild_hint());
  if (build != KVLAB_BUILD)
    return fmt::format("got a plugin built with [{}], wanted [{}]; {}", build, KVLAB_BUILD, rebuild_hint());
  return std::nullopt;
}

LibraryNote library_note(const fs::path& path) {
  const std::optional<std::string> bytes = read_note(path);
  if (!bytes)
    throw Error(Errc::plugin,
                "got a library without kvlab's note, wanted a kvlab plugin; end its source with KVLAB_PLUGIN(...) from "
                "<kvlab/plugin.hpp>, or take the file out of the plugin folder",
                path.string());
  try {
    NoteReader in(*bytes);
    LibraryNote note;
    note.abi = in.u32();
    note.size = in.u32();
    note.build = in.text();
    if (note.abi != KVLAB_ABI || !in.flag()) return note;
    note.roles.emplace();
    for (std::uint32_t n = in.u32(); n > 0; --n) note.roles->push_back(in.role());
    return note;
  } catch (const Error& e) {
    throw Error(e.code(), e.message() + "; " + rebuild_hint(), path.string());
  }
}

}  // namespace kvlab
