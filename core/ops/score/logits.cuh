// Softmax, pooling and reduction of the logits that attention left, for groups whose logits of a token come in vectors.
#pragma once
#include <kvlab/ops.hpp>

#include <algorithm>
#include <type_traits>

#include "base/cuda.cuh"
#include "base/lanes.cuh"
#include "base/ptx.cuh"
#include "ops/score/logits.hpp"

namespace kvlab::ops {

decltype(pooled_in_layers) pooled_in_layers_cuda;

// Whether each token's logits begin where a vector may.
inline bool logit_vectors(const HeadLogits& logits) {
  const std::int64_t floats = std::min<std::int64_t>(logits.out.extent[3], 4);
  for (const std::int64_t at : {logits.out.stride[0], logits.out.stride[1],
                                static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(logits.out.data) / 4)})
    if (at % floats != 0) return false;
  return true;
}

}  // namespace kvlab::ops

namespace kvlab::ops::device {

// Joins (maximum, sum of 2^(x - maximum)) of two sets.
__device__ __forceinline__ void join(float2& x, const float2& other) {
  const float high = fmaxf(x.x, other.x);
  if (high == -INFINITY) return;
  x = make_float2(high, x.y * exp2f(x.x - high) + other.y * exp2f(other.x - high));
}
struct Join {
  __device__ __forceinline__ float2 operator()(float2 x, float2 other) const {
    join(x, other);
    return x;
  }
};

// stats: the maximum and 1 / sum.
__device__ __forceinline__ float2 stats_of(float2 all) { return make_float2(all.x, all.y > 0 ? 1.f / all.y : 0.f); }
__device__ __forceinline__ float share_of(float logit, float2 stats) {
  return logit != -INFINITY ? cuda::exp2_fast(logit - stats.x) * stats.y : 0.f;
}

// The score of a token, from its query heads' pooled shares, which come in order.
struct GroupScore {
  GroupRule rule;
  float best = 0;

  __device__ __forceinline__ void add(int g, float x) {
    best = g == 0 ? x : rule != GroupRule::max ? best + x : best < x ? x : best;
  }
  __device__ __forceinline__ float result(int group) const {
    return rule == GroupRule::mean ? best * (1.f / static_cast<float>(group)) : best;
  }
};

// A token's logits.
template <int Group>
union TokenLogits {
  static constexpr int floats = Group % 4 == 0 ? 4 : Group % 2 == 0 ? 2 : 1, vectors = Group / floats;
  using Vector = std::conditional_t<floats == 4, float4, std::conditional_t<floats == 2, float2, float>>;
  Vector of[vectors];
  float x[Group];
  __device__ TokenLogits() {}

  __device__ __forceinline__ void load(const float* logits, int t) {
#pragma unroll
    for (int v = 0; v < vectors; ++v)
      of[v] = __ldcg(reinterpret_cast<const Vector*>(logits) + std::int64_t{t} * vectors + v);
  }
};

// Sums of a row's softmax, by blocks that have the threads of one of `All`: sums [warp, Group]. So the number of blocks
// does not change the order of additions. part: of these threads.
template <int Group, int All, int Threads>
__device__ __forceinline__ void softmax_sums(const float* logits, int tokens, int part, float2* sums) {
  constexpr int batch = Group > 4 ? 32 / Group : 8;
  const int mine = part * Threads + static_cast<int>(threadIdx.x);
  float2 all[Group];
#pragma unroll
  for (int g = 0; g < Group; ++g) all[g] = make_float2(-INFINITY, 0.f);
#pragma unroll 1
  for (int first = mine; first < tokens; first += batch * All) {
    TokenLogits<Group> next[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i)  // all loads first: none waits for another
      next[i].load(logits, min(first + i * All, tokens - 1));
#pragma unroll
    for (int g = 0; g < Group; ++g) {
      float high = all[g].x;
#pragma unroll
      for (int i = 0; i < batch; ++i) high = fmaxf(high, next[i].x[g]);  // a token twice changes no maximum
      if (high == -INFINITY) continue;
      float sum = all[g].y * cuda::exp2_fast(all[g].x - high);
#pragma unroll
      for (int i = 0; i < batch; ++i) sum += first + i * All < tokens ? cuda::exp2_fast(next[i].x[g] - high) : 0.f;
      all[g] = make_float2(high, sum);
    }
  }
#pragma unroll
  for (int g = 0; g < Group; ++g) {
    all[g] = cuda::join_lanes(all[g], Join{});
    if (mine % 32 == 0) sums[mine / 32 * Group + g] = all[g];
  }
}

// stats[g] of a row, by the block, from softmax_sums of an earlier launch. copy: shared memory for the sums.
template <int Group, int Warps>
__device__ __forceinline__ void softmax_stats(const float2* sums, float2* copy, float2* stats) {
  const int mine = static_cast<int>(threadIdx.x);
  for (int x = mine; x < Warps * Group; x += static_cast<int>(blockDim.x)) copy[x] = __ldcg(sums + x);
  __syncthreads();
  if (mine < Group) {
    float2 sum = copy[mine];
    for (int w = 1; w < Warps; ++w) join(sum, copy[w * Group + mine]);
    stats[mine] = stats_of(sum);
  }
  __syncthreads();
}

// Floats of pool_tiles's shared memory.
template <int Group, int Threads, int Each>
constexpr int pool_floats = 2 * Threads* Each* Group;

// Calls put(token, score) for the tokens of a row in tiles of Threads * Each with their edges: tiles `tile`, tile +
// step, ... The next tile's logits are on their way while one is pooled. Half: half a kernel, -1 = `half`. The whole
// block calls it, with pool_floats floats of shared memory.
template <int Group, int Half, int Threads, int Each, class Put>
__device__ __forceinline__ void pool_tiles(const float* logits, int tokens, const float2* stats, VotePooling pooling,
                                           int given_half, int tile, int tiles, float* memory, const Put& put) {
  using Token = TokenLogits<Group>;
  using Vector = typename Token::Vector;
  constexpr int vectors = Token::vectors, entries = Threads * Each;
  const int mine = static_cast<int>(threadIdx.x), half = Half < 0 ? given_half : Half, width = entries - 2 * half,
            step = tiles * width;
  const bool maximum = pooling.kind == Pooling::max;
  auto* const both = reinterpret_cast<Vector*>(memory);  // [2, token of a tile, vectors]
  Token next[Each];
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < Each; ++i)
      if (const int t = base - half + mine + i * Threads; t >= 0 && t < tokens) next[i].load(logits, t);
  };
  int base = tile * width;
  load(base);
#pragma unroll 1
  for (int odd = 0; base < tokens; base += step, odd ^= 1) {
    Vector* const shares = both + odd * entries * vectors;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int e = mine + i * Threads, t = base - half + e;
      const bool there = t >= 0 && t < tokens;
      Token share;
#pragma unroll
      for (int g = 0; g < Group; ++g) share.x[g] = there ? share_of(next[i].x[g], stats[g]) : maximum ? -INFINITY : 0.f;
#pragma unroll
      for (int v = 0; v < vectors; ++v) shares[e * vectors + v] = share.of[v];
    }
    if (base + step < tokens) load(base + step);
    __syncthreads();  // once a tile: the next one has other memory
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int o = mine + i * Threads;
      if (o >= width || base + o >= tokens) continue;
      Token sum;
#pragma unroll
      for (int v = 0; v < vectors; ++v) sum.of[v] = shares[o * vectors + v];
#pragma unroll
      for (int n = 1; n <= 2 * half; ++n) {
        Token near;
#pragma unroll
        for (int v = 0; v < vectors; ++v) near.of[v] = shares[(o + n) * vectors + v];
#pragma unroll
        for (int g = 0; g < Group; ++g) sum.x[g] = maximum ? fmaxf(sum.x[g], near.x[g]) : sum.x[g] + near.x[g];
      }
      GroupScore score{pooling.rule};
#pragma unroll
      for (int g = 0; g < Group; ++g) score.add(g, maximum ? sum.x[g] : sum.x[g] / static_cast<float>(2 * half + 1));
      put(base + o, score.result(Group));
    }
  }
}

// pool_tiles of averages over five tokens. A thread makes the scores of four neighbours. put(token, its score and the
// next three, how many of them there are).
template <int Group, int Threads, int Each, class Put>
__device__ __forceinline__ void pool_fives(const float* logits, int tokens, const float2* stats, GroupRule rule,
                                           int tile, int tiles, float* memory, const Put& put) {
  constexpr int entries = Threads * Each, edge = 4, width = entries - 2 * edge, half = 2;
  const int step = tiles * width;
  const int mine = static_cast<int>(threadIdx.x);
  float2 fifths[Group];
#pragma unroll
  for (int g = 0; g < Group; ++g) fifths[g] = make_float2(stats[g].x, stats[g].y * (1.f / (2 * half + 1)));
  TokenLogits<Group> next[Each];
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < Each; ++i)
      if (const int t = base - edge + mine + i * Threads; t >= 0 && t < tokens) next[i].load(logits, t);
  };
  int base = tile * width;
  load(base);
#pragma unroll 1
  for (int odd = 0; base < tokens; base += step, odd ^= 1) {
    float* const shares = memory + odd * entries * Group;  // [query head of the group, token of a tile]
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int e = mine + i * Threads, t = base - edge + e;
      const bool there = t >= 0 && t < tokens;
#pragma unroll
      for (int g = 0; g < Group; ++g) shares[g * entries + e] = there ? share_of(next[i].x[g], fifths[g]) : 0.f;
    }
    if (base + step < tokens) load(base + step);
    __syncthreads();  // once a tile: the next one has other memory
#pragma unroll 1
    for (int o = mine * 4; o < width && base + o < tokens; o += Threads * 4) {
      GroupScore score[4] = {{rule}, {rule}, {rule}, {rule}};
#pragma unroll
      for (int g = 0; g < Group; ++g) {
        const auto* near = reinterpret_cast<const float4*>(shares + g * entries + o);
        const float4 before = near[0], own = near[1], behind = near[2];
        const float inner = own.y + own.z, outer = behind.x + behind.y;
        const float first = own.x + inner, last = inner + own.w;
        score[0].add(g, before.z + before.w + first);
        score[1].add(g, before.w + first + own.w);
        score[2].add(g, first + own.w + behind.x);
        score[3].add(g, last + outer);
      }
      put(base + o,
          make_float4(score[0].result(Group), score[1].result(Group), score[2].result(Group), score[3].result(Group)),
          min(4, tokens - base - o));
    }
  }
}

}  // namespace kvlab::ops::device
