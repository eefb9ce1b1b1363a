#include "ops/attend/attend_made_up.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 128, warps = threads / 32, most_dim = 256, most_parts = most_dim / 32;

struct Args {
  const std::int32_t* slots;
  View<const float, 3> queries;
  MadeUpTokens tokens;
  View<float, 3> out;
  View<float, 2> lse;
  std::uint16_t* rounded;  // [row, query head, head_dim], or null
  int group, dim;
  bool half;
  float scale;
};

// A block has one query head of a row. Its warps take the tokens in turn and keep a softmax of their own.
__global__ void __launch_bounds__(threads) made_up_kernel(const __grid_constant__ Args a) {
  __shared__ float sums[warps][most_dim], highs[warps], totals[warps];
  const int query_head = blockIdx.x, row = blockIdx.y, head = query_head / a.group, slot = a.slots[row];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* q = &a.queries(row, query_head, 0);
  float x[most_parts], sum[most_parts] = {}, high = -INFINITY, total = 0;
#pragma unroll
  for (int i = 0; i < most_parts; ++i) x[i] = lane + 32 * i < a.dim ? q[lane + 32 * i] : 0.f;
  for (int t = warp; t < a.tokens.weights.extent[2]; t += warps) {
    const float weight = a.tokens.weights(slot, head, t);
    if (!(weight > 0)) continue;
    const float *key = &a.tokens.keys(slot, head, t, 0), *value = &a.tokens.values(slot, head, t, 0);
    float dot = 0;
#pragma unroll
    for (int i = 0; i < most_parts; ++i)
      if (const int d = lane + 32 * i; d < a.dim) dot += x[i] * key[d];
    const float logit = sum_of_lanes(dot) * a.scale + logf(weight), now = fmaxf(high, logit);
    const float before = expf(high - now), share = expf(logit - now);
    total = total * before + share;
#pragma unroll
    for (int i = 0; i < most_parts; ++i)
      if (const int d = lane + 32 * i; d < a.dim) sum[i] = sum[i] * before + share * value[d];
    high = now;
  }
#pragma unroll
  for (int i = 0; i < most_parts; ++i) sums[warp][lane + 32 * i] = sum[i];
  if (lane == 0) highs[warp] = high, totals[warp] = total;
  float& lse = a.lse(row, query_head);
  const float first = lse;
  __syncthreads();
  float most = first;
  for (int w = 0; w < warps; ++w) most = fmaxf(most, highs[w]);
  if (most == -INFINITY) return;
  float factors[warps], all = expf(first - most);
  const float of_first = all;
#pragma unroll
  for (int w = 0; w < warps; ++w) {
    factors[w] = expf(highs[w] - most);
    all += factors[w] * totals[w];
  }
  for (int d = threadIdx.x; d < a.dim; d += threads) {
    float& out = a.out(row, query_head, d);
    float y = of_first * out;
#pragma unroll
    for (int w = 0; w < warps; ++w) y += factors[w] * sums[w][d];
    out = y /= all;
    if (!a.rounded) continue;
    const std::int64_t at = (std::int64_t{row} * gridDim.x + query_head) * a.dim + d;
    a.rounded[at] = a.half ? __half_as_ushort(__float2half_rn(y)) : __bfloat16_as_ushort(__float2bfloat16_rn(y));
  }
  if (threadIdx.x == 0) lse = most + logf(all);
}

void attend_made_up_cuda(const AttendArgs& in, const MadeUpTokens& tokens, Stream s) {
  const PagedKv& kv = in.kv;
  const std::int64_t heads = in.queries.extent[1];
  if (kv.rows == 0 || tokens.weights.extent[2] == 0) return;
  Args a;
  a.slots = kv.slots;
  a.queries = in.queries;
  a.tokens = tokens;
  a.out = in.out, a.lse = in.lse;
  a.rounded = static_cast<std::uint16_t*>(in.rounded);
  a.group = static_cast<int>(heads) / kv.kv_heads, a.dim = kv.head_dim;
  a.half = kv.layouts[0].dtype == DType::f16;
  a.scale = in.softmax_scale > 0 ? in.softmax_scale : 1.f / std::sqrt(static_cast<float>(kv.head_dim));
  const dim3 grid(static_cast<unsigned>(heads), static_cast<unsigned>(kv.rows));
  made_up_kernel<<<grid, threads, 0, stream_of(s)>>>(a);
  check_launch("attend_made_up");
}

}  // namespace

KVLAB_ON_CUDA(attend_made_up, attend_made_up_cuda);

}  // namespace kvlab::ops
