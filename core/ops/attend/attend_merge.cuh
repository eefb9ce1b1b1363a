// Merges partial results of attention: those of a pair's runs, of a block's warps, and of the blocks that share a pair
// (attend_kernel.cuh).
#pragma once
#include <cmath>
#include <type_traits>

#include "ops/attend/attend_line.cuh"

namespace kvlab::ops::decode {

// A warp's result of some units, as its lanes hold it. Lane 4 g + q has query heads 8 c + 2 q + h, and of these the
// elements Rows::element_of(g, ...). It holds sums of probabilities times values. What lanes have of heads that the
// group lacks is of no use.
template <int Dim, int ColumnTiles>
struct LaneResult {
  static constexpr int tiles = Dim / 16;
  float o[ColumnTiles][tiles][4], high[ColumnTiles][2], sum[ColumnTiles][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
#pragma unroll
      for (int t = 0; t < tiles; ++t) o[c][t][0] = o[c][t][1] = o[c][t][2] = o[c][t][3] = 0;
      high[c][0] = high[c][1] = -INFINITY, sum[c][0] = sum[c][1] = 0;
    }
  }
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
          set_elements<Rows>(
              head, g, t,
              make_float4(from.o[c][t][h], from.o[c][t][2 + h], from.o[c][t + 1][h], from.o[c][t + 1][2 + h]));
      }
  }
  // Adds what is here to the result, whose rows may be of another kind. All lanes of the warp have to see it.
  template <class Rows>
  __device__ __forceinline__ void add_to(LaneResult<Dim, 1>& r, int g, int q) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 2 * q + h;
      if (head >= heads) continue;
      float& own_high = r.high[0][h];
      const float kept = high(head), top = fmaxf(kept, own_high);
      const float kept_share = kept == -INFINITY ? 0.f : exp2_fast(kept - top);
      const float own_share = own_high == -INFINITY ? 0.f : exp2_fast(own_high - top);
      own_high = top;
      r.sum[0][h] = r.sum[0][h] * own_share + sum(head) * kept_share;
#pragma unroll
      for (int t = 0; t < Dim / 16; t += 2) {
        const float4 x = elements_of<Rows>(head, g, t);
        r.o[0][t][h] = r.o[0][t][h] * own_share + x.x * kept_share;
        r.o[0][t][2 + h] = r.o[0][t][2 + h] * own_share + x.y * kept_share;
        r.o[0][t + 1][h] = r.o[0][t + 1][h] * own_share + x.z * kept_share;
        r.o[0][t + 1][2 + h] = r.o[0][t + 1][2 + h] * own_share + x.w * kept_share;
      }
    }
  }

 private:
  // A lane's four elements of tiles t and t + 1, all of which follow each other, or two and two.
  template <class Rows>
  __device__ __forceinline__ void set_elements(int head, int g, int t, const float4& x) const {
    const int element = Rows::element_of(g, 2 * t);
    if constexpr (Rows::element_run == 4) {
      chunk(head, element / 4) = x;
    } else {
      two(head, element) = make_float2(x.x, x.y);
      two(head, Rows::element_of(g, 2 * t + 2)) = make_float2(x.z, x.w);
    }
  }
  template <class Rows>
  __device__ __forceinline__ float4 elements_of(int head, int g, int t) const {
    const int element = Rows::element_of(g, 2 * t);
    if constexpr (Rows::element_run == 4) return chunk(head, element / 4);
    const float2 x = two(head, element), y = two(head, Rows::element_of(g, 2 * t + 2));
    return make_float4(x.x, x.y, y.x, y.y);
  }
  __device__ __forceinline__ float2& two(int head, int element) const {
    return reinterpret_cast<float2*>(&chunk(head, element / 4))[element % 4 / 2];
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
