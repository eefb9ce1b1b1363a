// The mean of values, shares of listed tokens, and outputs that both fill.
#include "ops/attend/left_out.hpp"

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int most_dim = 256, parts = most_dim / 32, most_threads = 1024, threads = 512, warps = threads / 32;

// A block serves a KV head of a row. A warp takes a token at a time, so a decode step's block has one.
__global__ void __launch_bounds__(most_threads)
    mean_kernel(const __grid_constant__ DeviceKv kv, int newest, const __grid_constant__ View<float, 3> mean) {
  __shared__ double sums[most_dim];
  const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, n = kv.tokens(row, head),
            first = n - min(n, newest);
  if (first == n) return;
  float* to = &mean(kv.kv.slots[row], head, 0);
  double sum[parts] = {};
  for (int t = first + static_cast<int>(threadIdx.x) / 32; t < n; t += static_cast<int>(blockDim.x) / 32) {
    const auto token = kv.token(row, head, t);
#pragma unroll
    for (int i = 0; i < parts; ++i)
      if (const int d = lane + 32 * i; d < kv.head_dim) sum[i] += token.value(d);
  }
  for (int d = threadIdx.x; d < kv.head_dim; d += blockDim.x) sums[d] = first > 0 ? double(to[d]) * first : 0.;
  // Warps add one after the other, so the order of sums is always the same.
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    __syncthreads();
    if (w != static_cast<int>(threadIdx.x) / 32) continue;
#pragma unroll
    for (int i = 0; i < parts; ++i)
      if (const int d = lane + 32 * i; d < kv.head_dim) sums[d] += sum[i];
  }
  __syncthreads();
  for (int d = threadIdx.x; d < kv.head_dim; d += blockDim.x) to[d] = static_cast<float>(sums[d] / n);
}

// A block serves a query head of a row.
__global__ void __launch_bounds__(threads)
    share_kernel(const __grid_constant__ DeviceKv kv, const __grid_constant__ View<const float, 3> scores,
                 const __grid_constant__ IndexList list, const __grid_constant__ View<float, 2> share) {
  __shared__ float highs[warps];
  __shared__ double alls[warps], listeds[warps];
  const int query_head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32,
            head = query_head / (static_cast<int>(scores.extent[1]) / kv.kv_heads);
  const int n = static_cast<int>(min(static_cast<std::int64_t>(kv.tokens(row, head)), scores.extent[2]));
  const float* of = &scores(row, query_head, 0);
  float most = -INFINITY;
  for (int t = threadIdx.x; t < n; t += threads) most = fmaxf(most, of[t]);
  most = most_of_lanes(most);
  if (lane == 0) highs[warp] = most;
  __syncthreads();
  for (int w = 0; w < warps; ++w) most = fmaxf(most, highs[w]);
  const auto weight = [&](int t) { return of[t] > -INFINITY ? double(expf(of[t] - most)) : 0.; };
  double all = 0, listed = 0;
  for (int t = threadIdx.x; t < n; t += threads) all += weight(t);
  const std::int64_t at = list.at(row);
  const int count = static_cast<int>(min(static_cast<std::int64_t>(list.count(at, head)), list.index.extent[2]));
  for (int i = threadIdx.x; i < count; i += threads)
    if (const int t = list.index(at, head, i); t >= 0 && t < n) listed += weight(t);
  all = sum_of_lanes(all), listed = sum_of_lanes(listed);
  if (lane == 0) alls[warp] = all, listeds[warp] = listed;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < warps; ++w) all += alls[w], listed += listeds[w];
  share(row, query_head) = all > 0 ? static_cast<float>(listed / all) : 1.f;
}

__global__ void blend_kernel(const std::int32_t* slots, int group, const __grid_constant__ LeftOut what,
                             const __grid_constant__ View<float, 3> out, std::uint16_t* rounded, bool half) {
  const int query_head = blockIdx.x, row = blockIdx.y, dim = static_cast<int>(out.extent[2]);
  const float share = what.share(row, query_head);
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    float& y = out(row, query_head, d);
    y = share * y + (1 - share) * what.mean(slots[row], query_head / group, d);
    if (!rounded) continue;
    const std::int64_t at = (std::int64_t{row} * gridDim.x + query_head) * dim + d;
    rounded[at] = half ? __half_as_ushort(__float2half_rn(y)) : __bfloat16_as_ushort(__float2bfloat16_rn(y));
  }
}

void add_mean_value_cuda(const PagedKv& kv, int newest, View<float, 3> mean, Stream s) {
  if (kv.rows == 0 || newest == 0) return;
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  mean_kernel<<<grid, newest == 1 ? 32 : most_threads, 0, stream_of(s)>>>(DeviceKv(kv), newest, mean);
  check_launch("add_mean_value");
}

void listed_share_cuda(const PagedKv& kv, View<const float, 3> scores, const TokenList& list, View<float, 2> share,
                       Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(scores.extent[1]), static_cast<unsigned>(kv.rows));
  share_kernel<<<grid, threads, 0, stream_of(s)>>>(DeviceKv(kv), scores, list, share);
  check_launch("listed_share");
}

void blend_left_out_cuda(const PagedKv& kv, const LeftOut& what, View<float, 3> out, void* rounded, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(out.extent[1]), static_cast<unsigned>(kv.rows));
  blend_kernel<<<grid, static_cast<unsigned>((kv.head_dim + 31) / 32 * 32), 0, stream_of(s)>>>(
      kv.slots, static_cast<int>(out.extent[1]) / kv.kv_heads, what, out, static_cast<std::uint16_t*>(rounded),
      kv.layouts[0].dtype == DType::f16);
  check_launch("blend_left_out");
}

}  // namespace

KVLAB_ON_CUDA(add_mean_value, add_mean_value_cuda);
KVLAB_ON_CUDA(listed_share, listed_share_cuda);
KVLAB_ON_CUDA(blend_left_out, blend_left_out_cuda);

}  // namespace kvlab::ops
