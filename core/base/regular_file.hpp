// Files that users name. A read of a FIFO or a device may block or never end, so only regular files are opened.
#pragma once
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace kvlab {

// A file that is open for reading while the object lives. Errc::io names what is there instead: a folder, a FIFO ...
class RegularFile {
 public:
  // wanted: the end of the message, e.g. "a text file".
  explicit RegularFile(const std::filesystem::path& path, const std::string& wanted = "a readable file");
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  int descriptor() const { return fd_; }
  const struct stat& status() const { return status_; }  // when it was opened
  std::uint64_t size() const { return static_cast<std::uint64_t>(status_.st_size); }

  // Reads `count` bytes from byte `offset` on into `to`, fewer where the file ends. Returns their number. Thread-safe.
  std::size_t read(std::uint64_t offset, char* to, std::size_t count) const;

 private:
  std::string where_;
  int fd_ = -1;
  struct stat status_ {};
};

// The file's bytes, at most the first `most`.
std::string read_file(const std::filesystem::path& path, const std::string& wanted = "a readable file",
                      std::size_t most = std::string::npos);

}  // namespace kvlab
