// Shares of many queries. Each launch takes as many queries of a head as the tensor cores' kernels do: one kernel for
// the softmax of each query, and one for the tokens' numbers.
#include "ops/score/query_shares.hpp"

#include <algorithm>
#include <cmath>

#include "ops/page/ranks.cuh"
#include "ops/score/votes.cuh"

namespace kvlab::ops {
namespace {

using namespace votes;

constexpr int launch_queries = 64;  // of a launch, at most: more leave room for one block of a multiprocessor

struct Shares {
  Args a;  // its window is all queries of the call
  ShareRule rule;
  const float* temperature;
  const std::uint64_t* noise;
  float* least;      // [row, kv_head, query of the launch] 1 / tokens that it sees; counts only
  int first, count;  // queries of the launch
};

__device__ __forceinline__ float factor_of(const Shares& x, int row) {
  return x.temperature ? 1.f / x.temperature[row] : 1.f;
}

// Where the noise of a query of a head begins.
__device__ __forceinline__ std::uint64_t start_of(const Shares& x, int row, int head, int query) {
  const int group = x.a.group;
  return split_mix(x.noise[(row * group + head % group) * x.a.window + query], head / group);
}

// A logit times log2(e), with noise and temperature.
__device__ __forceinline__ float changed(const Shares& x, float s, float factor, std::uint64_t start, int position) {
  if (x.noise && s != -INFINITY) s -= log2f(-logf(draw_at(start, position) + least_draw));
  return s * factor;
}

// The noise of a pass: [member, query].
__device__ __forceinline__ void fill_starts(const Shares& x, int row, const Pass& pass, std::uint64_t* start) {
  if (!x.noise) return;
  for (int i = static_cast<int>(threadIdx.x); i < pass.members * pass.count; i += threads)
    start[i] = start_of(x, row, pass.head + i / pass.count, pass.first + i % pass.count);
}

template <class T, int Chunks, Stored S>
__global__ void __launch_bounds__(threads) share_stats_kernel(const __grid_constant__ Shares x) {
  extern __shared__ uint4 dynamic[];
  __shared__ std::uint64_t start[most_queries];
  const Args& a = x.a;
  const int head = blockIdx.y, row = blockIdx.z, column_tiles = (2 * x.count + 7) / 8;
  const Pass pass = {head, 1, x.first, x.count};
  const float factor = factor_of(x, row);
  fill_starts(x, row, pass, start);
  float2* stats = reinterpret_cast<float2*>(dynamic + column_tiles * Chunks * 32);  // [column tile, thread]
  for (int c = 0; c < column_tiles; ++c) stats[c * threads + threadIdx.x] = make_float2(-INFINITY, 0.f);
  for_scores<T, Chunks, S>(
      a, row, pass, dynamic,
      [&](int column, int, int query, const int(&)[2], const float(&s)[2], const int(&position)[2]) {
        if (query >= x.count) return;
        float2& own = stats[column * threads + threadIdx.x];
        const float y[2] = {changed(x, s[0], factor, start[query], position[0]),
                            changed(x, s[1], factor, start[query], position[1])};
        const float high = fmaxf(own.x, fmaxf(y[0], y[1]));
        if (high != -INFINITY)
          own = make_float2(high, own.y * exp2f(own.x - high) + exp2f(y[0] - high) + exp2f(y[1] - high));
      },
      [](const int(&)[2], int) {});
  __syncthreads();
  for (int i = threadIdx.x; i < x.count; i += threads) {
    float2 all = make_float2(-INFINITY, 0.f);
    for (int w = 0; w < warps; ++w)
      for (int g = 0; g < 8; ++g) {
        const float2 of = stats[i / 4 * threads + w * 32 + g * 4 + i % 4];
        join(all.x, all.y, of.x, of.y);
      }
    a.partial[((std::int64_t(row) * gridDim.y + head) * a.chunks + blockIdx.x) * x.count + i] = all;
  }
}

// 1 / tokens that each query of the launch sees. A block takes a KV head.
__global__ void __launch_bounds__(1024) seen_kernel(const __grid_constant__ Shares x) {
  __shared__ int from[most_queries];  // tokens that queries from i on see, and those before it do not
  const Args& a = x.a;
  const int kv_head = blockIdx.x, row = blockIdx.y, tokens = tokens_of(a, row, kv_head);
  const int oldest = newest_of(a, row, x.first), newest = newest_of(a, row, x.first + x.count - 1);
  if (threadIdx.x < most_queries) from[threadIdx.x] = 0;
  __syncthreads();
  int all = 0;
  for (int t = static_cast<int>(threadIdx.x); t < tokens; t += 1024) {
    const int position = a.seen ? a.kv.position(row, kv_head, t) : 0;
    if (position <= oldest)
      ++all;
    else if (position <= newest)
      atomicAdd(&from[position - oldest], 1);
  }
  atomicAdd(&from[0], all);
  __syncthreads();
  if (threadIdx.x > 0) return;
  int sees = 0;
  for (int i = 0; i < x.count; ++i) {
    sees += oldest == newest && i > 0 ? 0 : from[i];
    x.least[(std::int64_t(row) * a.kv.kv_heads + kv_head) * most_queries + i] = 1.f / static_cast<float>(sees);
  }
}

// Joins a query's share of a token to the token's number. `mean` is the sum over the heads before this one.
__device__ __forceinline__ void count_in(const Shares& x, bool sees, float share, float least, int member, float& mean,
                                         float& number) {
  switch (x.rule) {
    case ShareRule::sum: number += share; break;
    case ShareRule::max: number = fmaxf(number, share); break;
    case ShareRule::below_each: number += sees && share < least ? 1.f : 0.f; break;
    case ShareRule::below_mean:
      mean = member == 0 ? share : mean + share;
      if (member + 1 == x.a.group) number += sees && mean * (1.f / static_cast<float>(x.a.group)) < least ? 1.f : 0.f;
  }
}

// A block reads its tiles of keys once for each pass over the launch's queries.
template <class T, int Chunks, Stored S>
__global__ void __launch_bounds__(threads) shares_kernel(const __grid_constant__ Shares x) {
  extern __shared__ uint4 dynamic[];
  __shared__ std::uint64_t start[most_queries];
  __shared__ float2 stats[most_queries];  // maximum, 1 / sum
  __shared__ float least[most_queries];
  const Args& a = x.a;
  const int kv_head = blockIdx.y, row = blockIdx.z, quarter = threadIdx.x % 4;
  const int most = queries_of_pass(a.group, x.count);
  const bool greatest = x.rule == ShareRule::max, counts = counts_below(x.rule);
  const float factor = factor_of(x, row);
  for (int first = 0; first < x.count; first += most) {
    const Pass pass = {kv_head * a.group, a.group, x.first + first, min(most, x.count - first)};
    __syncthreads();  // the pass before has read its queries
    fill_starts(x, row, pass, start);
    for (int i = threadIdx.x; i < pass.members * pass.count; i += threads)
      stats[i] = softmax_of(a, row, pass.head + i / pass.count, first + i % pass.count, x.count);
    for (int i = threadIdx.x; counts && i < pass.count; i += threads)
      least[i] = x.least[(std::int64_t(row) * a.kv.kv_heads + kv_head) * most_queries + first + i];
    float number[2] = {}, mean[2] = {};
    for_scores<T, Chunks, S>(
        a, row, pass, dynamic,
        [&](int, int member, int query, const int(&)[2], const float(&s)[2], const int(&position)[2]) {
          if (query >= pass.count) return;
          const int i = member * pass.count + query;
          const float2 of = stats[i];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float y = changed(x, s[half], factor, start[i], position[half]);
            const bool sees = y != -INFINITY;
            count_in(x, sees, sees ? exp2f(y - of.x) * of.y : 0.f, least[query], member, mean[half], number[half]);
          }
        },
        [&](const int(&t)[2], int tokens) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float all = greatest ? most_of_lanes<1, 2>(number[half]) : sum_of_lanes<1, 2>(number[half]);
            if (quarter == 0 && t[half] < tokens) {
              float& to = a.votes(row, kv_head, t[half]);
              to = pass.first == 0 ? all : greatest ? fmaxf(to, all) : to + all;
            }
            number[half] = 0;
          }
        });
  }
}

// Serves any codec, regime, head_dim and group. One block per KV head takes the queries in turn.
__global__ void __launch_bounds__(threads) shares_any_kernel(const __grid_constant__ Shares x) {
  __shared__ float parts[warps];
  __shared__ int counts[warps];
  const Args& a = x.a;
  const int kv_head = blockIdx.x, row = blockIdx.y, dim = a.kv.head_dim;
  const int tokens = tokens_of(a, row, kv_head), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* logits = a.logits + (std::int64_t(row) * gridDim.x + kv_head) * 2 * a.room;
  float* mean = logits + a.room;
  const std::int32_t* rank = a.rank ? a.rank + (std::int64_t(row) * a.kv.kv_heads + kv_head) * a.room : nullptr;
  const float factor = factor_of(x, row);
  for (int t = threadIdx.x; t < tokens; t += threads) a.votes(row, kv_head, t) = 0;
  for (int n = 0; n < a.window * a.group; ++n) {
    const int i = n / a.group, member = n % a.group, head = kv_head * a.group + member;
    const float* q = query_at(a, row, head, i, 0);
    const int newest = newest_of(a, row, i);
    const std::uint64_t start = x.noise ? start_of(x, row, head, i) : 0;
    float high = -INFINITY, sum = 0;
    int seen = 0;
    for (int t = warp; t < tokens; t += warps) {
      const auto token = a.kv.token(row, kv_head, t);
      float s = 0;
      for (int d = lane; d < dim; d += 32) s += q[d] * (rank ? a.kv.rotated_key(token, d, rank[t]) : token.key(d));
      s = sum_of_lanes(s);
      const int position = token.position();
      s = changed(x, position <= newest ? s * a.scale : -INFINITY, factor, start, position);
      if (lane == 0) logits[t] = s;
      seen += position <= newest ? 1 : 0;
      high = fmaxf(high, s);
    }
    if (lane == 0) parts[warp] = high, counts[warp] = seen;
    __syncthreads();  // it also orders the block's writes of logits
    seen = 0;
    for (int w = 0; w < warps; ++w) high = fmaxf(high, parts[w]), seen += counts[w];
    __syncthreads();
    for (int t = threadIdx.x; seen > 0 && t < tokens; t += threads) sum += exp2f(logits[t] - high);
    sum = sum_of_lanes(sum);
    if (lane == 0) parts[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < warps; ++w) sum += parts[w];
    const float least = 1.f / static_cast<float>(seen), inverse = 1.f / sum;
    for (int t = threadIdx.x; t < tokens; t += threads) {
      const bool sees = logits[t] != -INFINITY;
      count_in(x, sees, sees ? exp2f(logits[t] - high) * inverse : 0.f, least, member, mean[t],
               a.votes(row, kv_head, t));
    }
    __syncthreads();
  }
}

template <class T, int Chunks, Stored S>
void launch(const Shares& x, cudaStream_t stream) {
  const auto first = share_stats_kernel<T, Chunks, S>;
  const auto second = shares_kernel<T, Chunks, S>;
  const int room = static_cast<int>(shared_bytes() - 4096);
  static const cudaError_t once[] = {cudaFuncSetAttribute(first, cudaFuncAttributeMaxDynamicSharedMemorySize, room),
                                     cudaFuncSetAttribute(second, cudaFuncAttributeMaxDynamicSharedMemorySize, room)};
  check(once[0], "query_shares"), check(once[1], "query_shares");
  const Args& a = x.a;
  const auto heads = static_cast<unsigned>(a.queries.extent[1]), kv_heads = static_cast<unsigned>(a.kv.kv_heads),
             rows = static_cast<unsigned>(a.kv.kv.rows);
  first<<<dim3(a.chunks, heads, rows), threads, tile_bytes(a.kv.head_dim, x.count), stream>>>(x);
  if (counts_below(x.rule)) seen_kernel<<<dim3(kv_heads, rows), 1024, 0, stream>>>(x);
  // A block for each part of the tokens: the device is full though these are fewer heads.
  const unsigned blocks = static_cast<unsigned>(std::clamp<std::int64_t>(
      4 * multiprocessors() / (kv_heads * rows), 1, (a.room + tile_tokens * warps - 1) / (tile_tokens * warps)));
  const int tiles = a.group * ((2 * queries_of_pass(a.group, x.count) + 7) / 8);
  second<<<dim3(blocks, kv_heads, rows), threads, tiles * Chunks * 512, stream>>>(x);
  check_launch("query_shares");
}

void query_shares_cuda(const Tensor<4>& tensor, const PagedKv& kv, const QueryShares& how, Scores out, Stream s) {
  const View<const float, 4> queries = tensor.f32();
  if (kv.rows == 0) return;
  Shares x = {arguments(kv, queries, out, {}), how.rule, how.temperature, how.noise, nullptr, 0, 0};
  Args& a = x.a;
  a.seen = how.seen, a.each = how.alike, a.placed = how.noise != nullptr, a.of_slots = how.of_slots, a.skips = true;
  int most = launch_queries;
  while (most > 0 && tile_bytes(kv.head_dim, most) > shared_bytes() - 4096) most -= 4;
  const std::int64_t heads = queries.extent[1], kv_heads = kv.kv_heads;
  if (!fits_tiles(kv) || most == 0 || a.window == 0 || queries_of_pass(a.group, most) == 0) {
    if (kv.rope == RopeRegime::cache_relative) a.rank = token_ranks(a.kv, s.handle());
    a.logits = static_cast<float*>(
        fixed_scratch(s.handle(), "query shares logits", std::size_t(kv.rows * kv_heads) * std::size_t(a.room) * 8));
    shares_any_kernel<<<dim3(kv.kv_heads, kv.rows), threads, 0, stream_of(s)>>>(x);
    return check_launch("query_shares");
  }
  a.chunks = static_cast<int>(
      std::clamp<std::int64_t>(4 * multiprocessors() / (heads * kv.rows), 1,
                               std::max<std::int64_t>(1, (a.room + tile_tokens * warps - 1) / (tile_tokens * warps))));
  a.partial = static_cast<float2*>(fixed_scratch(
      s.handle(), "query shares", std::size_t(kv.rows * heads * a.chunks * std::min(most, a.window)) * sizeof(float2)));
  if (counts_below(how.rule))
    x.least = static_cast<float*>(
        fixed_scratch(s.handle(), "query shares seen", std::size_t(kv.rows * kv_heads * most_queries) * sizeof(float)));
  for (; x.first < a.window; x.first += most) {
    x.count = std::min(most, a.window - x.first);
    for_format(kv, [&]<class T, int Chunks, Stored S> { launch<T, Chunks, S>(x, stream_of(s)); });
  }
}

}  // namespace

KVLAB_ON_CUDA(query_shares, query_shares_cuda);

}  // namespace kvlab::ops
