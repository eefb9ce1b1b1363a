#include "base/new_file.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <kvlab/error.hpp>
#include <system_error>

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr const char* suffix = ".tmp";

std::string temporary_name(const std::string& target) {
  return target + "." + host_name() + "." + std::to_string(::getpid()) + suffix;
}

// Writes the folder's entries to the disk; 0 or errno. Some file systems cannot sync a folder and need not.
int sync_folder(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return errno;
  const int reason = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  return reason == EINVAL || reason == ENOTSUP || reason == ENOSYS ? 0 : reason;
}

// True if the process that wrote a temporary file has ended. A file with our process id is from an earlier process.
bool abandoned(long pid) { return pid == ::getpid() || (::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH); }

}  // namespace

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "host";
  return name;
}

std::string follow_links(const std::string& path) {
  fs::path at = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(at, error)); ++links) {
    if (links == 40) throw Error(Errc::io, "got symbolic links that lead in a circle, wanted a file", path);
    const fs::path next = fs::read_symlink(at, error);
    if (error) throw Error(Errc::io, "got '" + error.message() + "', wanted to read the symbolic link", at.string());
    at = next.is_absolute() ? next : at.parent_path() / next;
  }
  return at.string();
}

void write_text(const std::string& path, const std::string& text) {
  NewFile file(path, text.size());
  file.write(text.data(), text.size());
  file.take_name();
}

std::int64_t free_bytes(const std::string& folder) {
  struct statvfs info {};
  if (::statvfs(folder.c_str(), &info) != 0) return -1;
  return static_cast<std::int64_t>(info.f_bavail * info.f_frsize);
}

NewFile::NewFile(const std::string& path, std::uint64_t bytes)
    : target_(follow_links(path)), temporary_(temporary_name(target_)), bytes_(bytes) {
  const auto open = [&] {
    return ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  };
  fd_ = open();
  if (fd_ < 0 && errno == EEXIST && ::unlink(temporary_.c_str()) == 0) fd_ = open();
  if (fd_ < 0) fail(errno);
}

NewFile::~NewFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void NewFile::fail(int reason) const {
  std::string message = std::string("got '") + std::strerror(reason) + "' after " + std::to_string(written_) + " of " +
                        std::to_string(bytes_) + " bytes";
  const std::int64_t room = free_bytes(folder_of(target_));
  if (room >= 0) message += " (free there: " + std::to_string(room) + " bytes)";
  throw Error(Errc::io, message + ", wanted to write the file", target_);
}

void NewFile::write(const void* data, std::size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = ::write(fd_, at, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(n < 0 ? errno : ENOSPC);
    at += n;
    size -= static_cast<std::size_t>(n);
    written_ += static_cast<std::uint64_t>(n);
  }
}

void NewFile::sync() {
  if (::fsync(fd_) != 0) fail(errno);
}

void NewFile::take_name() {
  sync();
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  ::close(fd_);
  fd_ = -1;
  if (const int reason = sync_folder(folder_of(target_))) fail(reason);
}

void remove_abandoned(const std::string& folder, const std::string& target) {
  const std::string host = "." + host_name() + ".";
  const std::string start = target.empty() ? "" : fs::path(target).filename().string() + host;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    const std::size_t at = name.rfind(host);
    if (at == std::string::npos || name.compare(0, start.size(), start) != 0) continue;
    long pid = 0;
    int end = 0;
    if (std::sscanf(name.c_str() + at + host.size(), "%ld.tmp%n", &pid, &end) != 1 || pid <= 0) continue;
    if (end == 0 || at + host.size() + static_cast<std::size_t>(end) != name.size()) continue;
    if (abandoned(pid)) fs::remove(entry.path(), ignored);
  }
}

}  // namespace kvlab
