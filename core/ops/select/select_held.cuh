// Exact selection by one block from a row that its threads hold in registers, 4 * Vectors entries each. It spares
// shared memory. A histogram of the greatest of each four entries bounds the threshold from below. A histogram of the
// few entries above that bound finds it; with one vector per thread, a histogram of all entries does. Rows for which
// Held::select fails go to select_best.
#pragma once
#include "base/lanes.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops::device {

// Place of a bin in SelectShared::bins. A thread of find_bin reads neighbouring bins, and a warp's reads are free of
// bank conflicts.
template <int Threads>
__device__ __forceinline__ int place_of_bin(int bin) {
  constexpr int each = select_bins / Threads;
  return bin % each * Threads + bin / each;
}

// Finds the bin of the last of the `need` best and sets s.bin, s.above and s.inside; false if all bins hold fewer. All
// threads call it once the bins are complete. It leaves the bins zero.
template <int Threads>
__device__ __noinline__ bool find_bin(unsigned need, SelectShared& s) {
  constexpr int warps = Threads / 32, each = select_bins / Threads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned own[each], sum = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    own[i] = s.bins[i * Threads + threadIdx.x];
    s.bins[i * Threads + threadIdx.x] = 0;
    sum += own[i];
  }
  const unsigned of_warp = __reduce_add_sync(all_lanes, sum);
  if (lane == 0) s.scan[warp] = of_warp;
  __syncthreads();
  const unsigned other = lane < warps ? s.scan[lane] : 0;
  const unsigned total = __reduce_add_sync(all_lanes, other);
  const unsigned below = __reduce_add_sync(all_lanes, lane < warp ? other : 0);
  if (below < need && need <= below + of_warp) {
    unsigned before = cuda::sum_through_lane(sum) + below - sum;
    if (before < need && need <= before + sum) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        if (before < need && need <= before + own[i])
          s.bin = threadIdx.x * each + i, s.above = before, s.inside = own[i];
        before += own[i];
      }
    }
  }
  __syncthreads();
  return total >= need;
}

// Entry (j * Threads + thread) * 4 + e of a row is x[4 j + e] of the thread, and bit 4 j + e of its `chosen`.
template <int Threads, int Vectors>
struct Held {
  static constexpr int each = 4 * Vectors, warps = Threads / 32;
  static_assert(Vectors <= 4, "four counts of a warp's entries share a register");
  float x[each];  // NaN past the end of the row and for entries chosen before the selection
  unsigned chosen = 0;
  bool shares = false;  // see level()

  static __device__ __forceinline__ int index(int i) { return (i / 4 * Threads + threadIdx.x) * 4 + i % 4; }

  // Bypasses the L1 cache, since other blocks may have written the row in this launch.
  __device__ __forceinline__ void load(const float* row, int n) {
    const bool aligned = reinterpret_cast<unsigned long long>(row) % 16 == 0;
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
      const int first = index(4 * j);
      if (aligned && first + 4 <= n) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(row + first));
        x[4 * j] = v.x, x[4 * j + 1] = v.y, x[4 * j + 2] = v.z, x[4 * j + 3] = v.w;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[4 * j + e] = first + e < n ? __ldcg(row + first + e) : NAN;
      }
    }
  }
  // Loads from shared memory, 16-byte aligned.
  __device__ __forceinline__ void load_own(const float* row, int n) {
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
      const int first = index(4 * j);
      float4 v = {};
      if (first < n) v = *reinterpret_cast<const float4*>(row + first);
      x[4 * j] = first < n ? v.x : NAN;
      x[4 * j + 1] = first + 1 < n ? v.y : NAN;
      x[4 * j + 2] = first + 2 < n ? v.z : NAN;
      x[4 * j + 3] = first + 3 < n ? v.w : NAN;
    }
  }
  // Chooses the entries of [0, n) for which pinned(index) holds.
  template <class Pinned>
  __device__ __forceinline__ void pin(int n, const Pinned& pinned) {
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (index(i) < n && pinned(index(i))) chosen |= 1u << i, x[i] = NAN;
  }
  __device__ __forceinline__ void choose_all(int n) {
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (index(i) < n) chosen |= 1u << i;
  }

  // Chooses the `wanted` best of the unchosen entries; 0 < wanted < their number. Returns false and changes nothing
  // where NaN would be among them or too many entries lie in the threshold's bin.
  __device__ __forceinline__ bool select(int wanted, SelectShared& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto need = static_cast<unsigned>(wanted);
    // Long rows have enough fours to bound the threshold. In short ones that costs more than it spares.
    const bool groups = Vectors > 2 && wanted <= Threads * Vectors / 2;
    float best[Vectors], low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
      best[j] = level(fmaxf(fmaxf(x[4 * j], x[4 * j + 1]), fmaxf(x[4 * j + 2], x[4 * j + 3])), shares);
      widen(best[j], low, high);
    }
    if (!groups) {
#pragma unroll
      for (int i = 0; i < each; ++i) widen(level(x[i], shares), low, high);
    }
    low = least_number(low), high = greatest_number(high);
    if (lane == 0) s.low[warp] = low, s.high[warp] = high;
#pragma unroll
    for (int i = 0; i < select_bins / Threads; ++i) s.bins[i * Threads + threadIdx.x] = 0;
    if (threadIdx.x == 0) s.candidates = 0;
    __syncthreads();
    low = s.low[lane % warps], high = s.high[lane % warps];
    low = least_number(low), high = greatest_number(high);

    // At least `wanted` entries reach `edge`: the greatest of as many fours do. Half a bin exceeds bin_of's error.
    float edge = -INFINITY;
    if (groups) {
      const float scale = static_cast<float>(select_bins) / (high - low);
#pragma unroll
      for (int j = 0; j < Vectors; ++j) atomicAdd(&s.bins[place_of_bin<Threads>(bin_of(best[j], low, scale))], 1u);
      __syncthreads();
      find_bin<Threads>(need, s);
      const int up = select_bins - 1 - static_cast<int>(s.bin);
      if (up > 0) edge = scale < INFINITY ? fmaf((static_cast<float>(up) - .5f) / select_bins, high - low, low) : low;
      if (up > 0) low = edge;
    }
    const float scale = static_cast<float>(select_bins) / (high - low);
    int of[each];  // bins; select_bins = below the edge
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const float at = level(x[i], shares);
      of[i] = at >= edge ? bin_of(at, low, scale) : select_bins;
      if (of[i] < select_bins) atomicAdd(&s.bins[place_of_bin<Threads>(of[i])], 1u);
    }
    __syncthreads();
    if (!find_bin<Threads>(need, s)) return false;
    const int bin = static_cast<int>(s.bin);
    const unsigned left = need - s.above, inside = s.inside;
    const bool whole = left == inside;
    if (!whole && inside > most_candidates) return false;

    unsigned sure = 0, border = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (of[i] < bin + whole) sure |= 1u << i;
      if (of[i] == bin && !whole) border |= 1u << i;
    }
    for (unsigned rest = border; rest; rest &= rest - 1) {  // few threads have any
      const int i = __ffs(static_cast<int>(rest)) - 1;
      float score = x[0];
#pragma unroll
      for (int e = 1; e < each; ++e) score = e == i ? x[e] : score;
      s.candidate[atomicAdd(&s.candidates, 1u)] = selection_key(score, static_cast<unsigned>(index(i)));
    }
    if (!whole) {
      __syncthreads();
      for (unsigned c = threadIdx.x; c < inside; c += Threads) {
        const unsigned long long key = s.candidate[c];
        unsigned better = 0;
        for (unsigned o = 0; o < inside; ++o) better += s.candidate[o] > key;
        if (better == left - 1) s.threshold = key;
      }
      __syncthreads();
      if (border) {
        const unsigned long long threshold = s.threshold;
#pragma unroll
        for (int i = 0; i < each; ++i)
          if (border >> i & 1 && selection_key(x[i], static_cast<unsigned>(index(i))) >= threshold) sure |= 1u << i;
      }
    }
    chosen |= sure;
    return true;
  }

  // The same for any entries of [0, n), by halving the range that the worst of the best lies in. It has a tenth of the
  // code of `select`. So a kernel of many parts waits less for its code.
  __device__ __forceinline__ void select_by_halves(int wanted, int n, SelectShared& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr unsigned of_nan = 1;  // no number has this key; 0 = chosen already, or past the end
    unsigned key[each], low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const bool open = index(i) < n && !(chosen >> i & 1u);
      key[i] = !open ? 0 : x[i] == x[i] ? score_key(x[i]) : of_nan;
      high = max(high, key[i]);
      if (open) low = min(low, key[i]);
    }
    low = __reduce_min_sync(all_lanes, low), high = __reduce_max_sync(all_lanes, high);
    if (lane == 0) s.bins[warp] = low, s.bins[warps + warp] = high;
    __syncthreads();
    for (int w = 0; w < warps; ++w) low = min(low, s.bins[w]), high = max(high, s.bins[warps + w]);
    unsigned* counts = s.bins + 2 * warps;
    // Entries of the block for which takes(i) holds. Two calls in a row use different counts.
    const auto count = [&](const auto& takes) {
      unsigned own = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) own += takes(i);
      own = __reduce_add_sync(all_lanes, own);
      counts = counts == s.bins + 2 * warps ? s.bins + 3 * warps : s.bins + 2 * warps;
      if (lane == 0) counts[warp] = own;
      __syncthreads();
      own = 0;
#pragma unroll
      for (int w = 0; w < warps; ++w) own += counts[w];
      return static_cast<int>(own);
    };
    // `wanted` entries or more reach `low`. Fewer reach `high`.
    ++high;
    int reach = n + 1;  // of those that reach `low`, once it is known
#pragma unroll 1
    while (high - low > 1 && reach != wanted) {
      const unsigned mid = low + (high - low) / 2;
      const int here = count([&](int i) { return key[i] >= mid; });
      if (here >= wanted)
        low = mid, reach = here;
      else
        high = mid;
    }
    // Of entries with the worst key the first ones are chosen.
    int last = n;
    if (reach != wanted) {
      const int better = count([&](int i) { return key[i] > low; });
      int first = 0;
#pragma unroll 1
      while (last - first > 1) {
        const int mid = first + (last - first) / 2;
        if (better + count([&](int i) { return key[i] == low && index(i) < mid; }) >= wanted)
          last = mid;
        else
          first = mid;
      }
    }
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (key[i] > low || (key[i] == low && index(i) < last)) chosen |= 1u << i;
  }

  // Writes the chosen entries as an ascending list of at most `room`, and returns its length. Uses s.bins.
  // first: added to each entry.
  template <class Index>
  __device__ __forceinline__ int write(Index* to, std::int64_t step, int room, SelectShared& s, int first = 0) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned counts = 0;  // byte j: chosen entries of vector j
#pragma unroll
    for (int j = 0; j < Vectors; ++j) counts |= __popc(chosen >> 4 * j & 15u) << 8 * j;
    unsigned before = cuda::sum_through_lane(counts);  // at most 128 a byte
    __syncthreads();
    if (lane == 31)
#pragma unroll
      for (int j = 0; j < Vectors; ++j) s.bins[j * warps + warp] = before >> 8 * j & 255u;
    before -= counts;
    __syncthreads();
    constexpr int runs = Vectors * warps, of_lane = (runs + 31) / 32;  // a run is 128 entries in order
    unsigned run[of_lane], all = 0;
#pragma unroll
    for (int r = 0; r < of_lane; ++r) {
      run[r] = r * 32 + lane < runs ? s.bins[r * 32 + lane] : 0;
      all += run[r];
    }
    const auto total = static_cast<int>(__reduce_add_sync(all_lanes, all));
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
      unsigned smaller = 0;
#pragma unroll
      for (int r = 0; r < of_lane; ++r) smaller += r * 32 + lane < j * warps + warp ? run[r] : 0;
      int at = static_cast<int>(__reduce_add_sync(all_lanes, smaller) + (before >> 8 * j & 255u));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (chosen >> (4 * j + e) & 1u) {
          if (at < room) to[at * step] = static_cast<Index>(first + index(4 * j + e));
          ++at;
        }
    }
    return min(total, room);
  }
};

// Selects with select_best where Held::select returned false. own is the thread's Held::chosen, and `chosen` is shared
// memory for the row's bits.
template <int Threads>
__device__ __noinline__ int choose_slowly(unsigned own, bool shares, const float* scores, int n, int wanted,
                                          std::int32_t* to, std::int64_t step, int room, unsigned* chosen,
                                          SelectShared& s, int first) {
  __syncthreads();
  fill_bits(chosen, n, false);
  for (; own; own &= own - 1) {
    const int at = Held<Threads, 1>::index(__ffs(static_cast<int>(own)) - 1);
    atomicOr(&chosen[at >> 5], 1u << (at & 31));
  }
  __syncthreads();
  select_best(load_row(scores, n, nullptr, shares), n, wanted, chosen, s);
  return write_list(chosen, n, to, step, room, s, first);
}

// Chooses `wanted` more entries and writes the list of all chosen. first: added to each entry.
template <int Threads, int Vectors>
__device__ __forceinline__ int choose_held(Held<Threads, Vectors>& held, const float* scores, int n, int pinned,
                                           int wanted, std::int32_t* to, std::int64_t step, int room, unsigned* chosen,
                                           SelectShared& s, int first = 0) {
  if (pinned + wanted >= n)
    held.choose_all(n);
  else if (wanted > 0 && !held.select(wanted, s))
    return choose_slowly<Threads>(held.chosen, held.shares, scores, n, wanted, to, step, room, chosen, s, first);
  return held.write(to, step, room, s, first);
}

// Runs choose_pages on a row that the block holds.
template <int Threads, int Vectors>
__device__ __forceinline__ int choose_pages_held(Held<Threads, Vectors>& held, const float* scores, int n, int budget,
                                                 bool newest, std::int32_t* to, std::int64_t step, int room,
                                                 unsigned* chosen, SelectShared& s, int first = 0) {
  const int pinned = newest && n > 0;
  if (pinned) held.pin(n, [&](int i) { return i == n - 1; });
  return choose_held(held, scores, n, pinned, min(budget, n) - pinned, to, step, room, chosen, s, first);
}
// Runs choose_pages for n <= 4 * Vectors * Threads.
template <int Threads, int Vectors>
__device__ __forceinline__ int choose_pages_held(const float* scores, int n, int budget, bool newest, std::int32_t* to,
                                                 std::int64_t step, int room, unsigned* chosen, SelectShared& s) {
  Held<Threads, Vectors> held;
  held.load(scores, n);
  return choose_pages_held(held, scores, n, budget, newest, to, step, room, chosen, s);
}

}  // namespace kvlab::ops::device
