#include "cli/shared_files.hpp"

#include <fmt/format.h>

#include <kvlab/error.hpp>

namespace kvlab {

std::filesystem::path shared_files(const std::filesystem::path& needed, const char* where) {
  namespace fs = std::filesystem;
  const fs::path prefix = fs::read_symlink("/proc/self/exe").parent_path().parent_path();
  const fs::path installed = prefix / "share" / "kvlab", source = KVLAB_SOURCE_DIR;
  for (const fs::path& folder : {installed, source})
    if (fs::exists(folder / needed)) return folder;
  throw Error(Errc::config,
              fmt::format("got no {}, wanted the folder {} of kvlab's source tree", (installed / needed).string(),
                          needed.begin()->string()),
              where);
}

}  // namespace kvlab
