#include "store/cuda_turn.hpp"

#include <algorithm>

#include "base/scratch.cuh"
#include "ops/page/ranks.cuh"
#include "store/cuda_head.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int warps = 4;  // warps of a block
constexpr int most_dim = 256;

__global__ void __launch_bounds__(ops::rank_threads)
    store_rank_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreRows r,
                      std::int32_t* rank) {
  __shared__ int4 tile[ops::rank_tile / 4];
  const int row = blockIdx.x / s.kv_heads, p = s.layout.page_size;
  const Head h = head_of(s, r.slots[row], static_cast<int>(blockIdx.x) % s.kv_heads);
  const auto position = [&](int t) {
    const std::byte* page = page_at(s, h, t / p);
    return reinterpret_cast<const std::int32_t*>(page + layout_at(s, h, t / p).positions)[t % p];
  };
  ops::write_ranks(*h.length, position, rank + std::int64_t{blockIdx.x} * s.pages * p, tile);
}

// Each warp turns one page at a time. Tokens of a page mostly turn by the same angles, so a warp keeps them.
template <bool Mixed>
__global__ void __launch_bounds__(warps * 32)
    turn_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreRows r,
                const std::int32_t* before, const std::int32_t* after) {
  __shared__ float keys[warps][most_dim];
  constexpr int pairs = most_dim / 64;  // pairs of a lane
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, p = s.layout.page_size, half = s.layout.head_dim / 2;
  const int row = blockIdx.x / s.kv_heads;
  const Head h = head_of(s, r.slots[row], static_cast<int>(blockIdx.x) % s.kv_heads);
  const RowLanes at(s.layout.head_dim, lane);
  const int n = *h.length;
  before += std::int64_t{blockIdx.x} * s.pages * p, after += std::int64_t{blockIdx.x} * s.pages * p;
  float cosine[pairs], sine[pairs];
  int angle = 0;  // the places that cosine and sine turn by; 0 = not set
  for (int page = static_cast<int>(blockIdx.y) * warps + warp; page * p < n;
       page += static_cast<int>(gridDim.y) * warps) {
    std::byte* frame = page_at(s, h, page);
    const PageLayout& l = Mixed ? layout_at(s, h, page) : s.layout;
    const int tokens = min(p, n - page * p);
    bool changed = false;
    for (int t = 0; t < tokens; ++t) {
      const int places = after[page * p + t] - before[page * p + t];
      if (places == 0) continue;
      changed = true;
      if (places != angle) {
#pragma unroll
        for (int j = 0; j < pairs; ++j)
          if (const int i = lane + 32 * j; i < half) {
            double of_sine, of_cosine;
            sincos(static_cast<double>(places) * static_cast<double>(s.inv_freq[i]), &of_sine, &of_cosine);
            cosine[j] = static_cast<float>(of_cosine), sine[j] = static_cast<float>(of_sine);
          }
        angle = places;
      }
#pragma unroll
      for (int j = 0; j < pairs; ++j)
        if (const int i = lane + 32 * j; i < half) {
          // The host uses no fused multiply-add here either.
          const float x = element(frame, l, true, t, i), y = element(frame, l, true, t, i + half);
          keys[warp][i] = __fsub_rn(__fmul_rn(x, cosine[j]), __fmul_rn(y, sine[j]));
          keys[warp][i + half] = __fadd_rn(__fmul_rn(y, cosine[j]), __fmul_rn(x, sine[j]));
        }
      __syncwarp();
      RowParts<1> row = {{}, at.first, 0, at.there && at.key(0)};
#pragma unroll
      for (int i = 0; i < lane_elements; ++i) row.x[0][i] = at.there ? keys[warp][at.first + i] : 0.f;
      encode(frame, l, true, t, row, at.lanes);
      __syncwarp();
    }
    if (!changed) continue;
    if (lane == 0 && h.table[0][page].frame >= 0) give_back(s, 1, h.table[1][page]);
    __syncwarp();
    summarize(s, h, page, tokens, lane);
  }
}

}  // namespace

std::int32_t* store_ranks(const CudaStoreLayer& s, const CudaStoreRows& r, const char* tag, void* stream) {
  const std::int64_t heads = std::int64_t{r.rows} * s.kv_heads, room = std::int64_t{s.pages} * s.layout.page_size;
  auto* rank = static_cast<std::int32_t*>(
      fixed_scratch(stream, tag, static_cast<std::size_t>(heads * room) * sizeof(std::int32_t)));
  const dim3 grid(static_cast<unsigned>(heads), 1, ops::rank_blocks(room));
  store_rank_kernel<<<grid, ops::rank_threads, 0, stream_of(stream)>>>(s, r, rank);
  check_launch("store ranks");
  return rank;
}

void turn_keys(const CudaStoreLayer& s, const CudaStoreRows& r, const std::int32_t* before, const std::int32_t* after,
               void* stream) {
  const dim3 grid(static_cast<unsigned>(r.rows * s.kv_heads),
                  static_cast<unsigned>(std::clamp((s.pages + warps - 1) / warps, 1, 64)));
  const auto kernel = s.mixed ? turn_kernel<true> : turn_kernel<false>;
  kernel<<<grid, warps * 32, 0, stream_of(stream)>>>(s, r, before, after);
  check_launch("turn keys");
}

}  // namespace kvlab
