// Attention of decode steps for every cache that the pipelined kernel does not take: one block per (row, query head),
// plain loops, any codec, regime, page size and head_dim.
#include <cmath>

#include "base/cuda.cuh"
#include "ops/attend_cuda.hpp"
#include "ops/ranks.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
constexpr int warps = 4, most_per_lane = 8;

struct Args {
  DeviceKv kv;
  View<const float, 3> queries;
  View<const std::int32_t, 3> list;
  View<const std::int32_t, 2> list_count;
  View<float, 3> out, mass;
  View<float, 2> lse;
  const std::int32_t* last;
  const std::int32_t* rank;  // [row, kv_head, room], cache_relative only
  int room, window, group;
  float scale;
};

__global__ void __launch_bounds__(warps * 32) attend_any_kernel(const __grid_constant__ Args a) {
  const int head = blockIdx.x, row = blockIdx.y, kv_head = head / a.group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = a.kv.head_dim;
  const int tokens = a.kv.tokens(row, kv_head), p = a.kv.page_size;
  const bool listed = a.list.data != nullptr;
  const int pages = listed ? a.list_count(row, kv_head) : (tokens + p - 1) / p;
  const std::int32_t* rank = a.rank ? a.rank + (std::int64_t(row) * a.kv.kv_heads + kv_head) * a.room : nullptr;
  const int oldest = a.window > 0 ? a.last[row] - a.window : -0x7fffffff;

  float q[most_per_lane], o[most_per_lane], high = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < most_per_lane; ++i) {
    q[i] = lane + 32 * i < dim ? a.queries(row, head, lane + 32 * i) : 0.f;
    o[i] = 0;
  }
  for (int x = warp; x < pages * p; x += warps) {
    const int page = listed ? a.list(row, kv_head, x / p) : x / p, t = page * p + x % p;
    if (t >= tokens) continue;
    const auto token = a.kv.token(row, kv_head, t);
    if (a.window > 0 && token.position() <= oldest) continue;
    float dot = 0;
#pragma unroll
    for (int i = 0; i < most_per_lane; ++i) {
      const int d = lane + 32 * i;
      if (d < dim) dot += q[i] * (rank ? a.kv.rotated_key(token, d, rank[t]) : token.key(d));
    }
    for (int m = 16; m > 0; m /= 2) dot += __shfl_xor_sync(~0u, dot, m);
    dot *= a.scale;
    if (a.mass.data && lane == 0) a.mass(row, head, t) = dot;
    const float fresh = fmaxf(high, dot), shrink = high == -INFINITY ? 0.f : expf(high - fresh), e = expf(dot - fresh);
    high = fresh;
    sum = sum * shrink + e;
#pragma unroll
    for (int i = 0; i < most_per_lane; ++i) {
      const int d = lane + 32 * i;
      if (d < dim) o[i] = o[i] * shrink + e * token.value(d);
    }
  }
  __shared__ float highs[warps], sums[warps], outs[warps][32 * most_per_lane];
#pragma unroll
  for (int i = 0; i < most_per_lane; ++i) outs[warp][lane + 32 * i] = o[i];
  if (lane == 0) highs[warp] = high, sums[warp] = sum;
  __syncthreads();
  float top = -INFINITY, total = 0;
  for (int w = 0; w < warps; ++w) top = fmaxf(top, highs[w]);
  for (int w = 0; w < warps; ++w)
    if (highs[w] != -INFINITY) total += sums[w] * expf(highs[w] - top);
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    float value = 0;
    for (int w = 0; w < warps; ++w)
      if (highs[w] != -INFINITY) value += outs[w][d] * expf(highs[w] - top);
    a.out(row, head, d) = total > 0 ? value / total : 0.f;
  }
  const float lse = total > 0 ? top + logf(total) : -INFINITY;
  if (a.lse.data && threadIdx.x == 0) a.lse(row, head) = lse;
  if (a.mass.data)
    for (int t = threadIdx.x; t < a.mass.extent[2]; t += blockDim.x) {
      float& x = a.mass(row, head, t);
      x = x == -INFINITY ? 0.f : expf(x - lse);
    }
}

__global__ void clear_kernel(View<float, 3> x) {
  for (std::int64_t t = threadIdx.x; t < x.extent[2]; t += blockDim.x) x(blockIdx.y, blockIdx.x, t) = -INFINITY;
}

}  // namespace

void attend_any_cuda(const AttendArgs& in, void* handle) {
  const cudaStream_t stream = stream_of(handle);
  Args a = {};
  a.kv = DeviceKv(in.kv);
  a.queries = in.queries;
  if (in.pages) {
    a.list = in.pages->index;
    a.list_count = in.pages->count;
  }
  a.out = in.out, a.mass = in.mass, a.lse = in.lse, a.last = in.last, a.window = in.window;
  const int heads = static_cast<int>(in.queries.extent[1]), rows = in.kv.rows;
  if (rows == 0) return;
  a.group = heads / in.kv.kv_heads;
  a.scale = in.softmax_scale != 0 ? in.softmax_scale : 1.f / std::sqrt(static_cast<float>(in.kv.head_dim));
  if (in.kv.rope == RopeRegime::cache_relative) {
    a.room = static_cast<int>(in.kv.table.extent[2]) * in.kv.page_size;
    a.rank = token_ranks(a.kv, handle);
  }
  if (in.mass) clear_kernel<<<dim3(heads, rows), 256, 0, stream>>>(in.mass);
  attend_any_kernel<<<dim3(heads, rows), warps * 32, 0, stream>>>(a);
  check_launch("attend");
}

}  // namespace kvlab::ops
