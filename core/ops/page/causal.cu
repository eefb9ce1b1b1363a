#include "ops/page/causal.hpp"

#include "base/cuda.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

__global__ void causal_kernel(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length,
                              std::int32_t* row) {
  const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= std::int64_t{tokens} * kv_heads) return;
  const int t = static_cast<int>(i / kv_heads), head = static_cast<int>(i % kv_heads);
  length[i] = now[head] - tokens + t + 1;
  if (head == 0) row[t] = t;
}

__global__ void pages_kernel(View<const std::int32_t, 3> index, View<std::int32_t, 2> count, PagedKv kv) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= kv.rows * kv.kv_heads) return;
  const int row = i / kv.kv_heads, head = i % kv.kv_heads,
            pages = (kv.length(kv.slots[row], head) + kv.page_size - 1) / kv.page_size;
  int low = 0, high = count(kv.rows, head);  // the first entry beyond the row's pages lies between them
  while (low < high) {
    const int middle = (low + high) / 2;
    if (index(row, head, middle) < pages)
      low = middle + 1;
    else
      high = middle;
  }
  count(row, head) = low;
}

}  // namespace

static void count_causal_pages_cuda(const PageList& list, const PagedKv& rows, Stream s) {
  constexpr int threads = 256;
  if (rows.rows == 0) return;
  pages_kernel<<<static_cast<unsigned>((rows.rows * rows.kv_heads + threads - 1) / threads), threads, 0,
                 stream_of(s)>>>(list.index, list.count, rows);
  check_launch("count_causal_pages");
}
KVLAB_ON_CUDA(count_causal_pages, count_causal_pages_cuda);

static void causal_cuda(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length, std::int32_t* row,
                        Stream s) {
  constexpr unsigned threads = 256;
  const auto blocks = static_cast<unsigned>((std::int64_t{tokens} * kv_heads + threads - 1) / threads);
  causal_kernel<<<blocks, threads, 0, stream_of(s)>>>(now, kv_heads, tokens, length, row);
  check_launch("causal");
}
KVLAB_ON_CUDA(causal, causal_cuda);

}  // namespace kvlab::ops
