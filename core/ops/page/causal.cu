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

}  // namespace

static void causal_cuda(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length, std::int32_t* row,
                        Stream s) {
  constexpr unsigned threads = 256;
  const auto blocks = static_cast<unsigned>((std::int64_t{tokens} * kv_heads + threads - 1) / threads);
  causal_kernel<<<blocks, threads, 0, stream_of(s)>>>(now, kv_heads, tokens, length, row);
  check_launch("causal");
}
KVLAB_ON_CUDA(causal, causal_cuda);

}  // namespace kvlab::ops
