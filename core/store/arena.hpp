// The memory of one tier: frames of a few sizes carved out of extents, addressed in granules of 128 bytes from one
// base. An extent holds frames of one size; an empty one goes back to the operating system, so resident memory follows
// what is held.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/memory_map.hpp"

namespace kvlab {

// Tests set KVLAB_POISON=1: memory of frames that are not in use is all ones then, which reads as NaN. So bytes that a
// frame had before it was freed are not mistaken for those that should have been copied into it.
bool poison_frames();
inline constexpr int poison_byte = 0xff;

class Arena {
 public:
  // reserve: most bytes that can ever be held (address space only). limit: bytes that may be held at once, -1 =
  // reserve.
  Arena(std::int64_t reserve, std::int64_t limit);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A frame of `bytes` (a multiple of granule_bytes, at most extent_bytes), or null_frame when it does not fit.
  std::int32_t allocate(std::int64_t bytes);
  void free(std::int32_t frame, std::int64_t bytes);

  std::byte* base() const { return base_; }
  std::byte* at(std::int32_t frame) const { return base_ + std::int64_t{frame} * granule_bytes; }
  std::int64_t held() const { return held_; }

  // Debug aid: while protected, any access faults. Proves that attention never reads this tier.
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

  MappedArray memory_;
  std::byte* base_ = nullptr;  // of whole huge pages
  std::int64_t reserve_ = 0, limit_ = 0, held_ = 0;
  std::vector<Extent> extents_;
  std::set<int> empty_;                            // by address: low ones are used first
  std::map<std::int64_t, std::set<int>> partial_;  // frame bytes -> extents with a free frame
};

}  // namespace kvlab
