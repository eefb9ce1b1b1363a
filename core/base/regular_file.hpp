// Files that somebody else named. A FIFO or a device would block or never end, so only regular files are opened.
#pragma once
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace kvlab {

// Open for reading until it is destroyed. Errc::io with what is there instead: nothing, a folder, a FIFO, a device.
class RegularFile {
 public:
  // wanted: ends the message, e.g. "a text file".
  explicit RegularFile(const std::filesystem::path& path, const std::string& wanted = "a readable file");
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  int descriptor() const { return fd_; }
  const struct stat& status() const { return status_; }  // when it was opened
  std::uint64_t size() const { return static_cast<std::uint64_t>(status_.st_size); }

  // Bytes read into `to`: `count` of them from byte `offset` on, fewer where the file ends. Thread-safe.
  std::size_t read(std::uint64_t offset, char* to, std::size_t count) const;

 private:
  std::string where_;
  int fd_ = -1;
  struct stat status_ {};
};

// The file's bytes, of a longer one the first `most`.
std::string read_file(const std::filesystem::path& path, const std::string& wanted = "a readable file",
                      std::size_t most = std::string::npos);

}  // namespace kvlab
