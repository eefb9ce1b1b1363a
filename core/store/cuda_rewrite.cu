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
  const int n = *h.length, step = static_cast<int>(gridDim.y) * warps, begin = a.range.begin(row, head, n);
  const int end = min(a.range.end(row, head, n), begin + static_cast<int>(a.values.extent[2]));
  if (begin >= end) return;
  for (int page = begin / p + static_cast<int>(blockIdx.y) * warps + static_cast<int>(threadIdx.x) / 32; page * p < end;
       page += step) {
    const PageEntry& entry = h.table[0][page];
    if (entry.frame < 0) {
      if (lane == 0) fail(s, ops::page_absent);
      continue;
    }
    std::byte* frame = frame_at(s, 0, entry.frame);
    const PageLayout& l = layout_at(s, h, page);
    bool changed = false;
    for (int t = max(0, begin - page * p); t < min(p, end - page * p); ++t) {
      std::byte* to = frame + ops::row_offset(l, a.key, t);
      const float* from = &a.values(row, head, page * p + t - begin, 0);
      for (int d = lane; d < dim; d += 32) changed |= put_element(to, l.dtype, d, from[d]);
    }
    if (!__any_sync(~0u, changed)) continue;
    if (lane == 0) {
      give_back(s, 1, h.table[1][page]);
      count_fired(s, a.edit);
    }
    __syncwarp();
    summarize(s, h, page, min(p, n - page * p), lane);
  }
}

}  // namespace

namespace cuda_store {

void rewrite(const CudaStoreLayer& s, const CudaStoreRewrite& a, Stream stream) {
  // A range of n tokens is in at most n / page_size + 2 pages.
  const int pages = static_cast<int>(std::min<std::int64_t>(s.pages, a.values.extent[2] / s.layout.page_size + 2));
  const dim3 grid(static_cast<unsigned>(a.rows * s.kv_heads),
                  static_cast<unsigned>(std::clamp((pages + warps - 1) / warps, 1, 64)));
  rewrite_kernel<<<grid, warps * 32, 0, stream_of(stream)>>>(s, a);
  check_launch("rewrite");
}
KVLAB_ON_CUDA(rewrite, rewrite);

}  // namespace cuda_store
}  // namespace kvlab
