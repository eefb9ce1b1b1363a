// Ranks of resident tokens (RopeRegime::cache_relative) in kernels.
#pragma once
#include <algorithm>

#include "base/scratch.cuh"
#include "ops/paged.cuh"

namespace kvlab::ops {

// rank[row, kv_head, t] = resident tokens with a smaller text position. Caches are mostly in order, where the rank is
// the place; elsewhere every thread compares its token with all, in tiles. Blocks of one head take turns.
static __global__ void __launch_bounds__(256)
    rank_kernel(const __grid_constant__ DeviceKv kv, std::int32_t* rank, std::int64_t room) {
  constexpr int tile = 2048;
  __shared__ int4 tile_of[tile / 4];
  const int head = blockIdx.x, row = blockIdx.y, n = kv.tokens(row, head), threads = static_cast<int>(blockDim.x);
  std::int32_t* out = rank + (std::int64_t(row) * kv.kv_heads + head) * room;
  const int first = static_cast<int>(blockIdx.z) * threads, step = static_cast<int>(gridDim.z) * threads;
  if (first >= n) return;
  bool descends = false;
  for (int t = threadIdx.x; t + 1 < n; t += threads)
    descends |= kv.position(row, head, t) > kv.position(row, head, t + 1);
  descends = __syncthreads_or(descends);
  if (!descends) {
    for (int t = first + threadIdx.x; t < n; t += step) {
      int before = t;
      const int own = kv.position(row, head, t);
      while (before > 0 && kv.position(row, head, before - 1) == own) --before;
      out[t] = before;
    }
    return;
  }
  int* positions = reinterpret_cast<int*>(tile_of);
  for (int base = first; base < n; base += step) {
    const int t = base + threadIdx.x, own = t < n ? kv.position(row, head, t) : 0;
    int before = 0;
    for (int from = 0; from < n; from += tile) {
      for (int i = threadIdx.x; i < tile; i += threads)
        positions[i] = from + i < n ? kv.position(row, head, from + i) : 0x7fffffff;
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < (min(tile, n - from) + 3) / 4; ++i) {
        const int4 x = tile_of[i];
        before += (x.x < own) + (x.y < own) + (x.z < own) + (x.w < own);
      }
      __syncthreads();
    }
    if (t < n) out[t] = before;
  }
}

// [row, kv_head, room], room = tokens of a head's table; good until the next call for the stream.
inline const std::int32_t* token_ranks(const DeviceKv& kv, void* stream) {
  const std::int64_t room = kv.kv.table.extent[2] * kv.page_size;
  const std::size_t bytes = std::size_t(kv.kv.rows) * std::size_t(kv.kv_heads) * std::size_t(room) * 4;
  auto* rank = static_cast<std::int32_t*>(cuda::fixed_scratch(stream, "token ranks", bytes));
  const std::int64_t blocks = std::min<std::int64_t>((room + 255) / 256, 16);
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.kv.rows),
                  static_cast<unsigned>(std::max<std::int64_t>(blocks, 1)));
  rank_kernel<<<grid, 256, 0, cuda::stream_of(stream)>>>(kv, rank, room);
  cuda::check_launch("token ranks");
  return rank;
}

}  // namespace kvlab::ops
