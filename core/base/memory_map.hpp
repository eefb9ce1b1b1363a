// Address space from the operating system: reserved at once, backed by memory only where it is touched.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvlab {

std::byte* reserve_memory(std::int64_t bytes);                      // zeroed on first touch; NoRoom when refused
void release_memory(std::byte* base, std::int64_t bytes) noexcept;  // base may be null
void discard_memory(std::byte* base, std::int64_t bytes);           // contents are lost, memory goes back; page aligned
// Advises the kernel to back the range with huge pages (whole ones inside it), or not to. With small pages, scattered
// reads of a cache spend a fifth of their time in TLB misses.
void prefer_huge_pages(std::byte* base, std::int64_t bytes, bool on) noexcept;
// Advises so for the whole pages inside a range that need not be aligned and was not touched yet.
void prefer_huge_pages_within(void* base, std::int64_t bytes) noexcept;
inline constexpr std::int64_t huge_page_bytes = 2 << 20;
void protect_memory(std::byte* base, std::int64_t bytes, bool on);  // on: any access faults
std::int64_t resident_bytes();                                      // of this process, now
std::int64_t peak_resident_bytes();                                 // of this process, ever

// Owner of a reserved range.
class MappedArray {
 public:
  MappedArray() = default;
  explicit MappedArray(std::int64_t bytes) : base_(bytes ? reserve_memory(bytes) : nullptr), bytes_(bytes) {}
  ~MappedArray() { release_memory(base_, bytes_); }
  MappedArray(MappedArray&& o) noexcept : base_(o.base_), bytes_(o.bytes_) { o.base_ = nullptr, o.bytes_ = 0; }
  MappedArray& operator=(MappedArray&& o) noexcept {
    if (this != &o) {
      release_memory(base_, bytes_);
      base_ = o.base_, bytes_ = o.bytes_;
      o.base_ = nullptr, o.bytes_ = 0;
    }
    return *this;
  }
  std::byte* data() const { return base_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace kvlab
