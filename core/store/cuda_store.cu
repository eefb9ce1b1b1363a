// The store's kernels. One block or one warp handles a head of a row. Heads share only the pools. Kernels change a
// pool's counts atomically. None but that of step_down both takes frames of a pool and gives some back. The plan of an
// append runs in one block and takes frames without atomics.
#include <algorithm>
#include <string>

#include "base/cuda.cuh"
#include "base/finite.hpp"
#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "ops/page/packed.hpp"
#include "ops/page/paged.hpp"
#include "store/cuda_carry.cuh"
#include "store/cuda_moves.cuh"
#include "store/cuda_packed.hpp"
#include "store/cuda_turn.hpp"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int warps = 4;  // warps of a block whose warps work alone
int blocks_of(std::int64_t work) { return static_cast<int>((work + warps - 1) / warps); }

// ---- append --------------------------------------------------------------------------------------------------------

// A head's share of an append.
struct AppendPlan {
  int length, begin;  // tokens before the append; frames that lower heads take
  int pages, up;      // new pages; 1 if the partly filled last page comes from the host
};

constexpr int plan_threads = 1024;

// One block gives frames to every head's new pages, in the order of heads and pages. Threads read all heads before any
// thread changes one.
__global__ void __launch_bounds__(plan_threads)
    append_plan_kernel(const __grid_constant__ CudaStoreLayer s, int slot, int tokens) {
  extern __shared__ AppendPlan plans[];  // [kv_head]
  __shared__ int next;
  __shared__ bool enough;
  wait_for_predecessor();
  let_successor_start();  // only now: append_kernel reads tokens of earlier kernels at once
  const int p = s.layout.page_size, mine = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int head = mine; head < s.kv_heads; head += threads) {
    const Head h = head_of(s, slot, head);
    const int n = *h.length;
    plans[head].length = n;
    plans[head].pages = (n + tokens + p - 1) / p - (n + p - 1) / p;
    plans[head].up = n % p && h.table[0][n / p].frame < 0 && h.table[1][n / p].frame >= 0;
  }
  const ops::FramePool& pool = s.pool[0];
  __syncthreads();
  if (mine == 0) {
    int all = 0, fresh = 0;
    for (int head = 0; head < s.kv_heads; ++head) {
      plans[head].begin = all;
      all += plans[head].pages + plans[head].up;
      fresh += plans[head].pages;
    }
    next = atomicAdd(pool.taken, all);  // plans of another stream may take some meanwhile
    enough = next + all <= *static_cast<volatile std::int32_t*>(pool.given);
    if (!enough) {
      atomicSub(pool.taken, all);
      fail(s, store_no_frame);
    } else if (s.summary != Summary::none) {
      atomicAdd(&s.counters->pages, fresh);
    }
  }
  __syncthreads();
  if (!enough) return;
  const int each = max(1, threads / s.kv_heads), teams = threads / each, team = mine / each;
  for (int head = team; team < teams && head < s.kv_heads; head += teams) {
    const Head h = head_of(s, slot, head);
    const AppendPlan plan = plans[head];
    const int end = plan.length + tokens, first = (plan.length + p - 1) / p;
    const int frames = next + plan.begin;
#pragma unroll 4
    for (int i = mine % each; i < plan.pages; i += each) {
      PageEntry e;
      e.frame = pool.at(frames + plan.up + i);
      e.tokens = static_cast<std::uint16_t>(min(p, end - (first + i) * p));
      h.table[0][first + i] = e;
    }
    if (plan.up && !s.mixed)
      copy_frame(s, frame_at(s, 1, h.table[1][plan.length / p].frame), frame_at(s, 0, pool.at(frames)), mine % each,
                 each);
  }
  for (int head = mine / 32; s.mixed && head < s.kv_heads; head += threads / 32)
    if (const AppendPlan plan = plans[head]; plan.up)
      carry_page(s, 0, head_of(s, slot, head).table[1][plan.length / p].frame, pool.at(next + plan.begin),
                 plan.length % p, mine % 32);
  __syncthreads();
  for (int head = mine; head < s.kv_heads; head += threads) {
    const Head h = head_of(s, slot, head);
    const int n = plans[head].length, end = n + tokens;
    if (n % p) {
      PageEntry& e = h.table[0][n / p];
      if (plans[head].up)
        e = PageEntry{}, e.frame = pool.at(next + plans[head].begin), atomicAdd(&s.counters->moved[0], 1ull);
      e.tokens = static_cast<std::uint16_t>(min(p, end - n / p * p));
      give_back(s, 1, h.table[1][n / p], true);  // the device page has tokens that the host copy lacks
    }
    *h.length = end;
  }
}

// The lane's elements of a row. wide: they are aligned to 16 bytes.
template <class In>
__device__ void read_elements(const In* from, bool wide, float (&x)[lane_elements]) {
  constexpr int each = 16 / int{sizeof(In)};
#pragma unroll
  for (int i = 0; i < lane_elements; i += each) {
    alignas(16) In part[each];
    if (wide)
      *reinterpret_cast<uint4*>(part) = *reinterpret_cast<const uint4*>(from + i);
    else
#pragma unroll
      for (int e = 0; e < each; ++e) part[e] = from[i + e];
#pragma unroll
    for (int e = 0; e < each; ++e) x[i + e] = static_cast<float>(part[e]);
  }
}

// A warp stores keys and values of 32 / Lanes neighbouring tokens of a head. `Lanes` neighbouring lanes have a row.
constexpr int append_parts = 2;
template <class In, int Lanes>
__global__ void __launch_bounds__(warps * 32)
    append_kernel(const __grid_constant__ CudaStoreLayer s, int slot, const In* k, const In* v, std::int64_t stride,
                  bool wide, int tokens, int first, std::int32_t* nonfinite, float limit) {
  const int dim = s.layout.head_dim, p = s.layout.page_size;
  const int lane = threadIdx.x % 32, d = lane % Lanes * lane_elements;
  const unsigned item = blockIdx.x * warps + threadIdx.x / 32, heads = static_cast<unsigned>(s.kv_heads);
  const int head = static_cast<int>(item % heads), begin = static_cast<int>(item / heads) * (32 / Lanes),
            i = begin + lane / Lanes;
  if (begin >= tokens) return;
  const RowParts<append_parts> empty = {{}, d, Lanes * lane_elements, d < dim && i < tokens};
  RowParts<append_parts> row[2] = {empty, empty};  // on their way while the plan ends and pages are looked up
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int part = 0; part < append_parts; ++part)
      if (empty.has(part, dim))
        read_elements((side ? v : k) + i * stride + std::int64_t{head} * dim + d + part * empty.step, wide,
                      row[side].x[part]);
  wait_for_predecessor();
  let_successor_start();
  const Head h = head_of(s, slot, head);
  const int length = *h.length - tokens;
  if (length < 0) return;  // the plan found too few frames
  const int t = length + min(i, tokens - 1), page = t / p, offset = t % p;
  const PageLayout& l = s.mixed ? layout_at(s, h, page) : s.layout;  // a page of the second codec may have lost tokens
  std::byte* frame = frame_at(s, 0, h.table[0][page].frame);
  bool finite = true;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int part = 0; part < append_parts; ++part)
#pragma unroll
      for (int e = 0; e < lane_elements; ++e) finite = finite && fabsf(row[side].x[part][e]) < limit;
    encode(frame, l, side == 0, offset, row[side], Lanes);
  }
  if (nonfinite && !finite) *nonfinite = 1;
  if (i >= tokens) return;
  if (d == 0) *reinterpret_cast<std::int32_t*>(field(frame, l, offset, 0)) = first + i;
  for (int c = lane % Lanes; c < l.state_columns; c += Lanes) *field(frame, l, offset, 1 + c) = 0;
}

__global__ void append_summaries_kernel(const __grid_constant__ CudaStoreLayer s, int slot, int tokens, int pages) {
  const int lane = threadIdx.x % 32;
  const std::int64_t index = std::int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= std::int64_t{pages} * s.kv_heads) return;
  const Head h = head_of(s, slot, static_cast<int>(index % s.kv_heads));
  const int n = *h.length, p = s.layout.page_size;
  const int page = max(0, n - tokens) / p + static_cast<int>(index / s.kv_heads);
  if (page * p < n) summarize(s, h, page, min(p, n - page * p), lane);
}

__global__ void before_step_kernel(const __grid_constant__ CudaStoreLayer s, const CudaStoreRows r) {
  const int lane = threadIdx.x % 32, index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= r.rows * s.kv_heads) return;
  const Head h = head_of(s, r.slots[index / s.kv_heads], index % s.kv_heads);
  const int n = *h.length, p = s.layout.page_size, page = n / p;
  if (n % p == 0) return;
  const PageEntry below = h.table[1][page];
  if (below.frame < 0) return;
  int frame = h.table[0][page].frame;
  if (frame < 0) {
    PageEntry e;
    if (lane == 0 && take(s, 0, e, below.tokens)) frame = e.frame;
    frame = __shfl_sync(~0u, frame, 0);
    if (frame < 0) return;
    if (s.mixed)
      carry_page(s, 0, below.frame, frame, below.tokens, lane);
    else
      copy_frame(s, frame_at(s, 1, below.frame), frame_at(s, 0, frame), lane, 32);
    if (lane == 0) h.table[0][page] = e, atomicAdd(&s.counters->moved[0], 1ull);
  }
  __syncwarp();
  if (lane == 0) give_back(s, 1, h.table[1][page], true);
}

// ---- evictions -----------------------------------------------------------------------------------------------------

// A head's list: ascending places of the tokens that stay, or of those that leave.
struct Places {
  const std::int32_t* list;
  std::int64_t stride;
  int count;
  bool rest;  // the list names the tokens that stay

  __device__ int at(int i) const { return list[i * stride]; }
  // Returns the length of the list's prefix with at(i) - i <= holes.
  __device__ int behind(int holes) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (at(middle) - middle <= holes)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // Place of the i-th token that stays.
  __device__ int stays(int i) const { return rest ? at(i) : i + behind(i); }
  // The i-th place that a token leaves. Callers use it up to the first such place at or above the kept count.
  __device__ int hole(int i) const { return rest ? behind(i) + i : at(i); }
};

template <class Unit, bool Mixed>
__global__ void __launch_bounds__(512)
    keep_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreList a, bool rest,
                std::int32_t* ranks) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads;
  const Head h = head_of(s, a.slots[row], head);
  const int before = *h.length;
  Places x;
  x.list = &a.index(row, head, 0);
  x.stride = a.index.stride[2];
  x.count = a.count(row, head);
  x.rest = rest;
  if (wrong_list(s, a, row, head, before)) return;
  std::int32_t* rank = ranks ? ranks + std::int64_t{blockIdx.x} * s.pages * s.layout.page_size : nullptr;
  close_holes<Unit, Mixed>(s, h, before, rest ? before - x.count : x.count, x, rank, a.edit, &s.counters->last_edit);
}

// A warp evicts at most one token of a head.
template <class Unit, bool Mixed>
__global__ void __launch_bounds__(warps * 32)
    evict_one_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreList a,
                     std::int32_t* ranks) {
  const int of_all = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32;
  const int row = of_all / s.kv_heads, head = of_all % s.kv_heads;
  if (row >= a.rows) return;
  std::int32_t* rank = ranks ? ranks + std::int64_t{of_all} * s.pages * s.layout.page_size : nullptr;
  if (evict_one<Unit, Mixed>(s, a, row, head, rank, static_cast<int>(threadIdx.x) % 32) && threadIdx.x % 32 == 0)
    count_fired(s, a.edit);
}

// A warp swaps a head's pairs in order.
template <class Unit, bool Mixed>
__global__ void __launch_bounds__(warps * 32)
    swap_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreList a) {
  const int of_all = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32;
  const int row = of_all / s.kv_heads, head = of_all % s.kv_heads;
  if (row >= a.rows) return;
  if (swap_pairs<Unit, Mixed>(s, a, row, head, static_cast<int>(threadIdx.x) % 32) && threadIdx.x % 32 == 0)
    count_fired(s, a.edit);
}

// Grid [kv_head, layer].
__global__ void clear_kernel(const __grid_constant__ CudaStoreLayer first, int slot) {
  CudaStoreLayer s = first;
  const std::int64_t heads = s.heads_per_layer * blockIdx.y;
  for (int tier = 0; tier < 2; ++tier) s.table[tier] += heads * s.pages;
  s.length += heads;
  if (s.lower_pages) s.lower_pages += heads;
  const Head h = head_of(s, slot, static_cast<int>(blockIdx.x));
  const int pages = (*h.length + s.layout.page_size - 1) / s.layout.page_size;
  __syncthreads();
  for (int page = threadIdx.x; page < pages; page += blockDim.x)
    for (int tier = 0; tier < 2; ++tier) give_back(s, tier, h.table[tier][page]);
  if (threadIdx.x == 0) {
    *h.length = 0;
    if (h.lower_pages) *h.lower_pages = 0;
    fewer_pages(s, pages);
    if (s.placed) s.placed[heads + slot * s.kv_heads + blockIdx.x] = 0;
  }
}

// ---- pages ---------------------------------------------------------------------------------------------------------

__global__ void page_edit_kernel(const __grid_constant__ CudaStoreLayer s,
                                 const __grid_constant__ CudaStorePageEdit a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int part = static_cast<int>(blockIdx.y) * threads + mine, parts = static_cast<int>(gridDim.y) * threads;
  const Head h = head_of(s, a.slots[row], head);
  const int pages = (*h.length + p - 1) / p;
  const bool every = a.verb == CudaStorePageEdit::recall_all;
  const int count = every ? pages : a.count(row, head);
  // Every block checks the whole list, so that a wrong list changes nothing.
  if (!every && wrong_list(s, a, row, head, pages)) return;
  bool changed = false;
  for (int i = part; i < count; i += parts) {
    const int page = every ? i : a.index(row, head, i);
    PageEntry &d = h.table[0][page], &low = h.table[1][page];
    if (a.verb == CudaStorePageEdit::drop) {
      PageEntry &from = a.tier == Tier::host ? low : d, &other = a.tier == Tier::host ? d : low;
      if (from.frame < 0) continue;
      if (other.frame < 0) {
        fail(s, store_only_copy);
        continue;
      }
      if (a.tier == Tier::device && s.layout.state_columns > 0) copy_state_down(s, d.frame, low.frame);
      give_back(s, a.tier == Tier::host ? 1 : 0, from);
      changed = true;
      continue;
    }
    const int to = a.verb == CudaStorePageEdit::offload ? 1 : 0;
    PageEntry &source = to ? d : low, &target = to ? low : d;
    if (target.frame >= 0 || source.frame < 0) continue;
    if (!take(s, to, target, source.tokens)) continue;
    std::int32_t* job = a.jobs + 4 * atomicAdd(a.job_count, 1);
    job[0] = to ? CudaStorePlace::down : CudaStorePlace::up;
    job[1] = source.frame, job[2] = target.frame, job[3] = last_of_job(s, low, source.tokens);
    changed = true;
  }
  if (changed) count_fired(s, a.edit);
}

__device__ inline void count_moved(const CudaStoreLayer& s, int count, int to) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && count > 0)
    atomicAdd(&s.counters->moved[to], static_cast<unsigned long long>(count));
}

// Each warp copies one page at a time. Whole frames cross the link in units of 16 bytes, many in flight.
__global__ void __launch_bounds__(256) page_copy_kernel(const __grid_constant__ CudaStoreLayer s,
                                                        const std::int32_t* count, const std::int32_t* jobs, int to) {
  const int all_warps = static_cast<int>(blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int job = static_cast<int>(blockIdx.x) * all_warps + static_cast<int>(threadIdx.x) / 32; job < *count;
       job += static_cast<int>(gridDim.x) * all_warps)
    copy_frame(s, frame_at(s, 1 - to, jobs[4 * job + 1]), frame_at(s, to, jobs[4 * job + 2]), lane, 32);
  count_moved(s, *count, to);
}

// The same where the tiers' layouts differ.
__global__ void __launch_bounds__(32 * carrying_warps)
    page_carry_kernel(const __grid_constant__ CudaStoreLayer s, const std::int32_t* count, const std::int32_t* jobs,
                      int to, const __grid_constant__ CarryRoom room) {
  extern __shared__ uint4 carried[];
  carry_jobs(s, jobs, *count, room, carried);
  count_moved(s, *count, to);
}

__global__ void __launch_bounds__(256)
    pack_kernel(const CudaStorePacking* jobs, int count, std::byte* device, std::byte* packed, bool to_host) {
  const int all = static_cast<int>(gridDim.x * blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32; i < count; i += all) {
    const CudaStorePacking job = jobs[i];
    auto* frame = reinterpret_cast<uint4*>(device + std::int64_t{job.frame} * granule_bytes);
    auto* copy = reinterpret_cast<uint4*>(packed + std::int64_t{job.at} * granule_bytes);
    const uint4* from = to_host ? frame : copy;
    copy_units([&](int x) { return from + x; }, to_host ? copy : frame,
               job.granules * static_cast<int>(granule_bytes / sizeof(uint4)), lane, 32);
  }
}

__device__ std::int32_t position_at(const CudaStoreLayer& s, const Head& h, int t) {
  const int p = s.layout.page_size;
  const std::byte* page = page_at(s, h, t / p);
  const PageEntry &upper = h.table[0][t / p], &e = upper.frame >= 0 ? upper : h.table[1][t / p];
  return reinterpret_cast<const std::int32_t*>(page + ops::positions_of(layout_at(s, h, t / p), e))[t % p];
}

__global__ void positions_kernel(const __grid_constant__ CudaStoreLayer s, int slot, int head, int tokens,
                                 std::int32_t* out) {
  const int t = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (t < tokens) out[t] = position_at(s, head_of(s, slot, head), t);
}

__global__ void by_place_kernel(const __grid_constant__ CudaStoreLayer s, int slot, View<const float, 3> of,
                                View<float, 3> out, std::int64_t row) {
  const int t = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), head = static_cast<int>(blockIdx.y);
  if (t >= out.extent[2]) return;
  const Head h = head_of(s, slot, head);
  const std::int64_t p = t < *h.length ? position_at(s, h, t) : of.extent[2];
  out(row, head, t) = p >= 0 && p < of.extent[2] ? of(row, head, p) : 0;
}

constexpr int attend_threads = 512;

// Writes the pages or tokens of a list and of the pins in ascending order.
__global__ void __launch_bounds__(attend_threads)
    attend_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreAttend a) {
  extern __shared__ unsigned chosen[];
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const Head h = head_of(s, a.slots[row], head);
  const int n = *h.length;
  const int unit = a.unit, all = min((n + unit - 1) / unit, a.most), words = (all + 31) / 32;
  for (int i = mine; i < words; i += threads) chosen[i] = 0;
  __syncthreads();
  const auto choose = [&](int entry) {
    if (s.base[1] && h.table[0][static_cast<std::int64_t>(entry) * unit / p].frame < 0)
      fail(s, ops::page_absent);
    else
      atomicOr(&chosen[entry / 32], 1u << (entry % 32));
  };
  const std::int64_t at = a.list_slots ? a.list_slots[row] : row;
  int count = a.count(at, head);
  if (count < 0 || count > a.index.extent[2]) {
    if (mine == 0) fail(s, store_bad_list);
    count = 0;
  }
  for (int i = mine; i < count; i += threads) {
    const int entry = a.index(at, head, i);
    if (entry < 0 || entry >= all)
      fail(s, store_bad_attend);
    else
      choose(entry);
  }
  const int first = a.pins.first > 0 ? min(all, (min(a.pins.first, n) + unit - 1) / unit) : 0;
  int last = a.pins.last > 0 ? max(0, n - a.pins.last) / unit : all;
  if (a.pins.newest_page) last = min(last, max(0, n - 1) / p * p / unit);
  for (int entry = mine; entry < first; entry += threads) choose(entry);
  for (int entry = last + mine; entry < all; entry += threads) choose(entry);
  for (int page = mine; a.resident && page < all; page += threads)
    if (h.table[0][page].frame >= 0) choose(page);
  __syncthreads();
  __shared__ int of_warp[attend_threads / 32];
  const int warp = mine / 32;
  int out = 0;
  for (int begin = 0; begin < words; begin += threads) {
    unsigned word = begin + mine < words ? chosen[begin + mine] : 0;
    const int here = __popc(word);
    const int sum = sum_through_lane(here);
    if (mine % 32 == 31) of_warp[warp] = sum;
    __syncthreads();
    int next = out + sum - here;
    for (int w = 0; w < threads / 32; ++w) {
      if (w < warp) next += of_warp[w];
      out += of_warp[w];
    }
    for (; word; word &= word - 1) a.out(row, head, next++) = (begin + mine) * 32 + __ffs(static_cast<int>(word)) - 1;
    __syncthreads();
  }
  if (mine == 0) {
    a.out_count(row, head) = out;
    if (out != all) count_fired(s, a.edit);
  }
}

__global__ void absent_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreList a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads;
  const Head h = head_of(s, a.slots[row], head);
  const int pages = (*h.length + s.layout.page_size - 1) / s.layout.page_size;
  const int count = a.count.data ? min(a.count(row, head), static_cast<int>(a.index.extent[2])) : pages;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    const int page = a.count.data ? a.index(row, head, i) : i;
    if (h.table[0][page].frame < 0) fail(s, ops::page_absent);
  }
}

// ---- launches ------------------------------------------------------------------------------------------------------

template <class In, int Lanes>
void append_rows(const CudaStoreLayer& s, const CudaStoreAppend& a, cudaStream_t stream) {
  constexpr int tokens_of_warp = 32 / Lanes;
  const auto aligned = [](auto bytes) { return static_cast<std::uint64_t>(bytes) % 16 == 0; };
  const bool wide = aligned(reinterpret_cast<std::uintptr_t>(a.k)) && aligned(reinterpret_cast<std::uintptr_t>(a.v)) &&
                    aligned(a.stride * std::int64_t{sizeof(In)});
  const std::int64_t items = std::int64_t{(a.tokens + tokens_of_warp - 1) / tokens_of_warp} * s.kv_heads;
  launch("append", append_kernel<In, Lanes>, blocks_of(items), warps * 32, 0, stream, true, s, a.slot,
         static_cast<const In*>(a.k), static_cast<const In*>(a.v), a.stride, wide, a.tokens, a.first, a.nonfinite,
         finite_limit(s.layout.dtype));
}
template <class In>
void append_of(const CudaStoreLayer& s, const CudaStoreAppend& a, cudaStream_t stream) {
  const int dim = s.layout.head_dim;
  return dim <= 64    ? append_rows<In, 4>(s, a, stream)
         : dim <= 128 ? append_rows<In, 8>(s, a, stream)
                      : append_rows<In, 16>(s, a, stream);
}

}  // namespace

namespace cuda_store {

void append(const CudaStoreLayer& s, const CudaStoreAppend& a, Stream to) {
  const cudaStream_t stream = stream_of(to);
  if (a.dtype != DType::f32 && a.dtype != DType::bf16)
    throw Error(Errc::unsupported, "got tokens of " + std::string(name_of(a.dtype)) + ", wanted f32 or bf16",
                "store append (CUDA)");
  launch("append_plan", append_plan_kernel, 1, plan_threads, static_cast<std::size_t>(s.kv_heads) * sizeof(AppendPlan),
         stream, true, s, a.slot, a.tokens);
  a.dtype == DType::f32 ? append_of<float>(s, a, stream) : append_of<__nv_bfloat16>(s, a, stream);
  if (s.summary == Summary::none) return;
  const int pages = (a.tokens + s.layout.page_size - 1) / s.layout.page_size + 1;
  append_summaries_kernel<<<blocks_of(std::int64_t{pages} * s.kv_heads), warps * 32, 0, stream>>>(s, a.slot, a.tokens,
                                                                                                  pages);
  check_launch("append_summaries");
}
KVLAB_ON_CUDA(append, append);

void before_step(const CudaStoreLayer& s, const CudaStoreRows& r, Stream stream) {
  before_step_kernel<<<blocks_of(std::int64_t{r.rows} * s.kv_heads), warps * 32, 0, stream_of(stream)>>>(s, r);
  check_launch("before_step");
}
KVLAB_ON_CUDA(before_step, before_step);

static void keep_some(const CudaStoreLayer& s, const CudaStoreList& a, bool rest, Stream stream) {
  std::int32_t* before = s.inv_freq ? store_ranks(s, a, "ranks before", stream.handle()) : nullptr;
  const int heads = a.rows * s.kv_heads;
  if (!rest && a.index.extent[2] == 1) {
    const auto kernel = s.mixed          ? evict_one_kernel<unsigned, true>
                        : wide(s.layout) ? evict_one_kernel<uint4, false>
                                         : evict_one_kernel<unsigned, false>;
    kernel<<<blocks_of(heads), warps * 32, 0, stream_of(stream)>>>(s, a, before);
  } else {
    const auto kernel = s.mixed          ? keep_kernel<unsigned, true>
                        : wide(s.layout) ? keep_kernel<uint4, false>
                                         : keep_kernel<unsigned, false>;
    // Steps evict few tokens of each head: blocks are small then, so that many run at once.
    const int threads = !rest && a.index.extent[2] <= few ? 128 : 512;
    kernel<<<heads, threads, 0, stream_of(stream)>>>(s, a, rest, before);
  }
  check_launch("keep");
  if (before) turn_keys(s, a, before, store_ranks(s, a, "ranks after", stream.handle()), stream.handle());
}
void keep(const CudaStoreLayer& s, const CudaStoreList& kept, Stream stream) { keep_some(s, kept, true, stream); }
KVLAB_ON_CUDA(keep, keep);
void evict(const CudaStoreLayer& s, const CudaStoreList& lost, Stream stream) { keep_some(s, lost, false, stream); }
KVLAB_ON_CUDA(evict, evict);

void swap_places(const CudaStoreLayer& s, const CudaStoreList& pairs, Stream stream) {
  const auto kernel = s.mixed          ? swap_kernel<unsigned, true>
                      : wide(s.layout) ? swap_kernel<uint4, false>
                                       : swap_kernel<unsigned, false>;
  kernel<<<blocks_of(std::int64_t{pairs.rows} * s.kv_heads), warps * 32, 0, stream_of(stream)>>>(s, pairs);
  check_launch("swap");
}
KVLAB_ON_CUDA(swap_places, swap_places);

void page_edit(const CudaStoreLayer& s, const CudaStorePageEdit& e, Stream stream) {
  const std::int64_t most = e.verb == CudaStorePageEdit::recall_all ? s.pages : e.index.extent[2];
  const unsigned parts = static_cast<unsigned>(std::clamp<std::int64_t>((most + 127) / 128, 1, 16));
  page_edit_kernel<<<dim3(e.rows * s.kv_heads, parts), 128, 0, stream_of(stream)>>>(s, e);
  check_launch("page_edit");
  if (e.verb == CudaStorePageEdit::drop) return;
  const int to = e.verb == CudaStorePageEdit::offload ? 1 : 0;
  if (s.packs) return copy_packing(s, {e.jobs, e.job_count, false, to}, 64, stream);
  constexpr int blocks = 64;
  if (s.mixed) {
    const CarryRoom room = carry_room(s.layout, s.host_layout);
    launch_apart("page_carry", page_carry_kernel, blocks, 32 * room.warps, stream, s, e.job_count, e.jobs, to, room);
    return;
  }
  page_copy_kernel<<<blocks, 256, 0, stream_of(stream)>>>(s, e.job_count, e.jobs, to);
  check_launch("page_copy");
}
KVLAB_ON_CUDA(page_edit, page_edit);

void attend(const CudaStoreLayer& s, const CudaStoreAttend& a, Stream stream) {
  const std::size_t shared = (static_cast<std::size_t>(a.most) + 31) / 32 * 4;
  const std::size_t room = static_cast<std::size_t>(shared_bytes()) - 1024;
  if (shared > room)
    throw Error(Errc::unsupported,
                "got " + std::to_string(a.most) + (a.unit == 1 ? " tokens" : " pages") + " of a head, wanted at most " +
                    std::to_string(room * 8),
                "store attend (CUDA)");
  static const cudaError_t once =
      cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room));
  check(once, "store attend");
  attend_kernel<<<a.rows * s.kv_heads, attend_threads, shared, stream_of(stream)>>>(s, a);
  check_launch("store attend");
}
KVLAB_ON_CUDA(attend, attend);

void note_absent(const CudaStoreLayer& s, const CudaStoreList& a, Stream stream) {
  absent_kernel<<<a.rows * s.kv_heads, 128, 0, stream_of(stream)>>>(s, a);
  check_launch("note_absent");
}
KVLAB_ON_CUDA(note_absent, note_absent);

void clear(const CudaStoreLayer& first, int layers, int slot, Stream stream) {
  clear_kernel<<<dim3(static_cast<unsigned>(first.kv_heads), static_cast<unsigned>(layers)), 128, 0,
                 stream_of(stream)>>>(first, slot);
  check_launch("clear");
}
KVLAB_ON_CUDA(clear, clear);

void pack(const CudaStorePacking* jobs, int count, std::byte* device, std::byte* packed, bool to_host, Stream stream) {
  if (count < 1) return;
  pack_kernel<<<256, 256, 0, stream_of(stream)>>>(jobs, count, device, packed, to_host);
  check_launch("pack");
}
KVLAB_ON_CUDA(pack, pack);

void positions(const CudaStoreLayer& s, int slot, int head, int tokens, std::int32_t* out, Stream stream) {
  if (tokens < 1) return;
  positions_kernel<<<(tokens + 255) / 256, 256, 0, stream_of(stream)>>>(s, slot, head, tokens, out);
  check_launch("positions");
}
KVLAB_ON_CUDA(positions, positions);

void by_place(const CudaStoreLayer& s, int slot, View<const float, 3> of, View<float, 3> out, std::int64_t row,
              Stream stream) {
  if (out.extent[2] < 1) return;
  by_place_kernel<<<dim3(static_cast<unsigned>((out.extent[2] + 255) / 256), static_cast<unsigned>(s.kv_heads)), 256, 0,
                    stream_of(stream)>>>(s, slot, of, out, row);
  check_launch("by_place");
}
KVLAB_ON_CUDA(by_place, by_place);

}  // namespace cuda_store
}  // namespace kvlab
