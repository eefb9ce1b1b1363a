#include "result/output.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <kvlab/error.hpp>
#include <optional>
#include <string_view>
#include <system_error>

#include "base/log.hpp"
#include "base/new_file.hpp"
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

// Permissions do not tell whether a file system takes new files (/proc, a full or read-only disk), so probe() writes
// one. name: of a file that will be written, so that a name too long for the disk shows here.
void probe(const fs::path& folder, const fs::path& name, const std::string& out_path) {
  try {
    const char block[4096] = {};
    NewFile file((folder / name).string(), sizeof block);
    file.write(block, sizeof block);
    file.sync();
  } catch (const Error& e) {
    refuse("got the folder '" + folder.string() + "', in which no file can be written (" + e.message() +
               "), wanted one that can be written",
           out_path);
  }
}

void check_folder(fs::path folder, const fs::path& name, const std::string& out_path) {
  std::error_code error;
  while (folder.has_relative_path() && !fs::exists(folder, error)) folder = folder.parent_path();
  if (!fs::is_directory(folder, error))
    refuse("got '" + folder.string() + "', which is no folder, wanted one", out_path);
  probe(folder, name, out_path);
}

bool has_parts(const std::string& out_path) {
  std::error_code error;
  return fs::is_directory(parts_folder(out_path), error) && !fs::is_empty(parts_folder(out_path), error);
}

OutputKind kind_of(const h5::File& file) {
  if (file.has("profilers")) return OutputKind::profile;
  return is_recording(file) ? OutputKind::recording : OutputKind::results;
}

// Refuses an undamaged file of ours that is not of the kind that will replace it.
void check_kind(const h5::File& file, OutputKind kind, const std::string& out_path) {
  static constexpr const char* files[] = {"result file", "profile file", "recording"};
  static constexpr const char* makers[] = {"run", "profile", "recording"};
  const OutputKind there = kind_of(file);
  if (there != kind)
    refuse(std::string("got a ") + files[static_cast<int>(there)] + " as the output of a " +
               makers[static_cast<int>(kind)] + ", wanted a new name: it would be overwritten",
           out_path);
  try {
    read_info(file);
  } catch (const Error& e) {
    refuse(
        "got a file of another kvlab as the output (" + e.message() + "), wanted a new name: it would be overwritten",
        out_path);
  }
  const fs::path path = out_path;
  if (there == OutputKind::results && path.parent_path().extension() == ".parts" &&
      file.has("cells/" + path.stem().string()))
    refuse("got a finished cell of another output, wanted a new name: it would be overwritten", out_path);
}

void check_ours(OutputKind kind, const std::string& out_path) {
  const auto held = h5::lock();
  std::optional<h5::File> file;
  try {
    file = open_sealed(out_path);
  } catch (const Error& e) {
    // A damaged result is built from its parts again.
    if (kind != OutputKind::results || !has_parts(out_path))
      refuse("got a damaged file as the output (" + e.message() + "), wanted a new name: it would be overwritten",
             out_path);
    return;
  }
  check_kind(*file, kind, out_path);
}

void check_file(OutputKind kind, const std::string& out_path) {
  std::error_code error;
  const fs::file_status status = fs::status(out_path, error);
  if (fs::is_directory(status))
    refuse("got a folder as the output, wanted a file's name, e.g. results/mine.h5", out_path);
  if (fs::exists(status) && !fs::is_regular_file(status))
    refuse("got a device, FIFO or socket as the output, wanted a file's name, e.g. results/mine.h5", out_path);
  const std::string name = fs::path(out_path).filename().string();
  if (name.empty() || name == "." || name == "..")
    refuse("got a folder as the output, wanted a file's name, e.g. results/mine.h5", out_path);
  switch (origin_of(follow_links(out_path))) {
    case Origin::absent: break;
    case Origin::ours: check_ours(kind, out_path); break;
    case Origin::foreign:
      refuse("got a file as the output that is no result of this kvlab, wanted a new name: it would be overwritten",
             out_path);
  }
  if (kind != OutputKind::results && has_parts(out_path))
    refuse("got the output of a run, whose parts are in " + parts_folder(out_path) + ", wanted a new name for a " +
               (kind == OutputKind::profile ? "profile" : "recording"),
           out_path);
}

void make_folder(const std::string& folder, const std::string& out_path) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse("got '" + error.message() + "', wanted to make the folder " + folder, out_path);
}

void check_part(const std::string& path) {
  if (origin_of(path) == Origin::foreign)
    refuse(
        "got a file that kvlab did not write where a cell's part goes, wanted it moved away: it would be overwritten",
        path);
}

constexpr std::string_view lock_head = "kvlab lock\n";

}  // namespace

void check_output(const std::string& out_path, OutputKind kind) {
  check_file(kind, out_path);
  std::error_code error;
  const fs::path file = fs::absolute(follow_links(out_path), error).lexically_normal();
  check_folder(file.parent_path(), file.filename(), out_path);
  if (kind == OutputKind::results) check_folder(file.string() + ".parts", "probe.h5", out_path);
}

void check_apart(const std::string& out_path, const std::vector<std::string>& inputs) {
  std::error_code error;
  for (const std::string& input : inputs)
    if (fs::equivalent(out_path, input, error))
      refuse("got a file as the output that the run reads, wanted a new name: it would be overwritten", out_path);
}

std::unique_ptr<OutputLock> open_output(const std::string& out_path, const std::string& command, OutputKind kind,
                                        const std::vector<std::string>& ids) {
  check_file(kind, out_path);
  const std::string file = follow_links(out_path);
  make_folder(folder_of(file), out_path);
  auto lock = std::make_unique<OutputLock>(out_path, command);
  remove_abandoned(folder_of(file), file);
  check_output(out_path, kind);  // under the lock no other run changes it
  if (kind == OutputKind::results) {
    make_folder(parts_folder(out_path), out_path);
    check_folder(parts_folder(out_path), "probe.h5", out_path);
  }
  for (const std::string& id : ids) check_part(part_path(out_path, id));
  return lock;
}

OutputLock::OutputLock(const std::string& out_path, const std::string& command)
    : path_(follow_links(out_path) + ".lock"), owner_(::getpid()) {
  try {
    while (!take()) {
    }
    sign(command);
  } catch (...) {
    if (fd_ >= 0) ::close(fd_);
    throw;
  }
}

OutputLock::~OutputLock() {
  // It is removed while it is locked: later the file could be another run's lock.
  if (::getpid() == owner_) ::unlink(path_.c_str());
  ::close(fd_);
}

bool OutputLock::take() {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
  struct stat opened {
  }, named{};
  if (fd_ < 0 || ::fstat(fd_, &opened) != 0)
    refuse(std::string("got '") + std::strerror(errno) + "', wanted to make the lock " + path_, path_);
  char head[lock_head.size()];
  const ssize_t got = S_ISREG(opened.st_mode) ? ::pread(fd_, head, sizeof head, 0) : -1;
  if (got < 0 ||
      std::string_view(head, static_cast<std::size_t>(got)) != lock_head.substr(0, static_cast<std::size_t>(got)))
    refuse("got a file that kvlab did not write, wanted to make a lock of this name: move it away", path_);
  int done = 0;
  do done = ::flock(fd_, LOCK_EX | LOCK_NB);
  while (done != 0 && errno == EINTR);
  if (done != 0 && errno == EWOULDBLOCK) refuse_second();
  if (done != 0)
    log::warn(path_ + ": got '" + std::strerror(errno) +
              "', wanted to lock it: a second run into the same output would not be noticed");
  if (::stat(path_.c_str(), &named) == 0 && named.st_ino == opened.st_ino && named.st_dev == opened.st_dev) return true;
  ::close(fd_);
  fd_ = -1;
  return false;
}

void OutputLock::sign(const std::string& command) {
  const std::string text = std::string(lock_head) + "host " + host_name() + "\nprocess " + std::to_string(owner_) +
                           "\ncommand " + command.substr(0, 1000) + "\n";
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    refuse(std::string("got '") + std::strerror(errno ? errno : ENOSPC) + "', wanted to write the lock " + path_,
           path_);
}

void OutputLock::refuse_second() const {
  char buffer[2048] = {};
  const ssize_t got = ::pread(fd_, buffer, sizeof buffer - 1, 0);
  std::string holder(buffer, got > 0 ? static_cast<std::size_t>(got) : 0);
  holder.erase(0, std::min(lock_head.size(), holder.size()));
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  std::replace(holder.begin(), holder.end(), '\n', ' ');
  if (holder.empty()) holder = "it has not given its name yet";
  refuse("got an output that another run is writing (" + holder + "), wanted it to end first, or a new name", path_);
}

}  // namespace kvlab::results
