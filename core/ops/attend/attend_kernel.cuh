// Attention of decode steps: the kernel, for every storage that it can pipeline. A class of rows (attend_plain.cuh,
// attend_codes.cuh) says how a unit comes to shared memory, and multiplies it.
//
// Each multiprocessor has one block. The units of all (row, KV head) pairs, of 16 tokens or 32 of codes, form one line,
// which the blocks share out (attend_line.cuh). So ragged batches and long single sequences fill the machine alike. In
// a block every warp runs its own pipeline over each n-th unit. Bulk copies (TMA, 128-byte swizzle) bring K and V of a
// unit; tensor cores compute with the query heads of the group as columns.
//
// Blocks that share a pair write partial results; the last block to arrive merges them (attend_merge.cuh) in the order
// of their numbers. Within a block the warps do the same in shared memory: the last warp to arrive combines a pair's
// results, and the others go on.
#pragma once
#include "ops/attend/attend_merge.cuh"

namespace kvlab::ops::decode {

// A place in a warp's ring of stages. `odd` is the parity of the phase that its barrier is in.
struct Place {
  int stage = 0;
  unsigned odd = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, odd ^= 1;
  }
};

template <class Rows>
__global__ void __launch_bounds__(Rows::warps * 32, 1)
    attend_kernel(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap map) {
  using T = typename Rows::Element;
  constexpr int Dim = Rows::dim, ColumnTiles = Rows::column_tiles;
  using P = Partial<Dim, ColumnTiles>;
  constexpr int warps = Rows::warps, threads = warps * 32;
  const int stage_bytes = Rows::stage_bytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int group = a.group;

  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* stages = memory;
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(stages + warps * a.stages * stage_bytes);
  float* merge = reinterpret_cast<float*>(barriers + warps * a.stages + 2);  // [warp, head] max, sum; [warp, head, dim]
  const Pairs pairs(a.rows * a.kv_heads, Rows::unit, reinterpret_cast<int*>(merge + merge_floats(Dim, warps, group)));
  const int* first = pairs.first;
  __shared__ int warp_sum[warps], warp_most[warps];
  __shared__ int arrivals;  // warps whose results of a pair are in `merge`
  // parts: number of blocks that share the block's first and last pair. first_block: the first of these blocks.
  __shared__ int parts[2], first_block[2];  // parts 0: nothing to merge
  __shared__ bool merges[2];
  float2* turns = nullptr;  // [head_dim / 2]
  if constexpr (Rows::turned) {
    __shared__ float2 own_turns[Dim / 2];
    turns = own_turns;
  }

  const unsigned my_stage = shared_address(stages) + warp * a.stages * stage_bytes;
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
      for (int column = threadIdx.x; column < group * (Dim / 4); column += blockDim.x)
        put_result<T, Dim>(a, pair, column, Running{});
  // Every block that works has at least one unit, so every block from a pair's first to its last arrives for the pair.
  const Line line(FirstUnit{first}, pairs.count, longest, a.blocks_each);
  const auto part = line.part(blockIdx.x);
  const int lo = part.begin, hi = part.end;
  if (lo >= hi) return;
  const int items = (hi - lo - warp + warps - 1) / warps;  // units of this warp: lo + warp + i * warps
  const std::uint64_t policy = read_once_policy();
  if constexpr (Rows::turned) {
    if (threadIdx.x < Dim / 2) turns[threadIdx.x] = turns_of(a.inv_freq[threadIdx.x]);
    __syncthreads();
  }

  // The loads of the queries start before the copies, else they would wait for them.
  float4 asked[ColumnTiles][Dim / 16];
  const auto ask_queries = [&](int of) {
    const int row = a.pair_of.row(of), kv_head = of - row * a.kv_heads;
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
      const float* from = a.queries + row * a.query_row + (kv_head * group + min(c * 8 + g, group - 1)) * a.query_head;
#pragma unroll
      for (int i = 0; i < Dim / 16; ++i)
        asked[c][i] = *reinterpret_cast<const float4*>(from + Rows::query_element(q, 4 * i));
    }
  };
  const int first_pair = line.pair_of(lo);
  int pair = first_pair, handed = 0;  // handed: pairs that the block has finished
  ask_queries(pair);

  Unit ahead = {};
  if (lane < items) ahead = locate(a, pairs, line, Rows::unit_rows, lo + warp + lane * warps);
  Unit current = ahead;  // of the current batch of 32 units
  const auto issue = [&](int i, int stage, const Unit& batch) {
    const int y0 = __shfl_sync(~0u, batch.y0, i % 32), y1 = __shfl_sync(~0u, batch.y1, i % 32);
    if (lane) return;
    Rows::copy(a, &map, my_stage + stage * stage_bytes, y0, y1, my_barrier + 8 * stage, policy);
  };
#pragma unroll 1
  for (int i = 0; i < a.stages && i < items; ++i) issue(i, i, ahead);

  const int last_pair = line.pair_of(hi - 1);
  if (threadIdx.x < 2) {
    const int of = threadIdx.x ? last_pair : first_pair;
    const bool shared = (first[of] < lo || first[of + 1] > hi) && (threadIdx.x == 0 || last_pair != first_pair);
    first_block[threadIdx.x] = line.first_block(of);
    parts[threadIdx.x] = shared ? line.last_block(of) - line.first_block(of) + 1 : 0;
  }

  const int tile_row = Rows::token_of(g);  // token of tile row g; row g + 8 is 8 tokens on
  Place here;
  for (int i = 0;; ++handed) {
    const int begin = first[pair], end = first[pair + 1];
    const int row = a.pair_of.row(pair), kv_head = pair - row * a.kv_heads;
    const int tokens = pairs.tokens(pair);
    const int stop = min(end, hi);

    Rows rows(a, asked, group, g, q);
    float high[ColumnTiles][2], sum[ColumnTiles][2];
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) high[c][0] = high[c][1] = -INFINITY, sum[c][0] = sum[c][1] = 0;

    for (int x; i < items && (x = lo + warp + i * warps) < stop; ++i) {
      const unsigned at = my_stage + here.stage * stage_bytes;
      const int valid = min(Rows::unit, tokens - (x - begin) * Rows::unit);
      if constexpr (!Rows::turned) barrier_wait(my_barrier + 8 * here.stage, here.odd);
      constexpr int tile_rows = Rows::unit / 8;  // of each lane; row r has token tile_row + 8 r
      int place[tile_rows];                      // in the cache, once find_places has run
      const auto find_places = [&] {
        const int place0 = __shfl_sync(~0u, current.place0, i % 32), place1 = __shfl_sync(~0u, current.place1, i % 32);
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) {
          const int t = tile_row + 8 * r;
          place[r] = t < a.page_size ? place0 + t : place1 + t - a.page_size;
        }
      };
      float s[ColumnTiles][2 * tile_rows];  // [2 r + h]: scores times log2(e)
      if constexpr (Rows::turned) {
        find_places();
        const std::int32_t* rank = a.rank + std::int64_t{pair} * a.rank_room;
        const int rank0 = tile_row < valid ? rank[place[0]] : 0, rank1 = tile_row + 8 < valid ? rank[place[1]] : 0;
        barrier_wait(my_barrier + 8 * here.stage, here.odd);
        rows.score_turned(at, tile_row, rank0, rank1, turns, s);
      } else {
        rows.score(at, s);
      }
      if (valid < Rows::unit || a.window > 0 || a.mass) {
        bool seen[tile_rows];
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) seen[r] = tile_row + 8 * r < valid;
        if constexpr (!Rows::turned)
          if (a.window > 0 || a.mass) find_places();
        if (a.window > 0) {
          const int oldest = a.last[row] - a.window;  // this position and older ones are not seen
          const PageEntry* entries = a.table + a.slots[row] * a.table_slot + kv_head * a.table_head;
#pragma unroll
          for (int r = 0; r < tile_rows; ++r) {
            if (!seen[r]) continue;
            const std::byte* frame = a.base + entries[place[r] / a.page_size].frame * granule_bytes;
            seen[r] = reinterpret_cast<const std::int32_t*>(frame + a.positions)[place[r] % a.page_size] > oldest;
          }
        }
        if (a.mass)
#pragma unroll
          for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int head = c * 8 + 2 * q + h;
              if (head >= group) continue;
              float* to = a.mass + row * a.mass_row + (kv_head * group + head) * a.mass_head;
#pragma unroll
              for (int r = 0; r < tile_rows; ++r)
                if (seen[r]) to[place[r]] = s[c][2 * r + h];
            }
#pragma unroll
        for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
          for (int r = 0; r < tile_rows; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) s[c][2 * r + h] = seen[r] ? s[c][2 * r + h] : -INFINITY;
      }
      rows.add(at, valid, s, high, sum);
      const int freed = here.stage;
      here.next(a.stages);
      __syncwarp();
      const int next = i + a.stages;
      if (next % 32 == 0 && next < items + 32) {
        Unit fresh = {};
        if (next + lane < items) fresh = locate(a, pairs, line, Rows::unit_rows, lo + warp + (next + lane) * warps);
        ahead = fresh;
      }
      if (next < items) issue(next, freed, ahead);
      if ((i + 1) % 32 == 0) current = ahead;
    }
    rows.finish();

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
        for (int t = 0; t < Dim / 16; ++t)
          *reinterpret_cast<float2*>(to + Rows::element_of(g, 2 * t)) =
              make_float2(rows.o[c][t][h], rows.o[c][t][2 + h]);
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
                                     parts[i], stages, warps * a.stages * stage_bytes);
    __syncthreads();
  }
}

template <class Rows>
void launch(Args a, const CUtensorMap& map, cudaStream_t stream) {
  constexpr int dim = Rows::dim, warps = Rows::warps;
  const int pairs = a.rows * a.kv_heads, stage = Rows::stage_bytes;
  const std::int64_t fixed = std::int64_t{merge_floats(dim, warps, a.group)} * 4 + Pairs::bytes_of(pairs) + 16;
  constexpr int own = Rows::turned && dim > 128 ? 2048 : 1024;  // bytes of static shared memory, aligned
  const std::int64_t limit = cuda::shared_bytes() - own;
  // These bytes in flight hide the memory's latency. More would only queue up in front of small, urgent loads.
  constexpr std::int64_t under_way = 128 << 10;
  const std::int64_t together = warps * Rows::copied_bytes, enough = (under_way + together - 1) / together;
  a.stages = static_cast<int>(std::min(enough, (limit - fixed) / (warps * (stage + 8))));
  if (a.stages < 2)
    throw Error(Errc::unsupported,
                "got a group of " + std::to_string(a.group) + " query heads of " + std::to_string(dim) +
                    ", wanted one that fits shared memory",
                "op attend");
  const int bytes = static_cast<int>(warps * a.stages * (stage + 8) + fixed);
  const auto kernel = attend_kernel<Rows>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(cuda::shared_bytes() - own));
  cuda::check(once, "attend");
  const int blocks = cuda::step_multiprocessors();
  a.blocks_each = pairs > 0 ? blocks / pairs : 0;
  cuda::launch("attend", kernel, blocks, warps * 32, bytes, stream, true, a, map);
}

// Launches the kernel on turned keys (attend_turned.cu): head_dim 64, 128 or 256.
void launch_turned(const Args& a, int dim, bool half, const CUtensorMap& map, cudaStream_t stream);
// Whether the kernel has rows for pages of codes (attend_codes.cu), with groups up to 8; launches it on them.
bool takes_codes(const PageLayout& l);
void launch_codes(const Args& a, const PageLayout& l, cudaStream_t stream);

}  // namespace kvlab::ops::decode
