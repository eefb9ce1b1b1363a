// What the blocks of attention's decode kernel work on: arguments, the line of units and its parts, and where a unit's
// pages are (attend_kernel.cuh).
#pragma once
#include "base/launch.cuh"
#include "ops/attend_unit.cuh"

namespace kvlab::ops::decode {
using namespace cuda;

constexpr int max_pairs = 1024;  // (row, KV head) pairs of one launch

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
  void* rounded;  // or null: [row, query head, head_dim] of T
  std::int64_t out_row, out_head, lse_row, mass_row, mass_head;
  const std::byte* base;
  const std::int32_t* last;
  float* partial;
  int* arrived;
  std::int64_t positions;  // offset in a frame
  int rows, kv_heads, group, page_size, window;
  int value_rows;  // 128-byte rows from a page's keys to its values
  int stages;
  bool joint;                // a page's keys and values are one piece of a unit's size
  float scale;               // of the scores, times log2(e)
  const std::int32_t* rank;  // [row, kv_head, rank_room], where keys are turned
  const float* inv_freq;     // [head_dim / 2]
  float turn_scale;          // of turned keys
  int rank_room;
};

// The line of units, cut into equal parts for the blocks.
struct Line {
  int blocks, share, longer;  // blocks that have any; units of a part, the first `longer` parts have one more

  __device__ Line(int units, int most) {
    blocks = min(most, units);
    share = blocks > 0 ? units / blocks : 0, longer = units - share * blocks;
  }
  __device__ int begin(int block) const { return block * share + min(block, longer); }
  __device__ int block_of(int unit) const {
    const int in_longer = longer * (share + 1);
    return unit < in_longer ? unit / (share + 1) : longer + (unit - in_longer) / share;
  }
};

// What a lane knows of one unit to come: rows of the tensor map, place of its first token in the cache.
struct Unit {
  int y0, y1;  // second: of the next page where pages have 8 tokens, or -1
  int place0, place1;
};

// What a block keeps of the pairs in shared memory.
struct Pairs {
  int count;
  int* first;              // [pair] units before it, [count] = all
  unsigned char* missing;  // [pair] tokens that its last unit lacks

  static constexpr int bytes_of(int pairs) { return (pairs + 1) * 4 + pairs; }
  __device__ Pairs(int pairs, int* memory)
      : count(pairs), first(memory), missing(reinterpret_cast<unsigned char*>(memory + pairs + 1)) {}
  __device__ __forceinline__ int of_unit(int x) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      (first[mid] <= x ? low : high) = mid;
    }
    return low;
  }
  __device__ __forceinline__ int tokens(int pair) const {
    return (first[pair + 1] - first[pair]) * unit_tokens - missing[pair];
  }
};

template <int Dim>
__device__ __forceinline__ Unit locate(const Args& a, const Pairs& pairs, int x) {
  const int pair = pairs.of_unit(x), u = x - pairs.first[pair], row = pair / a.kv_heads, head = pair % a.kv_heads;
  const PageEntry* entries = a.table + a.slots[row] * a.table_slot + head * a.table_head;
  const std::int32_t* list = a.list ? a.list + row * a.list_row + head * a.list_head : nullptr;
  Unit out;
  if (a.page_size >= unit_tokens) {
    const int per_page = a.page_size / unit_tokens, i = u / per_page, sub = u % per_page;
    const int page = list ? list[i] : i;
    out.y0 = entries[page].frame + sub * (UnitShape<Dim>::side_bytes / 128);
    out.place0 = page * a.page_size + sub * unit_tokens;
    out.y1 = -1, out.place1 = 0;
  } else {
    const int count = (pairs.tokens(pair) + a.page_size - 1) / a.page_size;
    const int p0 = list ? list[2 * u] : 2 * u;
    out.y0 = entries[p0].frame;
    out.place0 = p0 * a.page_size;
    out.y1 = -1, out.place1 = 0;
    if (2 * u + 1 < count) {
      const int p1 = list ? list[2 * u + 1] : 2 * u + 1;
      out.y1 = entries[p1].frame;
      out.place1 = p1 * a.page_size;
    }
  }
  return out;
}

// Tokens of pairs `begin` and on, up to `Most`: all in two round trips.
template <int Most>
__device__ __forceinline__ void count_tokens(const Args& a, int begin, int pairs, int (&tokens)[Most]) {
  int row[Most], head[Most], slot[Most], count[Most], length[Most], last[Most];
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    const int pair = min(begin + i, pairs - 1);
    row[i] = pair / a.kv_heads, head[i] = pair % a.kv_heads;
    slot[i] = a.slots[row[i]];
    count[i] = a.list ? a.list_count[row[i] * a.count_row + head[i] * a.count_head] : 0;
  }
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    length[i] = a.length[slot[i] * a.length_slot + head[i] * a.length_head];
    last[i] = count[i] > 0 ? a.list[row[i] * a.list_row + head[i] * a.list_head + count[i] - 1] : 0;
  }
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    const int newest = (length[i] - 1) / a.page_size;
    const int lacking = last[i] == newest ? (newest + 1) * a.page_size - length[i] : 0;
    tokens[i] = !a.list ? length[i] : count[i] > 0 ? count[i] * a.page_size - lacking : 0;
  }
}

template <int Threads, int Most>
__device__ __forceinline__ void count_units(const Args& a, const Pairs& to, int each, int* warp_sum) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = threadIdx.x * each;
  int tokens[Most], own = 0;
  count_tokens(a, begin, to.count, tokens);
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    if (i >= each || begin + i >= to.count) continue;
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
    if (begin + i < to.count) to.first[begin + i] += offset;
  if (threadIdx.x == Threads - 1) to.first[to.count] = offset + own;
  __syncthreads();
}

}  // namespace kvlab::ops::decode
