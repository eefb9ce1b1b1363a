// One warp per head of a row.
#include "base/cuda.cuh"
#include "ops/page/rope_rank.hpp"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int warps = 4;  // warps of a block

__global__ void __launch_bounds__(warps * 32) rope_rank_kernel(const __grid_constant__ RopeRankArgs a) {
  const int lane = threadIdx.x % 32, each = a.heads + a.kv_heads + a.values;
  const std::int64_t index = std::int64_t(blockIdx.x) * warps + threadIdx.x / 32;
  if (index >= std::int64_t{a.rows} * each) return;
  const int row = static_cast<int>(index / each), head = static_cast<int>(index % each), half = a.head_dim / 2;
  const float* x = a.x + row * a.x_stride + std::int64_t{head} * a.head_dim;
  float* out = a.out + row * a.out_stride + std::int64_t{head} * a.head_dim;
  if (head >= a.heads + a.kv_heads) {
    for (int i = lane; i < a.head_dim; i += 32) out[i] = x[i];
    return;
  }
  const int kv_head = head < a.heads ? head / (a.heads / a.kv_heads) : head - a.heads,
            slot = a.slots ? a.slots[row] : 0;
  const int tokens = a.length.data[slot * a.length.stride[0] + kv_head * a.length.stride[1]];
  const std::int64_t rank = max(0, min(tokens + a.ahead + row * a.step, a.angles - 1));
  for (int i = lane; i < half; i += 32) {
    const float low = x[i], high = x[i + half], c = a.cosine[rank * half + i], s = a.sine[rank * half + i];
    out[i] = low * c - high * s;
    out[i + half] = high * c + low * s;
  }
}

}  // namespace

static void rope_rank_cuda(const RopeRankArgs& a, Stream s) {
  const std::int64_t heads = std::int64_t{a.rows} * (a.heads + a.kv_heads + a.values);
  if (heads == 0) return;
  rope_rank_kernel<<<static_cast<unsigned>((heads + warps - 1) / warps), warps * 32, 0, stream_of(s)>>>(a);
  check_launch("rope_rank");
}
KVLAB_ON_CUDA(rope_rank, rope_rank_cuda);

}  // namespace kvlab::ops
