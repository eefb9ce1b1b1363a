// The readers take paths, so an input is put into a memory file.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>

namespace kvlab::fuzz {

class MemoryFile {
 public:
  MemoryFile(const std::uint8_t* data, std::size_t size) : fd_(::memfd_create("input", MFD_CLOEXEC)) {
    while (size > 0) {
      const ssize_t done = ::write(fd_, data, size);
      if (done <= 0) break;
      data += done;
      size -= static_cast<std::size_t>(done);
    }
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

}  // namespace kvlab::fuzz
