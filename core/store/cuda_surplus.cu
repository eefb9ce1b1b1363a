// evict_surplus: one block per (KV head, row, layer) finds the tokens that leave and closes their holes. A decode step
// that evicts what it appended loses one token of each head. That takes one pass over the ranks, and the last token's
// bytes are loaded meanwhile.
#include <kvlab/error.hpp>

#include <algorithm>
#include <string>

#include "base/launch.cuh"
#include "ops/score/verify.hpp"
#include "ops/select/surplus.cuh"
#include "store/cuda_tokens.cuh"
#include "store/cuda_turn.hpp"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

using ops::device::all_lanes;
using ops::device::SelectShared;

constexpr int threads = 256, warps = threads / 32;
constexpr int rounds = 3;  // groups of 4 tokens that a thread loads at once

// The bits of the tokens that leave, and for each word the number of bits in front of it.
struct Leaves {
  const unsigned* bits;
  const int* before;
  int words;

  __device__ int hole(int i) const { return find<true>(i); }
  __device__ int stays(int i) const { return find<false>(i); }

 private:
  // Returns the place of the i-th bit that is set, or that is clear.
  template <bool Set>
  __device__ int find(int i) const {
    const auto in_front = [&](int w) { return Set ? before[w] : 32 * w - before[w]; };
    int low = 0, high = words;  // in_front(low) <= i
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (in_front(middle) <= i ? low : high) = middle;
    }
    unsigned word = Set ? bits[low] : ~bits[low];
    for (int skip = i - in_front(low); skip > 0; --skip) word &= word - 1;
    return 32 * low + __ffs(static_cast<int>(word)) - 1;
  }
};

// A thread's share of the head's last token, while the block looks for the place that it goes to.
template <class Unit>
struct LastToken {
  static constexpr int each = sizeof(Unit) == 16 ? 1 : 2;  // units of a thread
  Unit unit[each];
  unsigned field = 0;

  __device__ void read(std::byte* frame, const PageLayout& l, int offset) {
    const int mine = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int j = 0; j < each; ++j)
      if (const int u = mine + j * threads; u < Token<Unit>::units(l))
        unit[j] = *Token<Unit>::unit(frame, l, offset, u);
    if (mine < fields_of(l)) field = *device_store::field(frame, l, offset, mine);
  }
  __device__ void write(std::byte* frame, const PageLayout& l, int offset) const {
    const int mine = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int j = 0; j < each; ++j)
      if (const int u = mine + j * threads; u < Token<Unit>::units(l))
        *Token<Unit>::unit(frame, l, offset, u) = unit[j];
    if (mine < fields_of(l)) *device_store::field(frame, l, offset, mine) = field;
  }
};

enum class By { age, score, column };

// What a warp found among its tokens.
struct alignas(16) Found {
  unsigned long long worst;  // least key of a token that is not pinned
  unsigned first, last;      // tokens that pins of the first and of the last ones cover
};

// The least key of the lanes: its upper half first.
__device__ __forceinline__ unsigned long long least_key(unsigned long long key) {
  const unsigned upper = static_cast<unsigned>(key >> 32), high = __reduce_min_sync(all_lanes, upper),
                 low = __reduce_min_sync(all_lanes, upper == high ? static_cast<unsigned>(key) : ~0u);
  return static_cast<unsigned long long>(high) << 32 | low;
}

// Closes the hole of the only token that leaves. `last` has the token of place n - 1.
template <class Unit>
__device__ void close_hole(const CudaStoreLayer& s, const Head& h, int n, int hole, const LastToken<Unit>& last,
                           std::int32_t* rank) {
  const PageLayout& l = s.layout;
  const int mine = static_cast<int>(threadIdx.x), p = l.page_size, count = n - 1;
  const int from = count / p, to = hole / p;
  const bool moves = hole != count, emptied = from * p == count;
  if (moves) last.write(page_at(s, h, to), l, hole - to * p);
  if (mine == 0) {
    if (moves && rank) rank[hole] = rank[count];
    *h.length = count;
    if (emptied) {
      give_back(s, 0, h.table[0][from]);
      give_back(s, 1, h.table[1][from]);
      fewer_pages(s, 1);
    } else {
      (h.table[0][from].frame >= 0 ? h.table[0][from] : h.table[1][from]).tokens =
          static_cast<std::uint16_t>(count - from * p);
    }
  }
  if (!s.base[1] && s.summary == Summary::none) return;
  // The lower copy of a device page whose tokens have changed is stale, and so is the summary.
  __syncthreads();
  const int warp = mine / 32, lane = mine % 32;
  const auto outdated = [&](int page) {
    if (lane == 0 && h.table[0][page].frame >= 0) give_back(s, 1, h.table[1][page]);
    summarize(s, h, page, min(p, count - page * p), lane);
  };
  if (warp == 0 && moves) outdated(to);
  if (warp == 1 && !emptied && !(moves && from == to)) outdated(from);
}

// The tables of all layers lie one behind the other.
__device__ __forceinline__ int slot_of(const CudaStoreSurplus& a, int row, int layer) {
  return a.slots[row] + layer * a.slots_of_layer;
}
__device__ __forceinline__ unsigned long long edit_of(const CudaStoreSurplus& a, int layer) {
  return a.edit + static_cast<unsigned>(layer);
}

// Evicts any number of tokens, from pages on any tier. A call, so that the kernel keeps its registers for one token.
template <class Unit, bool Mixed>
__device__ __noinline__ void evict_many(const CudaStoreLayer& s, const CudaStoreSurplus& a, int n, int keep,
                                        unsigned* chosen, SelectShared& shared, std::int32_t* rank) {
  const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y),
            layer = static_cast<int>(blockIdx.z);
  const int mine = static_cast<int>(threadIdx.x), p = s.layout.page_size;
  const bool by_score = a.of.scores.data, by_age = !by_score && a.of.column < 0;
  const float* scores = by_score ? &a.of.scores(row, head, 0) : nullptr;
  const Pins pins = a.of.pins ? a.of.pins[row] : Pins{};
  const Head h = head_of(s, slot_of(a, row, layer), head);
  const auto at = [&](int t) {
    const int page = t / p;
    return reinterpret_cast<const std::int32_t*>(page_at(s, h, page) + layout_at(s, h, page).positions)[t % p];
  };
  const auto score = [&](int t) {
    if (by_score) return scores[t];
    const int page = t / p;
    const PageLayout& of_page = layout_at(s, h, page);
    return reinterpret_cast<const float*>(page_at(s, h, page) + of_page.state +
                                          std::int64_t{a.of.column} * p * 4)[t % p];
  };
  if (ops::Finding* nan = a.nan; nan && !by_age)
    for (int t = mine; t < n; t += threads)
      if (const float x = score(t); x != x) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&nan->count), 1ull);
        atomicMax(reinterpret_cast<unsigned long long*>(&nan->first),
                  static_cast<unsigned long long>(ops::Finding::key(a.layer + layer, head, at(t))));
      }
  const ops::device::Leaving leaving = ops::device::find_surplus(at, score, by_age, n, keep, pins, chosen, shared);
  if (leaving.count == 0) return;
  const int words = (n + 31) / 32;
  if (leaving.count == 1) {
    for (int w = mine; w < words; w += threads) chosen[w] = w == leaving.place / 32 ? 1u << leaving.place % 32 : 0;
    __syncthreads();
  }
  auto* before = reinterpret_cast<int*>(chosen + words);
  unsigned sum = 0;
  for (int base = 0; base < words; base += threads) {
    const int w = base + mine;
    unsigned total;
    const unsigned in_front = ops::device::block_scan(w < words ? __popc(chosen[w]) : 0, shared.scan, total);
    if (w < words) before[w] = static_cast<int>(sum + in_front);
    sum += total;
  }
  __syncthreads();
  close_holes<Unit, Mixed>(s, h, n, leaving.count, Leaves{chosen, before, words}, rank, edit_of(a, layer),
                           a.last + layer);
}

template <class Unit, bool Mixed, By by>
__global__ void __launch_bounds__(threads)
    surplus_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreSurplus a,
                   std::int32_t* ranks) {
  extern __shared__ unsigned chosen[];  // [words] bits of the tokens that leave, then [words] Leaves::before
  __shared__ SelectShared shared;
  __shared__ Found found[warps];
  const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y),
            layer = static_cast<int>(blockIdx.z);
  const int mine = static_cast<int>(threadIdx.x), p = s.layout.page_size;
  const PageLayout& l = s.layout;
  const float* scores = by == By::score ? &a.of.scores(row, head, 0) : nullptr;
  const std::int64_t column = l.state + std::int64_t{a.of.column} * p * 4;

  let_successor_start();
  wait_for_predecessor();
  const int slot = slot_of(a, row, layer), wanted = (&a.of.keep(row, head))[layer * a.next_keep], keep = max(0, wanted);
  const Pins pins = a.of.pins ? a.of.pins[row] : Pins{};
  const int first = max(0, pins.first), last = max(0, pins.last);
  // 4 tokens that a thread loads lie in one page.
  const int shift = __ffs(p) - 1;
  const bool aligned = p >= 4 && p == 1 << shift;

  // If one token leaves, the head has keep + 1. So these loads need not wait for the length.
  const Head h = head_of(s, slot, head);
  const auto frame_of = [&](int page) { return page < s.pages ? h.table[0][page].frame : null_frame; };
  const int n = *h.length, last_frame = frame_of(keep >> shift);
  int frames[rounds];
#pragma unroll
  for (int i = 0; i < rounds; ++i) frames[i] = frame_of(4 * (mine + i * threads) >> shift);
  if (wanted >= n) return;
  if (by == By::score && n > a.of.scores.extent[2]) {
    if (mine == 0) fail(s, store_bad_list);
    return;
  }
  std::int32_t* rank = ranks ? ranks + (std::int64_t{row} * s.kv_heads + head) * s.pages * p : nullptr;

  if (!Mixed && n == keep + 1 && std::int64_t{first} + last <= keep && aligned && last_frame >= 0) {
    const unsigned long long edit = edit_of(a, layer);
    unsigned long long counted = edit;
    if (mine == 0) counted = atomicExch(a.last + layer, edit);
    std::byte* from = frame_at(s, 0, last_frame);
    const int offset = keep & (p - 1);
    LastToken<Unit> token;
    token.read(from, l, offset);
    // Without gaps, the first tokens have positions below `first`, and the last ones positions from `recent` on. Counts
    // tell below whether that holds. By age only the first ones matter, because the oldest of the others leaves.
    const bool reads_positions = by == By::age || first > 0 || last > 0;
    const int recent = by != By::age && last > 0
                           ? reinterpret_cast<const std::int32_t*>(from + l.positions)[offset] - last + 1
                           : 0x7fffffff;
    Found own{~0ull, 0, 0};
    bool unusual = false;  // a page that is not on the device, or NaN
    for (int begin = mine;; begin += rounds * threads) {
      int4 position[rounds];
      float4 state[rounds];
#pragma unroll
      for (int i = 0; i < rounds; ++i) {
        const int t = 4 * (begin + i * threads);
        position[i] = int4{}, state[i] = float4{};
        if (t >= n) continue;
        if constexpr (by == By::score) {
          state[i].x = scores[t];
          if (t + 1 < n) state[i].y = scores[t + 1];
          if (t + 2 < n) state[i].z = scores[t + 2];
          if (t + 3 < n) state[i].w = scores[t + 3];
          if (!reads_positions) continue;
        }
        unusual |= frames[i] < 0;
        if (frames[i] < 0) continue;
        const std::byte* frame = frame_at(s, 0, frames[i]) + (t & (p - 1)) * 4;
        if (reads_positions) position[i] = *reinterpret_cast<const int4*>(frame + l.positions);
        if constexpr (by == By::column) state[i] = *reinterpret_cast<const float4*>(frame + column);
      }
#pragma unroll
      for (int i = 0; i < rounds; ++i) {
        const int t = 4 * (begin + i * threads);
        if (t >= n) break;
        const auto take = [&](int at, int place, float score) {
          const bool here = place < n, old = here && at < first, young = here && at >= recent;
          own.first += old;
          unsigned long long key;
          if constexpr (by == By::age) {
            key = static_cast<unsigned long long>(at) << 32 | (0xffffffffu - static_cast<unsigned>(place));
          } else {
            own.last += young;
            unusual |= here && score != score;
            key = ops::device::selection_key(score, static_cast<unsigned>(place));
          }
          if (here && !old && !young) own.worst = min(own.worst, key);
        };
        take(position[i].x, t, state[i].x), take(position[i].y, t + 1, state[i].y);
        take(position[i].z, t + 2, state[i].z), take(position[i].w, t + 3, state[i].w);
      }
      if (4 * (begin - mine + rounds * threads) >= n) break;
#pragma unroll
      for (int i = 0; i < rounds; ++i) frames[i] = frame_of(4 * (begin + (rounds + i) * threads) >> shift);
    }
    own.worst = least_key(own.worst);
    own.first = __reduce_add_sync(all_lanes, own.first);
    if constexpr (by != By::age) own.last = __reduce_add_sync(all_lanes, own.last);
    if (mine % 32 == 0) found[mine / 32] = own;
    unusual = __syncthreads_or(unusual);
    if (counted != edit) atomicAdd(&s.counters->fired, 1ull);
    Found all{~0ull, 0, 0};
#pragma unroll
    for (const Found& of_warp : found) {
      all.worst = min(all.worst, of_warp.worst);
      all.first += of_warp.first, all.last += of_warp.last;
    }
    const bool pins_found = (!reads_positions || all.first == static_cast<unsigned>(first)) &&
                            (by == By::age || all.last == static_cast<unsigned>(last));
    if (!unusual && pins_found) {
      close_hole(s, h, n, static_cast<int>(0xffffffffu - static_cast<unsigned>(all.worst)), token, rank);
      return;
    }
  }

  evict_many<Unit, Mixed>(s, a, n, keep, chosen, shared, rank);
}

template <By by>
auto kernel_of(const CudaStoreLayer& s) {
  return s.mixed          ? surplus_kernel<unsigned, true, by>
         : wide(s.layout) ? surplus_kernel<uint4, false, by>
                          : surplus_kernel<unsigned, false, by>;
}

}  // namespace

namespace cuda_store {

void evict_surplus(const CudaStoreLayer& s, const CudaStoreSurplus& a, Stream stream) {
  const auto kernel = a.of.scores        ? kernel_of<By::score>(s)
                      : a.of.column >= 0 ? kernel_of<By::column>(s)
                                         : kernel_of<By::age>(s);
  const std::int64_t most = std::int64_t{s.pages} * s.layout.page_size, bytes = (most + 31) / 32 * 8;
  const std::int64_t room = shared_bytes() - static_cast<std::int64_t>(sizeof(SelectShared)) - 1024;
  if (bytes > room)
    throw Error(Errc::unsupported,
                "got heads of up to " + std::to_string(most) + " tokens, wanted at most " + std::to_string(room * 4),
                "store evict_surplus (CUDA)");
  if (bytes > 32 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)),
          "evict_surplus");
  if (a.layers > 1 && (s.inv_freq || a.of.scores))
    throw Error(Errc::internal, "got several layers by scores or under re_rotate, wanted one",
                "store evict_surplus (CUDA)");
  std::int32_t* before = s.inv_freq ? store_ranks(s, a, "ranks before", stream.handle()) : nullptr;
  const dim3 grid(static_cast<unsigned>(s.kv_heads), static_cast<unsigned>(a.rows), static_cast<unsigned>(a.layers));
  launch("evict_surplus", kernel, grid, threads, static_cast<std::size_t>(bytes), stream_of(stream), true, s, a,
         before);
  if (before) turn_keys(s, a, before, store_ranks(s, a, "ranks after", stream.handle()), stream.handle());
}
KVLAB_ON_CUDA(evict_surplus, evict_surplus);

}  // namespace cuda_store
}  // namespace kvlab
