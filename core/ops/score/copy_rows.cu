#include <kvlab/rewrite.hpp>

#include "base/device_op.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int warps = score_threads / 32;

// A warp has a token.
__global__ void __launch_bounds__(score_threads)
    copy_kernel(const __grid_constant__ DeviceKv kv, const __grid_constant__ TokenList tokens,
                View<const float, 4> from, View<float, 4> to) {
  const int head = blockIdx.y, row = blockIdx.z;
  const int n = entries_of(kv, row, head, 1, min(from.extent[2], to.extent[2]));
  const std::int64_t of = tokens.at(row);
  const int count = min(static_cast<std::int64_t>(tokens.count(of, head)), tokens.index.extent[2]);
  for (int i = blockIdx.x * warps + threadIdx.x / 32; i < count; i += gridDim.x * warps) {
    const int t = tokens.index(of, head, i);
    if (t < 0 || t >= n) continue;
    for (int d = threadIdx.x % 32; d < kv.head_dim; d += 32) to(row, head, t, d) = from(row, head, t, d);
  }
}

void copy_rows_cuda(const PagedKv& kv, const TokenList& tokens, View<const float, 4> from, View<float, 4> to,
                    Stream s) {
  if (kv.rows == 0) return;
  copy_kernel<<<grid_of(kv.kv_heads, kv.rows, tokens.index.extent[2], warps), score_threads, 0, stream_of(s)>>>(
      DeviceKv(kv), tokens, from, to);
  check_launch("copy_rows");
}

}  // namespace

KVLAB_ON_CUDA(copy_rows, copy_rows_cuda);

}  // namespace kvlab::ops
