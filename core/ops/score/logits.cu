// Scores from the logits that attention left: one launch sums up every query head's softmax, and the next one pools
// probabilities and reduces each group.
#include "ops/score/logits.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <span>
#include <tuple>

#include "base/joined_calls.hpp"
#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "ops/page/paged.cuh"
#include "ops/score/logits.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 256, batch = 8, tokens_of_chunk = 2048, most_chunks = 64, most_blocks = 128;

constexpr int most_layers = 32;  // of a launch

// Where a layer's memory begins. The rest is that of Args.
struct Layer {
  const std::int32_t* length;
  const float* logits;
  std::int64_t logits_row;
  const std::int32_t* index;
  const std::uint8_t *flags, *classes;
  float* out;
};
struct Args {
  Layer layers[most_layers];
  View<const std::int32_t, 2> length;
  HeadLogits logits;
  View<float, 3> out;
  const std::int32_t* slots;
  float2* partial;  // [layer and row, i, chunk, query head of the group] maximum, and sum of 2^(x - maximum)
  VotePooling pooling;
  int rows, kv_heads, group, chunks;
  int half, entries, stride;  // half a kernel; tokens of a tile with its edges; floats between rows of a tile
};
static_assert(sizeof(Args) < 4000, "a kernel's arguments");

// The KV head of logits i, and where they lie; null = this step has none.
struct Of {
  int row = 0, head = -1, tokens = 0;
  const float* logits = nullptr;
  float* out = nullptr;
};
__device__ __forceinline__ Of head_of(const Args& a, int i) {
  Of of;
  const Layer& l = a.layers[blockIdx.z / a.rows];
  of.row = static_cast<int>(blockIdx.z) % a.rows;
  const int slot = a.slots[of.row];
  for (int h = 0; h < a.kv_heads; ++h)
    if (l.index[h] == i) of.head = h;
  if (of.head < 0) return of;
  const std::int32_t tokens = l.length[slot * a.length.stride[0] + of.head * a.length.stride[1]];
  of.tokens = static_cast<int>(min(std::int64_t{tokens}, a.out.extent[2]));
  Heads heads = a.logits.heads;
  heads.flags.data = const_cast<std::uint8_t*>(l.flags), heads.classes = l.classes;
  if (!l.logits || !heads.on(slot, of.head) || of.tokens > a.logits.out.extent[2]) return of;
  of.logits = l.logits + of.row * l.logits_row + i * a.logits.out.stride[1];
  of.out = l.out + of.row * a.out.stride[0] + of.head * a.out.stride[1];
  return of;
}

// Blocks [chunk, i, layer and row]. A thread reads logits of one query head.
__global__ void __launch_bounds__(threads) stats_kernel(const __grid_constant__ Args a) {
  __shared__ float2 parts[threads];
  let_successor_start();
  wait_for_predecessor();
  const int mine = static_cast<int>(threadIdx.x), each = threads / a.group, active = each * a.group;
  const Of of = head_of(a, blockIdx.y);
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
    a.partial[((std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * a.chunks + blockIdx.x) * a.group + mine] =
        parts[mine];
}

// The maximum and 1 / sum of each query head's softmax, from the parts that stats_kernel left. The whole block calls
// it.
__device__ __forceinline__ void load_stats(const Args& a, float2* stats) {
  const int mine = static_cast<int>(threadIdx.x), lane = mine % 32;
  for (int g = mine / 32; g < a.group; g += threads / 32) {
    float2 all = make_float2(-INFINITY, 0.f);
    for (int c = lane; c < a.chunks; c += 32)
      join(all, a.partial[((std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * a.chunks + c) * a.group + g]);
    all = join_lanes(all, Join{});
    if (lane == 0) stats[g] = stats_of(all);
  }
  __syncthreads();
}

constexpr int each = 2, vector_entries = each * threads, most_vector_half = 32;

// pool_kernel for groups whose logits of a token come in vectors. Half: half a kernel, -1 = Args::half.
template <int Group, int Half>
__global__ void __launch_bounds__(threads) pool_vectors_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float2 stats[Group];
  let_successor_start();
  wait_for_predecessor();
  const Of of = head_of(a, blockIdx.y);
  const int half = Half < 0 ? a.half : Half, width = vector_entries - 2 * half;
  if (!of.logits || static_cast<int>(blockIdx.x) * width >= of.tokens) return;
  load_stats(a, stats);
  pool_tiles<Group, Half, threads, each>(of.logits, of.tokens, stats, a.pooling, half, blockIdx.x, gridDim.x,
                                         reinterpret_cast<float*>(memory),
                                         [&](int t, float score) { of.out[t] = score; });
}

// Blocks [part of the tiles, i, layer and row].
__global__ void __launch_bounds__(threads) pool_kernel(const __grid_constant__ Args a) {
  extern __shared__ float shares[];  // [query head of the group, stride]
  __shared__ float2 stats[most_logit_group];
  let_successor_start();
  wait_for_predecessor();
  const int mine = static_cast<int>(threadIdx.x);
  const Of of = head_of(a, blockIdx.y);
  if (!of.logits) return;
  load_stats(a, stats);
  const bool maximum = a.pooling.kind == Pooling::max;
  const int width = a.entries - 2 * a.half, numbers = a.entries * a.group;
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
        const float share = share_of(x[i], stats[g]);
        shares[g * a.stride + t] = maximum && (at < 0 || at >= end) ? -INFINITY : share;
      }
    }
    __syncthreads();
    for (int t = mine; t < width && base + t < of.tokens; t += threads) {
      GroupScore score{a.pooling.rule};
      for (int g = 0; g < a.group; ++g) {
        const float* near = shares + g * a.stride + t;
        float x = near[0];
        for (int i = 1; i <= 2 * a.half; ++i) x = maximum ? fmaxf(x, near[i]) : x + near[i];
        if (!maximum) x /= static_cast<float>(2 * a.half + 1);
        score.add(g, x);
      }
      of.out[base + t] = score.result(a.group);
    }
    __syncthreads();
  }
}

}  // namespace

// What calls that share launches have in common.
static auto common_of(const PooledLogits& c) {
  const Heads& h = c.logits.heads;
  return std::tuple(std::tuple(c.kv.rows, c.kv.kv_heads, c.kv.page_size, c.kv.slots, c.kv.table.extent[2],
                               c.kv.length.stride, c.logits.out.extent[2], c.logits.out.extent[3],
                               c.logits.out.stride[1], c.out.extent[2], c.out.stride, c.stream.handle()),
                    std::tuple(c.pooling.kind, c.pooling.kernel, c.pooling.rule, h.flags.data != nullptr,
                               h.flags.stride, h.unflagged, h.steps, h.period, h.lead, h.classes != nullptr, h.join));
}

// pool_vectors_kernel for these calls, or null.
static decltype(&pool_vectors_kernel<1, 2>) vectors_kernel(const Args& a, std::span<const PooledLogits> calls) {
  if (a.half > most_vector_half) return nullptr;
  for (const PooledLogits& c : calls)
    if (!logit_vectors(c.logits)) return nullptr;
  const auto of_group = [&](auto group) {
    constexpr int n = decltype(group)::value;
    return a.half == 2 ? pool_vectors_kernel<n, 2> : pool_vectors_kernel<n, -1>;
  };
  switch (a.group) {
    case 1: return of_group(std::integral_constant<int, 1>{});
    case 2: return of_group(std::integral_constant<int, 2>{});
    case 4: return of_group(std::integral_constant<int, 4>{});
    case 8: return of_group(std::integral_constant<int, 8>{});
    default: return nullptr;
  }
}

static void run(std::span<const PooledLogits> calls) {
  const PooledLogits& first = calls[0];
  const PagedKv& kv = first.kv;
  const VotePooling& pooling = first.pooling;
  const Stream s = first.stream;
  Args a = {};
  std::int64_t heads = 0;  // most of a layer
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const PooledLogits& c = calls[i];
    a.layers[i] = {c.kv.length.data, c.logits.out.data,         c.logits.out.stride[0],
                   c.logits.index,   c.logits.heads.flags.data, c.logits.heads.classes,
                   c.out.data};
    heads = std::max(heads, c.logits.out.extent[1]);
  }
  if (kv.rows == 0 || heads == 0) return;
  a.length = kv.length, a.logits = first.logits, a.out = first.out;
  a.slots = kv.slots, a.rows = kv.rows, a.kv_heads = kv.kv_heads, a.pooling = pooling;
  a.group = static_cast<int>(first.logits.out.extent[3]);
  const int room = static_cast<int>(std::min(kv.table.extent[2] * kv.page_size, first.out.extent[2]));
  a.chunks = std::clamp((room + tokens_of_chunk - 1) / tokens_of_chunk, 1, most_chunks);
  const auto blocks = static_cast<unsigned>(heads), layers_and_rows = static_cast<unsigned>(calls.size()) * kv.rows;
  a.partial = static_cast<float2*>(
      fixed_scratch(s.handle(), "pooled_logits",
                    std::size_t{layers_and_rows} * blocks * std::size_t(a.chunks * a.group) * sizeof(float2)));
  a.half = pooling.kind == Pooling::none ? 0 : pooling.kernel / 2;
  const auto pool = [&](const auto kernel, int width, std::size_t bytes) {
    launch("pooled_logits", stats_kernel, dim3(a.chunks, blocks, layers_and_rows), threads, 0, stream_of(s), true, a);
    const int parts = std::clamp((room + width - 1) / width, 1, most_blocks / blocks_fewer(layers_and_rows));
    launch("pooled_logits", kernel, dim3(parts, blocks, layers_and_rows), threads, bytes, stream_of(s), true, a);
  };
  if (const auto vectors = vectors_kernel(a, calls))
    return pool(vectors, vector_entries - 2 * a.half, std::size_t{2} * vector_entries * a.group * sizeof(float));
  a.entries = a.half > 32 ? threads + 2 * a.half : threads;
  a.stride = (a.entries + 31) / 32 * 32 + 8;  // so that the rows of a group of four lie in other banks
  const int bytes = a.group * a.stride * static_cast<int>(sizeof(float));
  static const cudaError_t once = cudaFuncSetAttribute(pool_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(shared_bytes() - 2048));
  check(once, "pooled_logits");
  if (bytes > shared_bytes() - 2048)
    throw Error(Errc::unsupported,
                "got a kernel of " + std::to_string(pooling.kernel) + " and a group of " + std::to_string(a.group) +
                    " query heads, wanted less of one: a tile must fit shared memory",
                "op pooled_logits");
  pool(pool_kernel, a.entries - 2 * a.half, static_cast<std::size_t>(bytes));
}

void pooled_in_layers_cuda(const std::vector<PooledLogits>& calls) {
  for_each_alike(std::span(calls), most_layers, common_of, run);
}
KVLAB_ON_CUDA(pooled_in_layers, pooled_in_layers_cuda);

static void pooled_logits_cuda(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, Scores out,
                               Stream s) {
  const PooledLogits call{kv, logits, pooling, out, s};
  run({&call, 1});
}
KVLAB_ON_CUDA(pooled_logits, pooled_logits_cuda);

}  // namespace kvlab::ops
