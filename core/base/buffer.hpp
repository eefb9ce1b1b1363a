// Owned, aligned, uninitialised memory for large arrays (weights, packed blocks).
#pragma once
#include <cstddef>
#include <utility>

namespace kvlab {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes);  // 64-byte aligned; asks for huge pages from 4 MiB on. std::bad_alloc
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer();

  std::size_t bytes() const { return bytes_; }
  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }

  // Makes it hold at least `bytes`. Growing loses the contents.
  void reserve(std::size_t bytes) {
    if (bytes > bytes_) *this = Buffer(bytes);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace kvlab
