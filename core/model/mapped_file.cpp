#include "model/mapped_file.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <kvlab/error.hpp>
#include <utility>

#include "base/regular_file.hpp"
#include "base/stream_memory.hpp"

namespace kvlab {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const RegularFile file(path);
  size_ = static_cast<std::size_t>(file.size());
  if (size_ == 0) return;
  void* map = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (map == MAP_FAILED && errno == ENOMEM)
    throw NoRoom(
        fmt::format("got no address space for the {} bytes of {}, wanted it: see ulimit -v", size_, path.string()));
  if (map == MAP_FAILED)
    throw Error(Errc::io, fmt::format("got '{}' when mapping the file, wanted a readable file", std::strerror(errno)),
                path.string());
  data_ = static_cast<const std::byte*>(map);
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
