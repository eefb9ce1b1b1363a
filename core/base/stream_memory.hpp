// Memory of a stream's device and copies in the stream's order, for code that serves streams of both kinds.
#pragma once
#include <kvlab/stream.hpp>

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace kvlab {

// Owner of a stream of one device. The CPU's is Stream::cpu().
class OwnedStream {
 public:
  // background: see CudaRuntime::new_stream. Errc::device without a usable GPU.
  explicit OwnedStream(Device device, bool background = false);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  Stream get() const { return stream_; }

 private:
  Stream stream_;
};

// Thrown when memory does not fit; the text says how much was wanted. Measurement records it as a result.
class NoRoom : public std::bad_alloc {
 public:
  explicit NoRoom(std::string text) : text_(std::move(text)) {}
  NoRoom(std::size_t free_bytes, std::size_t wanted)  // of a GPU
      : NoRoom("got " + std::to_string(free_bytes) + " free bytes of GPU memory, wanted " + std::to_string(wanted) +
               " more") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Owned memory of a stream's device, uninitialised, 64-byte aligned.
class StreamMemory {
 public:
  StreamMemory() = default;
  StreamMemory(Stream s, std::size_t bytes);  // std::bad_alloc; NoRoom on a GPU
  ~StreamMemory();
  StreamMemory(StreamMemory&& o) noexcept { swap(o); }
  StreamMemory& operator=(StreamMemory&& o) noexcept {
    StreamMemory old(std::move(*this));
    swap(o);
    return *this;
  }

  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  void swap(StreamMemory& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(device_, o.device_);
  }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_ = Device::cpu;
};

// Copies between any memories that the stream's device reaches; the ranges do not overlap. On a GPU the call may return
// before the copy has run, but pageable host memory that it reads may be written again at once.
void copy_memory(void* to, const void* from, std::size_t bytes, Stream s);
void zero_memory(void* to, std::size_t bytes, Stream s);
void synchronize(Stream s);  // waits for all work of the stream; throws its error

}  // namespace kvlab
