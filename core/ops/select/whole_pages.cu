#include "ops/select/whole_pages.hpp"

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

// of_pages: `in` has pages; else it has tokens, and their greatest counts.
__global__ void __launch_bounds__(score_threads)
    pages_kernel(const __grid_constant__ DeviceKv kv, View<const float, 3> in, bool of_pages, Scores out) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, out.extent[2]),
            tokens = entries_of(kv, row, head, 1, in.extent[2]);
  for (int t = blockIdx.x * score_threads + threadIdx.x; t < n; t += gridDim.x * score_threads) {
    const int page = t / kv.page_size;
    float most = -INFINITY;
    if (of_pages)
      most = page < in.extent[2] ? in(row, head, page) : most;
    else
      for (int u = page * kv.page_size; u < min(tokens, (page + 1) * kv.page_size); ++u)
        most = in(row, head, u) > most ? in(row, head, u) : most;
    out(row, head, t) = most;
  }
}

__global__ void room_kernel(const __grid_constant__ DeviceKv kv, const std::int32_t* most, View<std::int32_t, 2> keep) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / kv.kv_heads, head = i % kv.kv_heads;
  if (row < kv.kv.rows) keep(row, head) = kept_beside_page(kv.tokens(row, head), most[row], kv.page_size);
}

void run_pages(const PagedKv& kv, View<const float, 3> in, bool of_pages, Scores out, Stream s) {
  if (kv.rows == 0) return;
  pages_kernel<<<grid_of(kv.kv_heads, kv.rows, out.extent[2]), score_threads, 0, stream_of(s)>>>(DeviceKv(kv), in,
                                                                                                 of_pages, out);
}

void spread_pages_cuda(const PagedKv& kv, View<const float, 3> pages, Scores out, Stream s) {
  run_pages(kv, pages, true, out, s);
  check_launch("spread_pages");
}

void page_greatest_cuda(const PagedKv& kv, View<const float, 3> in, Scores out, Stream s) {
  run_pages(kv, in, false, out, s);
  check_launch("page_greatest");
}

void room_for_page_cuda(const PagedKv& kv, const std::int32_t* most, View<std::int32_t, 2> keep, Stream s) {
  const int heads = kv.rows * kv.kv_heads;
  if (heads == 0) return;
  room_kernel<<<(heads + score_threads - 1) / score_threads, score_threads, 0, stream_of(s)>>>(DeviceKv(kv), most,
                                                                                               keep);
  check_launch("room_for_page");
}

}  // namespace

KVLAB_ON_CUDA(spread_pages, spread_pages_cuda);
KVLAB_ON_CUDA(page_greatest, page_greatest_cuda);
KVLAB_ON_CUDA(room_for_page, room_for_page_cuda);

}  // namespace kvlab::ops
