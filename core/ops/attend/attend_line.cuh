// Work of the blocks of attention's decode kernel (attend_kernel.cuh): arguments, the line of units and its parts, and
// the pages of a unit.
#pragma once
#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "base/line.cuh"
#include "ops/attend/attend_shares.cuh"
#include "ops/attend/attend_unit.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops::decode {
using namespace cuda;

constexpr int max_pairs = 1024;  // (row, KV head) pairs of one launch

struct Args {
  const PageEntry* table;
  std::int64_t table_slot, table_head;
  const std::int32_t* length;
  std::int64_t length_slot, length_head;
  const std::int32_t* slots;
  // In a cache of two codecs, the pages of the second one form a head's lower run. A kernel reads both runs, or takes a
  // launch for each. `part` says which run this launch reads.
  enum Part : int { all, lower, rest } part;
  const std::int32_t* lower_pages;  // [slot, kv_head], null = no head has a lower run
  std::int64_t lower_slot, lower_head;
  const float *prior_out, *prior_lse;  // [row, query head, head_dim], [row, query head], dense: of the lower pages
  const std::int32_t *list, *list_count;
  std::int64_t list_row, list_head, count_row, count_head;
  int list_room;              // entries of a head's list of tokens
  View<const float, 3> bias;  // of listed tokens: [row, query head, token place], or empty
  const float* queries;
  std::int64_t query_row, query_head;
  float *out, *lse, *mass;
  void* rounded;  // [row, query head, head_dim] of T, or null
  std::int64_t out_row, out_head, lse_row, mass_row, mass_head;
  const std::byte* base;
  const std::int32_t* last;
  float* partial;
  int* arrived;
  std::int64_t keys, positions;  // offsets of the keys and of the positions in a frame
  int rows, kv_heads, group, page_size, window;
  PairOf pair_of;
  int blocks_each;  // whole blocks that every pair could have
  int value_rows;   // 128-byte rows from a page's keys to its values
  int stages;
  bool joint;  // a page is one unit: its keys and values are contiguous
  bool half;   // `rounded` is f16
  HeadLogits logits;
  int logits_at_once;        // numbers of a store
  MassShares shares;         // data null = none; else `lse` is there
  bool adds;                 // the kernel adds the shares to token state
  FrameColumn state;         // of the sums
  GroupRule rule;            // of the sums
  std::int32_t* error;       // PagedKv::error
  bool wide;                 // four elements of `out` can be one store
  float scale;               // factor of the scores, times log2(e)
  const std::int32_t* rank;  // [row, kv_head, rank_room] if the kernel rotates keys
  const float* inv_freq;     // [head_dim / 2]
  float turn_scale;          // factor of rotated keys
  int rank_room;
};

__device__ __forceinline__ int lower_pages_of(const Args& a, int slot, int head) {
  return a.lower_pages[slot * a.lower_slot + head * a.lower_head];
}

// A unit that a lane has looked up: rows of the tensor map, and places of its first tokens in the cache.
struct Unit {
  int y0, y1;  // y1: row of the second page if pages have 8 tokens, or 16 in units of 32; else -1
  int place0, place1;
  int lower;  // whether it lies in a lower run
};

// The units of pairs, in a block's shared memory. Runs: 2 = a pair has a lower run and the rest, each in whole units.
template <int Runs>
struct Pairs {
  int count, unit;         // unit: its tokens
  int* first;              // [pair, run] units in front; [count, 0]: all units
  unsigned char* missing;  // [pair, run] tokens missing from the run's last unit

  static constexpr int bytes_of(int pairs) { return (pairs * Runs + 1) * 4 + pairs * Runs; }
  __device__ Pairs(int pairs, int unit, int* memory)
      : count(pairs), unit(unit), first(memory), missing(reinterpret_cast<unsigned char*>(memory + pairs * Runs + 1)) {}
  __device__ __forceinline__ int begin(int pair) const { return first[pair * Runs]; }
  __device__ __forceinline__ int end(int pair) const { return first[(pair + 1) * Runs]; }
  // The run of unit x, which is one of the pair's: 0 = the lower one, if there are two.
  __device__ __forceinline__ int run_of(int pair, int x) const {
    return Runs == 2 && x >= first[pair * Runs + 1] ? 1 : 0;
  }
  __device__ __forceinline__ int begin(int pair, int run) const { return first[pair * Runs + run]; }
  __device__ __forceinline__ int end(int pair, int run) const { return first[pair * Runs + run + 1]; }
  __device__ __forceinline__ int tokens(int pair, int run) const {
    return (end(pair, run) - begin(pair, run)) * unit - missing[pair * Runs + run];
  }
};

template <int Runs>
struct FirstUnit {
  const int* first;
  __device__ __forceinline__ int operator()(int pair) const { return first[pair * Runs]; }
};
template <int Runs>
using UnitLine = Line<FirstUnit<Runs>>;

// unit_rows: rows of the tensor map from a unit of a page to the next one.
template <int Runs>
__device__ __forceinline__ Unit locate(const Args& a, const Pairs<Runs>& pairs, const UnitLine<Runs>& line,
                                       int unit_rows, int x) {
  const int pair = line.pair_of(x), run = pairs.run_of(pair, x), u = x - pairs.begin(pair, run),
            row = a.pair_of.row(pair), head = pair - row * a.kv_heads, slot = a.slots[row];
  const bool behind = Runs == 2 ? run == 1 : a.part == Args::rest;
  const int in_front = behind ? lower_pages_of(a, slot, head) : 0, first_place = in_front * a.page_size;
  const PageEntry* entries = a.table + slot * a.table_slot + head * a.table_head + in_front;
  const std::int32_t* list = a.list ? a.list + row * a.list_row + head * a.list_head : nullptr;
  Unit out;
  out.lower = Runs == 2 && run == 0;
  out.y1 = -1, out.place1 = 0;
  if (a.page_size >= pairs.unit) {
    const int shift = __ffs(a.page_size / pairs.unit) - 1, i = u >> shift, sub = u - (i << shift);
    const int page = list ? list[i] : i;
    out.y0 = entries[page].frame + sub * unit_rows;
    out.place0 = first_place + page * a.page_size + sub * pairs.unit;
  } else {
    const int count = (pairs.tokens(pair, run) + a.page_size - 1) / a.page_size;
    const int p0 = list ? list[2 * u] : 2 * u;
    out.y0 = entries[p0].frame;
    out.place0 = first_place + p0 * a.page_size;
    if (2 * u + 1 < count) {
      const int p1 = list ? list[2 * u + 1] : 2 * u + 1;
      out.y1 = entries[p1].frame;
      out.place1 = first_place + p1 * a.page_size;
    }
  }
  return out;
}

// Counts the tokens of pairs `begin` and on, up to `Most`, in each run. All its loads take two round trips.
// Listed: the list has tokens.
template <bool Listed, int Runs, int Most>
__device__ __forceinline__ void count_tokens(const Args& a, int begin, int pairs, int (&tokens)[Most][Runs]) {
  int row[Most], head[Most], slot[Most], count[Most], length[Most], last[Most], lower[Most];
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    const int pair = min(begin + i, pairs - 1);
    row[i] = a.pair_of.row(pair), head[i] = pair - row[i] * a.kv_heads;
    slot[i] = a.slots[row[i]];
    count[i] = a.list ? a.list_count[row[i] * a.count_row + head[i] * a.count_head] : 0;
  }
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    length[i] = a.length[slot[i] * a.length_slot + head[i] * a.length_head];
    last[i] = !Listed && count[i] > 0 ? a.list[row[i] * a.list_row + head[i] * a.list_head + count[i] - 1] : 0;
    lower[i] = Runs == 2 || a.part != Args::all ? lower_pages_of(a, slot[i], head[i]) * a.page_size : 0;
  }
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    const int newest = (length[i] - 1) / a.page_size;
    const int lacking = last[i] == newest ? (newest + 1) * a.page_size - length[i] : 0;
    lower[i] = min(lower[i], length[i]);
    if constexpr (Listed) {
      tokens[i][0] = length[i] > 0 ? max(0, min(count[i], a.list_room)) : 0;
      continue;
    }
    if constexpr (Runs == 2)
      tokens[i][0] = lower[i], tokens[i][1] = length[i] - lower[i];
    else
      tokens[i][0] = a.list                  ? (count[i] > 0 ? count[i] * a.page_size - lacking : 0)
                     : a.part == Args::lower ? lower[i]
                                             : length[i] - lower[i];
  }
}

// Fills `to` and returns the units of the longest pair. each: pairs of a thread. warp_sum, warp_most: one int per warp.
template <int Threads, bool Listed, int Runs>
__device__ __forceinline__ int count_units(const Args& a, const Pairs<Runs>& to, int each, int* warp_sum,
                                           int* warp_most) {
  constexpr int at_once = 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = threadIdx.x * each;
  int own = 0, most = 0;
#pragma unroll 1
  for (int first = 0; first < each; first += at_once) {
    int tokens[at_once][Runs];
    count_tokens<Listed>(a, begin + first, to.count, tokens);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int pair = begin + first + i, before = own;
      if (first + i >= each || pair >= to.count) continue;
#pragma unroll
      for (int run = 0; run < Runs; ++run) {
        const int units =
            static_cast<int>(static_cast<unsigned>(tokens[i][run] + to.unit - 1) / static_cast<unsigned>(to.unit));
        to.first[pair * Runs + run] = own;
        to.missing[pair * Runs + run] = static_cast<unsigned char>(units * to.unit - tokens[i][run]);
        own += units;
      }
      most = max(most, own - before);
    }
  }
  const int before = sum_through_lane(own);
  most = most_of_lanes(most);
  if (lane == 31) warp_sum[warp] = before, warp_most[warp] = most;
  __syncthreads();
  int offset = before - own;
  for (int w = 0; w < warp; ++w) offset += warp_sum[w];
  for (int w = 0; w < Threads / 32; ++w) most = max(most, warp_most[w]);
#pragma unroll 1
  for (int i = 0; i < each * Runs; ++i)
    if (begin * Runs + i < to.count * Runs) to.first[begin * Runs + i] += offset;
  if (threadIdx.x == Threads - 1) to.first[to.count * Runs] = offset + own;
  __syncthreads();
  return most;
}

}  // namespace kvlab::ops::decode
