// One block takes a KV head of a row.
#include "ops/select/page_order.hpp"

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "ops/page/paged.cuh"
#include "ops/select/candidates.hpp"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    keep_kernel(const __grid_constant__ PagedKv kv, View<const float, 3> scores, Pins left_out,
                const __grid_constant__ Heads heads, View<float, 3> order) {
  const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y), slot = kv.slots[row];
  if (!heads.on(slot, head)) return;
  const Candidates pages = candidates(kv.length(slot, head), kv.page_size, left_out);
  const int last = min(pages.last, static_cast<int>(scores.extent[2]));
  for (int page = static_cast<int>(threadIdx.x); page < order.extent[2]; page += threads)
    order(slot, head, page) = page >= pages.first && page < last
                                  ? scores(row, head, page)
                                  : __uint_as_float(0x7f000000u + static_cast<unsigned>(page));
}

}  // namespace

static void keep_page_scores_cuda(const PagedKv& kv, View<const float, 3> scores, const Pins& left_out,
                                  const Heads& heads, View<float, 3> order, Stream s) {
  if (kv.rows == 0 || kv.kv_heads == 0) return;
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  keep_kernel<<<grid, threads, 0, stream_of(s)>>>(kv, scores, left_out, heads, order);
  check_launch("keep_page_scores");
}
KVLAB_ON_CUDA(keep_page_scores, keep_page_scores_cuda);

}  // namespace kvlab::ops
