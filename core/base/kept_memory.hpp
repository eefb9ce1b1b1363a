// Device memory that kernels keep between calls, by stream and tag: scratch, and counters that are zero between
// kernels.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/stream_memory.hpp"

namespace kvlab {

class KeptMemory {
 public:
  struct Device {
    void* (*allocate)(std::size_t bytes);  // null when it does not fit
    void (*free)(void* memory);            // does not throw
    std::size_t (*free_bytes)();
    void (*zero)(void* memory, std::size_t bytes, void* stream);  // is done on return
    void (*wait)(void* stream);
  };
  explicit KeptMemory(const Device& device) : device_(device) {}

  // At least `bytes` for the stream and the tag: the same memory as before if that suffices. Otherwise it moves, and
  // its contents are lost. `zero`: new memory is zero, else it is uninitialised. NoRoom.
  void* get(void* stream, const std::string& tag, std::size_t bytes, bool zero) {
    const std::lock_guard lock(mutex_);
    Piece& piece = all_[{stream, tag}];
    if (piece.bytes >= bytes) return piece.memory;
    device_.wait(stream);
    if (piece.memory) device_.free(piece.memory), ++moves_;
    piece = {};
    void* memory = device_.allocate(bytes);
    if (!memory) throw NoRoom(device_.free_bytes(), bytes);
    piece.memory = memory;
    if (zero) device_.zero(memory, bytes, stream);
    piece.bytes = bytes;
    return memory;
  }

  // Frees the memory of a stream in which nothing runs any more. A later stream may have the same address.
  void drop(void* stream) {
    const std::lock_guard lock(mutex_);
    auto i = all_.lower_bound({stream, {}});
    for (; i != all_.end() && i->first.first == stream; i = all_.erase(i))
      if (i->second.memory) device_.free(i->second.memory);
  }

  std::int64_t moves() const { return moves_; }

 private:
  struct Piece {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };
  const Device device_;
  std::mutex mutex_;
  std::map<std::pair<void*, std::string>, Piece> all_;
  std::atomic<std::int64_t> moves_ = 0;
};

}  // namespace kvlab
