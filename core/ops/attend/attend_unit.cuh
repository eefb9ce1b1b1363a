// A warp's attention to units of 16 tokens in shared memory, with queries as columns. Tensor cores compute S^T = K Q^T
// and O^T += V^T P^T. Any map from tokens to rows of a tile, and from elements of head_dim to rows of O^T, is right.
// The maps below make every shared-memory load 16 bytes wide and free of bank conflicts (head_dim 64 and 128) without a
// transposing load. Lane 4 g + q of a warp holds queries 8 c + 2 q and 8 c + 2 q + 1 of 8-query column tile c.
#pragma once
#include <cuda.h>
#include <kvlab/kv.hpp>

#include "base/cuda.cuh"
#include "base/lanes.cuh"

namespace kvlab::ops {

inline constexpr int unit_tokens = 16;
inline constexpr float log2e = 1.4426950408889634f, ln2 = 0.6931471805599453f;

template <int Dim>
struct UnitShape {
  static constexpr int row_bytes = Dim * 2;
  static constexpr int side_bytes = unit_tokens * row_bytes;  // bytes of a unit's keys, or of its values
  static constexpr int unit_bytes = 2 * side_bytes;
  static constexpr int steps = Dim / 16;                // steps of the contraction over head_dim
  static constexpr int tiles = Dim / 16;                // tiles of 16 rows of O^T
  static constexpr int vector = Dim % 64 == 0 ? 8 : 4;  // elements of one load of V
  static constexpr int vectors = Dim / 8 / vector;      // loads of a lane from one row of V
};

// Tensor map that copies units: the tier as rows of 128 bytes, in boxes of `box_rows`. The process keeps it.
const CUtensorMap& unit_map(const void* base, int box_rows, bool half);

// Token of tile row g, 0 <= g < 8; row g + 8 is 8 tokens on. The tokens of rows 2i and 2i + 1 differ in the bit that
// moves a 16-byte chunk to the other half of a swizzled 128-byte row. The even rows lie in rows that are swizzled
// differently, and so do the odd ones.
template <int Dim>
__device__ __forceinline__ int token_of(int g) {
  const int q = g >> 1;
  if constexpr (Dim == 64) return g & 1 ? (2 * q ^ 4) + 1 : 2 * q;
  if constexpr (Dim == 128) return g & 1 ? 4 + (q ^ 2) : q;
  return g;
}

// Offset of a byte of a unit's keys or values after the 128-byte swizzle of a bulk copy.
__device__ __forceinline__ unsigned swizzled(unsigned offset) { return offset ^ ((offset >> 3) & 0x70u); }

// Element of head_dim that is a lane's e-th element of V.
template <int Dim>
__device__ __forceinline__ int element_of(int g, int e) {
  constexpr int v = UnitShape<Dim>::vector;
  return (g + 8 * (e / v)) * v + e % v;
}

// A query's elements in the order of the fragments of Q^T, for two steps of the contraction.
struct QueryPiece {
  float4 even, odd;
};
__device__ __forceinline__ QueryPiece query_piece(const float* from, int q, int pair) {
  return {*reinterpret_cast<const float4*>(from + (pair * 4 + q) * 8),
          *reinterpret_cast<const float4*>(from + (pair * 4 + q) * 8 + 4)};
}
template <class T>
__device__ __forceinline__ void pack_query(const QueryPiece& from, float factor, unsigned (&even)[2],
                                           unsigned (&odd)[2]) {
  const float4 x = from.even, y = from.odd;
  even[0] = cuda::Pair<T>::pack(x.x * factor, x.y * factor), even[1] = cuda::Pair<T>::pack(x.z * factor, x.w * factor);
  odd[0] = cuda::Pair<T>::pack(y.x * factor, y.y * factor), odd[1] = cuda::Pair<T>::pack(y.z * factor, y.w * factor);
}

// s = scores of the unit's tokens: [0, 1] for row g, [2, 3] for row g + 8.
template <class T, int Dim, int Columns>
__device__ __forceinline__ void score_unit(unsigned keys, int row0, int row1, int q,
                                           const unsigned (&qf)[Columns][UnitShape<Dim>::steps][2],
                                           float (&s)[Columns][4]) {
  using S = UnitShape<Dim>;
#pragma unroll
  for (int c = 0; c < Columns; ++c) s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0;
#pragma unroll
  for (int j = 0; j < S::steps / 2; ++j) {
    const uint4 k0 = cuda::load_shared16(keys + swizzled(row0 * S::row_bytes + (4 * j + q) * 16));
    const uint4 k1 = cuda::load_shared16(keys + swizzled(row1 * S::row_bytes + (4 * j + q) * 16));
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      cuda::mma16816<T>(s[c], k0.x, k1.x, k0.y, k1.y, qf[c][2 * j][0], qf[c][2 * j][1]);
      cuda::mma16816<T>(s[c], k0.z, k1.z, k0.w, k1.w, qf[c][2 * j + 1][0], qf[c][2 * j + 1][1]);
    }
  }
}

// Full turns per place of rank, in two parts that keep a large rank's angle exact.
__device__ __forceinline__ float2 turns_of(float inv_freq) {
  const double turns = inv_freq * 0.15915494309189533577;
  const float high = static_cast<float>(turns);
  return make_float2(high, static_cast<float>(turns - high));
}

// Rotates two pairs (i, i + head_dim / 2) by `rank` places: low packs their first elements, high the second ones.
template <class T>
__device__ __forceinline__ void turn_pairs(unsigned& low, unsigned& high, float rank, const float2* turns,
                                           float scale) {
  float x[2], y[2];
  cuda::Pair<T>::unpack(low, x[0], x[1]);
  cuda::Pair<T>::unpack(high, y[0], y[1]);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float2 turn = turns[e];
    const float most = __fmul_rn(rank, turn.x), rest = fmaf(rank, turn.x, -most) + rank * turn.y;
    const float angle = 6.283185307f * ((most - rintf(most)) + rest);
    const float c = __cosf(angle) * scale, s = __sinf(angle) * scale;
    const float turned = x[e] * c - y[e] * s;
    y[e] = y[e] * c + x[e] * s;
    x[e] = turned;
  }
  low = cuda::Pair<T>::pack(x[0], x[1]), high = cuda::Pair<T>::pack(y[0], y[1]);
}
template <class T>
__device__ __forceinline__ void turn_pairs(uint4& low, uint4& high, float rank, const float2* turns, float scale) {
  turn_pairs<T>(low.x, high.x, rank, turns, scale), turn_pairs<T>(low.y, high.y, rank, turns + 2, scale);
  turn_pairs<T>(low.z, high.z, rank, turns + 4, scale), turn_pairs<T>(low.w, high.w, rank, turns + 6, scale);
}

// score_unit for keys that RoPE has yet to rotate by the ranks of rows g and g + 8. turns: [head_dim / 2]. If head_dim
// is a multiple of 64, a lane holds both elements of a pair.
template <class T, int Dim, int Columns>
__device__ __forceinline__ void score_turned_unit(unsigned keys, int row0, int row1, int q, int rank0, int rank1,
                                                  const float2* turns, float scale,
                                                  const unsigned (&qf)[Columns][UnitShape<Dim>::steps][2],
                                                  float (&s)[Columns][4]) {
  using S = UnitShape<Dim>;
  static_assert(Dim % 64 == 0);
#pragma unroll
  for (int c = 0; c < Columns; ++c) s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0;
#pragma unroll
  for (int j = 0; j < S::steps / 4; ++j) {
    uint4 k[2][2];  // [half of head_dim, token]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = 4 * j + q + half * (Dim / 16);
      k[half][0] = cuda::load_shared16(keys + swizzled(row0 * S::row_bytes + chunk * 16));
      k[half][1] = cuda::load_shared16(keys + swizzled(row1 * S::row_bytes + chunk * 16));
    }
    turn_pairs<T>(k[0][0], k[1][0], static_cast<float>(rank0), turns + (4 * j + q) * 8, scale);
    turn_pairs<T>(k[0][1], k[1][1], static_cast<float>(rank1), turns + (4 * j + q) * 8, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int step = 2 * j + half * (S::steps / 2);
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        cuda::mma16816<T>(s[c], k[half][0].x, k[half][1].x, k[half][0].y, k[half][1].y, qf[c][step][0], qf[c][step][1]);
        cuda::mma16816<T>(s[c], k[half][0].z, k[half][1].z, k[half][0].w, k[half][1].w, qf[c][step + 1][0],
                          qf[c][step + 1][1]);
      }
    }
  }
}

// Adds a unit's scores (times log2(e), -inf where nothing is seen) to one column tile's running softmax; p = P^T.
template <class T, int Tiles>
__device__ __forceinline__ void soften_unit(float (&s)[4], float (&high)[2], float (&sum)[2], float (&o)[Tiles][4],
                                            unsigned (&p)[2]) {
  float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
  // All lanes of a head have the same running maximum; it rises rarely.
  if (__any_sync(~0u, top[0] > high[0] || top[1] > high[1])) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = cuda::most_of_lanes<4, 16>(top[h]);
      const float fresh = fmaxf(top[h], high[h]);
      const float shrink = high[h] == -INFINITY ? 0.f : cuda::exp2_fast(high[h] - fresh);
      high[h] = fresh;
      sum[h] *= shrink;
#pragma unroll
      for (int t = 0; t < Tiles; ++t) o[t][h] *= shrink, o[t][2 + h] *= shrink;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float shift = high[h] == -INFINITY ? 0.f : high[h];
    s[h] = cuda::exp2_fast(s[h] - shift);
    s[2 + h] = cuda::exp2_fast(s[2 + h] - shift);
    sum[h] += s[h] + s[2 + h];
  }
  p[0] = cuda::transpose8x8(cuda::Pair<T>::pack(s[0], s[1]));
  p[1] = cuda::transpose8x8(cuda::Pair<T>::pack(s[2], s[3]));
}

// O^T += V^T P^T. The unit has `valid` tokens; the values after them may hold anything, also NaN.
template <class T, int Dim, int Columns>
__device__ __forceinline__ void add_unit(unsigned values, int valid, int g, int q, const unsigned (&p)[Columns][2],
                                         float (&o)[Columns][UnitShape<Dim>::tiles][4]) {
  using S = UnitShape<Dim>;
  const int even = token_of<Dim>(2 * q), odd = token_of<Dim>(2 * q + 1);  // tokens of P^T's rows 2q, 2q + 1
  const int lane_tokens[4] = {even, odd, even + 8, odd + 8};
  const bool partial = valid < unit_tokens;
#pragma unroll
  for (int v = 0; v < S::vectors; ++v) {
    unsigned w[4][S::vector / 2];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const unsigned from = values + swizzled(lane_tokens[t] * S::row_bytes + (g + 8 * v) * S::vector * 2);
      if constexpr (S::vector == 8) {
        const uint4 x = cuda::load_shared16(from);
        w[t][0] = x.x, w[t][1] = x.y, w[t][2] = x.z, w[t][3] = x.w;
      } else {
        const uint2 x = cuda::load_shared8(from);
        w[t][0] = x.x, w[t][1] = x.y;
      }
      if (partial && lane_tokens[t] >= valid)
#pragma unroll
        for (int e = 0; e < S::vector / 2; ++e) w[t][e] = 0;
    }
#pragma unroll
    for (int e = 0; e < S::vector / 2; ++e) {
      const int tile = v * (S::vector / 2) + e;
      const unsigned a0 = __byte_perm(w[0][e], w[1][e], 0x5410), a1 = __byte_perm(w[0][e], w[1][e], 0x7632),
                     a2 = __byte_perm(w[2][e], w[3][e], 0x5410), a3 = __byte_perm(w[2][e], w[3][e], 0x7632);
#pragma unroll
      for (int c = 0; c < Columns; ++c) cuda::mma16816<T>(o[c][tile], a0, a1, a2, a3, p[c][0], p[c][1]);
    }
  }
}

}  // namespace kvlab::ops
