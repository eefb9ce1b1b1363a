// Ranks of resident tokens (RopeRegime::cache_relative) in kernels.
#pragma once
#include "base/scratch.cuh"
#include "ops/paged.cuh"

namespace kvlab::ops {

// rank[row, kv_head, t] = resident tokens with a smaller text position. Caches are mostly in order, where the rank is
// the place.
static __global__ void __launch_bounds__(256) rank_kernel(DeviceKv kv, std::int32_t* rank, std::int64_t room) {
  const int head = blockIdx.x, row = blockIdx.y, n = kv.tokens(row, head), threads = static_cast<int>(blockDim.x);
  std::int32_t* out = rank + (std::int64_t(row) * kv.kv_heads + head) * room;
  bool descends = false;
  for (int t = threadIdx.x; t + 1 < n; t += threads)
    descends |= kv.position(row, head, t) > kv.position(row, head, t + 1);
  descends = __syncthreads_or(descends);
  for (int t = threadIdx.x; t < n; t += threads) {
    int before = t;
    const int own = kv.position(row, head, t);
    if (descends) {
      before = 0;
      for (int i = 0; i < n; ++i) before += kv.position(row, head, i) < own;
    } else {
      while (before > 0 && kv.position(row, head, before - 1) == own) --before;
    }
    out[t] = before;
  }
}

// [row, kv_head, room], room = tokens of a head's table; good until the next call for the stream.
inline const std::int32_t* token_ranks(const DeviceKv& kv, void* stream) {
  const std::int64_t room = kv.kv.table.extent[2] * kv.page_size;
  const std::size_t bytes = std::size_t(kv.kv.rows) * std::size_t(kv.kv_heads) * std::size_t(room) * 4;
  auto* rank = static_cast<std::int32_t*>(cuda::fixed_scratch(stream, "token ranks", bytes));
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.kv.rows));
  rank_kernel<<<grid, 256, 0, cuda::stream_of(stream)>>>(kv, rank, room);
  cuda::check_launch("token ranks");
  return rank;
}

}  // namespace kvlab::ops
