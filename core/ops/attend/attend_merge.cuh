// Merges partial results of attention: those of a pair's runs, of a block's warps, and of the blocks that share a pair
// (attend_kernel.cuh).
#pragma once
#include <cmath>
#include <type_traits>

#include "ops/attend/attend_line.cuh"

namespace kvlab::ops::decode {

// A warp's result of some units, as its lanes hold it. Lane 4 g + q has query heads 8 c + 2 q + h, and of these the
// elements Rows::element_of(g, ...). It holds sums of probabilities times values.
template <int Dim, int ColumnTiles>
struct LaneResult {
  static constexpr int tiles = Dim / 16;
  float o[ColumnTiles][tiles][4], high[ColumnTiles][2], sum[ColumnTiles][2];
};

// A result in shared memory. The chunks of a head, of four elements, are permuted against bank conflicts.
template <int Dim>
struct Slot {
  float* memory;
  int heads;

  static __host__ __device__ constexpr int sums_of(int heads) { return (2 * heads + 3) / 4 * 4; }
  static __host__ __device__ constexpr int floats_of(int heads) { return sums_of(heads) + heads * Dim; }
  __device__ __forceinline__ float& high(int head) const { return memory[head]; }
  __device__ __forceinline__ float& sum(int head) const { return memory[heads + head]; }
  __device__ __forceinline__ float4& chunk(int head, int i) const {
    return reinterpret_cast<float4*>(memory + sums_of(heads))[head * (Dim / 4) + (i ^ (i >> 3 & 3) ^ (head >> 1 & 3))];
  }

  // Writes the result's heads from `begin` on, as many as the slot has.
  template <class Rows, int ColumnTiles>
  __device__ __forceinline__ void put(const LaneResult<Dim, ColumnTiles>& from, int begin, int g, int q) const {
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = c * 8 + 2 * q + h - begin;
        if (head < 0 || head >= heads) continue;
        if (g == 0) high(head) = from.high[c][h], sum(head) = from.sum[c][h];
#pragma unroll
        for (int t = 0; t < Dim / 16; t += 2)
          chunk(head, Rows::element_of(g, 2 * t) / 4) =
              make_float4(from.o[c][t][h], from.o[c][t][2 + h], from.o[c][t + 1][h], from.o[c][t + 1][2 + h]);
      }
  }
};

// The result of a pair's lower run, which a warp keeps while it reads the rest. Lanes without a query head keep
// nothing.
template <int Dim>
struct Stash {
  static constexpr int each = Dim / 4 + 4;  // floats of a lane
  float* memory;
  int lanes, lane;  // lane < 0: it keeps nothing

  static __host__ __device__ constexpr int lanes_of(int group) { return 8 * ((group + 1) / 2); }
  __device__ Stash(float* memory, int group, int g, int q)
      : memory(memory), lanes(lanes_of(group)), lane(2 * q < group ? q * 8 + g : -1) {}

  __device__ __forceinline__ void put(const LaneResult<Dim, 1>& from) const {
    if (lane < 0) return;
#pragma unroll
    for (int t = 0; t < Dim / 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) memory[(4 * t + i) * lanes + lane] = from.o[0][t][i];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      memory[(each - 4 + h) * lanes + lane] = from.high[0][h];
      memory[(each - 2 + h) * lanes + lane] = from.sum[0][h];
    }
  }
  // Adds what was kept.
  __device__ __forceinline__ void add_to(LaneResult<Dim, 1>& r) const {
    if (lane < 0) return;
    float kept_share[2], own_share[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float kept = memory[(each - 4 + h) * lanes + lane], top = fmaxf(kept, r.high[0][h]);
      kept_share[h] = kept == -INFINITY ? 0.f : exp2_fast(kept - top);
      own_share[h] = r.high[0][h] == -INFINITY ? 0.f : exp2_fast(r.high[0][h] - top);
      r.high[0][h] = top;
      r.sum[0][h] = r.sum[0][h] * own_share[h] + memory[(each - 2 + h) * lanes + lane] * kept_share[h];
    }
#pragma unroll
    for (int t = 0; t < Dim / 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        r.o[0][t][i] = r.o[0][t][i] * own_share[i % 2] + memory[(4 * t + i) * lanes + lane] * kept_share[i % 2];
  }
};

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

template <int Dim>
__device__ __forceinline__ std::uint16_t* rounded_at(const Args& a, int row, int query_head, int element) {
  return static_cast<std::uint16_t*>(a.rounded) + (std::int64_t{row} * a.kv_heads * a.group + query_head) * Dim +
         element;
}

// Element of `rounded`. EitherHalf: what a.half says.
struct EitherHalf {};
template <class T>
__device__ __forceinline__ unsigned round_pair(const Args& a, float low, float high) {
  if constexpr (std::is_same_v<T, EitherHalf>)
    return a.half ? Pair<__half>::pack(low, high) : Pair<__nv_bfloat16>::pack(low, high);
  else
    return Pair<T>::pack(low, high);
}

// Writes a column of four elements of a head. Columns count through the pair's heads.
template <class T, int Dim>
__device__ __forceinline__ void put_result(const Args& a, int pair, int column, Running r) {
  const int row = a.pair_of.row(pair), query_head = (pair - row * a.kv_heads) * a.group + column / (Dim / 4),
            element = column % (Dim / 4) * 4;
  if (a.prior_lse) {
    const std::int64_t at = std::int64_t{row} * a.kv_heads * a.group + query_head;
    const float high = a.prior_lse[at] * log2e;
    r.raise(high);
    if (high != -INFINITY) r.add(high, 1, *reinterpret_cast<const float4*>(a.prior_out + at * Dim + element));
  }
  const float share = r.sum != 0 ? 1 / r.sum : 0.f;  // a NaN sum gives NaN
  const float4 x = {r.out.x * share, r.out.y * share, r.out.z * share, r.out.w * share};
  float* out = a.out + row * a.out_row + query_head * a.out_head + element;
  if (a.wide)
    *reinterpret_cast<float4*>(out) = x;
  else
    out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
  if (a.rounded)
    *reinterpret_cast<uint2*>(rounded_at<Dim>(a, row, query_head, element)) =
        make_uint2(round_pair<T>(a, x.x, x.y), round_pair<T>(a, x.z, x.w));
  if (a.lse && element == 0) a.lse[row * a.lse_row + query_head] = r.sum != 0 ? r.high * ln2 + logf(r.sum) : -INFINITY;
}

// Merges the partial results of `parts` blocks into the pair's output, in the blocks' order. `first` is the first
// block's; part k lies k * 2 partials behind `others`. The whole block must call it. The parts come to `room` bytes of
// shared memory, all that fit in one round trip.
template <class T, int Dim, int ColumnTiles>
__device__ __forceinline__ void merge_parts(const Args& a, int pair, const float* first, const float* others, int parts,
                                            unsigned char* memory, int room) {
  using P = Partial<Dim, ColumnTiles>;
  const int columns = a.group * (Dim / 4), vectors = P::heads / 2 + columns, at_once = room / (vectors * 16);
  const float4* held = reinterpret_cast<const float4*>(memory);
#pragma unroll 1
  for (int column = threadIdx.x; column - static_cast<int>(threadIdx.x) < columns; column += blockDim.x) {
    Running r;
#pragma unroll 1
    for (int from = 0; from < parts; from += at_once) {
      const int count = min(at_once, parts - from);
      __syncthreads();
#pragma unroll 1
      for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        const float* part = others + from * std::int64_t{2 * P::floats} + 4 * v;
        unsigned to = shared_address(held + v);
        copy_async16(to, from == 0 ? first + 4 * v : part);
#pragma unroll 8
        for (int k = 1; k < count; ++k) copy_async16(to += vectors * 16, part += 2 * P::floats);
      }
      wait_copies();
      __syncthreads();
      if (column >= columns) continue;
      const float2* sums = reinterpret_cast<const float2*>(held) + column / (Dim / 4);
      const float4* outs = held + P::heads / 2 + column;
      float top = -INFINITY;
#pragma unroll 8
      for (int k = 0; k < count; ++k) top = fmaxf(top, sums[2 * k * vectors].x);
      r.raise(top);
#pragma unroll 8
      for (int k = 0; k < count; ++k) {
        const float2 sum = sums[2 * k * vectors];
        r.add(sum.x, sum.y, outs[k * vectors]);
      }
    }
    if (column < columns) put_result<T, Dim>(a, pair, column, r);
  }
}

}  // namespace kvlab::ops::decode
