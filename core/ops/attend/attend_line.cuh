// Work of the blocks of attention's decode kernel (attend_kernel.cuh): arguments, the line of units and its parts, and
// the pages of a unit.
#pragma once
#include "base/launch.cuh"
#include "ops/attend/attend_unit.cuh"

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
  void* rounded;  // [row, query head, head_dim] of T, or null
  std::int64_t out_row, out_head, lse_row, mass_row, mass_head;
  const std::byte* base;
  const std::int32_t* last;
  float* partial;
  int* arrived;
  std::int64_t positions;  // offset of the positions in a frame
  int rows, kv_heads, group, page_size, window;
  int value_rows;  // 128-byte rows from a page's keys to its values
  int stages;
  bool joint;                // a page is one unit: its keys and values are contiguous
  float scale;               // factor of the scores, times log2(e)
  const std::int32_t* rank;  // [row, kv_head, rank_room] if the kernel rotates keys
  const float* inv_freq;     // [head_dim / 2]
  float turn_scale;          // factor of rotated keys
  int rank_room;
};

// A unit that a lane has looked up: rows of the tensor map, and places of its first tokens in the cache.
struct Unit {
  int y0, y1;  // y1: row of the second page if pages have 8 tokens, else -1
  int place0, place1;
};

// The pairs' units, in a block's shared memory.
struct Pairs {
  int count;
  int* first;              // [pair] units before the pair; [count]: all units
  unsigned char* missing;  // [pair] tokens missing from the pair's last unit

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

// The line of units and its parts, one per block. If parts are short and pairs have about the same length, every pair
// gets the same number of whole blocks. Then no block has parts of two pairs. In other cases equal parts cut the line
// anywhere.
class Line {
 public:
  // longest: units of the longest pair. most: number of blocks.
  __device__ Line(const Pairs& pairs, int longest, int most) : pairs_(pairs), each_(0) {
    const int units = pairs.first[pairs.count];
    blocks_ = min(most, units);
    share_ = blocks_ > 0 ? units / blocks_ : 0, longer_ = units - share_ * blocks_;
    constexpr int few = 256;
    if (pairs.count > most || share_ > few) return;
    const int each = most / pairs.count, part = (longest + each - 1) / each;
    if (part <= share_ + share_ / 16 + 1) each_ = each, share_ = part, blocks_ = each * pairs.count;
  }
  __device__ bool works(int block) const { return block < blocks_ && begin(block) < end(block); }
  __device__ int begin(int block) const {
    if (each_ == 0) return block * share_ + min(block, longer_);
    const int pair = block / each_;
    return min(pairs_.first[pair] + block % each_ * share_, pairs_.first[pair + 1]);
  }
  __device__ int end(int block) const {
    if (each_ == 0) return begin(block + 1);
    const int pair = block / each_;
    return min(pairs_.first[pair] + (block % each_ + 1) * share_, pairs_.first[pair + 1]);
  }
  __device__ int first_block(int pair) const { return each_ ? pair * each_ : block_of(pairs_.first[pair]); }
  __device__ int last_block(int pair) const {
    const int last = pairs_.first[pair + 1] - 1;
    return each_ ? pair * each_ + (last - pairs_.first[pair]) / share_ : block_of(last);
  }

 private:
  __device__ int block_of(int unit) const {
    const int in_longer = longer_ * (share_ + 1);
    return unit < in_longer ? unit / (share_ + 1) : longer_ + (unit - in_longer) / share_;
  }
  const Pairs& pairs_;
  int each_;                     // blocks of a pair; 0: the line is cut anywhere
  int blocks_, share_, longer_;  // blocks with units; units of a part; parts with one unit more, if cut anywhere
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

// Counts the tokens of pairs `begin` and on, up to `Most`. All its loads take two round trips.
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

// Fills `to` and returns the units of the longest pair. warp_sum, warp_most: one int per warp.
template <int Threads, int Most>
__device__ __forceinline__ int count_units(const Args& a, const Pairs& to, int each, int* warp_sum, int* warp_most) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = threadIdx.x * each;
  int tokens[Most], own = 0, most = 0;
  count_tokens(a, begin, to.count, tokens);
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    if (i >= each || begin + i >= to.count) continue;
    const int units = (tokens[i] + unit_tokens - 1) / unit_tokens;
    to.first[begin + i] = own;
    to.missing[begin + i] = static_cast<unsigned char>(units * unit_tokens - tokens[i]);
    own += units;
    most = max(most, units);
  }
  int before = own;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  for (int d = 1; d < 32; d *= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
  if (lane == 31) warp_sum[warp] = before, warp_most[warp] = most;
  __syncthreads();
  int offset = before - own;
  for (int w = 0; w < warp; ++w) offset += warp_sum[w];
  for (int w = 0; w < Threads / 32; ++w) most = max(most, warp_most[w]);
  for (int i = 0; i < each; ++i)
    if (begin + i < to.count) to.first[begin + i] += offset;
  if (threadIdx.x == Threads - 1) to.first[to.count] = offset + own;
  __syncthreads();
  return most;
}

}  // namespace kvlab::ops::decode
