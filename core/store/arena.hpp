// The memory of one tier: frames of a few sizes, addressed in granules of 128 bytes from one base. An extent holds
// frames of one size. An empty extent goes back to the operating system, so resident memory follows held(). An arena
// that keeps its memory leaves it for the frames to come.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/memory_map.hpp"

namespace kvlab {

// Tests set KVLAB_POISON=1. Then all bits of free frames are ones, which read as NaN. A frame that misses a copy shows
// NaN instead of the bytes of its last use.
bool poison_frames();
inline constexpr int poison_byte = 0xff;

class Arena {
 public:
  // reserve: bytes of address space. limit: bytes of frames that may be held at once; -1 = reserve.
  Arena(std::int64_t reserve, std::int64_t limit, bool keeps_memory = false);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns a frame of `bytes` (a multiple of granule_bytes, at most extent_bytes), or null_frame if it does not fit.
  std::int32_t allocate(std::int64_t bytes);
  void free(std::int32_t frame, std::int64_t bytes);

  std::byte* base() const { return base_; }
  std::byte* at(std::int32_t frame) const { return base_ + std::int64_t{frame} * granule_bytes; }
  std::int64_t held() const { return held_; }
  std::int64_t left() const { return (limit_ < 0 ? reserve_ : limit_) - held_; }

  // While protected, any access faults. Tests prove with it that attention never reads this tier.
  void protect(bool on);

  static constexpr std::int64_t extent_bytes = 256 * 1024;

 private:
  struct Extent {
    std::int64_t frame_bytes = 0;
    int used = 0;
    std::vector<std::uint64_t> free;  // bit = free frame
  };
  int take_extent(std::int64_t frame_bytes);
  void discard_extent(int id);

  bool keeps_memory_;
  MappedArray memory_;
  std::byte* base_ = nullptr;  // the first huge page boundary in memory_
  std::int64_t reserve_ = 0, limit_ = 0, held_ = 0;
  std::vector<Extent> extents_;
  std::set<int> empty_;                            // extents by address: low ones are used first
  std::map<std::int64_t, std::set<int>> partial_;  // frame bytes -> extents with a free frame
};

}  // namespace kvlab
