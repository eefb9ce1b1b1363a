#include "base/regular_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <kvlab/error.hpp>

namespace kvlab {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

RegularFile::RegularFile(const std::filesystem::path& path, const std::string& wanted) : where_(path.string()) {
  const auto refused = [&] {
    return Error(Errc::io, std::string("got '") + std::strerror(errno) + "' when opening the file, wanted " + wanted,
                 where_);
  };
  const auto check_kind = [&] {
    if (S_ISREG(status_.st_mode)) return;
    if (fd_ >= 0) ::close(fd_);
    throw Error(Errc::io, std::string("got ") + kind_of(status_.st_mode) + ", wanted " + wanted, where_);
  };
  // Opening a device may have effects, so the kind is checked first. O_NONBLOCK: a FIFO may have taken its place since.
  if (::stat(path.c_str(), &status_) != 0) throw refused();
  check_kind();
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd_ < 0) throw refused();
  if (::fstat(fd_, &status_) != 0) {
    const Error error = refused();
    ::close(fd_);
    throw error;
  }
  check_kind();
}

RegularFile::~RegularFile() { ::close(fd_); }

std::size_t RegularFile::read(std::uint64_t offset, char* to, std::size_t count) const {
  std::size_t done = 0;
  while (done < count) {
    const ssize_t n = ::pread(fd_, to + done, count - done, static_cast<off_t>(offset + done));
    if (n == 0) break;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      throw Error(Errc::io, std::string("got '") + std::strerror(errno) + "' when reading the file, wanted its bytes",
                  where_);
    done += static_cast<std::size_t>(n);
  }
  return done;
}

std::string read_file(const std::filesystem::path& path, const std::string& wanted, std::size_t most) {
  const RegularFile file(path, wanted);
  std::string text;
  // The size is a guess: files of /proc say 0.
  for (std::size_t piece = std::max<std::size_t>(file.size() + 1, 4096); text.size() < most;) {
    const std::size_t had = text.size(), want = std::min(piece, most - had);
    text.resize(had + want);
    const std::size_t got = file.read(had, text.data() + had, want);
    text.resize(had + got);
    if (got < want) break;
  }
  return text;
}

}  // namespace kvlab
