// Copies of scattered pages from pinned memory to a GPU. The functions lie in libkvlab_cuda.so; only_on_cuda calls
// them.
#pragma once
#include <kvlab/stream.hpp>

#include <cstddef>
#include <cstdint>

namespace kvlab {

// Pages whose bytes lie together in `to`. In `from` a page is `pieces` pieces of piece_bytes, which 16 divides.
struct ScatteredCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  // [page] offsets in bytes; device memory. Null from_at: the pages lie one behind the other.
  const std::int64_t *from_at = nullptr, *to_at = nullptr;
  int pages = 0, pieces = 1, piece_bytes = 0;
  std::int64_t stride = 0;  // bytes from one piece of a page to the next
};

namespace scattered_copy {

// A kernel of `blocks` blocks of 256 threads, 8 of which fill a multiprocessor. A warp copies one page at a time.
void gather(const ScatteredCopy& c, int blocks, Stream s);

// A kernel of `blocks` blocks of one warp, which relay pages of one piece through shared memory (base/relay.cuh). A
// block fills a multiprocessor.
void relay(const ScatteredCopy& c, int blocks, Stream s);

// Says whether relays run beside decode steps to come, whose kernels then leave them room.
void relays_beside(bool yes);

// One cudaMemcpy2DAsync, which copies one page.
void page_2d(const std::byte* from, std::byte* to, int pieces, int piece_bytes, std::int64_t stride, Stream s);

// One cudaMemcpyBatchAsync of `pages` pages. A library that was built with a toolkit older than CUDA 13.0 lacks it.
bool has_batch();
void batch(void* const* to, const void* const* from, const std::size_t* bytes, int pages, Stream s);

}  // namespace scattered_copy
}  // namespace kvlab
