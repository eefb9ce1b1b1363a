#include "model/mapped_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <kvlab/error.hpp>
#include <utility>

namespace kvlab {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const auto refuse = [&](const char* what) {
    return Error(Errc::io, fmt::format("got '{}' when {} the file, wanted a readable file", std::strerror(errno), what),
                 path.string());
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw refuse("opening");
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    if (errno == 0) errno = EINVAL;
    const Error error = refuse("looking at");
    ::close(fd);
    throw error;
  }
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ > 0) {
    void* map = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) {
      const Error error = refuse("mapping");
      ::close(fd);
      throw error;
    }
    data_ = static_cast<const std::byte*>(map);
  }
  ::close(fd);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

std::string_view ByteCursor::take_string(const char* what) {
  const auto length = take<std::uint64_t>(what);
  return {reinterpret_cast<const char*>(skip(length, what)), static_cast<std::size_t>(length)};
}

const std::byte* ByteCursor::skip(std::uint64_t count, const char* what) {
  if (count > left())
    throw Error(Errc::model, fmt::format("got {} bytes left for {} at byte {}, wanted {}", left(), what, at_, count),
                where_);
  const std::byte* begin = bytes_.data() + at_;
  at_ += static_cast<std::size_t>(count);
  return begin;
}

}  // namespace kvlab
