// Kernels for the ranks of resident tokens (RopeRegime::cache_relative and re_rotate).
#pragma once
#include <algorithm>

#include "base/scratch.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {

constexpr int rank_threads = 256, rank_tile = 2048;

// out[t] = number of the head's n tokens whose position is smaller than position(t). Blocks of rank_threads threads
// along z share the tokens. In a head whose positions ascend, the rank is the place. In others every thread compares
// its token with all tokens, one tile at a time. tile: shared memory, [rank_tile / 4].
template <class Position>
__device__ inline void write_ranks(int n, Position position, std::int32_t* out, int4* tile) {
  const int threads = rank_threads;
  const int first = static_cast<int>(blockIdx.z) * threads, step = static_cast<int>(gridDim.z) * threads;
  if (first >= n) return;
  bool descends = false;
  for (int t = threadIdx.x; t + 1 < n; t += threads) descends |= position(t) > position(t + 1);
  descends = __syncthreads_or(descends);
  if (!descends) {
    for (int t = first + threadIdx.x; t < n; t += step) {
      int before = t;
      const int own = position(t);
      while (before > 0 && position(before - 1) == own) --before;
      out[t] = before;
    }
    return;
  }
  int* positions = reinterpret_cast<int*>(tile);
  for (int base = first; base < n; base += step) {
    const int t = base + threadIdx.x, own = t < n ? position(t) : 0;
    int before = 0;
    for (int from = 0; from < n; from += rank_tile) {
      for (int i = threadIdx.x; i < rank_tile; i += threads)
        positions[i] = from + i < n ? position(from + i) : 0x7fffffff;
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < (min(rank_tile, n - from) + 3) / 4; ++i) {
        const int4 x = tile[i];
        before += (x.x < own) + (x.y < own) + (x.z < own) + (x.w < own);
      }
      __syncthreads();
    }
    if (t < n) out[t] = before;
  }
}

// Blocks along z for one head whose table has room for `room` tokens.
inline unsigned rank_blocks(std::int64_t room) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((room + rank_threads - 1) / rank_threads, 1, 16));
}

// Writes rank [row, kv_head, room].
static __global__ void __launch_bounds__(rank_threads)
    rank_kernel(const __grid_constant__ DeviceKv kv, std::int32_t* rank, std::int64_t room) {
  __shared__ int4 tile[rank_tile / 4];
  const int head = blockIdx.x, row = blockIdx.y;
  write_ranks(
      kv.tokens(row, head), [&](int t) { return kv.position(row, head, t); },
      rank + (std::int64_t(row) * kv.kv_heads + head) * room, tile);
}

// Returns the ranks [row, kv_head, room]; room counts the tokens that a head's table can hold. The scratch stays valid
// until the next call on the stream.
inline const std::int32_t* token_ranks(const DeviceKv& kv, void* stream) {
  const std::int64_t room = kv.kv.table.extent[2] * kv.page_size;
  const std::size_t bytes = std::size_t(kv.kv.rows) * std::size_t(kv.kv_heads) * std::size_t(room) * 4;
  auto* rank = static_cast<std::int32_t*>(cuda::fixed_scratch(stream, "token ranks", bytes));
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.kv.rows), rank_blocks(room));
  rank_kernel<<<grid, rank_threads, 0, cuda::stream_of(stream)>>>(kv, rank, room);
  cuda::check_launch("token ranks");
  return rank;
}

static __global__ void __launch_bounds__(rank_threads)
    beyond_kernel(const __grid_constant__ DeviceKv kv, const std::int32_t* last, int most, std::int32_t* out,
                  std::int64_t room) {
  const int head = blockIdx.x, row = blockIdx.y, n = kv.tokens(row, head);
  out += (std::int64_t(row) * kv.kv_heads + head) * room;
  for (int t = blockIdx.z * rank_threads + threadIdx.x; t < n; t += gridDim.z * rank_threads)
    out[t] = kv.entry(row, head, t / kv.page_size).frame == null_frame
                 ? 0  // attention does not read the page
                 : max(0, last[row] - most - kv.position(row, head, t));
}

// In place of ranks: how many text positions a token lies further than `most` before last[row].
inline const std::int32_t* tokens_beyond(const DeviceKv& kv, const std::int32_t* last, int most, void* stream) {
  const std::int64_t room = kv.kv.table.extent[2] * kv.page_size;
  const std::size_t bytes = std::size_t(kv.kv.rows) * std::size_t(kv.kv_heads) * std::size_t(room) * 4;
  auto* out = static_cast<std::int32_t*>(cuda::fixed_scratch(stream, "token ranks", bytes));
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.kv.rows), rank_blocks(room));
  beyond_kernel<<<grid, rank_threads, 0, cuda::stream_of(stream)>>>(kv, last, most, out, room);
  cuda::check_launch("tokens beyond");
  return out;
}

}  // namespace kvlab::ops
