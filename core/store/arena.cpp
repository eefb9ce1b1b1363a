#include "store/arena.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace kvlab {

bool poison_frames() {
  static const bool on = [] {
    const char* set = std::getenv("KVLAB_POISON");
    return set && std::string_view(set) == "1";
  }();
  return on;
}

Arena::Arena(std::int64_t reserve, std::int64_t limit, bool keeps_memory) : keeps_memory_(keeps_memory), limit_(limit) {
  const std::int64_t count = (reserve + extent_bytes - 1) / extent_bytes + 1;
  reserve_ = count * extent_bytes;
  if (reserve_ / granule_bytes > INT32_MAX)
    throw Error(Errc::unsupported, "got a KV cache of " + std::to_string(reserve_ >> 30) +
                                       " GiB in the worst case, wanted at most 256 GiB a tier: lower batch or context");
  memory_ = MappedArray(reserve_ + huge_page_bytes);
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
  base_ = memory_.data() + (huge_page_bytes - address % huge_page_bytes) % huge_page_bytes;
  prefer_huge_pages(base_, reserve_, true);
  extents_.resize(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) empty_.insert(empty_.end(), i);
}

int Arena::take_extent(std::int64_t frame_bytes) {
  if (empty_.empty()) return -1;
  const int id = *empty_.begin();
  empty_.erase(empty_.begin());
  Extent& e = extents_[static_cast<std::size_t>(id)];
  const int frames = static_cast<int>(extent_bytes / frame_bytes);
  e.frame_bytes = frame_bytes;
  e.used = 0;
  e.free.assign(static_cast<std::size_t>((frames + 63) / 64), ~std::uint64_t{0});
  if (frames % 64) e.free.back() = (std::uint64_t{1} << (frames % 64)) - 1;
  return id;
}

std::int32_t Arena::allocate(std::int64_t bytes) {
  if (bytes <= 0 || bytes % granule_bytes || bytes > extent_bytes)
    throw Error(Errc::unsupported, "got a frame of " + std::to_string(bytes) + " bytes, wanted at most " +
                                       std::to_string(extent_bytes) + ": lower page_size");
  if (limit_ >= 0 && held_ + bytes > limit_) return null_frame;
  auto& open = partial_[bytes];
  if (open.empty()) {
    const int id = take_extent(bytes);
    if (id < 0) return null_frame;
    open.insert(id);
  }
  const int id = *open.begin();
  Extent& e = extents_[static_cast<std::size_t>(id)];
  std::size_t word = 0;
  while (e.free[word] == 0) ++word;
  const int slot = static_cast<int>(word) * 64 + std::countr_zero(e.free[word]);
  e.free[word] &= e.free[word] - 1;
  if (++e.used == extent_bytes / bytes) open.erase(open.begin());
  held_ += bytes;
  const auto frame = static_cast<std::int32_t>((id * extent_bytes + slot * bytes) / granule_bytes);
  if (poison_frames()) std::memset(at(frame), poison_byte, static_cast<std::size_t>(bytes));
  return frame;
}

void Arena::free(std::int32_t frame, std::int64_t bytes) {
  const std::int64_t offset = std::int64_t{frame} * granule_bytes;
  const int id = static_cast<int>(offset / extent_bytes);
  if (frame < 0 || offset >= reserve_ || extents_[static_cast<std::size_t>(id)].frame_bytes != bytes)
    throw Error(Errc::internal, "freed frame " + std::to_string(frame) + ", wanted one of this arena and size");
  Extent& e = extents_[static_cast<std::size_t>(id)];
  const std::int64_t slot = (offset % extent_bytes) / bytes;
  const std::uint64_t bit = std::uint64_t{1} << (slot % 64);
  if (e.free[static_cast<std::size_t>(slot / 64)] & bit)
    throw Error(Errc::internal, "freed frame " + std::to_string(frame) + " twice");
  if (poison_frames()) std::memset(at(frame), poison_byte, static_cast<std::size_t>(bytes));
  e.free[static_cast<std::size_t>(slot / 64)] |= bit;
  held_ -= bytes;
  auto& open = partial_[bytes];
  if (--e.used == 0) {
    open.erase(id);
    e.frame_bytes = 0;
    if (!keeps_memory_) discard_extent(id);
    empty_.insert(id);
  } else {
    open.insert(id);
  }
}

// The range of a huge page uses small pages while it has gaps. Otherwise the operating system would fill the gaps to
// make the page whole again.
void Arena::discard_extent(int id) {
  discard_memory(base_ + id * extent_bytes, extent_bytes);
  constexpr int group = huge_page_bytes / extent_bytes;
  const int first = id / group * group, last = std::min(first + group, static_cast<int>(extents_.size()));
  const bool empty = std::all_of(extents_.begin() + first, extents_.begin() + last,
                                 [](const Extent& e) { return e.frame_bytes == 0; });
  prefer_huge_pages(base_ + first * extent_bytes, (last - first) * extent_bytes, empty);
}

void Arena::protect(bool on) { protect_memory(base_, reserve_, on); }

}  // namespace kvlab
