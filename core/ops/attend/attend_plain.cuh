// Rows of bf16 or f16 in the kernel of decode steps (attend_kernel.cuh). A unit has 16 tokens; attend_unit.cuh
// multiplies it. Turn: the cache holds keys without RoPE; the kernel rotates them by their tokens' ranks.
#pragma once
#include "ops/attend/attend_kernel.cuh"

namespace kvlab::ops::decode {

template <class T, int Dim, int ColumnTiles, bool Turn>
struct PlainRows : Columns<false> {
  using Element = T;
  using S = UnitShape<Dim>;
  static constexpr int dim = Dim, column_tiles = ColumnTiles;
  static constexpr int warps = Dim > 128 ? 4 : 8, unit = unit_tokens;
  static constexpr int stage_bytes = S::unit_bytes, copied_bytes = S::unit_bytes;
  static constexpr bool turned = Turn, listed = false;
  static constexpr int unit_rows = S::side_bytes / 128;  // of the tensor map, from a unit's keys to the next one's

  static __device__ __forceinline__ int token_of(int g) { return ops::token_of<Dim>(g); }
  static constexpr int element_run = 4;  // elements that follow each other
  static __device__ __forceinline__ int element_of(int g, int e) { return ops::element_of<Dim>(g, e); }
  // The element of a query that is the lane's i-th.
  static __device__ __forceinline__ int query_element(int q, int i) { return (i / 8 * 4 + q) * 8 + i % 8; }

  static __device__ __forceinline__ void copy(const Args& a, const CUtensorMap* map, unsigned to, int y0, int y1,
                                              unsigned barrier, std::uint64_t policy) {
    const int pages = y1 >= 0 ? 2 : 1, sides = a.joint ? 1 : 2;
    barrier_expect(barrier, a.page_size < unit_tokens && pages == 1 ? S::unit_bytes / 2 : S::unit_bytes);
#pragma unroll 1
    for (int page = 0; page < pages; ++page)
#pragma unroll 1
      for (int side = 0; side < sides; ++side)
        bulk_copy_2d(to + side * S::side_bytes + page * (S::side_bytes / 2), map, 0,
                     (page ? y1 : y0) + side * a.value_rows, barrier, policy);
  }

  unsigned qf[ColumnTiles][S::steps][2];  // B fragments of Q^T: columns are the query heads of the group
  float o[ColumnTiles][S::tiles][4];
  float scale, turn_scale;
  int g, q;

  __device__ __forceinline__ PlainRows(const Args& a, const float4 (&asked)[ColumnTiles][Dim / 16], int group, int g,
                                       int q)
      : scale(a.scale), turn_scale(a.turn_scale), g(g), q(q) {
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
#pragma unroll
      for (int j = 0; j < S::steps / 2; ++j)
        pack_query<T>({asked[c][2 * j], asked[c][2 * j + 1]}, c * 8 + g < group ? 1.f : 0.f, qf[c][2 * j],
                      qf[c][2 * j + 1]);
#pragma unroll
      for (int t = 0; t < S::tiles; ++t) o[c][t][0] = o[c][t][1] = o[c][t][2] = o[c][t][3] = 0;
    }
  }

  // s = scores, times log2(e), of the tokens at tile rows g and g + 8.
  __device__ __forceinline__ void score(unsigned at, float (&s)[ColumnTiles][4]) const {
    score_unit<T, Dim>(at, token_of(g), token_of(g) + 8, q, qf, s);
    apply_scale(s);
  }
  __device__ __forceinline__ void score_turned(unsigned at, int row, int rank0, int rank1, const float2* turns,
                                               float (&s)[ColumnTiles][4]) const {
    score_turned_unit<T, Dim>(at, row, row + 8, q, rank0, rank1, turns, turn_scale, qf, s);
    apply_scale(s);
  }
  // Adds the unit's first `valid` tokens. s: scores times log2(e), -inf where nothing is seen; on return, the shares
  // 2^(score - high).
  __device__ __forceinline__ void add(unsigned at, int valid, float (&s)[ColumnTiles][4], float (&high)[ColumnTiles][2],
                                      float (&sum)[ColumnTiles][2]) {
    unsigned p[ColumnTiles][2];
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) soften_unit<T>(s[c], high[c], sum[c], o[c], p[c]);
    add_unit<T, Dim>(at + S::side_bytes, valid, g, q, p, o);
  }
  __device__ __forceinline__ void finish() {}

 private:
  __device__ __forceinline__ void apply_scale(float (&s)[ColumnTiles][4]) const {
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[c][i] *= scale;
  }
};

// Rows of listed tokens. The kernel copies them one by one, to where a bulk copy would put a unit's.
template <class T, int Dim, int ColumnTiles>
struct ListedRows : PlainRows<T, Dim, ColumnTiles, false> {
  using PlainRows<T, Dim, ColumnTiles, false>::PlainRows;
  static constexpr bool listed = true;
};

template <class T, int Dim, bool Turn>
void launch_plain(const Args& a, const CUtensorMap& map, cudaStream_t stream) {
  a.group > 8 ? launch<PlainRows<T, Dim, 2, Turn>>(a, map, nullptr, stream)
              : launch<PlainRows<T, Dim, 1, Turn>>(a, map, nullptr, stream);
}

}  // namespace kvlab::ops::decode
