#include "base/buffer.hpp"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvlab {

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  constexpr std::size_t line = 64, huge = std::size_t{2} << 20;
  if (bytes == 0) return;
  const std::size_t align = bytes >= 2 * huge ? huge : line;
  if (bytes > static_cast<std::size_t>(-1) - align) throw std::bad_alloc();
  const std::size_t rounded = (bytes + align - 1) / align * align;
  data_ = std::aligned_alloc(align, rounded);
  if (!data_) throw std::bad_alloc();
#if defined(__linux__)
  // TLB misses on 4 KiB pages cost streamed weights a tenth of their read rate. The kernel may ignore the advice.
  if (align == huge) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
}

Buffer::~Buffer() { std::free(data_); }

}  // namespace kvlab
