// Kernels over the entries of all heads of a batch: blocks of one head stride over its tokens.
#pragma once
#include <algorithm>

#include "base/lanes.cuh"
#include "base/scratch.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {

constexpr int score_threads = 256;

// Grid [blocks, heads, rows]: enough blocks to fill the device, and no more than `entries` gives work to.
inline dim3 grid_of(std::int64_t heads, std::int64_t rows, std::int64_t entries, int entries_of_block = score_threads) {
  const std::int64_t useful = (entries + entries_of_block - 1) / entries_of_block, wanted = 2048 / (heads * rows) + 1;
  return dim3(static_cast<unsigned>(std::max<std::int64_t>(1, std::min(useful, wanted))), static_cast<unsigned>(heads),
              static_cast<unsigned>(rows));
}
inline std::int64_t capacity(const PagedKv& kv) { return kv.table.extent[2] * kv.page_size; }

// Entries of a head: tokens, or pages of `unit` tokens; never more than `room`.
__device__ __forceinline__ int entries_of(const DeviceKv& kv, int row, int head, int unit, std::int64_t room) {
  return static_cast<int>(min(static_cast<std::int64_t>((kv.tokens(row, head) + unit - 1) / unit), room));
}

}  // namespace kvlab::ops
