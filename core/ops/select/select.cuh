// Exact selection by one block in the order of select.hpp, for rows in shared or global memory. Chosen entries are bits
// in shared memory, a form that pins, selection and the ascending list share.
#pragma once
#include <kvlab/ops.hpp>

#include <cmath>

#include "base/cuda.cuh"
#include "base/lanes.cuh"

namespace kvlab::ops {
decltype(top_pages) top_pages_cuda;
}

namespace kvlab::ops::device {

constexpr int select_bins = 2048, most_candidates = 256;
using cuda::all_lanes;

struct alignas(16) SelectShared {
  unsigned bins[select_bins];
  unsigned long long candidate[most_candidates];
  unsigned scan[32];
  float low[32], high[32];
  unsigned bin, above, inside, candidates;
  unsigned long long threshold;
};

// Returns the upper half of selection_key.
__device__ __forceinline__ unsigned score_key(float score) {
  const unsigned u = __float_as_uint(score);
  if (score != score) return 0;
  if (u == 0x80000000u) return 0x80000000u;  // -0 and 0 are a tie
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
// Returns the score of a score_key. That of NaN is a NaN, and -0 is 0.
__device__ __forceinline__ float score_of_key(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
// The least and the greatest of the lanes' numbers, which are not NaN, by an instruction each. -0 counts as 0.
__device__ __forceinline__ float least_number(float x) {
  return score_of_key(__reduce_min_sync(all_lanes, score_key(x)));
}
__device__ __forceinline__ float greatest_number(float x) {
  return score_of_key(__reduce_max_sync(all_lanes, score_key(x)));
}
__device__ __forceinline__ unsigned long long selection_key(float score, unsigned index) {
  return static_cast<unsigned long long>(score_key(score)) << 32 | (0xffffffffu - index);
}

__device__ __forceinline__ bool has_bit(const unsigned* bits, int i) { return bits[i >> 5] >> (i & 31) & 1; }

// Returns the exclusive prefix sum of `value` over the threads; `total` is the block's sum.
__device__ __forceinline__ unsigned block_scan(unsigned value, unsigned* scratch, unsigned& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned inclusive = cuda::sum_through_lane(value);
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  unsigned before = 0, sum = 0;
  for (int w = 0; w < warps; ++w) {
    const unsigned x = scratch[w];
    before += w < warp ? x : 0;
    sum += x;
  }
  total = sum;
  __syncthreads();
  return before + inclusive - value;
}

// Returns the block's largest value.
__device__ __forceinline__ int block_max(int value, unsigned* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  value = cuda::most_of_lanes(value);
  if (lane == 0) scratch[warp] = static_cast<unsigned>(value);
  __syncthreads();
  for (int w = 0; w < warps; ++w) value = max(value, static_cast<int>(scratch[w]));
  __syncthreads();
  return value;
}

// Returns a threshold that exactly `wanted` entries reach, if the bits from `lowest` up tell all keys apart. Entries
// with the same bits there stay together. key(s, t, i, k) sets k, the key of entry t of segment s, or returns false if
// the entry does not take part; i = first[s] + t. Needs 1 <= wanted <= entries and at least 256 threads. If lowest is
// 0, keys must end in ~i. Of Shared it uses 256 bins, scan, bin, above and inside.
template <class Key, class Shared>
__device__ unsigned long long radix_threshold(const Key& key, const int* first, int segments, unsigned wanted,
                                              int lowest, Shared& s) {
  const int lane = threadIdx.x % 32;
  const unsigned last = static_cast<unsigned>(max(first[segments] - 1, 0));
  unsigned long long prefix = 0;
  for (int shift = 56; shift >= lowest; shift -= 8) {
    if (shift < 32 && last >> shift == 0 && shift > 0) {  // all indices have this digit 0
      prefix |= 0xffull << shift;
      continue;
    }
    if (threadIdx.x < 256) s.bins[threadIdx.x] = 0;
    __syncthreads();
    for (int segment = 0; segment < segments; ++segment) {
      const int begin = first[segment], count = first[segment + 1] - begin;
      for (int base = threadIdx.x - lane; base < count; base += blockDim.x) {
        const int t = base + lane;
        unsigned long long k = 0;
        const bool active = t < count && key(segment, t, static_cast<unsigned>(begin + t), k) &&
                            (shift == 56 || k >> (shift + 8) == prefix >> (shift + 8));
        const unsigned digit = active ? 255 - static_cast<unsigned>(k >> shift & 255) : 256;
        const unsigned peers = __match_any_sync(all_lanes, digit);
        if (active && lane == __ffs(peers) - 1) atomicAdd(&s.bins[digit], __popc(peers));
      }
    }
    __syncthreads();
    const unsigned own = threadIdx.x < 256 ? s.bins[threadIdx.x] : 0;
    unsigned total;
    const unsigned before = block_scan(own, s.scan, total);
    if (before < wanted && wanted <= before + own) s.bin = threadIdx.x, s.above = before, s.inside = own;
    __syncthreads();
    prefix |= static_cast<unsigned long long>(255 - s.bin) << shift;
    wanted -= s.above;
    const bool done = wanted == s.inside;
    __syncthreads();
    if (done) break;
  }
  return prefix;
}

// Bins are even in the level of a score, which never falls while the score grows. Shares of a softmax, which are not
// negative, differ by orders of magnitude: their level is their logarithm, roughly.
__device__ __forceinline__ float level(float x, bool shares) {
  return shares && x == x ? __int2float_rn(__float_as_int(x)) : x;
}

// A row in its own memory or in its copy `stage`, and the range of the finite levels that this thread has read.
struct Row {
  const float* x;
  float low, high;
  bool shares;
};
__device__ __forceinline__ void widen(float x, float& low, float& high) {
  if (fabsf(x) < INFINITY) low = fminf(low, x), high = fmaxf(high, x);
}
// Bypasses the L1 cache, since other blocks may have written x in this launch.
__device__ __forceinline__ Row load_row(const float* x, int n, float* stage, bool shares) {
  Row r{stage ? stage : x, INFINITY, -INFINITY, shares};
  const auto widen_by = [&](float v) { widen(level(v, shares), r.low, r.high); };
  int begin = 0;
  if (stage && reinterpret_cast<unsigned long long>(x) % 16 == 0) {
    begin = n / 4 * 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < n / 4; i += blockDim.x) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(x) + i);
      reinterpret_cast<float4*>(stage)[i] = v;
      widen_by(v.x), widen_by(v.y), widen_by(v.z), widen_by(v.w);
    }
  }
#pragma unroll 4
  for (int i = begin + threadIdx.x; i < n; i += blockDim.x) {
    const float v = __ldcg(x + i);
    if (stage) stage[i] = v;
    widen_by(v);
  }
  __syncthreads();
  return r;
}

// Bin 0 has the greatest levels; NaN falls in the bin of the least. A lower level never has a lower bin, whatever low
// and scale are.
__device__ __forceinline__ int bin_of(float x, float low, float scale) {
  const float up = fminf(fmaxf((x - low) * scale, 0.f), static_cast<float>(select_bins - 1));
  return select_bins - 1 - static_cast<int>(up);
}

// Sets the bits of the `wanted` best entries of [0, n) whose bits are clear; 0 < wanted < number of clear bits. All
// threads see the bits before and after. Needs blocks of 256, 512 or 1024 threads.
__device__ inline void select_best(const Row& row, int n, int wanted, unsigned* chosen, SelectShared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float low = row.low, high = row.high;
  low = cuda::least_of_lanes(low), high = cuda::most_of_lanes(high);
  if (lane == 0) s.low[warp] = low, s.high[warp] = high;
  for (int i = threadIdx.x; i < select_bins; i += blockDim.x) s.bins[i] = 0;
  if (threadIdx.x == 0) s.candidates = 0;
  __syncthreads();
  for (int w = 0; w < blockDim.x / 32; ++w) low = fminf(low, s.low[w]), high = fmaxf(high, s.high[w]);
  const float scale = static_cast<float>(select_bins) / (high - low);

#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    if (!has_bit(chosen, i)) atomicAdd(&s.bins[bin_of(level(row.x[i], row.shares), low, scale)], 1u);
  __syncthreads();
  const int each = select_bins / blockDim.x;
  unsigned own = 0, total;
  for (int i = 0; i < each; ++i) own += s.bins[threadIdx.x * each + i];
  unsigned before = block_scan(own, s.scan, total);
  const auto need = static_cast<unsigned>(wanted);
  if (before < need && need <= before + own)
    for (int i = 0; i < each; ++i) {
      const unsigned inside = s.bins[threadIdx.x * each + i];
      if (need <= before + inside) {
        s.bin = threadIdx.x * each + i, s.above = before, s.inside = inside;
        break;
      }
      before += inside;
    }
  __syncthreads();
  const int bin = s.bin;
  const unsigned left = need - s.above;
  const bool whole = left == s.inside;

  for (int base = warp * 32; base < n; base += blockDim.x) {
    const int i = base + lane;
    const bool free = i < n && !has_bit(chosen, i);
    const float x = i < n ? row.x[i] : 0.f;
    const int b = bin_of(level(x, row.shares), low, scale);
    const bool sure = free && (b < bin || (whole && b == bin));
    if (free && !sure && b == bin) {
      const unsigned at = atomicAdd(&s.candidates, 1u);
      if (at < most_candidates) s.candidate[at] = selection_key(x, i);
    }
    const unsigned bits = __ballot_sync(all_lanes, sure);  // it also waits until every lane has read its bit
    if (lane == 0 && bits) chosen[base >> 5] |= bits;
  }
  __syncthreads();
  const unsigned candidates = s.candidates;
  if (candidates <= most_candidates) {
    for (unsigned c = threadIdx.x; c < candidates; c += blockDim.x) {
      const unsigned long long key = s.candidate[c];
      unsigned better = 0;
      for (unsigned o = 0; o < candidates; ++o) better += s.candidate[o] > key;
      const unsigned index = 0xffffffffu - static_cast<unsigned>(key);
      if (better < left) atomicOr(&chosen[index >> 5], 1u << (index & 31));
    }
    __syncthreads();
    return;
  }
  const auto key = [&](int, int t, unsigned i, unsigned long long& k) {
    const float x = row.x[t];
    k = selection_key(x, i);
    return !has_bit(chosen, t) && bin_of(level(x, row.shares), low, scale) == bin;
  };
  const int first[] = {0, n};
  const unsigned long long threshold = radix_threshold(key, first, 1, left, 0, s);
  for (int base = warp * 32; base < n; base += blockDim.x) {
    const int i = base + lane;
    unsigned long long k = 0;
    const bool take = i < n && key(0, i, static_cast<unsigned>(i), k) && k >= threshold;
    const unsigned bits = __ballot_sync(all_lanes, take);
    if (lane == 0 && bits) chosen[base >> 5] |= bits;
  }
  __syncthreads();
}

// Writes the set bits of [0, n) as an ascending list of at most `room`, and returns its length. Uses s.bins. first:
// added to each entry.
__device__ inline int write_list(const unsigned* chosen, int n, std::int32_t* to, std::int64_t step, int room,
                                 SelectShared& s, int first = 0) {
  const int words = (n + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  unsigned written = 0;
  for (int base = 0; base < words; base += blockDim.x) {
    const int own = base + threadIdx.x;
    unsigned total;
    s.bins[threadIdx.x] = written + block_scan(own < words ? __popc(chosen[own]) : 0, s.scan, total);
    __syncthreads();
    for (int w = warp; w < min(static_cast<int>(blockDim.x), words - base); w += warps) {
      const unsigned word = chosen[base + w];
      const unsigned at = s.bins[w] + __popc(word & ((1u << lane) - 1));
      if (word >> lane & 1 && at < static_cast<unsigned>(room)) to[at * step] = first + (base + w) * 32 + lane;
    }
    written += total;
    __syncthreads();
  }
  return min(static_cast<int>(written), room);
}

// Sets or clears all bits of [0, n).
__device__ __forceinline__ void fill_bits(unsigned* bits, int n, bool value) {
  for (int w = threadIdx.x; w < (n + 31) / 32; w += blockDim.x)
    bits[w] = !value ? 0u : w * 32 + 32 <= n ? ~0u : (1u << (n & 31)) - 1;
  __syncthreads();
}

// Writes the list of the `budget` best of n pages and returns its length. newest: the last page is pinned. shares: see
// level(). first: added to each page.
__device__ inline int choose_pages(const float* scores, int n, int budget, bool newest, bool shares, std::int32_t* to,
                                   std::int64_t step, int room, float* stage, unsigned* chosen, SelectShared& s,
                                   int first = 0) {
  const int pinned = newest && n > 0, wanted = min(budget, n) - pinned;
  const bool every = pinned + wanted >= n;
  fill_bits(chosen, n, every);
  if (!every) {
    if (pinned && threadIdx.x == 0) chosen[(n - 1) >> 5] |= 1u << ((n - 1) & 31);
    __syncthreads();
    if (wanted > 0) select_best(load_row(scores, n, stage, shares), n, wanted, chosen, s);
  }
  return write_list(chosen, n, to, step, room, s, first);
}

}  // namespace kvlab::ops::device
