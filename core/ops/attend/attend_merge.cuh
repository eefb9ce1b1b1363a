// Merges partial results of attention: those of a block's warps, and those of the blocks that share a pair
// (attend_kernel.cuh).
#pragma once
#include <cmath>

#include "ops/attend/attend_line.cuh"

namespace kvlab::ops::decode {

// Floats of shared memory for the results of a block's warps, or for its threads' sums while it merges blocks.
__host__ __device__ constexpr int merge_floats(int dim, int warps, int group) {
  const int results = warps * group * (2 + dim), merged = warps * 32 * 6;
  return results > merged ? results : merged;
}

// A block's partial result of a pair: [head] maximum and sum, [head, head_dim].
template <int Dim, int ColumnTiles>
struct Partial {
  static constexpr int heads = 8 * ColumnTiles;
  static constexpr std::int64_t floats = heads * (2 + Dim);
};

// A head's running result over several parts.
struct Running {
  float high = -INFINITY, sum = 0;
  float4 out = {0, 0, 0, 0};

  __device__ __forceinline__ void raise(float top) {
    if (top <= high) return;
    const float shrink = high == -INFINITY ? 0.f : exp2_fast(high - top);
    high = top;
    sum *= shrink, out.x *= shrink, out.y *= shrink, out.z *= shrink, out.w *= shrink;
  }
  // other_high must not be larger than high.
  __device__ __forceinline__ void add(float other_high, float other_sum, const float4& other) {
    const float weight = other_high == -INFINITY ? 0.f : exp2_fast(other_high - high);
    sum += weight * other_sum;
    out.x += weight * other.x, out.y += weight * other.y, out.z += weight * other.z, out.w += weight * other.w;
  }
};

template <class T, int Dim>
__device__ __forceinline__ T* rounded_at(const Args& a, int row, int query_head, int element) {
  return static_cast<T*>(a.rounded) + (std::int64_t{row} * a.kv_heads * a.group + query_head) * Dim + element;
}

// Writes a column of four elements of a head. Columns count through the pair's heads.
template <class T, int Dim>
__device__ __forceinline__ void put_result(const Args& a, int pair, int column, const Running& r) {
  const float share = r.sum != 0 ? 1 / r.sum : 0.f;  // a NaN sum gives NaN
  const int row = pair / a.kv_heads, query_head = pair % a.kv_heads * a.group + column / (Dim / 4),
            element = column % (Dim / 4) * 4;
  const float4 x = {r.out.x * share, r.out.y * share, r.out.z * share, r.out.w * share};
  float* out = a.out + row * a.out_row + query_head * a.out_head + element;
  out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
  if (a.rounded)
    *reinterpret_cast<uint2*>(rounded_at<T, Dim>(a, row, query_head, element)) =
        make_uint2(Pair<T>::pack(x.x, x.y), Pair<T>::pack(x.z, x.w));
  if (a.lse && element == 0) a.lse[row * a.lse_row + query_head] = r.sum != 0 ? r.high * ln2 + logf(r.sum) : -INFINITY;
}

// Merges the partial results of `parts` blocks into the pair's output. `first` is the first block's; part k lies k * 2
// partials behind `others`. The whole block must call it. A thread loads up to `at_once` parts in one round trip.
// Threads that share a column of four elements take every n-th part each.
template <class T, int Dim, int ColumnTiles>
__device__ __forceinline__ void merge_parts(const Args& a, int pair, const float* first, const float* others, int parts,
                                            float* memory) {
  using P = Partial<Dim, ColumnTiles>;
  constexpr int at_once = 10;
  const int threads = blockDim.x, columns = a.group * (Dim / 4), across = min(columns, threads),
            teams = threads / across, team = threadIdx.x / across;
  float4* team_out = reinterpret_cast<float4*>(memory);
  float2* team_sum = reinterpret_cast<float2*>(team_out + threads);
  for (int column = threadIdx.x % across; column < columns; column += across) {
    const int head = column / (Dim / 4);
    Running r;
    for (int i = team; team < teams && i < parts; i += at_once * teams) {
      float2 sums[at_once];
      float4 outs[at_once];
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
        const int k = min(i + u * teams, parts - 1);
        const float* part = k == 0 ? first : others + k * 2 * P::floats;
        sums[u] = __ldcg(reinterpret_cast<const float2*>(part) + head);
        outs[u] = __ldcg(reinterpret_cast<const float4*>(part + 2 * P::heads) + column);
      }
      float top = -INFINITY;
#pragma unroll
      for (int u = 0; u < at_once; ++u) top = fmaxf(top, sums[u].x);
      r.raise(top);
#pragma unroll
      for (int u = 0; u < at_once; ++u)
        if (i + u * teams < parts) r.add(sums[u].x, sums[u].y, outs[u]);
    }
    if (teams > 1) {  // across = columns, so every thread comes here once
      team_out[threadIdx.x] = r.out;
      team_sum[threadIdx.x] = make_float2(r.high, r.sum);
      __syncthreads();
    }
    if (team > 0) continue;
    for (int t = 1; t < teams; ++t) {
      const float2 other = team_sum[threadIdx.x + t * across];
      r.raise(other.x);
      r.add(other.x, other.y, team_out[threadIdx.x + t * across]);
    }
    put_result<T, Dim>(a, pair, column, r);
  }
}

}  // namespace kvlab::ops::decode
