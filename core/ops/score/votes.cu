// Votes of the window queries.
#include "ops/score/votes.hpp"

#include <algorithm>
#include <cmath>

#include "ops/page/ranks.cuh"
#include "ops/score/votes.cuh"

namespace kvlab::ops {
namespace {

using namespace votes;

template <class T, int Chunks, Stored S>
__global__ void __launch_bounds__(threads) stats_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.y, row = blockIdx.z, column_tiles = (2 * a.window + 7) / 8;
  if (left_out(a, row, head / a.group)) return;
  const int tokens = tokens_of(a, row, head / a.group);
  float2* stats = reinterpret_cast<float2*>(dynamic + column_tiles * Chunks * 32);  // [column tile, thread]
  for (int c = 0; c < column_tiles; ++c) stats[c * threads + threadIdx.x] = make_float2(-INFINITY, 0.f);
  for_scores<T, Chunks, S>(
      a, row, {head, 1, 0, a.window}, dynamic,
      [&](int column, int, int query, const int(&t)[2], const float(&s)[2], const int(&)[2]) {
        float2& own = stats[column * threads + threadIdx.x];
        const float high = fmaxf(own.x, fmaxf(s[0], s[1]));
        if (high != -INFINITY)
          own = make_float2(high, own.y * exp2f(own.x - high) + exp2f(s[0] - high) + exp2f(s[1] - high));
        if (a.stored.data && query < a.window)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (t[half] < tokens) a.stored(row, head * a.window + query, t[half]) = s[half];
      },
      [](const int(&)[2], int) {});
  __syncthreads();
  for (int i = threadIdx.x; i < a.window; i += threads) {
    float2 all = make_float2(-INFINITY, 0.f);
    for (int w = 0; w < warps; ++w)
      for (int g = 0; g < 8; ++g) {
        const float2 x = stats[i / 4 * threads + w * 32 + g * 4 + i % 4];
        join(all.x, all.y, x.x, x.y);
      }
    a.partial[((std::int64_t(row) * gridDim.y + head) * a.chunks + blockIdx.x) * a.window + i] = all;
  }
}

template <class T, int Chunks, Stored S>
__global__ void __launch_bounds__(threads) votes_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  __shared__ float2 stats[most_queries];  // maximum, 1 / sum
  const int head = blockIdx.y, row = blockIdx.z, quarter = threadIdx.x % 4;
  if (left_out(a, row, head / a.group)) return;
  const int tokens_of_head = tokens_of(a, row, head / a.group);
  for (int i = threadIdx.x; i < a.window; i += threads) stats[i] = softmax_of(a, row, head, i, a.window);
  float vote[2] = {};
  for_scores<T, Chunks, S>(
      a, row, {head, 1, 0, a.window}, dynamic,
      [&](int, int, int query, const int(&t)[2], const float(&s)[2], const int(&position)[2]) {
        if (query >= a.window) return;
        const float2 of = stats[query];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool counts = s[half] != -INFINITY && votes_for(a, row, query, position[half]);
          const float share = counts ? exp2f(s[half] - of.x) * of.y : 0.f;
          if (!a.each)
            vote[half] += share;
          else if (t[half] < tokens_of_head)
            a.votes(row, head * a.window + query, t[half]) = share;
        }
      },
      [&](const int(&t)[2], int tokens) {
        if (a.each) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          vote[half] = sum_of_lanes<1, 2>(vote[half]);
          if (quarter == 0 && t[half] < tokens) a.votes(row, head, t[half]) = vote[half];
          vote[half] = 0;
        }
      });
}

// A vote of each KV head. A block reads its tiles of keys once for each pass over the window, and adds to their votes.
template <class T, int Chunks, Stored S>
__global__ void __launch_bounds__(threads) group_votes_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  __shared__ float2 stats[most_queries];
  const int kv_head = blockIdx.y, row = blockIdx.z, quarter = threadIdx.x % 4;
  if (left_out(a, row, kv_head)) return;
  const int most = queries_of_pass(a.group, a.window);
  for (int first = 0; first < a.window; first += most) {
    const Pass pass = {kv_head * a.group, a.group, first, min(most, a.window - first)};
    __syncthreads();  // the pass before has read its queries
    for (int i = threadIdx.x; i < pass.members * pass.count; i += threads)
      stats[i] = softmax_of(a, row, pass.head + i / pass.count, first + i % pass.count, a.window);
    float vote[2] = {}, greatest[2] = {};
    for_scores<T, Chunks, S>(
        a, row, pass, dynamic,
        [&](int, int member, int query, const int(&)[2], const float(&s)[2], const int(&position)[2]) {
          if (query >= pass.count) return;
          const float2 of = stats[member * pass.count + query];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const bool counts = s[half] != -INFINITY && votes_for(a, row, first + query, position[half]);
            const float share = counts ? exp2f(s[half] - of.x) * of.y : 0.f;
            greatest[half] = member == 0 ? share : fmaxf(greatest[half], share);
            if (member + 1 == pass.members) vote[half] += greatest[half];
          }
        },
        [&](const int(&t)[2], int tokens) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            vote[half] = sum_of_lanes<1, 2>(vote[half]);
            if (quarter == 0 && t[half] < tokens) {
              float& to = a.votes(row, kv_head, t[half]);
              to = first == 0 ? vote[half] : to + vote[half];
            }
            vote[half] = 0;
          }
        });
  }
}

constexpr int pooled_tokens = 256, most_pooled = 65, pooled_bytes = 40 * 1024;  // most_pooled: of a kernel

struct Pooled {
  Args a;  // `votes` is the output
  VotePooling pooling;
  int parts, group;  // scores of a KV head, and queries of each
  int at_once;       // parts whose queries lie in shared memory together
};

// The stored logits become probabilities, are pooled, and reduced over each group. A thread reads a token of each
// query. The tokens at a tile's ends lie in two tiles.
__global__ void __launch_bounds__(pooled_tokens) pooled_kernel(const __grid_constant__ Pooled p) {
  extern __shared__ float shares[];  // [query of at_once parts, pooled_tokens]
  __shared__ float2 stats[most_queries];
  let_successor_start();
  wait_for_predecessor();
  const Args& a = p.a;
  const int head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, mine = static_cast<int>(threadIdx.x);
  if (left_out(a, row, head)) return;
  const int tokens = tokens_of(a, row, head), half = p.pooling.kernel / 2, width = pooled_tokens - 2 * half;
  const bool maximum = p.pooling.kind == Pooling::max;
  constexpr int batch = 10;
  for (int i = mine / 32; i < a.window; i += pooled_tokens / 32) {
    float2 all = make_float2(-INFINITY, 0.f);
    for (int c = lane; c < a.chunks; c += 32) {
      const float2 x = a.partial[((std::int64_t(row) * gridDim.y + head) * a.chunks + c) * a.window + i];
      join(all.x, all.y, x.x, x.y);
    }
    for (int m = 16; m > 0; m /= 2) {
      const float high = __shfl_xor_sync(all_lanes, all.x, m), sum = __shfl_xor_sync(all_lanes, all.y, m);
      join(all.x, all.y, high, sum);
    }
    if (lane == 0) stats[i] = make_float2(all.x, all.y > 0 ? 1.f / all.y : 0.f);
  }
  __syncthreads();
  for (int base = blockIdx.x * width; base < tokens; base += gridDim.x * width)
    for (int first = 0; first < p.parts; first += p.at_once) {
      const int parts = min(p.at_once, p.parts - first), t = base - half + mine;
      const bool there = t >= 0 && t < tokens;
      const float* from = &a.stored(row, head * a.window + first * p.group, there ? t : 0);
      for (int begin = 0; begin < parts * p.group; begin += batch) {
        float logits[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i)  // all loads first: none waits for another
          if (begin + i < parts * p.group) logits[i] = __ldcg(from + (begin + i) * a.stored.stride[1]);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          if (begin + i >= parts * p.group) break;
          const float2 of = stats[first * p.group + begin + i];
          const float share = logits[i] != -INFINITY ? exp2f(logits[i] - of.x) * of.y : 0.f;
          shares[(begin + i) * pooled_tokens + mine] = there ? share : maximum ? -INFINITY : 0.f;
        }
      }
      __syncthreads();
      if (mine >= half && mine < half + width && t < tokens)
        for (int part = 0; part < parts; ++part) {
          float best = 0;
          for (int g = 0; g < p.group; ++g) {
            const float* near = shares + (part * p.group + g) * pooled_tokens + mine - half;
            float x = near[0];
            for (int i = 1; i <= 2 * half; ++i) x = maximum ? fmaxf(x, near[i]) : x + near[i];
            if (!maximum) x /= static_cast<float>(p.pooling.kernel);
            best = g == 0 ? x : p.pooling.rule != GroupRule::max ? best + x : best < x ? x : best;
          }
          if (p.pooling.rule == GroupRule::mean) best *= 1.f / static_cast<float>(p.group);
          a.votes(row, head * p.parts + first + part, t) = best;
        }
      __syncthreads();
    }
}

// Serves any codec, regime, head_dim and window. One block per row of votes takes its queries in turn.
__global__ void __launch_bounds__(threads) votes_any_kernel(const __grid_constant__ Args a) {
  __shared__ float parts[warps];
  const int members = a.of_group ? a.group : 1, to = blockIdx.x, head = to * members, row = blockIdx.y,
            kv_head = head / a.group, dim = a.kv.head_dim;
  const int tokens = tokens_of(a, row, kv_head), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (left_out(a, row, kv_head)) return;
  float* logits = a.logits + (std::int64_t(row) * gridDim.x + to) * (a.of_group ? 2 : 1) * a.room;
  float* greatest = logits + a.room;  // share of a group's heads so far
  const std::int32_t* rank = a.rank ? a.rank + (std::int64_t(row) * a.kv.kv_heads + kv_head) * a.room : nullptr;
  for (int t = threadIdx.x; t < tokens; t += threads) a.votes(row, to, t) = 0;
  for (int n = 0; n < a.window * members; ++n) {
    const int i = n / members, member = n % members;
    const float* q = &a.queries(row, head + member, i, 0);
    const int newest = newest_of(a, row, i);
    float high = -INFINITY, sum = 0;
    for (int t = warp; t < tokens; t += warps) {
      const auto token = a.kv.token(row, kv_head, t);
      float x = 0;
      for (int d = lane; d < dim; d += 32) x += q[d] * (rank ? a.kv.rotated_key(token, d, rank[t]) : token.key(d));
      x = sum_of_lanes(x);
      x = token.position() <= newest ? x * a.scale : -INFINITY;
      if (lane == 0) logits[t] = x;
      high = fmaxf(high, x);
    }
    if (lane == 0) parts[warp] = high;
    __syncthreads();  // it also orders the block's writes of logits
    for (int w = 0; w < warps; ++w) high = fmaxf(high, parts[w]);
    __syncthreads();
    const bool sees = high != -INFINITY;
    for (int t = threadIdx.x; sees && t < tokens; t += threads) sum += exp2f(logits[t] - high);
    sum = sum_of_lanes(sum);
    if (lane == 0) parts[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < warps; ++w) sum += parts[w];
    for (int t = threadIdx.x; t < tokens; t += threads) {
      const bool counts = sees && (a.near <= 0 || votes_for(a, row, i, a.kv.position(row, kv_head, t)));
      float share = counts ? exp2f(logits[t] - high) / sum : 0.f;
      if (members > 1) share = greatest[t] = member == 0 ? share : fmaxf(greatest[t], share);
      if (member + 1 == members) a.votes(row, to, t) += share;
    }
    __syncthreads();
  }
}

template <class T, int Chunks, Stored S>
void launch(const Args& a, cudaStream_t stream) {
  const int column_tiles = (2 * a.window + 7) / 8, queries = column_tiles * Chunks * 512,
            stats = column_tiles * threads * 8;
  const dim3 grid(a.chunks, static_cast<unsigned>(a.queries.extent[1]), a.kv.kv.rows);
  const auto first = stats_kernel<T, Chunks, S>;
  const auto second = votes_kernel<T, Chunks, S>;
  static const cudaError_t once[] = {
      cudaFuncSetAttribute(first, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes() - 2048)),
      cudaFuncSetAttribute(second, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes() - 2048))};
  check(once[0], "window_votes"), check(once[1], "window_votes");
  cuda::launch("window_votes", first, grid, threads, queries + stats, stream, true, a);
  if (a.stored.data) return;
  if (a.of_group) {
    const auto of_group = group_votes_kernel<T, Chunks, S>;
    static const cudaError_t set = cudaFuncSetAttribute(of_group, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        static_cast<int>(shared_bytes() - 2048));
    check(set, "window_votes");
    const int tiles = a.group * ((2 * queries_of_pass(a.group, a.window) + 7) / 8);
    of_group<<<dim3(a.chunks, a.kv.kv_heads, a.kv.kv.rows), threads, tiles * Chunks * 512, stream>>>(a);
  } else {
    second<<<grid, threads, queries, stream>>>(a);
  }
  check_launch("window_votes");
}

bool fits_tiles(const PagedKv& kv, const View<const float, 4>& queries) {
  return votes::fits_tiles(kv) && queries.extent[2] <= most_queries &&
         tile_bytes(kv.head_dim, queries.extent[2]) <= shared_bytes() - 2048;
}

}  // namespace

// The group's query heads as a window of one head.
static View<const float, 4> together(const View<const float, 4>& q, int kv_heads) {
  const std::int64_t group = q.extent[1] / kv_heads;
  return {q.data,
          {q.extent[0], kv_heads, group, q.extent[3]},
          {q.stride[0], group * q.stride[1], q.stride[1], q.stride[3]}};
}

// Launches the kernels of tensor cores.
static void launch_tiles(Args& a, const char* op, Stream s) {
  const PagedKv& kv = a.kv.kv;
  const std::int64_t heads = a.queries.extent[1], useful = (a.room + tile_tokens * warps - 1) / (tile_tokens * warps);
  const int busy = a.heads.classes || a.heads.flags.data ? 4 : 1;  // few heads may take part
  a.chunks = static_cast<int>(
      std::clamp<std::int64_t>(4 * busy * multiprocessors() / (heads * kv.rows), 1, std::max<std::int64_t>(useful, 1)));
  a.partial = static_cast<float2*>(
      fixed_scratch(s.handle(), op, std::size_t(kv.rows * heads * a.chunks * a.window) * sizeof(float2)));
  const cudaStream_t stream = stream_of(s);
  for_format(kv, [&]<class T, int Chunks, Stored S> { launch<T, Chunks, S>(a, stream); });
}

static void window_votes_cuda(const Tensor<4>& window_queries, const std::int32_t* seen, const PagedKv& kv,
                              Scores votes, Stream s, const Heads& which, int newest) {
  View<const float, 4> queries = window_queries.f32();
  if (kv.rows == 0 || queries.extent[1] == 0) return;
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  const bool of_group = group > 1 && votes.extent[1] == kv.kv_heads,
             each = !of_group && queries.extent[2] == 1 && fits_tiles(kv, together(queries, kv.kv_heads));
  if (each) queries = together(queries, kv.kv_heads);
  Args a = arguments(kv, queries, votes, which);
  a.each = each, a.of_group = of_group, a.seen = seen, a.near = newest;
  if (fits_tiles(kv, queries) && a.window > 0 && (!of_group || queries_of_pass(a.group, a.window) > 0))
    return launch_tiles(a, "window votes", s);
  const int heads = of_group ? kv.kv_heads : static_cast<int>(queries.extent[1]);
  if (kv.rope == RopeRegime::cache_relative) a.rank = token_ranks(a.kv, s.handle());
  a.logits = static_cast<float*>(fixed_scratch(
      s.handle(), "window votes logits", std::size_t(kv.rows) * heads * std::size_t(a.room) * (of_group ? 8 : 4)));
  votes_any_kernel<<<dim3(heads, kv.rows), threads, 0, stream_of(s)>>>(a);
  check_launch("window_votes");
}
KVLAB_ON_CUDA(window_votes, window_votes_cuda);

static bool pooled_votes_at_once_cuda(const Tensor<4>& queries, const PagedKv& kv, const VotePooling& pooling,
                                      Scores rows, Scores out, Stream s, const Heads& heads) {
  const View<const float, 4> window = together(queries.f32(), kv.kv_heads);
  const int parts = static_cast<int>(out.extent[1]) / kv.kv_heads,
            kernel = pooling.kind == Pooling::none ? 1 : pooling.kernel;
  const int group = static_cast<int>(window.extent[2]) / std::max(1, parts),
            bytes = group * pooled_tokens * static_cast<int>(sizeof(float));
  if (!fits_tiles(kv, window) || pooling.rule == GroupRule::softmax_mean || bytes > pooled_bytes || kernel % 2 == 0 ||
      kernel > most_pooled)
    return false;
  if (kv.rows == 0) return true;
  Args a = arguments(kv, window, out, heads);
  a.each = true, a.stored = rows;
  launch_tiles(a, "pooled votes", s);
  const int at_once = std::min(parts, pooled_bytes / bytes);
  Pooled p = {a, pooling, parts, group, at_once};
  p.pooling.kernel = kernel;
  const int useful = static_cast<int>((a.room + pooled_tokens - 1) / pooled_tokens);
  cuda::launch("pooled_votes", pooled_kernel, dim3(std::clamp(useful, 1, 64), kv.kv_heads, kv.rows), pooled_tokens,
               at_once * bytes, stream_of(s), true, p);
  return true;
}
KVLAB_ON_CUDA(pooled_votes_at_once, pooled_votes_at_once_cuda);

}  // namespace kvlab::ops
