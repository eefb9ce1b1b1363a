#include "result/output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <kvlab/error.hpp>
#include <system_error>

#include "result/cell_file.hpp"
#include "result/h5.hpp"
#include "result/results.hpp"
#include "result/sealed.hpp"

namespace kvlab::results {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& message, const std::string& out_path) {
  throw Error(Errc::result_file, message, out_path);
}

// Permissions do not tell whether a file system takes new files (/proc, a full or read-only disk): a file does.
void probe(const fs::path& folder, const std::string& out_path) {
  const std::string path = (folder / (".kvlab-probe." + std::to_string(::getpid()))).string();
  const auto fail = [&](int reason) {
    refuse("got the folder '" + folder.string() + "', in which no file can be written (" + std::strerror(reason) +
               "), wanted one that can be written",
           out_path);
  };
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) fail(errno);
  const char block[4096] = {};
  int reason = 0;
  if (::write(fd, block, sizeof block) != static_cast<ssize_t>(sizeof block))
    reason = errno ? errno : ENOSPC;
  else if (::fsync(fd) != 0)
    reason = errno;
  ::close(fd);
  ::unlink(path.c_str());
  if (reason) fail(reason);
}

void check_file(const std::string& out_path) {
  std::error_code error;
  if (fs::is_directory(out_path, error))
    refuse("got a folder as the output, wanted a file's name, e.g. results/mine.h5", out_path);
  // What has parts beside it is ours even if it was damaged: it is built from them again.
  if (!fs::exists(out_path, error) || fs::is_directory(parts_folder(out_path), error)) return;
  const auto held = h5::lock();
  try {
    read_info(open_sealed(out_path));
  } catch (const Error& e) {
    refuse("got a file as the output that is no result of this kvlab (" + e.message() +
               "), wanted a new name: it would be overwritten",
           out_path);
  }
}

void check_folder(fs::path folder, const std::string& out_path) {
  std::error_code error;
  while (folder.has_relative_path() && !fs::exists(folder, error)) folder = folder.parent_path();
  if (!fs::is_directory(folder, error))
    refuse("got '" + folder.string() + "', which is no folder, wanted one", out_path);
  probe(folder, out_path);
}

}  // namespace

void check_output(const std::string& out_path) {
  check_file(out_path);
  std::error_code error;
  const fs::path parts = fs::absolute(parts_folder(out_path), error).lexically_normal();
  check_folder(parts.parent_path(), out_path);
  check_folder(parts, out_path);
}

void open_output(const std::string& out_path) {
  check_file(out_path);
  std::error_code error;
  fs::create_directories(parts_folder(out_path), error);
  if (error) refuse("got '" + error.message() + "', wanted to make the folder " + parts_folder(out_path), out_path);
  check_output(out_path);
}

}  // namespace kvlab::results
