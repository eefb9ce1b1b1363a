// Lengths of heads, and page lists of whole heads.
#include <kvlab/ops.hpp>

#include "base/cuda.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 256;

__global__ void lengths_kernel(DeviceKv kv, View<std::int32_t, 2> out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / kv.kv_heads, head = i % kv.kv_heads;
  if (row < kv.kv.rows) out(row, head) = kv.tokens(row, head);
}

__global__ void __launch_bounds__(threads)
    older_kernel(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest,
                 View<std::int32_t, 3> index, View<std::int32_t, 2> count) {
  const int head = blockIdx.x, row = blockIdx.y;
  const int pages = rows && !rows[row] ? 0 : (tokens(row, head) + page_size - 1) / page_size - newest;
  const int n = min(max(pages, 0), static_cast<int>(index.extent[2]));
  for (int page = threadIdx.x; page < n; page += threads) index(row, head, page) = page;
  if (threadIdx.x == 0) count(row, head) = n;
}

}  // namespace

static void lengths_cuda(const PagedKv& kv, View<std::int32_t, 2> out, Stream s) {
  const int heads = kv.rows * kv.kv_heads;
  if (heads <= 0) return;
  lengths_kernel<<<(heads + threads - 1) / threads, threads, 0, stream_of(s)>>>(DeviceKv(kv), out);
  check_launch("lengths");
}
KVLAB_ON_CUDA(lengths, lengths_cuda);

static void older_pages_cuda(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest,
                             PageList out, Stream s) {
  const dim3 grid(static_cast<unsigned>(tokens.extent[1]), static_cast<unsigned>(tokens.extent[0]));
  if (grid.x == 0 || grid.y == 0) return;
  older_kernel<<<grid, threads, 0, stream_of(s)>>>(tokens, rows, page_size, newest, out.index, out.count);
  check_launch("older_pages");
}
KVLAB_ON_CUDA(older_pages, older_pages_cuda);

static __global__ void aged_kernel(const __grid_constant__ PagedKv kv, View<const std::int32_t, 2> tokens, int residual,
                                   PageList out) {
  const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y), slot = kv.slots[row];
  const int n = tokens.data ? tokens(row, head) : kv.length(slot, head),
            first = kv.lower_pages.data ? kv.lower_pages(slot, head) : 0,
            aged = max(n - residual, 0) / kv.page_size - first,
            count = min(max(aged, 0), static_cast<int>(out.index.extent[2]));
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
    out.index(row, head, i) = first + i;
  if (threadIdx.x == 0) out.count(row, head) = count;
}

static void aged_pages_cuda(const PagedKv& kv, View<const std::int32_t, 2> tokens, int residual, PageList out,
                            Stream s) {
  if (kv.rows == 0 || kv.kv_heads == 0) return;
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  aged_kernel<<<grid, 32, 0, stream_of(s)>>>(kv, tokens, residual, out);
  check_launch("aged_pages");
}
KVLAB_ON_CUDA(aged_pages, aged_pages_cuda);

}  // namespace kvlab::ops
