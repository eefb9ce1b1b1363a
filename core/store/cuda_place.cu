// Plans place edits. One block takes a head: it finds the pages that come and those that leave, lets the ones take the
// frames of the others, changes the tables and writes jobs for the copies that follow.
//
// The plan takes frames of the pools. Copies may run beside plans and appends of later layers, so the frames that they
// give back wait in a list of their own until take_back.
#include <algorithm>
#include <string>

#include "base/lanes.cuh"
#include "base/relay.cuh"
#include "ops/page/codes.hpp"
#include "ops/score/key_factors.cuh"
#include "ops/select/select.cuh"
#include "store/cuda_carry.cuh"
#include "store/cuda_kernels.hpp"
#include "store/cuda_packed.hpp"
#include "store/cuda_tokens.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int threads = 256;
// Blocks that copy while the step waits. With more requests under way they get more of the link than copies beside it.
constexpr int awaited_blocks = 16;
constexpr unsigned rebuild_blocks = 512;

// Sums `mine` over the lanes before this one; `all` gets the warp's sum.
__device__ int before_in_warp(int mine, int& all) {
  const int sum = sum_through_lane(mine);
  all = __shfl_sync(~0u, sum, 31);
  return sum - mine;
}

// Returns the lowest `count` set bits of a word.
__device__ unsigned lowest(unsigned word, int count) {
  unsigned rest = word;
  for (int i = 0; i < count && rest; ++i) rest &= rest - 1;
  return word & ~rest;
}

// What radix_threshold needs.
struct RadixShared {
  unsigned bins[256], scan[32];
  unsigned bin, above, inside;
};

// Leaves the `count` lowest pages of the head in `bits`, which has more.
__device__ void keep_lowest(const float* order, int pages, int all, int count, unsigned* bits, RadixShared& s) {
  const int mine = static_cast<int>(threadIdx.x);
  const auto key = [&](int, int page, unsigned i, unsigned long long& k) {
    k = ops::device::selection_key(order[page], i);
    return ops::device::has_bit(bits, page);
  };
  const int first[] = {0, pages};
  const auto threshold = ops::device::radix_threshold(key, first, 1, static_cast<unsigned>(all - count), 0, s);
  for (int begin = mine / 32 * 32; begin < pages; begin += threads) {
    const int page = begin + mine % 32;
    unsigned long long k = 0;
    const bool leaves = page < pages && key(0, page, static_cast<unsigned>(page), k) && k < threshold;
    const unsigned low = __ballot_sync(~0u, leaves);
    if (mine % 32 == 0) bits[begin / 32] = low;
  }
  __syncthreads();
}

// The block copies a full page to the host before it returns. It is a call, so that the plan stays small.
__device__ __noinline__ void write_down(const CudaStoreLayer& s, std::int32_t frame, std::int32_t to, int thread) {
  if (!s.mixed)
    copy_frame(s, frame_at(s, 0, frame), frame_at(s, 1, to), thread, threads);
  else if (thread < 32)
    carry_page(s, 1, frame, to, s.layout.page_size, thread);
  if (thread == 0 && s.layout.state_columns > 0) atomicAdd(&s.counters->states, 1ull);
}

// Takes a free frame of the device where more than `keep` are free. Kernels beside it take theirs by take(), so no
// thread may take one and give it back.
__device__ bool take_beyond(const CudaStoreLayer& s, int keep, PageEntry& e, int tokens) {
  const ops::FramePool& pool = s.pool[device_pool];
  std::int32_t next = *static_cast<volatile std::int32_t*>(pool.taken);
  for (;;) {
    if (*static_cast<volatile std::int32_t*>(pool.given) - next <= keep) return false;
    const std::int32_t now = atomicCAS(pool.taken, next, next + 1);
    if (now == next) break;
    next = now;
  }
  e = entry_of(pool.at(next), tokens);
  return true;
}

struct Places {
  CudaStoreLayer first;
  CudaStorePlace of[cuda_store::most_places];
};

// Grid [row and kv_head, edit].
__global__ void __launch_bounds__(threads) plan_kernel(const __grid_constant__ Places f) {
  const CudaStoreLayer& s = f.first;
  const CudaStorePlace& a = f.of[blockIdx.y];
  extern __shared__ unsigned bits[];
  __shared__ int ups, reusable, uncopied, waiting, downs, below;
  __shared__ RadixShared radix;
  const int row = static_cast<int>(blockIdx.x) / s.kv_heads, head = static_cast<int>(blockIdx.x) % s.kv_heads,
            slot = a.slots[row], p = s.layout.page_size, mine = static_cast<int>(threadIdx.x), lane = mine % 32;
  const int spilled = a.spilled && !a.spare ? a.spilled[slot] : 1;
  if (spilled == 0) return;
  if (!a.heads.on(slot, head)) return;
  // Slots of later layers follow those of the first.
  const int of_layers = a.layer * static_cast<int>(s.heads_per_layer / s.kv_heads) + slot;
  if (mine == 0 && !a.spare) s.placed[of_layers * s.kv_heads + head] = 1;
  const Head h = head_of(s, of_layers, head);
  const int n = *h.length, pages = min((n + p - 1) / p, a.most), words = (pages + 31) / 32;
  if (pages == 0) return;
  unsigned *chosen = bits, *come = bits + words, *leave = bits + 2 * words, *copy = bits + 3 * words;
  for (int w = mine; w < words; w += threads) chosen[w] = 0;
  const std::int64_t at = a.list_slots ? a.list_slots[row] : row;
  const int listed = a.count(at, head);
  bool bad = listed < 0 || listed > a.index.extent[2] || (a.order.data && a.order.extent[2] < pages);
  for (int i = mine; !bad && i < listed; i += threads) {
    const int page = a.index(at, head, i);
    bad = page < 0 || page >= pages;
  }
  if (__syncthreads_or(bad)) {
    if (mine == 0) fail(s, store_bad_list);
    return;
  }
  const auto choose = [&](int page) { atomicOr(&chosen[page / 32], 1u << (page % 32)); };
  for (int i = mine; i < listed; i += threads) choose(a.index(at, head, i));
  const int first = a.pins.first > 0 ? min(pages, (min(a.pins.first, n) + p - 1) / p) : 0,
            last = a.pins.last > 0 ? min(pages - 1, (n > a.pins.last ? n - a.pins.last : 0) / p) : pages - 1;
  for (int page = mine; page < first; page += threads) choose(page);
  for (int page = last + mine; page < pages; page += threads) choose(page);
  __syncthreads();

  bool any = false;
  for (int page = mine; page < words * 32; page += threads) {
    const bool there = page < pages;
    const PageEntry d = there ? h.table[0][page] : PageEntry{}, low = there ? h.table[1][page] : PageEntry{};
    const bool wanted = chosen[page / 32] >> lane & 1u, here = d.frame >= 0;
    const unsigned up = __ballot_sync(~0u, there && wanted && !here), other = __ballot_sync(~0u, here && !wanted),
                   down = __ballot_sync(~0u, here && d.tokens == p && low.frame < 0);
    if (lane == 0) come[page / 32] = up, leave[page / 32] = other, copy[page / 32] = down;
    any = any || up || other || down;
  }
  if (!__syncthreads_or(any)) return;

  int taken = 0, others = 0, copies = 0;
  for (int w = lane; w < words; w += 32)
    taken += __popc(chosen[w]), others += __popc(leave[w]), copies += __popc(copy[w]);
  taken = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(taken)));
  others = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(others)));
  const int room = max(spilled - 1, a.rooms.data ? a.rooms(row, head) : a.room);
  int left = others - max(0, room - taken);  // pages that still leave
  if (a.spare) {
    copies = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(copies)));
    if (mine == 0) atomicAdd(&a.spare[slot].leave, max(0, left)), atomicAdd(&a.spare[slot].write, copies);
    return;
  }
  __syncthreads();  // every warp has counted before the bits change
  if (a.order.data && left > 0 && left < others) keep_lowest(&a.order(at, head, 0), pages, others, left, leave, radix);

  // One warp turns bits into lists. Two begin at the front of their memory: pages that come, and those that leave and
  // have a copy. Two go back from its end: pages to write down, and those that leave and have no copy yet.
  std::int32_t *coming = a.lists + std::int64_t{blockIdx.x} * 2 * a.most, *frames = coming + a.most;
  if (mine < 32) {
    int come_before = 0, reuse_before = 0, uncopied_before = 0, down_before = 0;
    for (int begin = 0; begin < words; begin += 32) {
      const int w = begin + lane;
      const bool there = w < words;
      int all;
      const unsigned other = there ? leave[w] : 0;
      const int others_before = before_in_warp(__popc(other), all), quota = left - others_before;
      const unsigned leaves = lowest(other, quota > 0 ? quota : 0);
      left -= all;
      if (there) leave[w] = leaves;
      unsigned up = there ? come[w] : 0;
      int next = come_before + before_in_warp(__popc(up), all);
      come_before += all;
      for (; up; up &= up - 1) coming[next++] = w * 32 + __ffs(static_cast<int>(up)) - 1;
      unsigned free = there ? leaves & ~copy[w] : 0;
      next = reuse_before + before_in_warp(__popc(free), all);
      reuse_before += all;
      for (; free; free &= free - 1) frames[next++] = w * 32 + __ffs(static_cast<int>(free)) - 1;
      unsigned held = there ? leaves & copy[w] : 0;
      next = uncopied_before + before_in_warp(__popc(held), all);
      uncopied_before += all;
      for (; held; held &= held - 1) frames[a.most - 1 - next++] = w * 32 + __ffs(static_cast<int>(held)) - 1;
      unsigned down = there ? copy[w] : 0;
      next = down_before + before_in_warp(__popc(down), all);
      down_before += all;
      for (; down; down &= down - 1) coming[a.most - 1 - next++] = w * 32 + __ffs(static_cast<int>(down)) - 1;
    }
    if (lane == 0) {
      ups = come_before, reusable = reuse_before, uncopied = uncopied_before, waiting = 0, downs = down_before;
      below = downs > 0 ? take_frames(s, host_pool, downs, store_no_room) : -1;
      if (below < 0) uncopied = 0;
    }
  }
  __syncthreads();

  const auto without_keys = [&](int page) { return a.keys.tokens != nullptr && a.keys.cover(slot, head, page, p); };
  const auto job = [&](int kind, int from, int to, int last) {
    const int i = atomicAdd(a.counts, 1);
    a.jobs[4 * i] = kind, a.jobs[4 * i + 1] = from, a.jobs[4 * i + 2] = to, a.jobs[4 * i + 3] = last;
  };
  bool changed = false;
  int arrived = 0, written = 0, rebuilt = 0;
  const auto bring = [&](int page) {  // to the frame that it has by now
    const PageEntry &to = h.table[0][page], &lower = h.table[1][page];
    const bool without = without_keys(page);
    job(without ? CudaStorePlace::up_without_keys : CudaStorePlace::up, lower.frame, to.frame,
        last_of_job(s, lower, to.tokens));
    ++arrived;
    if (!without) return;
    a.rebuilds[atomicAdd(a.rebuild_counts, 1)] = {slot, head, page, to.frame};
    ++rebuilt;
  };
  const auto give = [&](PageEntry& gone, int page) {  // its frame
    PageEntry fresh;
    fresh.frame = gone.frame;
    fresh.tokens = h.table[1][page].tokens;
    gone = PageEntry{};
    h.table[0][page] = fresh;
  };
  for (int i = mine; i < ups || i < reusable; i += threads) {
    PageEntry* gone = i < reusable ? &h.table[0][frames[i]] : nullptr;
    changed = true;
    if (gone && s.layout.state_columns > 0) copy_state_down(s, gone->frame, h.table[1][frames[i]].frame);
    if (i >= ups) {
      job(CudaStorePlace::leave, gone->frame, null_frame, 0);
      *gone = PageEntry{};
      continue;
    }
    PageEntry& to = h.table[0][coming[i]];
    const int tokens = h.table[1][coming[i]].tokens;
    if (gone && !a.reuse && take_beyond(s, a.keep, to, tokens)) {
      job(CudaStorePlace::leave, gone->frame, null_frame, 0);
      *gone = PageEntry{};
    } else if (gone) {
      give(*gone, coming[i]);
    } else if (!take(s, 0, to, tokens, uncopied > 0 ? 0 : store_no_room)) {
      if (uncopied > 0) frames[reusable + atomicAdd(&waiting, 1)] = coming[i];
      continue;
    }
    bring(coming[i]);
  }
  // A head's pages take their frames in one run of the pool's list, so that neighbours lie side by side.
  if (below >= 0) {
    for (int i = mine; i < downs; i += threads) {
      PageEntry fresh;
      fresh.frame = s.pool[host_pool].at(below + i);
      fresh.tokens = static_cast<std::uint16_t>(p);
      h.table[1][coming[a.most - 1 - i]] = fresh;
    }
    __syncthreads();
  }
  // No frame of the device is left. A page without a copy gives its own once it is written down, which only this kernel
  // can know: the copies of jobs run in any order.
  for (int i = 0; uncopied > 0 && i < waiting; ++i) {
    if (i >= uncopied) {
      if (mine == 0) fail(s, store_no_room);
      break;
    }
    const int page = frames[reusable + i], leaves = frames[a.most - 1 - i];
    PageEntry& d = h.table[0][leaves];
    write_down(s, d.frame, h.table[1][leaves].frame, mine);
    __syncthreads();
    if (mine == 0) {
      copy[leaves / 32] &= ~(1u << (leaves % 32));
      give(d, page);
      bring(page);
    }
    __syncthreads();
  }
  for (int i = mine; below >= 0 && i < downs; i += threads) {
    const int page = coming[a.most - 1 - i];
    ++written;
    if (!(copy[page / 32] >> (page % 32) & 1u)) continue;  // it has given its frame
    const bool leaves = leave[page / 32] >> (page % 32) & 1u;
    PageEntry &d = h.table[0][page], &low = h.table[1][page];
    job(leaves ? CudaStorePlace::down_and_leave : CudaStorePlace::down, d.frame, low.frame,
        last_of_job(s, low, d.tokens));
    if (!leaves) continue;
    changed = true;
    if (s.layout.state_columns > 0) atomicAdd(&s.counters->states, 1ull);
    d = PageEntry{};
  }
  if (a.busy && (changed || written)) a.busy[slot] = 1;
  if (arrived) atomicAdd(&s.counters->moved[0], static_cast<unsigned long long>(arrived));
  if (rebuilt) atomicAdd(&s.counters->rebuilt, static_cast<unsigned long long>(rebuilt));
  if (written) atomicAdd(&s.counters->moved[1], static_cast<unsigned long long>(written));
  // Edits of other layers run at the same time, so each layer knows its own.
  if (changed && atomicExch(a.last, a.edit) != a.edit) atomicAdd(&s.counters->fired, 1ull);
}

__device__ inline bool is_up(int kind) { return kind == CudaStorePlace::up || kind == CudaStorePlace::up_without_keys; }

// Blocks of one warp. A lane has a job; the first lane copies for all of them.
__global__ void __launch_bounds__(32) relay_kernel(const __grid_constant__ CudaStoreLayer s, const std::int32_t* jobs,
                                                   std::int32_t* counts, unsigned ahead) {
  const int lane = static_cast<int>(threadIdx.x), blocks = static_cast<int>(gridDim.x), count = counts[0];
  if (static_cast<int>(blockIdx.x) < count) {
    Relay relay(relay_shared(), ahead);
    if (lane == 0) relay.start();
    for (int first = static_cast<int>(blockIdx.x); first < count; first += 32 * blocks) {
      const int job = first + lane * blocks;
      const bool has = job < count;
      int4 mine = {};
      if (has) mine = reinterpret_cast<const int4*>(jobs)[job];
      const bool leaves = has && (mine.x == CudaStorePlace::leave || mine.x == CudaStorePlace::down_and_leave);
      for (unsigned left = __ballot_sync(~0u, has && mine.x != CudaStorePlace::leave); left; left &= left - 1) {
        const int of = __ffs(static_cast<int>(left)) - 1;
        const int kind = __shfl_sync(~0u, mine.x, of), to = is_up(kind) ? 0 : 1;
        const std::int64_t skip = kind == CudaStorePlace::up_without_keys ? s.layout.v : 0;
        const std::byte* from = frame_at(s, 1 - to, __shfl_sync(~0u, mine.y, of)) + skip;
        std::byte* target = frame_at(s, to, __shfl_sync(~0u, mine.z, of)) + skip;
        if (lane == 0) relay.copy(from, target, static_cast<unsigned>(s.layout.bytes - skip));
      }
      if (!__any_sync(~0u, leaves)) continue;
      if (lane == 0) relay.finish();
      __syncwarp();
      if (leaves) give_frame_back(s, mine.y);
    }
    if (lane == 0) relay.finish();
    __syncwarp();
  }
  if (lane == 0) end_copies(counts);
}

__global__ void __launch_bounds__(32 * carrying_warps)
    carry_kernel(const __grid_constant__ CudaStoreLayer s, const std::int32_t* jobs, std::int32_t* counts,
                 const __grid_constant__ CarryRoom room) {
  extern __shared__ uint4 carried[];
  carry_jobs(s, jobs, counts[0], room, carried);
  __syncthreads();
  if (threadIdx.x == 0) end_copies(counts);
}

// A block has a page at a time. Its positions may still be on their way, so they are those of the host's copy.
__global__ void __launch_bounds__(ops::rebuild_threads)
    rebuild_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ KeyFactors keys,
                   const __grid_constant__ RopeTable rope, const CudaStorePlace::Rebuild* all, std::int32_t* counts) {
  __shared__ ops::RebuildShared shared;
  const PageLayout& l = s.layout;
  const int count = counts[0], p = l.page_size;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const CudaStorePlace::Rebuild of = all[i];
    const auto* positions = reinterpret_cast<const std::int32_t*>(
        frame_at(s, 1, head_of(s, of.slot, of.head).table[1][of.page].frame) + l.positions);
    std::byte* frame = frame_at(s, 0, of.frame);
    for (int first = 0; first < p; first += ops::rebuilt_at_once)
      ops::rebuild_keys(
          keys, rope, of.slot, of.head, of.page * p + first, min(ops::rebuilt_at_once, p - first), shared,
          [&](int t) { return positions[first + t]; },
          [&](int t, int d, float x) { put_element(frame + ops::row_offset(l, true, first + t), l.dtype, d, x); });
  }
  __syncthreads();
  if (threadIdx.x == 0) end_copies(counts);
}

__global__ void __launch_bounds__(1024) take_back_kernel(const __grid_constant__ CudaStoreLayer s) {
  __shared__ int at;
  const int count = *s.returned_count;
  if (count == 0) return;
  if (threadIdx.x == 0) at = place_back(s, 0, count);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
    s.pool[0].at(at + i) = s.returned[i];
  __syncthreads();
  if (threadIdx.x == 0) *s.returned_count = 0;
}

__global__ void mark_kernel(const __grid_constant__ Heads heads, const __grid_constant__ CudaStoreRows r,
                            const __grid_constant__ HeadFlags out) {
  const int slot = r.slots[blockIdx.x];
  for (int head = static_cast<int>(threadIdx.x); head < out.extent[1]; head += static_cast<int>(blockDim.x))
    out(slot, head) = heads.on(slot, head);
}

// Grid [slot and kv_head, layer].
__global__ void __launch_bounds__(32) owed_kernel(const __grid_constant__ CudaStoreLayer first) {
  const std::int64_t head = first.heads_per_layer * blockIdx.y + blockIdx.x;
  const int full = first.length[head] / first.layout.page_size;
  const PageEntry* below = first.table[1] + head * first.pages;
  int kept = 0;
#pragma unroll 4
  for (int page = static_cast<int>(threadIdx.x); page < full; page += 32) kept += below[page].frame >= 0;
  kept = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(kept)));
  const bool goes_down = kept > 0 || first.placed[head];
  if (threadIdx.x == 0 && goes_down && kept < full) atomicAdd(&first.counters->owed, full - kept);
}

}  // namespace

namespace cuda_store {

void plan_places(const CudaStoreLayer& first, const std::vector<CudaStorePlace>& all, Stream stream) {
  Places f = {first, {}};
  std::copy(all.begin(), all.end(), f.of);
  int most = 0;
  for (const CudaStorePlace& a : all) most = std::max(most, a.most);
  const std::size_t shared = (static_cast<std::size_t>(most) + 31) / 32 * 4 * sizeof(unsigned);
  if (shared > 46 * 1024)
    throw Error(Errc::unsupported, "got " + std::to_string(most) + " pages of a head, wanted at most 94208",
                "store place (CUDA)");
  const dim3 grid(static_cast<unsigned>(all[0].rows * first.kv_heads), static_cast<unsigned>(all.size()));
  plan_kernel<<<grid, threads, shared, stream_of(stream)>>>(f);
  check_launch("plan_places");
}
KVLAB_ON_CUDA(plan_places, plan_places);

void copy_placed(const CudaStoreLayer& s, const CudaStorePlace& a, Stream stream) {
  const int blocks = a.awaited ? awaited_blocks : copying_multiprocessors;
  if (s.packs) {
    copy_packing(s, {a.jobs, a.counts, true, 0}, packing_multiprocessors, stream);
  } else if (s.mixed) {
    const CarryRoom room = carry_room(s.layout, s.host_layout);
    launch_apart("copy_placed", carry_kernel, blocks, 32 * room.warps, stream, s, a.jobs, a.counts, room);
  } else {
    launch_relay("copy_placed", relay_kernel, blocks, stream, s, a.jobs, a.counts,
                 a.awaited ? relay_awaited : relay_beside);
  }
  check_launch("copy_placed");
}
KVLAB_ON_CUDA(copy_placed, copy_placed);

void rebuild_placed(const CudaStoreLayer& s, const CudaStorePlace& a, const RopeTable& rope, Stream stream) {
  rebuild_kernel<<<rebuild_blocks, ops::rebuild_threads, 0, stream_of(stream)>>>(s, a.keys, rope, a.rebuilds,
                                                                                 a.rebuild_counts);
  check_launch("rebuild_placed");
}
KVLAB_ON_CUDA(rebuild_placed, rebuild_placed);

void leave_room(BesideStep work) {
  left_free.to_cache = work == BesideStep::checks   ? checking_multiprocessors
                       : work == BesideStep::copies ? copying_multiprocessors
                                                    : 0;
}
KVLAB_ON_CUDA(leave_room, leave_room);

void take_back(const CudaStoreLayer& s, Stream stream) {
  take_back_kernel<<<1, 1024, 0, stream_of(stream)>>>(s);
  check_launch("take_back");
}
KVLAB_ON_CUDA(take_back, take_back);

void mark_heads(const Heads& heads, const CudaStoreRows& r, HeadFlags out, Stream stream) {
  mark_kernel<<<r.rows, 32, 0, stream_of(stream)>>>(heads, r, out);
  check_launch("mark_heads");
}
KVLAB_ON_CUDA(mark_heads, mark_heads);

void count_owed(const CudaStoreLayer& first, int layers, Stream stream) {
  owed_kernel<<<dim3(static_cast<unsigned>(first.heads_per_layer), static_cast<unsigned>(layers)), 32, 0,
                stream_of(stream)>>>(first);
  check_launch("count_owed");
}
KVLAB_ON_CUDA(count_owed, count_owed);

}  // namespace cuda_store

}  // namespace kvlab
