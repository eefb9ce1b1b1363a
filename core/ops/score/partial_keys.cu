// Magnitudes of turned queries: blocks take some queries each, then one adds up their sums. Partial keys: a thread
// copies a channel of some keys. Scores: a thread takes a token, whose row it loads 16 bytes at a time. Pages of
// tokens: a warp takes a list.
#include "ops/score/partial_keys.hpp"

#include <algorithm>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "base/ptx.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int most_dim = 256;

// A block takes `queries_of_block` queries of a KV head, `at_once` at a time. A thread has a channel of all of them.
constexpr int queries_of_block = 256, at_once = 16;
__global__ void __launch_bounds__(most_dim)
    magnitudes_kernel(View<const float, 4> queries, Directions directions, View<double, 4> out) {
  __shared__ float4 x[at_once][most_dim / 4];
  const int head = blockIdx.y, row = blockIdx.z, channel = threadIdx.x, dim = static_cast<int>(directions.extent[2]);
  const std::int64_t count = queries.extent[2], group = queries.extent[1] / directions.extent[0], all = group * count;
  double sum = 0;
  for (std::int64_t first = std::int64_t{blockIdx.x} * queries_of_block;
       first < min(all, std::int64_t{blockIdx.x + 1} * queries_of_block); first += at_once) {
    __syncthreads();
    for (int i = threadIdx.x; i < at_once * dim; i += blockDim.x) {
      const std::int64_t q = first + i / dim;
      reinterpret_cast<float*>(x[i / dim])[i % dim] =
          q < all ? queries(row, head * group + q / count, q % count, i % dim) : 0.f;
    }
    __syncthreads();
    if (channel >= dim) continue;
    const float* direction = &directions(head, channel, 0);
    float along[at_once] = {};
#pragma unroll 2
    for (int d = 0; d < dim; d += 4) {
      const float a = direction[d], b = direction[d + 1], c = direction[d + 2], e = direction[d + 3];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const float4 y = x[i][d / 4];
        along[i] += a * y.x + b * y.y + c * y.z + e * y.w;
      }
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) sum += fabs(double(along[i]));
  }
  if (channel < dim) out(row, head, blockIdx.x, channel) = sum;
}

__global__ void __launch_bounds__(most_dim)
    sum_kernel(const std::int32_t* slots, View<const double, 4> of_blocks, View<float, 3> sums) {
  const int head = blockIdx.x, row = blockIdx.y, channel = threadIdx.x;
  if (channel >= sums.extent[2]) return;
  double sum = 0;
  for (int i = 0; i < of_blocks.extent[2]; ++i) sum += of_blocks(row, head, i, channel);
  float& to = sums(slots[row], head, channel);
  to = static_cast<float>(double(to) + sum);
}

// Channel c of x, f32 [head_dim]: the sum runs in the order of elements, as on the CPU. Products of two f32 are exact.
__device__ double channel_of(const float* x, const Directions& directions, int head, int channel, int dim) {
  if (!directions.data) return double(x[channel]);
  const float* direction = &directions(head, channel, 0);
  double sum = 0;
#pragma unroll 8
  for (int d = 0; d < dim; ++d) sum += double(x[d]) * double(direction[d]);
  return sum;
}

constexpr int threads = 128, tile = 8;
__global__ void __launch_bounds__(threads)
    copy_kernel(DeviceKv kv, int newest, const __grid_constant__ PartialKeys keys) {
  __shared__ float x[tile][most_dim];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row], dim = kv.head_dim;
  const int count = static_cast<int>(keys.channels.extent[2]),
            tokens = static_cast<int>(min(std::int64_t{kv.tokens(row, head)}, keys.rows.extent[2]));
  const int first = max(0, tokens - newest) + static_cast<int>(blockIdx.x) * tile, n = min(tile, tokens - first);
  if (n <= 0) return;
  for (int i = threadIdx.x; i < n * dim; i += threads)
    x[i / dim][i % dim] = kv.token(row, head, first + i / dim).key(i % dim);
  __syncthreads();
  for (int i = threadIdx.x; i < n * count; i += threads) {
    const int channel = min(max(keys.channels(slot, head, i % count), 0), dim - 1);
    const float y = in_range_of_half(channel_of(x[i / count], keys.directions, head, channel, dim));
    keys.rows(slot, head, first + i / count, i % count) = __half_as_ushort(__float2half_rn(y));
  }
}

// few: [row, query head, i]; those behind the last channel are zeros. A warp takes a channel.
__global__ void __launch_bounds__(threads)
    queries_kernel(const std::int32_t* slots, View<const float, 3> queries, const __grid_constant__ PartialKeys keys,
                   View<float, 3> few) {
  const int query = blockIdx.x, row = blockIdx.y, dim = static_cast<int>(queries.extent[2]);
  const int head = query / static_cast<int>(queries.extent[1] / keys.rows.extent[1]), lane = threadIdx.x % 32;
  const int count = static_cast<int>(keys.channels.extent[2]);
  for (int i = threadIdx.x / 32; i < few.extent[2]; i += threads / 32) {
    double sum = 0;
    if (i < count) {
      const int channel = min(max(keys.channels(slots[row], head, i), 0), dim - 1);
      if (!keys.directions.data)
        sum = lane == 0 ? double(queries(row, query, channel)) : 0;
      else
        for (int d = lane; d < dim; d += 32)
          sum += double(queries(row, query, d)) * double(keys.directions(head, channel, d));
    }
    sum = sum_of_lanes(sum);
    if (lane == 0) few(row, query, i) = static_cast<float>(sum);
  }
}

// Eight numbers of a row. Whole: rows begin at multiples of 16 bytes and have room for whole eights.
template <bool Whole>
__device__ __forceinline__ void load_eight(const std::uint16_t* row, int i, int count, float (&x)[8]) {
  if constexpr (Whole) {
    const uint4 y = *reinterpret_cast<const uint4*>(row + i);
    Pair<__half>::unpack(y.x, x[0], x[1]), Pair<__half>::unpack(y.y, x[2], x[3]);
    Pair<__half>::unpack(y.z, x[4], x[5]), Pair<__half>::unpack(y.w, x[6], x[7]);
    // What follows the last channel is nobody's.
#pragma unroll
    for (int j = 1; j < 8; ++j)
      if (i + j >= count) x[j] = 0;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = i + j < count ? __half2float(__ushort_as_half(row[i + j])) : 0.f;
  }
}

constexpr int members = 4;
template <bool Whole>
__global__ void __launch_bounds__(threads)
    scores_kernel(DeviceKv kv, View<const float, 3> few, const __grid_constant__ PartialKeys keys, float factor,
                  int newest, Scores out) {
  extern __shared__ float4 asked[];  // [query of the group, i]
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row];
  const int group = static_cast<int>(few.extent[1]) / kv.kv_heads, fours = static_cast<int>(few.extent[2]) / 4,
            count = static_cast<int>(keys.channels.extent[2]);
  for (int i = threadIdx.x; i < group * fours; i += threads)
    asked[i] = reinterpret_cast<const float4*>(&few(row, head * group + i / fours, 0))[i % fours];
  __syncthreads();
  const int tokens = static_cast<int>(min(min(std::int64_t{kv.tokens(row, head)}, out.extent[2]), keys.rows.extent[2]));
  for (int t = blockIdx.x * threads + threadIdx.x; t < tokens; t += gridDim.x * threads) {
    if (t + newest >= kv.tokens(row, head)) {
      out(row, head, t) = INFINITY;
      continue;
    }
    const std::uint16_t* stored = &keys.rows(slot, head, t, 0);
    float most = -INFINITY;
    for (int first = 0; first < group; first += members) {
      float sum[members] = {};
      for (int i = 0; i < fours; i += 2) {
        float x[8];
        load_eight<Whole>(stored, 4 * i, count, x);
#pragma unroll
        for (int g = 0; g < members; ++g) {
          if (first + g >= group) break;
          const float4 a = asked[(first + g) * fours + i], b = asked[(first + g) * fours + i + 1];
          sum[g] +=
              a.x * x[0] + a.y * x[1] + a.z * x[2] + a.w * x[3] + b.x * x[4] + b.y * x[5] + b.z * x[6] + b.w * x[7];
        }
      }
#pragma unroll
      for (int g = 0; g < members; ++g)
        if (first + g < group) most = fmaxf(most, sum[g]);
    }
    out(row, head, t) = factor * most;
  }
}

// A warp takes a head's list. A token whose page differs from that of the token before it adds a page.
__global__ void __launch_bounds__(32) pages_kernel(DeviceKv kv, TokenList tokens, int newest, PageList out) {
  const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x;
  const std::int64_t from = tokens.at(row), to = out.at(row);
  const int count = static_cast<int>(min(std::int64_t{tokens.count(from, head)}, tokens.index.extent[2]));
  const int end = kv.tokens(row, head) - newest;
  int pages = 0;
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    const int token = i < count ? tokens.index(from, head, i) : end, page = token / kv.page_size;
    const bool starts = token < end && (i == 0 || tokens.index(from, head, i - 1) / kv.page_size != page);
    const unsigned all = __ballot_sync(~0u, starts);
    const int at = pages + __popc(all & ((1u << lane) - 1));
    if (starts && at < out.index.extent[2]) out.index(to, head, at) = page;
    pages += __popc(all);
  }
  if (lane == 0) out.count(to, head) = static_cast<int>(min(std::int64_t{pages}, out.index.extent[2]));
}

dim3 grid_of(std::int64_t blocks, std::int64_t heads, const PagedKv& kv) {
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(heads), static_cast<unsigned>(kv.rows));
}

void add_channel_magnitudes_cuda(const PagedKv& kv, const Tensor<4>& of_queries, Directions directions,
                                 View<float, 3> sums, Workspace& w, Stream s) {
  const View<const float, 4> queries = of_queries.f32();
  const std::int64_t all = queries.extent[2] * (queries.extent[1] / kv.kv_heads),
                     blocks = (all + queries_of_block - 1) / queries_of_block;
  if (kv.rows == 0 || all == 0) return;
  const auto of_blocks =
      take_scratch<double>(w, "magnitudes of some queries", {kv.rows, kv.kv_heads, blocks, kv.head_dim});
  const unsigned block = static_cast<unsigned>((kv.head_dim + 31) / 32 * 32);
  magnitudes_kernel<<<grid_of(blocks, kv.kv_heads, kv), block, 0, stream_of(s)>>>(queries, directions, of_blocks);
  const dim3 heads(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  sum_kernel<<<heads, block, 0, stream_of(s)>>>(kv.slots, of_blocks, sums);
  check_launch("add_channel_magnitudes");
}

void copy_partial_keys_cuda(const PagedKv& kv, int newest, const PartialKeys& keys, Stream s) {
  newest = static_cast<int>(std::min<std::int64_t>(newest, keys.rows.extent[2]));
  if (kv.rows == 0 || newest == 0) return;
  copy_kernel<<<grid_of((newest + tile - 1) / tile, kv.kv_heads, kv), threads, 0, stream_of(s)>>>(DeviceKv(kv), newest,
                                                                                                  keys);
  check_launch("copy_partial_keys");
}

void partial_scores_cuda(const PagedKv& kv, View<const float, 3> queries, const PartialKeys& keys, float factor,
                         int newest, Scores out, Workspace& w, Stream s) {
  if (kv.rows == 0 || out.extent[2] == 0) return;
  const std::int64_t count = (keys.channels.extent[2] + 7) / 8 * 8, heads = queries.extent[1];
  const auto few = take_scratch<float>(w, "channels of queries", {kv.rows, heads, count});
  const dim3 vectors(static_cast<unsigned>(heads), static_cast<unsigned>(kv.rows));
  queries_kernel<<<vectors, threads, 0, stream_of(s)>>>(kv.slots, queries, keys, few);
  const std::int64_t most = (out.extent[2] + threads - 1) / threads, pairs = std::int64_t{kv.rows} * kv.kv_heads,
                     blocks = std::clamp<std::int64_t>(16 * multiprocessors() / pairs, 1, most);
  const auto& rows = keys.rows;
  const bool whole = reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.stride[0] % 8 == 0 &&
                     rows.stride[1] % 8 == 0 && rows.stride[2] % 8 == 0;
  const std::size_t shared = static_cast<std::size_t>(heads / kv.kv_heads * count) * sizeof(float);
  if (shared > 48 << 10)
    throw Error(Errc::unsupported,
                "got " + std::to_string(heads / kv.kv_heads) + " query heads of " + std::to_string(count) +
                    " channels to a KV head, wanted at most 12288 numbers",
                "op partial_scores (CUDA)");
  const auto kernel = whole ? scores_kernel<true> : scores_kernel<false>;
  kernel<<<grid_of(blocks, kv.kv_heads, kv), threads, shared, stream_of(s)>>>(DeviceKv(kv), few, keys, factor, newest,
                                                                              out);
  check_launch("partial_scores");
}

void token_pages_cuda(const PagedKv& kv, const TokenList& tokens, int newest, PageList out, Stream s) {
  if (kv.rows == 0) return;
  const dim3 heads(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  pages_kernel<<<heads, 32, 0, stream_of(s)>>>(DeviceKv(kv), tokens, newest, out);
  check_launch("token_pages");
}

}  // namespace

KVLAB_ON_CUDA(add_channel_magnitudes, add_channel_magnitudes_cuda);
KVLAB_ON_CUDA(copy_partial_keys, copy_partial_keys_cuda);
KVLAB_ON_CUDA(partial_scores, partial_scores_cuda);
KVLAB_ON_CUDA(token_pages, token_pages_cuda);

}  // namespace kvlab::ops
