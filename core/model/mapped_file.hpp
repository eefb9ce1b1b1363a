// A whole file mapped read-only into memory, and a cursor that cannot leave it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvlab {

// Its destructor unmaps the file. Errc::io if the system refuses, NoRoom if it has no address space. An empty file is
// an empty span.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Reads little-endian values one after the other; Errc::model where they would end past the last byte.
class ByteCursor {
 public:
  // where: prefix of error messages (the file).
  ByteCursor(std::span<const std::byte> bytes, std::string where) : bytes_(bytes), where_(std::move(where)) {}

  template <class T>
  T take(const char* what) {
    static_assert(std::is_arithmetic_v<T>);
    T value;
    std::memcpy(&value, skip(sizeof(T), what), sizeof(T));
    return value;
  }
  // Takes a u64 length and as many bytes; the view lives as long as the bytes.
  std::string_view take_string(const char* what);
  const std::byte* skip(std::uint64_t count, const char* what);

  std::size_t at() const { return at_; }
  std::size_t left() const { return bytes_.size() - at_; }
  const std::string& where() const { return where_; }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  std::string where_;
};

}  // namespace kvlab
