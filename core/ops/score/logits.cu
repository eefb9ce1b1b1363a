// Scores from the logits that attention left: one launch sums up every query head's softmax, and the next one pools
// probabilities and reduces each group.
#include "ops/score/logits.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>

#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 256, batch = 8, tokens_of_chunk = 2048, most_chunks = 64, most_blocks = 128;
constexpr unsigned all_lanes = ~0u;

struct Args {
  DeviceKv kv;
  HeadLogits logits;
  View<float, 3> out;
  float2* partial;  // [row, i, chunk, query head of the group] maximum, and sum of 2^(x - maximum)
  VotePooling pooling;
  int group, chunks;
  int half, entries, stride;  // half a kernel; tokens of a tile with its edges; floats between rows of a tile
};

// The KV head of logits i, and where they lie; null = this step has none.
struct Of {
  int head = -1, tokens = 0;
  const float* logits = nullptr;
};
__device__ __forceinline__ Of head_of(const Args& a, int row, int i) {
  Of of;
  for (int h = 0; h < a.kv.kv_heads; ++h)
    if (a.logits.index[h] == i) of.head = h;
  if (of.head < 0) return of;
  of.tokens = static_cast<int>(min(std::int64_t{a.kv.tokens(row, of.head)}, a.out.extent[2]));
  of.logits = a.logits.of(row, a.kv.kv.slots[row], of.head, of.tokens);
  return of;
}

// Joins (maximum, sum of 2^(x - maximum)) of two sets.
__device__ __forceinline__ void join(float2& x, const float2& other) {
  const float high = fmaxf(x.x, other.x);
  if (high == -INFINITY) return;
  x = make_float2(high, x.y * exp2f(x.x - high) + other.y * exp2f(other.x - high));
}

// Blocks [chunk, i, row]. A thread reads logits of one query head.
__global__ void __launch_bounds__(threads) stats_kernel(const __grid_constant__ Args a) {
  __shared__ float2 parts[threads];
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.z, mine = static_cast<int>(threadIdx.x), each = threads / a.group, active = each * a.group;
  const Of of = head_of(a, row, blockIdx.y);
  if (!of.logits) return;
  const int share = (of.tokens + a.chunks - 1) / a.chunks;
  const std::int64_t begin = min(std::int64_t{blockIdx.x} * share, std::int64_t{of.tokens}) * a.group,
                     end = min(begin + std::int64_t{share} * a.group, std::int64_t{of.tokens} * a.group);
  float2 sum = make_float2(-INFINITY, 0.f);
  if (mine < active)
    for (std::int64_t first = begin + mine; first < end; first += batch * active) {
      float x[batch], high = -INFINITY, all = 0;
#pragma unroll
      for (int i = 0; i < batch; ++i)  // all loads first: none waits for another
        x[i] = first + i * active < end ? __ldcg(of.logits + first + i * active) : -INFINITY;
#pragma unroll
      for (int i = 0; i < batch; ++i) high = fmaxf(high, x[i]);
      if (high == -INFINITY) continue;
#pragma unroll
      for (int i = 0; i < batch; ++i) all += exp2f(x[i] - high);
      join(sum, make_float2(high, all));
    }
  parts[mine] = sum;
  __syncthreads();
  int left = each;
  while (left > 1) {
    const int half = (left + 1) / 2;
    if (mine + half * a.group < left * a.group) join(parts[mine], parts[mine + half * a.group]);
    __syncthreads();
    left = half;
  }
  if (mine < a.group)
    a.partial[((std::int64_t{row} * gridDim.y + blockIdx.y) * a.chunks + blockIdx.x) * a.group + mine] = parts[mine];
}

// Blocks [part of the tiles, i, row].
__global__ void __launch_bounds__(threads) pool_kernel(const __grid_constant__ Args a) {
  extern __shared__ float shares[];  // [query head of the group, stride]
  __shared__ float2 stats[most_logit_group];
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.z, mine = static_cast<int>(threadIdx.x), lane = mine % 32;
  const Of of = head_of(a, row, blockIdx.y);
  if (!of.logits) return;
  for (int g = mine / 32; g < a.group; g += threads / 32) {
    float2 all = make_float2(-INFINITY, 0.f);
    for (int c = lane; c < a.chunks; c += 32)
      join(all, a.partial[((std::int64_t{row} * gridDim.y + blockIdx.y) * a.chunks + c) * a.group + g]);
    for (int m = 16; m > 0; m /= 2)
      join(all, make_float2(__shfl_xor_sync(all_lanes, all.x, m), __shfl_xor_sync(all_lanes, all.y, m)));
    if (lane == 0) stats[g] = make_float2(all.x, all.y > 0 ? 1.f / all.y : 0.f);
  }
  __syncthreads();
  const bool maximum = a.pooling.kind == Pooling::max;
  const int width = a.entries - 2 * a.half, numbers = a.entries * a.group;
  float* const out = &a.out(row, of.head, 0);
  for (int base = blockIdx.x * width; base < of.tokens; base += gridDim.x * width) {
    const std::int64_t begin = (std::int64_t{base} - a.half) * a.group, end = std::int64_t{of.tokens} * a.group;
    for (int first = mine; first < numbers; first += 4 * threads) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int f = first + i * threads;
        const std::int64_t at = begin + f;
        x[i] = f < numbers && at >= 0 && at < end ? __ldcg(of.logits + at) : -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int f = first + i * threads;
        if (f >= numbers) break;
        const int t = f / a.group, g = f - t * a.group;
        const std::int64_t at = begin + f;
        const float share = x[i] != -INFINITY ? exp2f(x[i] - stats[g].x) * stats[g].y : 0.f;
        shares[g * a.stride + t] = maximum && (at < 0 || at >= end) ? -INFINITY : share;
      }
    }
    __syncthreads();
    for (int t = mine; t < width && base + t < of.tokens; t += threads) {
      float best = 0;
      for (int g = 0; g < a.group; ++g) {
        const float* near = shares + g * a.stride + t;
        float x = near[0];
        for (int i = 1; i <= 2 * a.half; ++i) x = maximum ? fmaxf(x, near[i]) : x + near[i];
        if (!maximum) x /= static_cast<float>(2 * a.half + 1);
        best = g == 0 ? x : a.pooling.rule != GroupRule::max ? best + x : best < x ? x : best;
      }
      if (a.pooling.rule == GroupRule::mean) best *= 1.f / static_cast<float>(a.group);
      out[base + t] = best;
    }
    __syncthreads();
  }
}

}  // namespace

static void pooled_logits_cuda(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, Scores out,
                               Stream s) {
  const int heads = static_cast<int>(logits.out.extent[1]);
  if (kv.rows == 0 || heads == 0) return;
  Args a = {};
  a.kv = DeviceKv(kv);
  a.logits = logits, a.out = out, a.pooling = pooling;
  a.group = static_cast<int>(logits.out.extent[3]);
  const int room = static_cast<int>(std::min(kv.table.extent[2] * kv.page_size, out.extent[2]));
  a.chunks = std::clamp((room + tokens_of_chunk - 1) / tokens_of_chunk, 1, most_chunks);
  a.partial = static_cast<float2*>(fixed_scratch(
      s.handle(), "pooled_logits", std::size_t(kv.rows) * std::size_t(heads * a.chunks * a.group) * sizeof(float2)));
  a.half = pooling.kind == Pooling::none ? 0 : pooling.kernel / 2;
  a.entries = a.half > 32 ? threads + 2 * a.half : threads;
  a.stride = (a.entries + 31) / 32 * 32 + 8;  // so that the rows of a group of four lie in other banks
  const int bytes = a.group * a.stride * static_cast<int>(sizeof(float)), width = a.entries - 2 * a.half;
  static const cudaError_t once = cudaFuncSetAttribute(pool_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(shared_bytes() - 2048));
  check(once, "pooled_logits");
  if (bytes > shared_bytes() - 2048)
    throw Error(Errc::unsupported,
                "got a kernel of " + std::to_string(pooling.kernel) + " and a group of " + std::to_string(a.group) +
                    " query heads, wanted less of one: a tile must fit shared memory",
                "op pooled_logits");
  launch("pooled_logits", stats_kernel, dim3(a.chunks, heads, kv.rows), threads, 0, stream_of(s), true, a);
  launch("pooled_logits", pool_kernel, dim3(std::clamp((room + width - 1) / width, 1, most_blocks), heads, kv.rows),
         threads, bytes, stream_of(s), true, a);
}
KVLAB_ON_CUDA(pooled_logits, pooled_logits_cuda);

}  // namespace kvlab::ops
