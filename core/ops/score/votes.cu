// Votes of the window queries. The kernels read the keys twice: for the maximum and sum of every query's softmax, then
// for the probabilities. Tensor cores multiply tiles of 16 tokens with all queries of a query head. A query takes two
// columns: its rounded value and the rest. bf16 holds what a code means. A key is code * scale + zero, so its product
// with q is scale * (q . codes) + zero * sum(q).
#include "base/lanes.cuh"
#include "ops/score/votes.hpp"

#include <algorithm>
#include <cmath>

#include "base/launch.cuh"
#include "ops/page/ranks.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 256, warps = threads / 32, tile_tokens = 16, chunk_bytes = 64;
constexpr int most_queries = 128;  // longest window that the tensor cores take
constexpr float log2e = 1.4426950408889634f;

struct Args {
  DeviceKv kv;
  View<const float, 4> queries;
  const std::int32_t* seen;
  View<float, 3> votes;
  float2* partial;           // [row, query head, chunk, query] maximum and sum of logits times log2(e)
  float* logits;             // [row, query head, room], or [row, kv_head, 2, room]; votes_any_kernel only
  const std::int32_t* rank;  // [row, kv_head, room], cache_relative only
  std::int64_t room;
  int group, window, chunks;
  float scale;
  // Queries with w = 1: the query heads of a KV head are its window, and each has a row of votes.
  bool each;
  bool of_group;  // a vote of each KV head: the sum of the greatest shares of its query heads
  Scores stored;  // logits of the queries, for pooled_kernel; or empty
  Heads heads;
  int near;  // `newest` of window_votes
};

__device__ __forceinline__ bool left_out(const Args& a, int row, int kv_head) {
  return !a.heads.on(a.kv.kv.slots[row], kv_head);
}
// The newest text position that query i sees.
__device__ __forceinline__ int newest_of(const Args& a, int row, int i) {
  if (!a.seen) return 0x7ffffffe;
  return a.each ? a.seen[row] - 1 : a.seen[row] - a.window + i;
}

// Whether query i votes for a token that it sees.
__device__ __forceinline__ bool votes_for(const Args& a, int row, int i, int position) {
  return a.near <= 0 || position > newest_of(a, row, i) - a.near;
}

__device__ __forceinline__ int tokens_of(const Args& a, int row, int kv_head) {
  return min(a.kv.tokens(row, kv_head), static_cast<int>(a.votes.extent[2]));
}

// Joins (maximum, sum of 2^(x - maximum)) of two sets.
__device__ __forceinline__ void join(float& high, float& sum, float other_high, float other_sum) {
  const float fresh = fmaxf(high, other_high);
  if (fresh == -INFINITY) return;
  sum = sum * exp2f(high - fresh) + other_sum * exp2f(other_high - fresh);
  high = fresh;
}

enum class Stored { plain, code8, code4, code2, e4m3 };
constexpr int bits_of(Stored s) { return s == Stored::code4 ? 4 : s == Stored::code2 ? 2 : 8; }

// Turns the low two codes into elements.
template <class T, Stored S>
__device__ __forceinline__ unsigned pair_of(unsigned codes) {
  constexpr int bits = bits_of(S);
  const auto number = [](unsigned code) {
    code &= static_cast<unsigned>(most_code(bits));
    return S == Stored::e4m3 ? from_e4m3(code) : static_cast<float>(code);
  };
  return Pair<T>::pack(number(codes), number(codes >> bits));
}
// Turns eight codes from `row` on into elements.
template <class T, Stored S>
__device__ __forceinline__ uint4 eight_of(const std::byte* row) {
  if constexpr (bits_of(S) == 8) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(row));
    return make_uint4(pair_of<T, S>(x.x), pair_of<T, S>(x.x >> 16), pair_of<T, S>(x.y), pair_of<T, S>(x.y >> 16));
  } else {
    unsigned x;
    if constexpr (bits_of(S) == 4)
      x = __ldg(reinterpret_cast<const unsigned*>(row));
    else
      x = __ldg(reinterpret_cast<const unsigned short*>(row));
    constexpr int two = 2 * bits_of(S);
    return make_uint4(pair_of<T, S>(x), pair_of<T, S>(x >> two), pair_of<T, S>(x >> 2 * two),
                      pair_of<T, S>(x >> 3 * two));
  }
}

// Queries of a window that a pass scores: `count` from `first` on of `members` query heads from `head` on.
struct Pass {
  int head, members, first, count;
};

// Calls f(column tile, member, query, t, position, s) with the scores s[2] of this thread's two tokens t for one query.
// Tokens that the query does not see score -inf. After a tile it calls end_of_tile(t, tokens). Fragments lie as in
// score_pages.cu, a member's behind one another's.
template <class T, int Chunks, Stored S, class F, class EndOfTile>
__device__ __forceinline__ void for_scores(const Args& a, int row, const Pass& pass, uint4* fragments, const F& f,
                                           const EndOfTile& end_of_tile) {
  constexpr bool coded = S != Stored::plain;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = lane % 4, kv_head = pass.head / a.group;
  const int tokens = tokens_of(a, row, kv_head), column_tiles = (2 * pass.count + 7) / 8;
  for (int i = threadIdx.x; i < pass.members * column_tiles * Chunks * 32; i += threads) {
    const int of = i % 32, chunk = i / 32 % Chunks, tile = i / 32 / Chunks, member = tile / column_tiles,
              column = tile % column_tiles * 8 + of / 4, element = chunk * 32 + of % 4 * 8;
    unsigned out[4] = {};
    if (column / 2 < pass.count) {
      const float* q = &a.queries(row, pass.head + member, pass.first + column / 2, element);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[k] = Pair<T>::pack(q[2 * k], q[2 * k + 1]);
        if (column % 2) {
          float x, y;
          Pair<T>::unpack(out[k], x, y);
          out[k] = Pair<T>::pack(q[2 * k] - x, q[2 * k + 1] - y);
        }
      }
    }
    fragments[i] = make_uint4(out[0], out[1], out[2], out[3]);
  }
  __shared__ float query_sum[coded ? most_queries : 1];
  for (int i = warp; coded && i < pass.members * pass.count; i += warps) {
    float sum = 0;
    for (int d = lane; d < a.kv.head_dim; d += 32)
      sum += a.queries(row, pass.head + i / pass.count, pass.first + i % pass.count, d);
    sum = sum_of_lanes(sum);
    if (lane == 0) query_sum[i] = sum;
  }
  __syncthreads();
  const unsigned fragment = shared_address(fragments + lane);
  const PageLayout& layout = a.kv.layouts[0];
  const int tiles = (tokens + tile_tokens - 1) / tile_tokens;
  for (int tile = blockIdx.x * warps + warp; tile < tiles; tile += gridDim.x * warps) {
    int t[2], position[2];
    uint4 key[2][Chunks];
    float2 code[2] = {};  // scale and zero
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      t[half] = tile * tile_tokens + lane / 4 + 8 * half;
      const auto token = a.kv.token(row, kv_head, min(t[half], tokens - 1));
      position[half] = t[half] >= tokens ? 0x7fffffff : a.seen ? token.position() : 0;
      if constexpr (coded) {
        const __half* meta = reinterpret_cast<const __half*>(token.frame + layout.k_meta) + 2 * token.offset;
        code[half] = make_float2(__half2float(meta[0]), __half2float(meta[1]));
        constexpr int eight = bits_of(S);  // bytes of eight codes
        const std::byte* from = token.frame + layout.k + token.offset * (Chunks * 4 * eight) + quarter * eight;
#pragma unroll
        for (int c = 0; c < Chunks; ++c) key[half][c] = eight_of<T, S>(from + 4 * c * eight);
      } else {
        const auto* from = reinterpret_cast<const uint4*>(token.frame + layout.k +
                                                          token.offset * (Chunks * chunk_bytes) + quarter * 16);
#pragma unroll
        for (int c = 0; c < Chunks; ++c) key[half][c] = __ldg(from + c * (chunk_bytes / 16));
      }
    }
    for (int column = 0; column < column_tiles; ++column)
      for (int member = 0; member < pass.members; ++member) {
        float sum[4] = {};
#pragma unroll
        for (int c = 0; c < Chunks; ++c) {
          const uint4 b = load_shared16(fragment + ((member * column_tiles + column) * Chunks + c) * 512);
          mma16816<T>(sum, key[0][c].x, key[1][c].x, key[0][c].y, key[1][c].y, b.x, b.y);
          mma16816<T>(sum, key[0][c].z, key[1][c].z, key[0][c].w, key[1][c].w, b.z, b.w);
        }
        const int query = column * 4 + quarter;
        const bool there = query < pass.count;
        const int newest = there ? newest_of(a, row, pass.first + query) : -1;
        float s[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x = sum[2 * half] + sum[2 * half + 1];
          if constexpr (coded)
            x = x * code[half].x + (there ? query_sum[member * pass.count + query] : 0) * code[half].y;
          s[half] = position[half] <= newest ? x * a.scale : -INFINITY;
        }
        f(column, member, query, t, position, s);
      }
    end_of_tile(t, tokens);
  }
}

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
      [&](int column, int, int query, const int(&t)[2], const int(&)[2], const float(&s)[2]) {
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

// The maximum of a query's logits, and 1 / sum.
__device__ __forceinline__ float2 softmax_of(const Args& a, int row, int head, int query) {
  float2 all = make_float2(-INFINITY, 0.f);
  for (int c = 0; c < a.chunks; ++c) {
    const float2 x = a.partial[((row * a.queries.extent[1] + head) * a.chunks + c) * a.window + query];
    join(all.x, all.y, x.x, x.y);
  }
  return make_float2(all.x, all.y > 0 ? 1.f / all.y : 0.f);
}

template <class T, int Chunks, Stored S>
__global__ void __launch_bounds__(threads) votes_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  __shared__ float2 stats[most_queries];  // maximum, 1 / sum
  const int head = blockIdx.y, row = blockIdx.z, quarter = threadIdx.x % 4;
  if (left_out(a, row, head / a.group)) return;
  const int tokens_of_head = tokens_of(a, row, head / a.group);
  for (int i = threadIdx.x; i < a.window; i += threads) stats[i] = softmax_of(a, row, head, i);
  float vote[2] = {};
  for_scores<T, Chunks, S>(
      a, row, {head, 1, 0, a.window}, dynamic,
      [&](int, int, int query, const int(&t)[2], const int(&position)[2], const float(&s)[2]) {
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

// Queries of each head that a pass of group_votes_kernel takes, so that a pass has at most most_queries. 0: too many
// heads.
constexpr int queries_of_pass(int group, int window) {
  const int most = most_queries / group / 4 * 4;
  return window < most ? window : most;
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
      stats[i] = softmax_of(a, row, pass.head + i / pass.count, first + i % pass.count);
    float vote[2] = {}, greatest[2] = {};
    for_scores<T, Chunks, S>(
        a, row, pass, dynamic,
        [&](int, int member, int query, const int(&)[2], const int(&position)[2], const float(&s)[2]) {
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

template <class T, Stored S>
void launch_dim(const Args& a, cudaStream_t stream) {
  switch (a.kv.head_dim) {
    case 64: return launch<T, 2, S>(a, stream);
    case 96: return launch<T, 3, S>(a, stream);
    case 128: return launch<T, 4, S>(a, stream);
    default: return launch<T, 8, S>(a, stream);
  }
}

bool fits_tiles(const PagedKv& kv, const View<const float, 4>& queries) {
  const PageLayout& l = kv.layouts[0];
  const int dim = kv.head_dim;
  const std::int64_t window = queries.extent[2],
                     bytes = (2 * window + 7) / 8 * (std::int64_t{dim} / 32 * 512 + threads * 8);
  return !kv.lower_pages && (l.codec.k.bits > 0 || l.dtype == DType::bf16 || l.dtype == DType::f16) &&
         (dim == 64 || dim == 96 || dim == 128 || dim == 256) && kv.rope != RopeRegime::cache_relative &&
         window <= most_queries && bytes <= shared_bytes() - 2048;
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
  const CodecSide keys = kv.layouts[0].codec.k;
  if (keys.kind == CodeKind::e4m3) return launch_dim<__nv_bfloat16, Stored::e4m3>(a, stream);
  if (keys.bits == 2) return launch_dim<__nv_bfloat16, Stored::code2>(a, stream);
  if (keys.bits == 4) return launch_dim<__nv_bfloat16, Stored::code4>(a, stream);
  if (keys.bits) return launch_dim<__nv_bfloat16, Stored::code8>(a, stream);
  return kv.layouts[0].dtype == DType::f16 ? launch_dim<__half, Stored::plain>(a, stream)
                                           : launch_dim<__nv_bfloat16, Stored::plain>(a, stream);
}

static Args arguments(const PagedKv& kv, const View<const float, 4>& queries, const Scores& votes, const Heads& heads) {
  Args a = {};
  a.heads = heads;
  a.kv = DeviceKv(kv);
  a.queries = queries, a.votes = votes;
  a.group = static_cast<int>(queries.extent[1]) / kv.kv_heads, a.window = static_cast<int>(queries.extent[2]);
  a.scale = log2e / std::sqrt(static_cast<float>(kv.head_dim));
  a.room = kv.table.extent[2] * kv.page_size;
  return a;
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
