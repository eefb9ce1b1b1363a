// CudaStore changes keys or values in place.
#include <algorithm>

#include "base/cuda.cuh"
#include "base/launch.cuh"
#include "ops/page/paged.hpp"
#include "store/cuda_head.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int warps = 4;  // warps of a block

// Grid [row and kv_head, part of the pages]. A warp has one page at a time.
__global__ void __launch_bounds__(warps * 32)
    rewrite_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreRewrite a) {
  const int row = static_cast<int>(blockIdx.x) / s.kv_heads, head = static_cast<int>(blockIdx.x) % s.kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, p = s.layout.page_size, dim = s.layout.head_dim;
  const Head h = head_of(s, a.slots[row], head);
  const int n = min(*h.length, static_cast<int>(a.values.extent[2])), step = static_cast<int>(gridDim.y) * warps;
  for (int page = static_cast<int>(blockIdx.y) * warps + static_cast<int>(threadIdx.x) / 32; page * p < n;
       page += step) {
    const PageEntry& entry = h.table[0][page];
    if (entry.frame < 0) {
      if (lane == 0) fail(s, ops::page_absent);
      continue;
    }
    std::byte* frame = frame_at(s, 0, entry.frame);
    const PageLayout& l = layout_at(s, h, page);
    const int tokens = min(p, n - page * p);
    bool changed = false;
    for (int t = 0; t < tokens; ++t) {
      std::byte* to = frame + ops::row_offset(l, a.key, t);
      const float* from = &a.values(row, head, page * p + t, 0);
      for (int d = lane; d < dim; d += 32) changed |= put_element(to, l.dtype, d, from[d]);
    }
    if (!__any_sync(~0u, changed)) continue;
    if (lane == 0) {
      give_back(s, 1, h.table[1][page]);
      count_fired(s, a.edit);
    }
    __syncwarp();
    summarize(s, h, page, tokens, lane);
  }
}

}  // namespace

namespace cuda_store {

void rewrite(const CudaStoreLayer& s, const CudaStoreRewrite& a, Stream stream) {
  const dim3 grid(static_cast<unsigned>(a.rows * s.kv_heads),
                  static_cast<unsigned>(std::clamp((s.pages + warps - 1) / warps, 1, 64)));
  rewrite_kernel<<<grid, warps * 32, 0, stream_of(stream)>>>(s, a);
  check_launch("rewrite");
}
KVLAB_ON_CUDA(rewrite, rewrite);

}  // namespace cuda_store
}  // namespace kvlab
