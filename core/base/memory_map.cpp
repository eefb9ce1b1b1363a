#include "base/memory_map.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <kvlab/error.hpp>
#include <string>

#include "base/stream_memory.hpp"

namespace kvlab {

std::byte* reserve_memory(std::int64_t bytes) {
  void* p = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw NoRoom("got '" + std::string(std::strerror(errno)) + "' for " + std::to_string(bytes >> 20) +
                 " MiB of address space, wanted it: lower batch or context");
  return static_cast<std::byte*>(p);
}

void release_memory(std::byte* base, std::int64_t bytes) noexcept {
  if (base) munmap(base, static_cast<std::size_t>(bytes));
}

void discard_memory(std::byte* base, std::int64_t bytes) {
  if (madvise(base, static_cast<std::size_t>(bytes), MADV_DONTNEED) != 0)
    throw Error(Errc::internal, std::string("madvise: ") + std::strerror(errno));
}

void prefer_huge_pages(std::byte* base, std::int64_t bytes, bool on) noexcept {
  madvise(base, static_cast<std::size_t>(bytes), on ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

void prefer_huge_pages_within(void* base, std::int64_t bytes) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  const auto skipped = static_cast<std::int64_t>((huge_page_bytes - address % huge_page_bytes) % huge_page_bytes);
  const std::int64_t whole = (bytes - skipped) / huge_page_bytes * huge_page_bytes;
  if (whole > 0) prefer_huge_pages(static_cast<std::byte*>(base) + skipped, whole, true);
}

void protect_memory(std::byte* base, std::int64_t bytes, bool on) {
  if (mprotect(base, static_cast<std::size_t>(bytes), on ? PROT_NONE : PROT_READ | PROT_WRITE) != 0)
    throw Error(Errc::internal, std::string("mprotect: ") + std::strerror(errno));
}

std::int64_t resident_bytes() {
  long pages = 0, total = 0;
  if (FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%ld %ld", &total, &pages) != 2) pages = 0;
    std::fclose(f);
  }
  return std::int64_t{pages} * sysconf(_SC_PAGESIZE);
}

std::int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace kvlab
