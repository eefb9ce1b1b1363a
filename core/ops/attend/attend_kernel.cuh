// Attention of decode steps: the kernel, for every storage that it can pipeline. A class of rows (attend_plain.cuh,
// attend_codes.cuh) says how a unit comes to shared memory, and multiplies it.
//
// Each multiprocessor has one block. The units of all (row, KV head) pairs, of 16 tokens or 32 of codes, form one line,
// which the blocks share out (attend_line.cuh), and within a block its warps. So ragged batches and long single
// sequences fill the machine alike. Every warp runs its own pipeline over its units. Bulk copies (TMA, 128-byte
// swizzle) bring K and V of a unit; lanes copy those of listed tokens row by row. Tensor cores compute with the query
// heads of the group as columns.
//
// In a cache of two codecs a pair has two runs of units, one of each codec. A warp adds up both.
//
// A warp writes the output of a pair that it has to itself. Other results meet in shared memory, where the block
// combines them. Blocks that share a pair write partial results; the last block to arrive merges them
// (attend_merge.cuh) in the order of their numbers.
//
// With sums of mass a block then waits for those merges, and adds what its own units got (attend_sums.cuh). Or it
// leaves the shares for a later launch (late_mass.cu).
#pragma once
#include <algorithm>

#include "base/lanes.cuh"
#include "ops/attend/attend.hpp"
#include "ops/attend/attend_merge.cuh"
#include "ops/attend/attend_sums.cuh"

namespace kvlab::ops::decode {

// A place in a warp's ring of stages. `odd` is the parity of the phase that its barrier is in.
struct Place {
  int stage = 0;
  unsigned odd = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, odd ^= 1;
  }
};

// The units of a block's warps.
template <int Warps>
class Shares {
 public:
  __device__ Shares(int begin, int end)
      : begin_(begin), each_((end - begin) / Warps), longer_(end - begin - each_ * Warps) {}
  __device__ __forceinline__ int begin(int warp) const { return begin_ + warp * each_ + min(warp, longer_); }
  __device__ __forceinline__ int warp_of(int unit) const {
    const int x = unit - begin_, in_longer = longer_ * (each_ + 1);
    return x < in_longer ? x / (each_ + 1) : longer_ + (x - in_longer) / each_;
  }

 private:
  int begin_, each_, longer_;  // longer_: warps with one unit more
};

// A pair of several warps, [from, to], or of several blocks.
struct Joint {
  int pair, from, to;
};

// The query heads of a group as columns of a tile. Few: four heads at most. Then the lanes of columns 4 to 7 have the
// same heads as those of columns 0 to 3, and the tokens 8 on.
template <bool Few>
struct Columns {
  static constexpr bool few = Few;
  static constexpr int row_step = Few ? 16 : 8;  // between the tokens of a lane in a unit
  static constexpr int nearest = Few ? 2 : 4;    // distance of the next lane with other tokens of the same heads
  // The query head whose elements a lane has, the lane's pair of columns, and its first tile row less g.
  static __device__ __forceinline__ int head_of(int g) { return Few ? g % 4 : g; }
  static __device__ __forceinline__ int pair_of(int q) { return Few ? q % 2 : q; }
  static __device__ __forceinline__ int rows_on(int q) { return Few ? q / 2 * 8 : 0; }
};

// The rows that one launch reads. Lower: those of lower runs, void = there are none.
template <class Rows, class Lower>
struct Storage {
  static constexpr int runs = 2, stage_bytes = std::max(Rows::stage_bytes, Lower::stage_bytes),
                       copied_bytes = std::min(Rows::copied_bytes, Lower::copied_bytes);
  static_assert(Rows::unit == Lower::unit && Rows::warps == Lower::warps && Rows::dim == Lower::dim && !Rows::turned &&
                Rows::few == Lower::few);
};
template <class Rows>
struct Storage<Rows, void> {
  static constexpr int runs = 1, stage_bytes = Rows::stage_bytes, copied_bytes = Rows::copied_bytes;
};

// One for each run: that of the rest is the last.
template <int Runs>
struct Maps {
  CUtensorMap of[Runs];
};

// Floats of a block's shared memory behind the barriers: [warp] the result of its first pair, [warp] two heads of a
// result on their way out, [warp] a lower run's result.
template <int Dim, int Runs>
struct Extra {
  int first, two, kept;
  __host__ __device__ constexpr explicit Extra(int group)
      : first(Slot<Dim>::floats_of(group)),
        two(Slot<Dim>::floats_of(2)),
        kept(Runs == 2 ? Slot<Dim>::floats_of(group) : 0) {}
  __host__ __device__ constexpr int floats(int warps) const { return warps * (first + two + kept); }
};

// Writes a lane's scores of the unit's first `valid` tokens, [place, query head of the group]. q: its pair of columns.
// The code of a whole unit is short, because every lane's instructions count here.
template <int RowStep, int ColumnTiles, int TileRows>
__device__ __forceinline__ void put_scores(const Args& a, float* to, int group, int q, int tile_row, int valid,
                                           const int (&place)[TileRows], const float (&s)[ColumnTiles][2 * TileRows]) {
  if (a.logits_at_once > 1 && valid == RowStep * TileRows) {
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c)
      if (const int head = c * 8 + 2 * q; head < group)
#pragma unroll
        for (int r = 0; r < TileRows; ++r)  // logits_at_once sees to it that 32 bits hold the product
          store8(to + (place[r] * group + head), s[c][2 * r], s[c][2 * r + 1]);
    return;
  }
#pragma unroll 1
  for (int h = 0; h < 2 * ColumnTiles; ++h) {
    const int head = h / 2 * 8 + 2 * q + h % 2;
#pragma unroll
    for (int r = 0; r < TileRows; ++r) {
      float x = s[0][2 * r];
#pragma unroll
      for (int i = 1; i < 2 * ColumnTiles; ++i) x = i == h ? s[i / 2][2 * r + i % 2] : x;
      if (head < group && tile_row + RowStep * r < valid) to[std::int64_t{place[r]} * group + head] = x;
    }
  }
}

// Where a lane leaves its shares of a head (attend_shares.cuh).
template <class Heads>
struct LaneShares {
  std::byte* to;  // in the head's first record
  int high;       // bytes from there to the lane's `high`

  __device__ LaneShares(const MassShares& shares, std::byte* head, int pairs, int token, int q) {
    const int at = shares.behind_high + (token * pairs + Heads::pair_of(q)) * shares.of_pair;
    const int on = Heads::rows_on(q) / 8 * shares.of_pair / 2;
    to = head + at + on, high = 8 * Heads::pair_of(q) - at - on;
  }
  // record: of the unit's tokens from 0 and from 16 on. All of both are written: those from `valid` on have share 0.
  template <int ColumnTiles, int Values>
  __device__ __forceinline__ void put(const MassShares& shares, int group, int g, int q, int valid,
                                      const int (&record)[2], const float (&share)[ColumnTiles][Values],
                                      const float (&highs)[ColumnTiles][2]) const {
    constexpr int each = 32 / Heads::row_step;  // a lane's shares of 16 tokens, of both heads
#pragma unroll
    for (int u = 0; u < Values / each; ++u) {
      std::byte* const at = to + std::int64_t{record[u]} * shares.record;
#pragma unroll
      for (int c = 0; c < ColumnTiles; ++c) {
        if (8 * c + 2 * Heads::pair_of(q) >= group || 16 * u >= valid) continue;
        const float* const x = share[c] + each * u;
        if constexpr (each == 2) {
          const unsigned both = Pair<__half>::pack(x[0], x[1]);
          if (group == 1)
            *reinterpret_cast<std::uint16_t*>(at) = static_cast<std::uint16_t>(both);
          else
            *reinterpret_cast<unsigned*>(at) = both;
        } else if (group == 1) {
          *reinterpret_cast<unsigned*>(at) = Pair<__half>::pack(x[0], x[2]);
        } else {
          store8(at + 32 * c, Pair<__half>::pack(x[0], x[1]), Pair<__half>::pack(x[2], x[3]));
        }
        if (g == u) store8(reinterpret_cast<float*>(at + high + 32 * c), highs[c][0], highs[c][1]);
      }
    }
  }
};

// Adds the biases of a lane's two query heads of each column tile. place: -1 = none.
template <int ColumnTiles, int TileRows>
__device__ __forceinline__ void add_bias(const Args& a, int row, int first_head, int group, int q,
                                         const int (&place)[TileRows], float (&s)[ColumnTiles][2 * TileRows]) {
  if (!a.bias.data) return;
#pragma unroll
  for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = c * 8 + 2 * q + h;
      if (head >= group) continue;
#pragma unroll
      for (int r = 0; r < TileRows; ++r)
        if (static_cast<unsigned>(place[r]) < static_cast<unsigned>(a.bias.extent[2]))
          s[c][2 * r + h] = fmaf(a.bias(row, first_head + head, place[r]), log2e, s[c][2 * r + h]);
    }
}

// Copies the listed tokens of a warp's units to its stages, in order. A lane looks up a token of every second unit.
// Both units of a pair are looked up together: list entries a pair ahead, their pages before the pair's first copy. A
// number that names no token on the device gets zeros, and the kernel hides it.
template <class Rows>
class ListedTokens {
 public:
  // The warp's units are [begin, end).
  template <int Runs>
  __device__ __forceinline__ void start(const Args& a, const Pairs<Runs>& pairs, const UnitLine<Runs>& line, int begin,
                                        int end) {
    next_ = begin;
    find(a, pairs, line, begin, end);
    look_up(a);
    find(a, pairs, line, begin + 2, end);
  }
  // stage: of shared memory, at address `to`.
  template <int Runs>
  __device__ __forceinline__ void copy_next(const Args& a, const Pairs<Runs>& pairs, const UnitLine<Runs>& line,
                                            int end, unsigned char* stage, unsigned to, unsigned barrier) {
    constexpr int chunks = Rows::dim / 8, at_once = 32 / chunks;  // of 16 bytes in a row; rows of one copy
    const int lane = threadIdx.x % 32, half = second_ ? 16 : 0;
#pragma unroll
    for (int j = 0; j < unit_tokens / at_once; ++j) {
      const int token = j * at_once + lane / chunks;
      const std::int64_t key = __shfl_sync(~0u, key_, half + token);
      const unsigned offset = swizzled(static_cast<unsigned>(token * Rows::dim * 2 + lane % chunks * 16));
      if (key < 0) {
        *reinterpret_cast<uint4*>(stage + offset) = {};
        *reinterpret_cast<uint4*>(stage + Rows::S::side_bytes + offset) = {};
        continue;
      }
      const std::byte* from = a.base + key + lane % chunks * 16;
      copy_async16(to + offset, from);
      copy_async16(to + Rows::S::side_bytes + offset, from + std::int64_t{a.value_rows} * 128);
    }
    arrive_after_copies(barrier);
    second_ = !second_;
    if (second_) return;
    next_ += 2;
    look_up(a);
    find(a, pairs, line, next_ + 2, end);
  }

 private:
  // Starts the load of the lane's list entry in units x and x + 1.
  template <int Runs>
  __device__ __forceinline__ void find(const Args& a, const Pairs<Runs>& pairs, const UnitLine<Runs>& line, int x,
                                       int end) {
    const int lane = threadIdx.x % 32;
    x += lane / 16;
    length_ = 0;
    if (x >= end) return;
    const int pair = line.pair_of(x), row = a.pair_of.row(pair), head = pair - row * a.kv_heads;
    const int entry = (x - pairs.begin(pair)) * unit_tokens + lane % 16;
    if (entry >= pairs.tokens(pair, 0)) return;
    const int slot = a.slots[row];
    entries_ = a.table + slot * a.table_slot + head * a.table_head;
    length_ = a.length[slot * a.length_slot + head * a.length_head];
    place_ = a.list[row * a.list_row + head * a.list_head + entry];
  }
  // key_: offset of the token's key from the tier's start, -1 = none.
  __device__ __forceinline__ void look_up(const Args& a) {
    key_ = -1;
    if (static_cast<unsigned>(place_) >= static_cast<unsigned>(length_)) return;
    const int page = place_ / a.page_size, frame = entries_[page].frame;
    if (frame >= 0) key_ = std::int64_t{frame} * granule_bytes + a.keys + (place_ - page * a.page_size) * Rows::dim * 2;
  }

  const PageEntry* entries_ = nullptr;
  std::int64_t key_ = -1;
  int place_ = 0, length_ = 0, next_ = 0;
  bool second_ = false;
};

template <class Rows, class Lower>
__global__ void __launch_bounds__(Rows::warps * 32, 1)
    attend_kernel(const __grid_constant__ Args a, const __grid_constant__ Maps<Storage<Rows, Lower>::runs> maps) {
  using T = typename Rows::Element;
  using Kind = Storage<Rows, Lower>;
  constexpr int Dim = Rows::dim, ColumnTiles = Rows::column_tiles, runs = Kind::runs, last_run = runs - 1;
  constexpr bool scores_leave = runs == 1;  // two kinds of rows have no registers for that, nor for a window
  using P = Partial<Dim, ColumnTiles>;
  constexpr int warps = Rows::warps, threads = warps * 32, stage_bytes = Kind::stage_bytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int group = a.group;

  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* stages = memory;
  const int ring_bytes = a.stages * stage_bytes;
  std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(stages + warps * ring_bytes);
  float* results = reinterpret_cast<float*>(barriers + warps * a.stages);
  const Extra<Dim, runs> extra(group);
  const auto first_slot = [&](int w) { return Slot<Dim>{results + w * extra.first, group}; };
  // A warp's stages are free when it has read its last unit.
  const auto last_slot = [&](int w) { return Slot<Dim>{reinterpret_cast<float*>(stages + w * ring_bytes), group}; };
  const Slot<Dim> two_heads{results + warps * extra.first + warp * extra.two, 2};
  const Pairs<runs> pairs(a.rows * a.kv_heads, Rows::unit, reinterpret_cast<int*>(results + extra.floats(warps)));
  __shared__ int warp_sum[warps], warp_most[warps];
  __shared__ int last_pair_of[warps];  // of the warp's last unit
  __shared__ Joint joint[warps + 1];
  __shared__ int joints;
  // parts: number of blocks that share the block's first and last pair. first_block: the first of these blocks.
  __shared__ int parts[2], first_block[2];  // parts 0: nothing to merge
  __shared__ bool merges[2];
  float2* turns = nullptr;  // [head_dim / 2]
  if constexpr (Rows::turned) {
    __shared__ float2 own_turns[Dim / 2];
    turns = own_turns;
  }

  const unsigned my_stage = shared_address(stages) + static_cast<unsigned>(warp * ring_bytes);
  const unsigned my_barrier = shared_address(barriers + warp * a.stages);
  if (lane == 0) {
    for (int s = 0; s < a.stages; ++s) barrier_init(my_barrier + 8 * s, Rows::listed ? 32 : 1);
    barrier_init_fence();
    last_pair_of[warp] = -1;
    if (warp == 0) joints = 0;
  }
  __syncwarp();
  let_successor_start();
  if (!Rows::listed && threadIdx.x < runs) fetch_map(&maps.of[threadIdx.x]);
  if (static_cast<int>(threadIdx.x) < a.rows) keep_load(a.slots[threadIdx.x]);  // into L1; no kernel writes them
  if (scores_leave && a.logits.out.data) {                                      // L2 has lost these since the last step
    if (threadIdx.x == 0) fetch_line(a.logits.index);
    if (a.logits.heads.flags.data && static_cast<int>(threadIdx.x) < a.rows)
      fetch_line(&a.logits.heads.flags(a.slots[threadIdx.x], 0));
  }
  wait_for_predecessor();
  const int each = (pairs.count + threads - 1) / threads;
  const int longest = count_units<threads, Rows::listed>(a, pairs, each, warp_sum, warp_most);

#pragma unroll 1
  for (int pair = blockIdx.x; pair < pairs.count; pair += gridDim.x)
    if (pairs.end(pair) == pairs.begin(pair))
      for (int column = threadIdx.x; column < group * (Dim / 4); column += blockDim.x)
        put_result<T, Dim>(a, pair, column, Running{});
  // Every block that works has at least one unit, so every block from a pair's first to its last arrives for the pair.
  const UnitLine<runs> line(FirstUnit<runs>{pairs.first}, pairs.count, longest, a.blocks_each);
  const auto part = line.part(blockIdx.x);
  const int lo = part.begin, hi = part.end;
  if (lo >= hi) return;
  const Shares<warps> shares(lo, hi);
  const int begin = shares.begin(warp), end = shares.begin(warp + 1);  // this warp's units
  const std::uint64_t policy = read_once_policy();
  if constexpr (Rows::turned) {
    if (threadIdx.x < Dim / 2) turns[threadIdx.x] = turns_of(a.inv_freq[threadIdx.x]);
    __syncthreads();
  }

  // The loads of the queries start before the copies, else they would wait for them.
  float4 asked[ColumnTiles][Dim / 16];
  const auto ask_queries = [&](int of, int run) {
    const int row = a.pair_of.row(of), kv_head = of - row * a.kv_heads;
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
      const int head = min(c * 8 + Rows::head_of(g), group - 1);
      const float* from = a.queries + row * a.query_row + (kv_head * group + head) * a.query_head;
#pragma unroll
      for (int i = 0; i < Dim / 16; ++i) {
        int element = Rows::query_element(q, 4 * i);
        if constexpr (runs == 2) element = run == 0 ? Lower::query_element(q, 4 * i) : element;
        asked[c][i] = *reinterpret_cast<const float4*>(from + element);
      }
    }
  };
  int pair = 0, run = last_run;
  Unit ahead = {};
  if (begin < end) {
    pair = line.pair_of(begin), run = runs == 2 ? pairs.run_of(pair, begin) : 0;
    ask_queries(pair, run);
    if constexpr (!Rows::listed)
      if (begin + lane < end) ahead = locate(a, pairs, line, Rows::unit_rows, begin + lane);
  }
  Unit current = ahead;  // of the current batch of 32 units
  const auto issue = [&](int i, int stage, const Unit& batch) {
    const int y0 = __shfl_sync(~0u, batch.y0, i % 32), y1 = __shfl_sync(~0u, batch.y1, i % 32);
    int lower = 0;
    if constexpr (runs == 2) lower = __shfl_sync(~0u, batch.lower, i % 32);
    if (!elect_lane()) return;
    const unsigned to = my_stage + static_cast<unsigned>(stage * stage_bytes), barrier = my_barrier + 8 * stage;
    if constexpr (runs == 2)
      if (lower) return Lower::copy(a, &maps.of[0], to, y0, y1, barrier, policy);
    Rows::copy(a, &maps.of[last_run], to, y0, y1, barrier, policy);
  };
  const int items = end - begin;
  [[maybe_unused]] ListedTokens<Rows> tokens_of_list;
  if constexpr (Rows::listed) {
    tokens_of_list.start(a, pairs, line, begin, end);
#pragma unroll 1
    for (int i = 0; i < a.stages && i < items; ++i)
      tokens_of_list.copy_next(a, pairs, line, end, stages + warp * ring_bytes + i * stage_bytes,
                               my_stage + static_cast<unsigned>(i * stage_bytes), my_barrier + 8 * i);
    __syncwarp();  // zeros that other lanes have written
  } else {
#pragma unroll 1
    for (int i = 0; i < a.stages && i < items; ++i) issue(i, i, ahead);
  }

  const int first_pair = line.pair_of(lo), last_pair = line.pair_of(hi - 1);
  if (threadIdx.x < 2) {
    const int of = threadIdx.x ? last_pair : first_pair;
    const bool shared = (pairs.begin(of) < lo || pairs.end(of) > hi) && (threadIdx.x == 0 || last_pair != first_pair);
    first_block[threadIdx.x] = line.first_block(of);
    parts[threadIdx.x] = shared ? line.last_block(of) - line.first_block(of) + 1 : 0;
  }

  Place here;
  int i = 0;  // units that this warp has read
  LaneResult<Dim, ColumnTiles> result;
  // Reads the run's units up to `stop`.
  const auto read_run = [&](auto kind, int stop) {
    using R = typename decltype(kind)::type;
    const int run_begin = pairs.begin(pair, run), tokens = pairs.tokens(pair, run);
    const int row = a.pair_of.row(pair), kv_head = pair - row * a.kv_heads;
    const int tile_row = R::token_of(g) + R::rows_on(q);  // the lane's first token, of tile row g or g + 8
    const int heads = R::pair_of(q);                      // its pair of columns
    // Where the head's shares go, or its scores by token. Loads of the latter start before anything waits for the
    // queries.
    std::byte* shares = nullptr;
    float* scores = nullptr;
    if (a.shares.data) {
      shares = a.shares.of(row, kv_head);
    } else if (scores_leave && a.logits.out.data) {
      // HeadLogits::of, but none of its loads waits for another.
      const int slot = a.slots[row], index = a.logits.index[kv_head];
      const int held = a.length[slot * a.length_slot + kv_head * a.length_head];
      if ((index >= 0) & a.logits.heads.on(slot, kv_head) & (held <= a.logits.out.extent[2]))
        scores = a.logits.out.data + row * a.logits.out.stride[0] + index * a.logits.out.stride[1];
    }
    int cached = 0;  // tokens of the head, where lists may name others
    if constexpr (R::listed) cached = a.length[a.slots[row] * a.length_slot + kv_head * a.length_head];
    const LaneShares<Columns<R::few>> lane_shares(a.shares, shares, (group + 1) / 2, R::token_of(g), q);
    R rows(a, asked, group, g, q);
    float(&high)[ColumnTiles][2] = result.high, (&sum)[ColumnTiles][2] = result.sum;
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) high[c][0] = high[c][1] = -INFINITY, sum[c][0] = sum[c][1] = 0;

    // Without a list, units of a run follow each other in the cache.
    const bool in_order = !R::turned && (scores || shares) && !a.list;
    // One test for what few launches want, since codes are bound by the instructions of a unit.
    const bool places_asked =
        !R::turned && !R::listed && scores_leave && (a.window > 0 || (scores && !in_order) || a.mass);
    const bool hides_or_keeps = scores_leave && (a.window > 0 || scores || a.mass);
    const int first_place = in_order ? __shfl_sync(~0u, current.place0, i % 32) - i * R::unit : 0;
#pragma unroll 1
    for (; begin + i < stop; ++i) {
      const unsigned at = my_stage + static_cast<unsigned>(here.stage * stage_bytes);
      const int valid = min(R::unit, tokens - (begin + i - run_begin) * R::unit);
      if constexpr (!R::turned && !R::listed) barrier_wait(my_barrier + 8 * here.stage, here.odd);
      constexpr int step = R::row_step, tile_rows = R::unit / step;  // of each lane; row r has token tile_row + step r
      int place[tile_rows];                                          // in the cache, once find_places has run
      const auto find_places = [&] {
        if constexpr (R::listed) {
          const std::int32_t* list =
              a.list + row * a.list_row + kv_head * a.list_head + std::int64_t{begin + i - run_begin} * R::unit;
#pragma unroll
          for (int r = 0; r < tile_rows; ++r) place[r] = tile_row + step * r < valid ? list[tile_row + step * r] : -1;
        } else {
          const int place0 = __shfl_sync(~0u, current.place0, i % 32);
          const int place1 = __shfl_sync(~0u, current.place1, i % 32);
#pragma unroll
          for (int r = 0; r < tile_rows; ++r) {
            const int t = tile_row + step * r;
            place[r] = t < a.page_size ? place0 + t : place1 + t - a.page_size;
          }
        }
      };
      float s[ColumnTiles][2 * tile_rows];  // [2 r + h]: scores times log2(e)
      if constexpr (R::listed) find_places();
      if constexpr (R::turned) {
        find_places();
        const std::int32_t* rank = a.rank + std::int64_t{pair} * a.rank_room;
        const int rank0 = tile_row < valid ? rank[place[0]] : 0, rank1 = tile_row + 8 < valid ? rank[place[1]] : 0;
        barrier_wait(my_barrier + 8 * here.stage, here.odd);
        rows.score_turned(at, tile_row, rank0, rank1, turns, s);
      } else {
        if constexpr (R::listed) barrier_wait(my_barrier + 8 * here.stage, here.odd);
        rows.score(at, s);
      }
      if constexpr (R::listed) add_bias(a, row, kv_head * group, group, q, place, s);
      [[maybe_unused]] const auto leave_scores = [&](const float(&of)[ColumnTiles][2 * tile_rows]) {
        if (in_order) {
          int of_unit[tile_rows];
#pragma unroll
          for (int r = 0; r < tile_rows; ++r) of_unit[r] = tile_row + step * r;
          float* to = scores + std::int64_t{first_place + i * R::unit} * group;
          put_scores<step>(a, to, group, heads, tile_row, valid, of_unit, of);
        } else {
          put_scores<step>(a, scores, group, heads, tile_row, valid, place, of);
        }
      };
      // Stores follow the next copy, so that it does not wait for them, where registers hold the scores until then.
      constexpr bool late = ColumnTiles * tile_rows == 2;
      if (R::listed || valid < R::unit || hides_or_keeps) {
        if (places_asked) find_places();
        bool seen[tile_rows];
#pragma unroll
        for (int r = 0; r < tile_rows; ++r)
          seen[r] =
              R::listed ? static_cast<unsigned>(place[r]) < static_cast<unsigned>(cached) : tile_row + step * r < valid;
        if (scores_leave && a.window > 0) {
          const int oldest = a.last[row] - a.window;  // this position and older ones are not seen
          const PageEntry* entries = a.table + a.slots[row] * a.table_slot + kv_head * a.table_head;
#pragma unroll
          for (int r = 0; r < tile_rows; ++r) {
            if (!seen[r]) continue;
            const std::byte* frame = a.base + entries[place[r] / a.page_size].frame * granule_bytes;
            seen[r] = reinterpret_cast<const std::int32_t*>(frame + a.positions)[place[r] % a.page_size] > oldest;
          }
        }
#pragma unroll
        for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
          for (int r = 0; r < tile_rows; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) s[c][2 * r + h] = seen[r] ? s[c][2 * r + h] : -INFINITY;
        if (scores_leave && a.mass && !scores) {
#pragma unroll
          for (int c = 0; c < ColumnTiles; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int head = c * 8 + 2 * heads + h;
              if (head >= group) continue;
              float* to = a.mass + row * a.mass_row + (kv_head * group + head) * a.mass_head;
#pragma unroll
              for (int r = 0; r < tile_rows; ++r)
                if (tile_row + step * r < valid) to[place[r]] = s[c][2 * r + h];
            }
        }
        if constexpr (!late)
          if (scores_leave && scores) leave_scores(s);
      }
      [[maybe_unused]] float logits[ColumnTiles][2 * tile_rows];  // `add` makes shares of s
      if constexpr (late) {
#pragma unroll
        for (int r = 0; r < 2 * tile_rows; ++r) logits[0][r] = s[0][r];
      }
      rows.add(at, valid, s, high, sum);
      if (shares) {
        int first = first_place + i * R::unit, second = first + 16;
        if (!in_order) {
          first = __shfl_sync(~0u, current.place0, i % 32), second = __shfl_sync(~0u, current.place1, i % 32);
          if (a.page_size > 16) second = first + 16;
        }
        lane_shares.put(a.shares, group, g, q, valid, {first / 16, second / 16}, s, high);
      }
      const int freed = here.stage;
      here.next(a.stages);
      __syncwarp();
      const int next = i + a.stages;
      if constexpr (R::listed) {
        if (next < items)
          tokens_of_list.copy_next(a, pairs, line, end, stages + warp * ring_bytes + freed * stage_bytes,
                                   my_stage + static_cast<unsigned>(freed * stage_bytes), my_barrier + 8 * freed);
      } else {
        if (next % 32 == 0 && next < items + 32) {
          Unit fresh = {};
          if (next + lane < items) fresh = locate(a, pairs, line, R::unit_rows, begin + next + lane);
          ahead = fresh;
        }
        if (next < items) issue(next, freed, ahead);
        if ((i + 1) % 32 == 0) current = ahead;
      }
      if constexpr (late && scores_leave)
        if (scores) leave_scores(logits);
    }
    rows.finish();
#pragma unroll
    for (int c = 0; c < ColumnTiles; ++c) {
#pragma unroll
      for (int t = 0; t < Dim / 16; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) result.o[c][t][e] = rows.o[c][t][e];
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[c][h] = sum_of_lanes<R::nearest, 16>(sum[c][h]);
    }
  };

  [[maybe_unused]] bool kept = false;  // the stash has the pair's lower run
#pragma unroll 1
  while (i < items) {
    const int stop = min(pairs.end(pair, run), end);
    if constexpr (runs == 2) {
      const Slot<Dim> stash{results + warps * (extra.first + extra.two) + warp * extra.kept, group};
      if (run == 0) {
        read_run(std::type_identity<Lower>{}, stop);
        stash.template put<Lower>(result, 0, g, q);
        __syncwarp();
        kept = true;
        if (stop < end && stop < pairs.end(pair)) {
          run = 1;
          ask_queries(pair, run);
          continue;
        }
        result.clear();
      } else {
        read_run(std::type_identity<Rows>{}, stop);
      }
      if (kept) stash.template add_to<Rows>(result, g, q);
      kept = false;
    } else {
      read_run(std::type_identity<Rows>{}, stop);
    }
    const int of = pair, of_begin = pairs.begin(of), of_end = pairs.end(of);
    if (i < items) {
      pair = line.pair_of(begin + i), run = runs == 2 ? pairs.run_of(pair, begin + i) : 0;
      ask_queries(pair, run);
    } else if (lane == 0) {
      last_pair_of[warp] = of;
    }
    if (of_begin >= begin && of_end <= end) {
#pragma unroll 1
      for (int head = 0; head < group; head += 2) {
        two_heads.template put<Rows>(result, head, g, q);
        __syncwarp();
#pragma unroll
        for (int x = lane; x < Dim / 2; x += 32)
          if (const int h = x / (Dim / 4); head + h < group)
            put_result<T, Dim>(a, of, head * (Dim / 4) + x,
                               {two_heads.high(h), two_heads.sum(h), two_heads.chunk(h, x % (Dim / 4))});
        __syncwarp();
      }
      continue;
    }
    (i < items ? first_slot(warp) : last_slot(warp)).template put<Rows>(result, 0, g, q);
    if (lane == 0 && (of_begin >= begin || warp == 0))
      joint[atomicAdd(&joints, 1)] = {of, warp, shares.warp_of(min(of_end, hi) - 1)};
  }
  __syncthreads();

  const int columns = group * (Dim / 4);
#pragma unroll 1
  for (int x = threadIdx.x; x < joints * columns; x += threads) {
    const int j = x / columns, column = x - j * columns, head = column / (Dim / 4);
    const Joint of = joint[j];
    const auto slot_of = [&](int w) { return last_pair_of[w] == of.pair ? last_slot(w) : first_slot(w); };
    Running r;
    for (int w = of.from; w <= of.to; ++w) r.high = fmaxf(r.high, slot_of(w).high(head));
    for (int w = of.from; w <= of.to; ++w) {
      const Slot<Dim> slot = slot_of(w);
      r.add(slot.high(head), slot.sum(head), slot.chunk(head, column % (Dim / 4)));
    }
    if (pairs.begin(of.pair) >= lo && pairs.end(of.pair) <= hi) {
      put_result<T, Dim>(a, of.pair, column, r);
    } else {
      float* partial = a.partial + (blockIdx.x * 2 + (pairs.begin(of.pair) > lo ? 1 : 0)) * P::floats;
      if (column % (Dim / 4) == 0) reinterpret_cast<float2*>(partial)[head] = make_float2(r.high, r.sum);
      reinterpret_cast<float4*>(partial + 2 * P::heads)[column] = r.out;
    }
  }

  // The last block to arrive merges a pair that blocks share.
  const bool sums = !Rows::listed && a.adds;
  if (parts[0] + parts[1] == 0 && !sums) return;
  __syncthreads();
  if (threadIdx.x < 2) {
    const int of = threadIdx.x ? last_pair : first_pair, wanted = parts[threadIdx.x];
    const bool comes_last = wanted > 0 && add_released(a.arrived + of, 1) == wanted - 1;
    if (comes_last && !sums) a.arrived[of] = 0;
    merges[threadIdx.x] = comes_last;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (!merges[i]) continue;
    const int of = i ? last_pair : first_pair, from = first_block[i];
    const float* others = a.partial + 2 * from * P::floats;
    merge_parts<T, Dim, ColumnTiles>(a, of, pairs.begin(of) > line.part(from).begin ? others + P::floats : others,
                                     others, parts[i], stages, warps * ring_bytes);
    __syncthreads();
    if (sums && threadIdx.x == 0) add_released(a.arrived + of, 1);
  }
  if (!sums) return;
  if constexpr (!Rows::listed)
    add_shares(a, pairs, line, begin, end, [&] {
      if (threadIdx.x < 2 && parts[threadIdx.x] > 0 && !merges[threadIdx.x])
        wait_for_merge(a.arrived + (threadIdx.x ? last_pair : first_pair), parts[threadIdx.x]);
      __syncthreads();
    });
}

// Shared memory of a launch.
template <class Rows, class Lower>
class Memory {
  using Kind = Storage<Rows, Lower>;
  static constexpr int warps = Rows::warps, stage = Kind::stage_bytes + 8;
  static constexpr int own = Rows::turned && Rows::dim > 128 ? 2048 : 1024;  // bytes of static memory, aligned

 public:
  Memory(int group, int pairs)
      : fixed_(std::int64_t{Extra<Rows::dim, Kind::runs>(group).floats(warps)} * 4 +
               Pairs<Kind::runs>::bytes_of(pairs)) {
    // These bytes in flight hide the memory's latency. More would only queue up in front of small, urgent loads.
    constexpr std::int64_t under_way = 128 << 10;
    constexpr std::int64_t together = warps * Kind::copied_bytes, enough = (under_way + together - 1) / together;
    stages_ = static_cast<int>(std::min(enough, (most_bytes() - fixed_) / (warps * stage)));
    const std::int64_t last_slot = Slot<Rows::dim>::floats_of(group) * 4;  // takes the place of a warp's stages
    if (stages_ < 2 || stages_ * Kind::stage_bytes < last_slot) stages_ = 0;
  }
  int stages() const { return stages_; }  // of a warp; 0 = the launch does not fit
  int bytes() const { return static_cast<int>(warps * stages_ * stage + fixed_); }
  static int most_bytes() { return static_cast<int>(cuda::shared_bytes() - own); }

 private:
  std::int64_t fixed_;
  int stages_;
};

// maps: of the rest and of the lower runs, or of all rows.
template <class Rows, class Lower = void>
void launch(Args a, const CUtensorMap& map, const CUtensorMap* lower_map, cudaStream_t stream) {
  using Kind = Storage<Rows, Lower>;
  const int pairs = a.rows * a.kv_heads;
  const Memory<Rows, Lower> memory(a.group, pairs);
  a.stages = memory.stages();
  if (a.stages == 0)
    throw Error(Errc::unsupported,
                "got a group of " + std::to_string(a.group) + " query heads of " + std::to_string(Rows::dim) +
                    ", wanted one that fits shared memory",
                "op attend");
  const auto kernel = attend_kernel<Rows, Lower>;
  static const cudaError_t once =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory.most_bytes());
  cuda::check(once, "attend");
  const int blocks = cuda::step_multiprocessors();
  a.blocks_each = pairs > 0 ? blocks / pairs : 0;
  Maps<Kind::runs> maps;
  if (lower_map) maps.of[0] = *lower_map;
  maps.of[Kind::runs - 1] = map;
  cuda::launch("attend", kernel, blocks, Rows::warps * 32, memory.bytes(), stream, true, a, maps);
}

// What the arguments of a decode step's kernels have in common (attend.cu): all but rows; those of a launch's rows; the
// map of a plain cache's units.
Args args_of(const AttendArgs& in, const PageLayout& l, Stream s);
void set_rows(Args& a, const AttendArgs& in, int begin, int rows);
const CUtensorMap& map_of_units(const PagedKv& kv, const Args& a);

// Launches the kernel on turned keys (attend_turned.cu): head_dim 64, 128 or 256.
void launch_turned(const Args& a, int dim, bool half, const CUtensorMap& map, cudaStream_t stream);
// The same on listed tokens (attend_listed.cu).
void launch_listed(const Args& a, int dim, bool half, cudaStream_t stream);
// Whether the kernel has rows for pages of codes (attend_codes.cu), with groups up to 8; launches it on them.
bool takes_codes(const PageLayout& l);
void launch_codes(const Args& a, const PageLayout& l, cudaStream_t stream);
// The same for both runs of a cache of two codecs in one launch, without a window, logits and mass, but with shares.
bool takes_both(const PageLayout& l, const PageLayout& lower, int group, int pairs);
void launch_both(const Args& a, const PageLayout& l, const PageLayout& lower, cudaStream_t stream);

}  // namespace kvlab::ops::decode
