// Attention of decode steps over pages of plain bf16 or f16 rows.
//
// Each multiprocessor has one block. The 16-token units of all (row, KV head) pairs form one line, which the blocks
// share out (attend_line.cuh). So ragged batches and long single sequences fill the machine alike. In a block every
// warp runs its own pipeline over each n-th unit. Bulk copies (TMA, 128-byte swizzle) bring K and V of a unit; tensor
// cores compute with the query heads of the group as columns (attend_unit.cuh).
//
// Blocks that share a pair write partial results; the last block to arrive merges them (attend_merge.cuh) in the order
// of their numbers. Within a block the warps do the same in shared memory: the last warp to arrive combines a pair's
// results, and the others go on.
#pragma once
#include "ops/attend/attend_merge.cuh"

namespace kvlab::ops::decode {

constexpr int warps_of(int dim) { return dim > 128 ? 4 : 8; }  // warps of a block

// Turn: the cache holds keys without RoPE; the kernel rotates them by their tokens' ranks.
template <class T, int Dim, int ColumnTiles, bool Turn>
__global__ void __launch_bounds__(256, 1)
    attend_kernel(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap map) {
  using S = UnitShape<Dim>;
  using P = Partial<Dim, ColumnTiles>;
  constexpr int warps = warps_of(Dim), threads = warps * 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int group = a.group;

  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* stages = memory;
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(stages + warps * a.stages * S::unit_bytes);
  float* merge = reinterpret_cast<float*>(barriers + warps * a.stages + 2);  // [warp, head] max, sum; [warp, head, dim]
  const Pairs pairs(a.rows * a.kv_heads, reinterpret_cast<int*>(merge + merge_floats(Dim, warps, group)));
  const int* first = pairs.first;
  __shared__ int warp_sum[8], warp_most[8];
  __shared__ int arrivals;  // warps whose results of a pair are in `merge`
  // parts: number of blocks that share the block's first and last pair. first_block: the first of these blocks.
  __shared__ int parts[2], first_block[2];  // parts 0: nothing to merge
  __shared__ bool merges[2];
  float2* turns = nullptr;  // [head_dim / 2]
  if constexpr (Turn) {
    __shared__ float2 own_turns[Dim / 2];
    turns = own_turns;
  }

  const unsigned my_stage = shared_address(stages) + warp * a.stages * S::unit_bytes;
  const unsigned my_barrier = shared_address(barriers + warp * a.stages);
  // Barriers. landed: all warps' results of a pair are in `merge`. merged: a warp has read them.
  const unsigned landed = shared_address(barriers + warps * a.stages), merged = landed + 8;
  if (lane == 0) {
    for (int s = 0; s < a.stages; ++s) barrier_init(my_barrier + 8 * s, 1);
    if (warp == 0) barrier_init(landed, threads), barrier_init(merged, 32), arrivals = 0;
    barrier_init_fence();
  }
  __syncwarp();
  let_successor_start();
  if (threadIdx.x == 0) fetch_map(&map);
  if (static_cast<int>(threadIdx.x) < a.rows) keep_load(a.slots[threadIdx.x]);  // into L1; no kernel writes them
  wait_for_predecessor();
  const int each = (pairs.count + threads - 1) / threads;
  const int longest = count_units<threads>(a, pairs, each, warp_sum, warp_most);

#pragma unroll 1
  for (int pair = blockIdx.x; pair < pairs.count; pair += gridDim.x)
    if (first[pair + 1] == first[pair])
      for (int i = threadIdx.x; i < group * Dim; i += blockDim.x) {
        const int row = a.pair_of.row(pair), head = (pair - row * a.kv_heads) * group + i / Dim;
        a.out[row * a.out_row + head * a.out_head + i % Dim] = 0;
        if (a.rounded) *rounded_at<T, Dim>(a, row, head, i % Dim) = T(0.f);
        if (a.lse && i % Dim == 0) a.lse[row * a.lse_row + head] = -INFINITY;
      }
  // Every block that works has at least one unit, so every block from a pair's first to its last arrives for the pair.
  const Line line(FirstUnit{first}, pairs.count, longest, a.blocks_each);
  const auto part = line.part(blockIdx.x);
  const int lo = part.begin, hi = part.end;
  if (lo >= hi) return;
  const int items = (hi - lo - warp + warps - 1) / warps;  // units of this warp: lo + warp + i * warps
  const std::uint64_t policy = read_once_policy();
  if constexpr (Turn) {
    if (threadIdx.x < Dim / 2) turns[threadIdx.x] = turns_of(a.inv_freq[threadIdx.x]);
    __syncthreads();
  }

  // The loads of the queries start before the copies, else they would wait for them.
  QueryPiece asked[ColumnTiles][S::steps / 2];
  const auto ask_queries = [&](int of) {
    const int row = a.pair_of.row(of), kv_head = of - row * a.kv_heads;
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
      const float* from = a.queries + row * a.query_row + (kv_head * group + min(c * 8 + g, group - 1)) * a.query_head;
#pragma unroll
      for (int j = 0; j < S::steps / 2; ++j) asked[c][j] = query_piece(from, q, j);
    }
  };
  const int first_pair = line.pair_of(lo);
  int pair = first_pair, handed = 0;  // handed: pairs that the block has finished
  ask_queries(pair);

  Unit ahead = {};
  if (lane < items) ahead = locate<Dim>(a, pairs, line, lo + warp + lane * warps);
  Unit current = ahead;  // of the current batch of 32 units
  const int sides = a.joint ? 1 : 2;
  const auto issue = [&](int i, const Unit& batch) {
    const int y0 = __shfl_sync(~0u, batch.y0, i % 32), y1 = __shfl_sync(~0u, batch.y1, i % 32);
    if (lane) return;
    const int s = i % a.stages, pages = y1 >= 0 ? 2 : 1;
    const unsigned to = my_stage + s * S::unit_bytes, barrier = my_barrier + 8 * s;
    barrier_expect(barrier, a.page_size < unit_tokens && pages == 1 ? S::unit_bytes / 2 : S::unit_bytes);
#pragma unroll 1
    for (int page = 0; page < pages; ++page)
#pragma unroll 1
      for (int side = 0; side < sides; ++side)
        bulk_copy_2d(to + side * S::side_bytes + page * (S::side_bytes / 2), &map, 0,
                     (page ? y1 : y0) + side * a.value_rows, barrier, policy);
  };
#pragma unroll 1
  for (int i = 0; i < a.stages && i < items; ++i) issue(i, ahead);

  const int last_pair = line.pair_of(hi - 1);
  if (threadIdx.x < 2) {
    const int of = threadIdx.x ? last_pair : first_pair;
    const bool shared = (first[of] < lo || first[of + 1] > hi) && (threadIdx.x == 0 || last_pair != first_pair);
    first_block[threadIdx.x] = line.first_block(of);
    parts[threadIdx.x] = shared ? line.last_block(of) - line.first_block(of) + 1 : 0;
  }

  const int row0 = token_of<Dim>(g), row1 = row0 + 8;  // tokens of tile rows g and g + 8
  for (int i = 0;; ++handed) {
    const int begin = first[pair], end = first[pair + 1];
    const int row = a.pair_of.row(pair), kv_head = pair - row * a.kv_heads;
    const int tokens = pairs.tokens(pair);
    const int stop = min(end, hi);

    // B fragments of Q^T: columns are the query heads of the group.
    unsigned qf[ColumnTiles][S::steps][2];
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
      for (int j = 0; j < S::steps / 2; ++j)
        pack_query<T>(asked[c][j], c * 8 + g < group ? 1.f : 0.f, qf[c][2 * j], qf[c][2 * j + 1]);
    float o[ColumnTiles][S::tiles][4], high[ColumnTiles][2], sum[ColumnTiles][2];
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
#pragma unroll
      for (int t = 0; t < S::tiles; ++t) o[c][t][0] = o[c][t][1] = o[c][t][2] = o[c][t][3] = 0;
      high[c][0] = high[c][1] = -INFINITY;
      sum[c][0] = sum[c][1] = 0;
    }

    for (int x; i < items && (x = lo + warp + i * warps) < stop; ++i) {
      const int stage = i % a.stages;
      const unsigned keys = my_stage + stage * S::unit_bytes, values = keys + S::side_bytes;
      const int valid = min(unit_tokens, tokens - (x - begin) * unit_tokens);
      int lower = 0, upper = 0;  // places of the lane's two tokens, once find_places has run
      const auto find_places = [&] {
        const int place0 = __shfl_sync(~0u, current.place0, i % 32), place1 = __shfl_sync(~0u, current.place1, i % 32);
        lower = place0 + row0, upper = a.page_size >= unit_tokens ? place0 + row1 : place1 + row1 - 8;
      };
      float s[ColumnTiles][4];
      if constexpr (Turn) {
        find_places();
        const std::int32_t* rank = a.rank + std::int64_t{pair} * a.rank_room;
        const int rank0 = row0 < valid ? rank[lower] : 0, rank1 = row1 < valid ? rank[upper] : 0;
        barrier_wait(my_barrier + 8 * stage, (i / a.stages) & 1);
        score_turned_unit<T, Dim>(keys, row0, row1, q, rank0, rank1, turns, a.turn_scale, qf, s);
      } else {
        barrier_wait(my_barrier + 8 * stage, (i / a.stages) & 1);
        score_unit<T, Dim>(keys, row0, row1, q, qf, s);
      }
      bool seen0 = row0 < valid, seen1 = row1 < valid;
      if (a.window > 0 || a.mass) {
        if constexpr (!Turn) find_places();
        if (a.window > 0) {
          const int oldest = a.last[row] - a.window;  // this position and older ones are not seen
          const PageEntry* entries = a.table + a.slots[row] * a.table_slot + kv_head * a.table_head;
          const auto position = [&](int place) {
            const std::byte* frame = a.base + entries[place / a.page_size].frame * granule_bytes;
            return reinterpret_cast<const std::int32_t*>(frame + a.positions)[place % a.page_size];
          };
          if (seen0) seen0 = position(lower) > oldest;
          if (seen1) seen1 = position(upper) > oldest;
        }
        if (a.mass)
#pragma unroll
          for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int head = c * 8 + 2 * q + h;
              if (head >= group) continue;
              float* to = a.mass + row * a.mass_row + (kv_head * group + head) * a.mass_head;
              if (seen0) to[lower] = s[c][h] * a.scale;
              if (seen1) to[upper] = s[c][2 + h] * a.scale;
            }
      }
      unsigned p[ColumnTiles][2];
#pragma unroll
      for (int c = 0; c < ColumnTiles; ++c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[c][h] = seen0 ? s[c][h] * a.scale : -INFINITY;
          s[c][2 + h] = seen1 ? s[c][2 + h] * a.scale : -INFINITY;
        }
        soften_unit<T>(s[c], high[c], sum[c], o[c], p[c]);
      }
      add_unit<T, Dim>(values, valid, g, q, p, o);
      __syncwarp();
      const int next = i + a.stages;
      if (next % 32 == 0 && next < items + 32) {
        Unit fresh = {};
        if (next + lane < items) fresh = locate<Dim>(a, pairs, line, lo + warp + (next + lane) * warps);
        ahead = fresh;
      }
      if (next < items) issue(next, ahead);
      if ((i + 1) % 32 == 0) current = ahead;
    }

    // The last warp to arrive combines the block's warps; the others go on.
    float* merge_high = merge;
    float* merge_sum = merge_high + warps * group;
    float* merge_out = merge_sum + warps * group;
    if (handed > 0) barrier_wait(merged, (handed - 1) & 1);
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        for (int d = 4; d < 32; d *= 2) sum[c][h] += __shfl_xor_sync(~0u, sum[c][h], d);
        const int head = c * 8 + 2 * q + h;
        if (head >= group) continue;
        if (g == 0) {
          merge_high[warp * group + head] = high[c][h];
          merge_sum[warp * group + head] = sum[c][h];
        }
        float* to = merge_out + (warp * group + head) * Dim;
#pragma unroll
        for (int t = 0; t < S::tiles; ++t)
          *reinterpret_cast<float2*>(to + element_of<Dim>(g, 2 * t)) = make_float2(o[c][t][h], o[c][t][2 + h]);
      }
    const auto combine = [&](int from, int step) {
      float* partial = a.partial + (blockIdx.x * 2 + (begin > lo ? 1 : 0)) * P::floats;
#pragma unroll 1
      for (int column = from; column < group * (Dim / 4); column += step) {
        const int head = column / (Dim / 4);
        Running r;
#pragma unroll
        for (int w = 0; w < warps; ++w) r.high = fmaxf(r.high, merge_high[w * group + head]);
#pragma unroll
        for (int w = 0; w < warps; ++w)
          r.add(merge_high[w * group + head], merge_sum[w * group + head],
                reinterpret_cast<const float4*>(merge_out)[w * group * (Dim / 4) + column]);
        if (begin >= lo && end <= hi) {
          put_result<T, Dim>(a, pair, column, r);
        } else {
          if (column % (Dim / 4) == 0) reinterpret_cast<float2*>(partial)[head] = make_float2(r.high, r.sum);
          reinterpret_cast<float4*>(partial + 2 * P::heads)[column] = r.out;
        }
      }
    };
    const bool last = end >= hi;
    bool combines = last;
    int next_pair = pair;
    if (last) {
      __syncthreads();
    } else {
      next_pair = line.pair_of(end);
      ask_queries(next_pair);
      barrier_arrive(landed);
      __syncwarp();
      int before = 0;
      if (lane == 0) before = atomicAdd(&arrivals, 1);
      combines = __shfl_sync(~0u, before, 0) % warps == warps - 1;  // all warps have arrived: this warp does not wait
      if (combines) barrier_wait(landed, handed & 1);
    }
    if (combines) combine(last ? static_cast<int>(threadIdx.x) : lane, last ? threads : 32);
    if (last) break;
    if (combines) barrier_arrive(merged);
    pair = next_pair;
  }

  // The last block to arrive merges a pair that blocks share.
  if (parts[0] + parts[1] == 0) return;
  __syncthreads();
  if (threadIdx.x < 2) {
    const int of = threadIdx.x ? last_pair : first_pair, wanted = parts[threadIdx.x];
    const bool comes_last = wanted > 0 && add_released(a.arrived + of, 1) == wanted - 1;
    if (comes_last) a.arrived[of] = 0;
    merges[threadIdx.x] = comes_last;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (!merges[i]) continue;
    const int of = i ? last_pair : first_pair, from = first_block[i];
    const float* others = a.partial + 2 * from * P::floats;
    merge_parts<T, Dim, ColumnTiles>(a, of, first[of] > line.part(from).begin ? others + P::floats : others, others,
                                     parts[i], stages, warps * a.stages * S::unit_bytes);
    __syncthreads();
  }
}

template <class T, int Dim, int ColumnTiles, bool Turn>
void launch(Args a, const CUtensorMap& map, cudaStream_t stream) {
  using S = UnitShape<Dim>;
  constexpr int warps = warps_of(Dim);
  const int pairs = a.rows * a.kv_heads;
  const std::int64_t fixed = std::int64_t{merge_floats(Dim, warps, a.group)} * 4 + Pairs::bytes_of(pairs) + 16;
  constexpr int own = Turn && Dim > 128 ? 2048 : 1024;  // bytes of static shared memory, aligned
  const std::int64_t limit = cuda::shared_bytes() - own;
  // These bytes in flight hide the memory's latency. More would only queue up in front of small, urgent loads.
  constexpr std::int64_t under_way = 128 << 10, enough = under_way / (warps * S::unit_bytes);
  a.stages = static_cast<int>(std::min(enough, (limit - fixed) / (warps * (S::unit_bytes + 8))));
  if (a.stages < 2)
    throw Error(Errc::unsupported,
                "got a group of " + std::to_string(a.group) + " query heads of " + std::to_string(Dim) +
                    ", wanted one that fits shared memory",
                "op attend");
  const int bytes = static_cast<int>(warps * a.stages * (S::unit_bytes + 8) + fixed);
  const auto kernel = attend_kernel<T, Dim, ColumnTiles, Turn>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(cuda::shared_bytes() - own));
  cuda::check(once, "attend");
  const int blocks = cuda::step_multiprocessors();
  a.blocks_each = pairs > 0 ? blocks / pairs : 0;
  cuda::launch("attend", kernel, blocks, warps * 32, bytes, stream, true, a, map);
}

// Launches the kernel with Turn (attend_turned.cu): head_dim 64, 128 or 256.
void launch_turned(const Args& a, int dim, bool half, const CUtensorMap& map, cudaStream_t stream);

}  // namespace kvlab::ops::decode
