#include <kvlab/rewrite.hpp>

#include "base/device_op.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int warps = score_threads / 32;

// A warp has a token.
__global__ void __launch_bounds__(score_threads)
    turn_kernel(const __grid_constant__ DeviceKv kv, bool off, View<float, 4> rows,
                const __grid_constant__ RowRange range) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, rows.extent[2]);
  const int half = kv.head_dim / 2;
  const float scale = off ? 1.f / kv.kv.rope_table.attention_scale : kv.kv.rope_table.attention_scale;
  for (int t = range.first(row, head) + blockIdx.x * warps + threadIdx.x / 32; t < n; t += gridDim.x * warps) {
    const double position = kv.position(row, head, t), by = off ? -position : position;
    for (int i = threadIdx.x % 32; i < half; i += 32) {
      double sine, cosine;
      sincos(by * kv.kv.rope_table.inv_freq[i], &sine, &cosine);
      const float c = static_cast<float>(cosine) * scale, s = static_cast<float>(sine) * scale;
      float &x = rows(row, head, t, i), &y = rows(row, head, t, half + i);
      const float a = x, b = y;
      x = a * c - b * s, y = b * c + a * s;
    }
  }
}

void turn_rows_cuda(const PagedKv& kv, RopeTurn way, View<float, 4> rows, Stream s, const RowRange& range) {
  if (kv.rows == 0) return;
  turn_kernel<<<grid_of(kv.kv_heads, kv.rows, rows.extent[2], warps), score_threads, 0, stream_of(s)>>>(
      DeviceKv(kv), way == RopeTurn::off, rows, range);
  check_launch("turn_rows");
}

}  // namespace

KVLAB_ON_CUDA(turn_rows, turn_rows_cuda);

}  // namespace kvlab::ops
