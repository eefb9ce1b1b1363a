// Attention of decode steps over pages of plain bf16 or f16 rows.
//
// One block per multiprocessor. The 16-token units of all (row, KV head) pairs form one line, so that ragged batches
// and long single sequences fill the machine alike. Multiprocessors do not read equally fast: every block has most of
// an equal share for its own, the rest is cut into pieces that go to who is free (attend_line.cuh). In a block every
// warp runs a pipeline of its own over each n-th unit of its parts: bulk copies (TMA, 128-byte swizzle) bring K and V
// of a unit, tensor cores compute with the query heads of the group as columns (attend_unit.cuh). Parts that share a
// pair leave partial results; the last block to arrive merges them in the order of the line. So the result does not
// depend on who took which piece.
#pragma once
#include <cmath>

#include "base/launch.cuh"
#include "ops/attend_line.cuh"
#include "ops/attend_unit.cuh"

namespace kvlab::ops::decode {
using namespace cuda;

constexpr int max_pairs = 1024;  // (row, KV head) pairs of one launch
constexpr int claims_room = 32;  // more parts than a block's warps may be apart
constexpr int early_units = 2;   // of each warp: asked for before the kernel in front has ended

struct Args {
  const PageEntry* table;
  std::int64_t table_slot, table_head;
  const std::int32_t* length;
  std::int64_t length_slot, length_head;
  const std::int32_t* slots;
  const std::int32_t *list, *list_count;
  std::int64_t list_row, list_head, count_row, count_head;
  const float* queries;
  std::int64_t query_row, query_head;
  float *out, *lse, *mass;
  std::int64_t out_row, out_head, lse_row, mass_row, mass_head;
  const std::byte* base;
  const std::int32_t* last;
  float* partial;
  int* arrived;
  int* taken;                // pieces of the line
  std::int64_t positions;    // offset in a frame
  const std::int32_t* rank;  // [row, kv_head, rank_room], where keys are turned
  const float* inv_freq;     // [head_dim / 2]
  float turn_scale;          // of turned keys
  int rank_room;
  int rows, kv_heads, group, page_size, window;
  int slots_room, pages_room, list_room;
  int value_rows;  // 128-byte rows from a page's keys to its values
  int stages;
  bool joint;   // a page's keys and values are one piece of a unit's size
  float scale;  // of the scores, times log2(e)
};

// Of shared memory: a block's warps' results, or what its threads merge of parts.
__host__ __device__ constexpr int merge_floats(int dim, int warps, int group) {
  const int results = warps * group * (2 + dim), merged = warps * 32 * 6;
  return results > merged ? results : merged;
}

// What a block keeps of the pairs in shared memory.
struct Pairs {
  int count;
  int* first;              // [pair] units before it, [count] = all
  int* slot;               // [pair]
  unsigned char* missing;  // [pair] tokens that its last unit lacks

  static constexpr int bytes_of(int pairs) { return (pairs + 1) * 4 + pairs * 5; }
  __device__ Pairs(int pairs, int* memory)
      : count(pairs),
        first(memory),
        slot(memory + pairs + 1),
        missing(reinterpret_cast<unsigned char*>(memory + 2 * pairs + 1)) {}
  __device__ int of_unit(int x) const {
    int lo = 0, hi = count;
    while (hi - lo > 1) {
      const int mid = (lo + hi) / 2;
      (first[mid] <= x ? lo : hi) = mid;
    }
    return lo;
  }
  __device__ int tokens(int pair) const { return (first[pair + 1] - first[pair]) * unit_tokens - missing[pair]; }
};

// Early: the kernel in front may still be writing what is read. What is found then is only good for a guess: it is
// read past the first-level cache, which would keep it, and nothing outside of the arrays is asked for.
template <bool Early, class T>
__device__ __forceinline__ T load(const T* p) {
  if constexpr (Early) return __ldcg(p);
  return *p;
}

template <bool Early>
__device__ __forceinline__ int tokens_of_pair(const Args& a, int pair, int& slot) {
  const int row = pair / a.kv_heads, head = pair % a.kv_heads;
  slot = load<Early>(a.slots + row);
  if (Early && (slot < 0 || slot >= a.slots_room)) return slot = 0;
  int length = load<Early>(a.length + slot * a.length_slot + head * a.length_head);
  if (Early) length = max(0, min(length, a.pages_room * a.page_size));
  if (!a.list) return length;
  int count = load<Early>(a.list_count + row * a.count_row + head * a.count_head);
  if (Early) count = max(0, min(count, min(a.list_room, (length + a.page_size - 1) / a.page_size)));
  if (count == 0) return 0;
  const int newest = (length - 1) / a.page_size;
  const int last = load<Early>(a.list + row * a.list_row + head * a.list_head + count - 1);
  return count * a.page_size - (last == newest ? (newest + 1) * a.page_size - length : 0);
}

// One unit to come: rows of the tensor map, places of its tokens in the cache.
struct Unit {
  int y0, y1;  // second: of the next page where pages have 8 tokens, or -1
  int place0, place1;
};

template <int Dim, bool Early>
__device__ __forceinline__ Unit locate(const Args& a, const Pairs& pairs, int x) {
  const int pair = pairs.of_unit(x), u = x - pairs.first[pair], row = pair / a.kv_heads, head = pair % a.kv_heads;
  const PageEntry* entries = a.table + pairs.slot[pair] * a.table_slot + head * a.table_head;
  const std::int32_t* list = a.list ? a.list + row * a.list_row + head * a.list_head : nullptr;
  const auto page_of = [&](int i) {
    const int page = list ? load<Early>(list + i) : i;
    return Early ? max(0, min(page, a.pages_room - 1)) : page;
  };
  Unit out;
  out.y1 = -1, out.place1 = 0;
  if (a.page_size >= unit_tokens) {
    const int per_page = a.page_size / unit_tokens, page = page_of(u / per_page), sub = u % per_page;
    const int frame = load<Early>(&entries[page].frame);
    out.y0 = Early && frame < 0 ? -1 : frame + sub * (UnitShape<Dim>::side_bytes / 128);
    out.place0 = page * a.page_size + sub * unit_tokens;
  } else {
    const int count = (pairs.tokens(pair) + a.page_size - 1) / a.page_size, p0 = page_of(2 * u);
    out.y0 = load<Early>(&entries[p0].frame);
    out.place0 = p0 * a.page_size;
    if (2 * u + 1 < count) {
      const int p1 = page_of(2 * u + 1);
      out.y1 = load<Early>(&entries[p1].frame);
      out.place1 = p1 * a.page_size;
    }
  }
  return out;
}

template <bool Early>
__device__ void count_units(const Args& a, const Pairs& to, int* warp_sum) {
  const int threads = blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, pairs = to.count;
  const int each = (pairs + threads - 1) / threads, begin = threadIdx.x * each;
  constexpr int most = max_pairs / 128;  // of each: blocks have 128 or 256 threads
  int tokens[most], own = 0;
#pragma unroll
  for (int i = 0; i < most; ++i) {  // all loads at once
    int slot = 0;
    tokens[i] = i < each && begin + i < pairs ? tokens_of_pair<Early>(a, begin + i, slot) : 0;
    if (i < each && begin + i < pairs) to.slot[begin + i] = slot;
  }
#pragma unroll
  for (int i = 0; i < most; ++i)
    if (i < each && begin + i < pairs) {
      const int units = (tokens[i] + unit_tokens - 1) / unit_tokens;
      to.first[begin + i] = own;
      to.missing[begin + i] = static_cast<unsigned char>(units * unit_tokens - tokens[i]);
      own += units;
    }
  int before = own;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) warp_sum[warp] = before;
  __syncthreads();
  int offset = before - own;
  for (int w = 0; w < warp; ++w) offset += warp_sum[w];
  for (int i = 0; i < each; ++i)
    if (begin + i < pairs) to.first[begin + i] += offset;
  if (threadIdx.x == threads - 1) to.first[pairs] = offset + own;
  __syncthreads();
}

// A block's partial results of a pair: [head] maximum and sum, [head, head_dim]. A part of the line has two, of its
// first pair if that began before it, and of its last.
template <int Dim, int ColumnTiles>
struct Partial {
  static constexpr int heads = 8 * ColumnTiles, floats = heads * (2 + Dim);
  static __device__ float* of(const Args& a, int part, bool later) {
    return a.partial + (std::int64_t{part} * 2 + later) * floats;
  }
};

// The partial results of parts `from` to `to` of the line become the pair's result; by a whole block. Threads that
// share a column of four elements take every n-th part each.
template <int Dim, int ColumnTiles>
__device__ __forceinline__ void merge_parts(const Args& a, const UnitLine& line, int pair, int begin, int from, int to,
                                            float* memory) {
  using P = Partial<Dim, ColumnTiles>;
  constexpr int at_once = 12;
  const int threads = blockDim.x, columns = a.group * (Dim / 4), across = min(columns, threads),
            teams = threads / across, team = threadIdx.x / across, parts = to - from + 1;
  const int row = pair / a.kv_heads, kv_head = pair % a.kv_heads;
  const float* first = P::of(a, from, begin > line.begin(from));
  const float* others = P::of(a, from, false);
  float4* team_out = reinterpret_cast<float4*>(memory);
  float2* team_sum = reinterpret_cast<float2*>(team_out + threads);
  for (int column = threadIdx.x % across; column < columns; column += across) {
    const int head = column / (Dim / 4);
    float high = -INFINITY, sum = 0;
    float4 out = make_float4(0, 0, 0, 0);
    const auto add = [&](float other_high, float other_sum, const float4& other) {  // of a high no larger
      if (other_high == -INFINITY) return;
      const float weight = exp2_fast(other_high - high);
      sum += weight * other_sum;
      out.x += weight * other.x, out.y += weight * other.y, out.z += weight * other.z, out.w += weight * other.w;
    };
    const auto raise = [&](float top) {
      if (top <= high) return;
      const float shrink = high == -INFINITY ? 0.f : exp2_fast(high - top);
      high = top;
      sum *= shrink, out.x *= shrink, out.y *= shrink, out.z *= shrink, out.w *= shrink;
    };
    for (int i = team; team < teams && i < parts; i += at_once * teams) {
      float2 head_sum[at_once];
      float4 head_out[at_once];
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
        const int k = i + u * teams;
        const float* part = k == 0 ? first : others + std::int64_t{k} * 2 * P::floats;
        head_sum[u] = make_float2(-INFINITY, 0.f);
        if (k < parts) {
          head_sum[u] = __ldcg(reinterpret_cast<const float2*>(part) + head);
          head_out[u] = __ldcg(reinterpret_cast<const float4*>(part + 2 * P::heads) + column);
        }
      }
      float top = high;
#pragma unroll
      for (int u = 0; u < at_once; ++u) top = fmaxf(top, head_sum[u].x);
      raise(top);
#pragma unroll
      for (int u = 0; u < at_once; ++u) add(head_sum[u].x, head_sum[u].y, head_out[u]);
    }
    if (teams > 1) {  // then every thread comes here once: across = columns
      team_out[threadIdx.x] = out;
      team_sum[threadIdx.x] = make_float2(high, sum);
    }
    if (teams > 1) __syncthreads();
    if (team > 0) continue;
    for (int t = 1; t < teams; ++t) {
      const float2 other = team_sum[threadIdx.x + t * across];
      raise(other.x);
      add(other.x, other.y, team_out[threadIdx.x + t * across]);
    }
    const float share = sum > 0 ? 1 / sum : 0.f;
    const int query_head = kv_head * a.group + head, element = column % (Dim / 4) * 4;
    float* result = a.out + row * a.out_row + query_head * a.out_head + element;
    result[0] = out.x * share, result[1] = out.y * share, result[2] = out.z * share, result[3] = out.w * share;
    if (a.lse && element == 0) a.lse[row * a.lse_row + query_head] = sum > 0 ? high * ln2 + logf(sum) : -INFINITY;
  }
}

// Turn: keys are stored as they were before RoPE and turned by their tokens' ranks in the cache.
template <class T, int Dim, int ColumnTiles, bool Turn>
__global__ void __launch_bounds__(256, 1)
    attend_kernel(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap map) {
  using S = UnitShape<Dim>;
  using P = Partial<Dim, ColumnTiles>;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int group = a.group;

  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* stages = memory;
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(stages + warps * a.stages * S::unit_bytes);
  int2* places = reinterpret_cast<int2*>(barriers + warps * a.stages);  // [warp, stage] of a unit's tokens
  float* merge = reinterpret_cast<float*>(places + warps * a.stages);   // [merge_floats]
  const Pairs pairs(a.rows * a.kv_heads, reinterpret_cast<int*>(merge + merge_floats(Dim, warps, group)));
  __shared__ int warp_sum[8];
  __shared__ int claims[claims_room];
  __shared__ bool merges;
  float2* turns = nullptr;  // [head_dim / 2]
  if constexpr (Turn) {
    __shared__ float2 own_turns[Dim / 2];
    turns = own_turns;
  }

  const unsigned my_stages = shared_address(stages) + warp * a.stages * S::unit_bytes;
  const unsigned my_barriers = shared_address(barriers + warp * a.stages);
  int2* my_places = places + warp * a.stages;
  if (lane == 0) {
    for (int s = 0; s < a.stages; ++s) barrier_init(my_barriers + 8 * s, 1);
    barrier_init_fence();
  }
  if (threadIdx.x < claims_room) claims[threadIdx.x] = 0;
  __syncwarp();
  let_successor_start();
  {
    count_units<true>(a, pairs, warp_sum);
    const UnitLine line(pairs.first[pairs.count], gridDim.x);
    if (static_cast<int>(blockIdx.x) < line.blocks) {
      const int part = static_cast<int>(blockIdx.x) * line.parts_of_span();
      const int x = line.begin(part) + warp + lane * warps;
      if (lane < early_units && x < line.end(part)) {
        const Unit unit = locate<Dim, true>(a, pairs, x);
        const auto ask = [&](int y) {
          if (y < 0) return;
          bulk_prefetch_2d(&map, 0, y);
          if (!a.joint) bulk_prefetch_2d(&map, 0, y + a.value_rows);
        };
        ask(unit.y0), ask(unit.y1);
      }
    }
    __syncthreads();
  }
  wait_for_predecessor();
  count_units<false>(a, pairs, warp_sum);

  for (int pair = blockIdx.x; pair < pairs.count; pair += gridDim.x)
    if (pairs.first[pair + 1] == pairs.first[pair])
      for (int i = threadIdx.x; i < group * Dim; i += blockDim.x) {
        const int row = pair / a.kv_heads, head = pair % a.kv_heads * group + i / Dim;
        a.out[row * a.out_row + head * a.out_head + i % Dim] = 0;
        if (a.lse && i % Dim == 0) a.lse[row * a.lse_row + head] = -INFINITY;
      }
  const UnitLine line(pairs.first[pairs.count], gridDim.x);
  if (static_cast<int>(blockIdx.x) >= line.blocks) return;
  const std::uint64_t policy = read_once_policy();
  if constexpr (Turn) {
    if (threadIdx.x < Dim / 2) turns[threadIdx.x] = turns_of(a.inv_freq[threadIdx.x]);
    __syncthreads();
  }

  // The block's k-th part, the same for all its warps; -1: there is none.
  const auto part_at = [&](int k) {
    if (k == 0) return static_cast<int>(blockIdx.x) * line.parts_of_span();
    if (line.pieces == 0) return -1;
    int part = 0;
    if (lane == 0) part = take_piece(line, claims + k % claims_room, a.taken);
    return __shfl_sync(~0u, part, 0);
  };
  // B fragments of Q^T: columns are the query heads of the group. They are packed as late as registers allow.
  constexpr bool late = ColumnTiles * Dim <= 128;
  float4 query[late ? ColumnTiles : 1][S::steps];
  unsigned qf[ColumnTiles][S::steps][2];
  const auto load_queries = [&](int pair) {
    const int row = pair / a.kv_heads, kv_head = pair % a.kv_heads;
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
      const float* from = a.queries + row * a.query_row + (kv_head * group + min(c * 8 + g, group - 1)) * a.query_head;
#pragma unroll
      for (int j = 0; j < S::steps; ++j) {
        const float4 elements = query_elements(from, q, j);
        if constexpr (late)
          query[c][j] = elements;
        else
          pack_query<T>(elements, c * 8 + g < group ? 1.f : 0.f, qf[c][j]);
      }
    }
  };

  // Copies to come of this warp: item `next` of `items` of the block's part number `ahead_k`.
  int ahead_k = 0, ahead_lo, items, next = 0, ahead_stage = 0;
  const auto items_of = [&](int part) { return (line.end(part) - line.begin(part) - warp + warps - 1) / warps; };
  Unit ahead = {};  // of the lane's item among 32
  const auto issue = [&] {
    while (next == items) {
      if (ahead_k < 0) return;
      const int part = part_at(ahead_k + 1);
      if (part < 0) {
        ahead_k = -1;
        return;
      }
      ++ahead_k, next = 0, ahead_lo = line.begin(part), items = items_of(part);
    }
    if (next % 32 == 0) {
      ahead = {};
      if (next + lane < items) ahead = locate<Dim, false>(a, pairs, ahead_lo + warp + (next + lane) * warps);
    }
    Unit unit;
    unit.y0 = __shfl_sync(~0u, ahead.y0, next % 32), unit.y1 = __shfl_sync(~0u, ahead.y1, next % 32);
    unit.place0 = __shfl_sync(~0u, ahead.place0, next % 32), unit.place1 = __shfl_sync(~0u, ahead.place1, next % 32);
    if (lane == 0) {
      const unsigned to = my_stages + ahead_stage * S::unit_bytes, barrier = my_barriers + 8 * ahead_stage;
      my_places[ahead_stage] = make_int2(unit.place0, unit.place1);
      if (a.joint) {
        barrier_expect(barrier, S::unit_bytes);
        bulk_copy_2d(to, &map, 0, unit.y0, barrier, policy);
      } else if (a.page_size >= unit_tokens) {
        barrier_expect(barrier, S::unit_bytes);
        bulk_copy_2d(to, &map, 0, unit.y0, barrier, policy);
        bulk_copy_2d(to + S::side_bytes, &map, 0, unit.y0 + a.value_rows, barrier, policy);
      } else {
        barrier_expect(barrier, unit.y1 >= 0 ? S::unit_bytes : S::unit_bytes / 2);
        bulk_copy_2d(to, &map, 0, unit.y0, barrier, policy);
        bulk_copy_2d(to + S::side_bytes, &map, 0, unit.y0 + a.value_rows, barrier, policy);
        if (unit.y1 >= 0) {
          bulk_copy_2d(to + S::side_bytes / 2, &map, 0, unit.y1, barrier, policy);
          bulk_copy_2d(to + S::side_bytes * 3 / 2, &map, 0, unit.y1 + a.value_rows, barrier, policy);
        }
      }
    }
    ++next;
    ahead_stage = ahead_stage + 1 == a.stages ? 0 : ahead_stage + 1;
  };

  int k = 0, part = part_at(0), lo = line.begin(part), hi = line.end(part), pair = pairs.of_unit(lo);
  load_queries(pair);  // would wait behind the copies
  ahead_lo = lo, items = items_of(part);
  for (int s = 0; s < a.stages; ++s) issue();
  __syncwarp();  // places are read by all lanes

  const int row0 = token_of<Dim>(g), row1 = row0 + 8;  // tokens of tile rows g and g + 8
  int stage = 0, parity = 0, x = lo + warp;
  while (part >= 0) {
    const int begin = pairs.first[pair], end = pairs.first[pair + 1], stop = min(end, hi);
    const int row = pair / a.kv_heads, kv_head = pair % a.kv_heads, tokens = pairs.tokens(pair);

    if constexpr (late)
#pragma unroll
      for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
        for (int j = 0; j < S::steps; ++j) pack_query<T>(query[c][j], c * 8 + g < group ? 1.f : 0.f, qf[c][j]);
    float o[ColumnTiles][S::tiles][4], high[ColumnTiles][2], sum[ColumnTiles][2];
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
#pragma unroll
      for (int t = 0; t < S::tiles; ++t) o[c][t][0] = o[c][t][1] = o[c][t][2] = o[c][t][3] = 0;
      high[c][0] = high[c][1] = -INFINITY;
      sum[c][0] = sum[c][1] = 0;
    }

    for (; x < stop; x += warps) {
      const unsigned keys = my_stages + stage * S::unit_bytes, values = keys + S::side_bytes;
      const int valid = min(unit_tokens, tokens - (x - begin) * unit_tokens);
      bool seen0 = row0 < valid, seen1 = row1 < valid;
      const int2 place = my_places[stage];
      const int lower = place.x + row0, upper = a.page_size >= unit_tokens ? place.x + row1 : place.y + row1 - 8;
      float s[ColumnTiles][4];
      if constexpr (Turn) {
        const std::int32_t* rank = a.rank + std::int64_t{pair} * a.rank_room;
        const int rank0 = seen0 ? rank[lower] : 0, rank1 = seen1 ? rank[upper] : 0;
        barrier_wait(my_barriers + 8 * stage, parity);
        score_turned_unit<T, Dim>(keys, row0, row1, q, rank0, rank1, turns, a.turn_scale, qf, s);
      } else {
        barrier_wait(my_barriers + 8 * stage, parity);
        score_unit<T, Dim>(keys, row0, row1, q, qf, s);
      }
      if (a.window > 0 || a.mass) {
        if (a.window > 0) {
          const int oldest = a.last[row] - a.window;  // not seen, and what is older neither
          const PageEntry* entries = a.table + pairs.slot[pair] * a.table_slot + kv_head * a.table_head;
          const auto position = [&](int at) {
            const std::byte* frame = a.base + entries[at / a.page_size].frame * granule_bytes;
            return reinterpret_cast<const std::int32_t*>(frame + a.positions)[at % a.page_size];
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
      issue();
      if (++stage == a.stages) stage = 0, parity ^= 1;
    }

    // The block's warps into one.
    float* merge_high = merge;
    float* merge_sum = merge_high + warps * group;
    float* merge_out = merge_sum + warps * group;
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
    // What comes next, so that its queries are under way meanwhile.
    const int done_part = part, done_lo = lo, done_pair = pair, done_k = k;
    const bool whole = begin >= lo && end <= hi;
    if (stop == hi && (part = part_at(++k)) >= 0) lo = line.begin(part), hi = line.end(part), x = lo + warp;
    if (part >= 0) {
      pair = pairs.of_unit(part == done_part ? stop : lo);
      load_queries(pair);
    }
    __syncthreads();
    float* partial = P::of(a, done_part, begin > done_lo);
    for (int i = threadIdx.x; i < group * Dim; i += blockDim.x) {
      const int head = i / Dim, d = i % Dim;
      float top = -INFINITY, total_sum = 0, value = 0;
      for (int w = 0; w < warps; ++w) top = fmaxf(top, merge_high[w * group + head]);
      if (top != -INFINITY)
        for (int w = 0; w < warps; ++w) {
          const float weight = exp2_fast(merge_high[w * group + head] - top);
          total_sum += weight * merge_sum[w * group + head];
          value += weight * merge_out[(w * group + head) * Dim + d];
        }
      if (whole) {
        const int query_head = kv_head * group + head;
        a.out[row * a.out_row + query_head * a.out_head + d] = total_sum > 0 ? value / total_sum : 0.f;
        if (a.lse && d == 0)
          a.lse[row * a.lse_row + query_head] = total_sum > 0 ? top * ln2 + logf(total_sum) : -INFINITY;
      } else {
        if (d == 0) partial[head * 2] = top, partial[head * 2 + 1] = total_sum;
        partial[2 * P::heads + i] = value;
      }
    }
    if (!whole) {
      const int from = line.part_of(begin), to = line.part_of(end - 1);
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();  // of the block's writes, which the barrier has put in front
        merges = atomicAdd(a.arrived + done_pair, 1) == to - from;
        if (merges) a.arrived[done_pair] = 0;
        __threadfence();
      }
      __syncthreads();
      if (merges) merge_parts<Dim, ColumnTiles>(a, line, done_pair, begin, from, to, merge);
    }
    __syncthreads();
    if (part != done_part && threadIdx.x == 0) atomicExch(claims + done_k % claims_room, 0);
  }
}

template <class T, int Dim, int ColumnTiles, bool Turn>
void launch(Args a, const CUtensorMap& map, cudaStream_t stream) {
  using S = UnitShape<Dim>;
  const int warps = Dim > 128 ? 4 : 8;
  const std::int64_t fixed = std::int64_t{merge_floats(Dim, warps, a.group)} * 4 + Pairs::bytes_of(a.rows * a.kv_heads);
  constexpr int own = Turn && Dim > 128 ? 2048 : 1024;  // static shared memory, aligned
  const std::int64_t limit = cuda::shared_bytes() - own;
  a.stages = static_cast<int>(std::min<std::int64_t>(16, (limit - fixed) / (warps * (S::unit_bytes + 16))));
  if (a.stages < 2)
    throw Error(Errc::unsupported,
                "got a group of " + std::to_string(a.group) + " query heads of " + std::to_string(Dim) +
                    ", wanted one that fits shared memory",
                "op attend");
  const int bytes = static_cast<int>(warps * a.stages * (S::unit_bytes + 16) + fixed);
  const auto kernel = attend_kernel<T, Dim, ColumnTiles, Turn>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(cuda::shared_bytes() - own));
  cuda::check(once, "attend");
  cuda::launch("attend", kernel, cuda::multiprocessors(), warps * 32, bytes, stream, true, a, map);
}

// The kernel with Turn (attend_turned.cu): head_dim 64, 128 or 256.
void launch_turned(const Args& a, int dim, bool half, const CUtensorMap& map, cudaStream_t stream);

}  // namespace kvlab::ops::decode
