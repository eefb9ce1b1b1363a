// Tokens of a device with two codecs by their levels, and extents of frames. Pages of the second codec come first in a
// head's table.
#include <algorithm>

#include "base/cuda.cuh"
#include "base/lanes.cuh"
#include "ops/page/paged.hpp"
#include "store/cuda_tokens.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int threads = 256, warps = threads / 32;

// ---- levels --------------------------------------------------------------------------------------------------------

// Sums of a block's numbers in front of each thread, and of all.
struct BlockSums {
  int before, all;
};
__device__ BlockSums sum_block(int own) {
  __shared__ int of_warps[warps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int sum = cuda::sum_through_lane(own);
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  BlockSums out = {sum - own, 0};
  for (int w = 0; w < warps; ++w) {
    if (w < warp) out.before += of_warps[w];
    out.all += of_warps[w];
  }
  return out;
}

// A lane's tokens of a head, a bit each.
constexpr int lane_tokens = 16, warp_tokens = 32 * lane_tokens;
struct LaneLevels {
  unsigned low = 0, high = 0;  // tokens for the second codec, and others that stay
  bool bad = false;
};

__device__ LaneLevels levels_of_lane(const std::uint8_t* level, int first, int n) {
  unsigned word[lane_tokens / 4] = {};
  const std::uint8_t* from = level + first;
  if (first + lane_tokens <= n && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
  } else {
#pragma unroll
    for (int i = 0; i < lane_tokens; ++i) word[i / 4] |= unsigned{first + i < n ? from[i] : level_gone} << 8 * (i % 4);
  }
  constexpr unsigned bytes = 0x01010101u;
  const auto gathered = [](unsigned x) { return x * 0x01020408u >> 24 & 15u; };  // the lowest bit of each byte
  LaneLevels out;
#pragma unroll
  for (int i = 0; i < lane_tokens / 4; ++i) {
    const unsigned gone = word[i] >> 7 & bytes, low = word[i] & bytes & ~gone;
    out.bad = out.bad || word[i] != (low | gone * level_gone);
    out.low |= gathered(low) << 4 * i;
    out.high |= gathered(bytes & ~(low | gone)) << 4 * i;
  }
  return out;
}

// Writes the order of heads' tokens by their places to come, and takes frames for them. `Warps` warps have a head, one
// part each. Sums over a warp's lanes, a head's warps and a block's heads say where tokens go and which frames pages
// take. So a block asks each pool once.
template <int Warps>
__global__ void __launch_bounds__(threads)
    levels_plan_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  constexpr int heads = warps / Warps;
  struct Part {
    int low, high;
    bool bad, moves;
  };
  __shared__ std::int32_t places[warps][warp_tokens];
  __shared__ Part parts[warps];
  __shared__ int pages_of[heads][2], first_of[heads][2];
  const int mine = static_cast<int>(threadIdx.x), warp = mine / 32, lane = mine % 32, team = warp / Warps,
            part = warp % Warps, p = s.layout.page_size;
  const int all = a.rows * s.kv_heads, wanted = static_cast<int>(blockIdx.x) * heads + team, of = min(wanted, all - 1);
  const int row = of / s.kv_heads, head = of % s.kv_heads;
  const Head h = head_of(s, a.slots[row], head);
  int n = wanted < all ? *h.length : 0;
  const bool too_long = n > a.levels.extent[2] || n > a.most;
  if (too_long) n = 0;
  const std::uint8_t* level = n > 0 ? &a.levels(row, head, 0) : nullptr;
  const int span = (n + Warps * warp_tokens - 1) / (Warps * warp_tokens) * warp_tokens, begin = min(n, part * span),
            end = min(n, begin + span);
  Part own = {0, 0, too_long, false};
  for (int t = begin + lane * lane_tokens; t < end; t += warp_tokens) {
    const LaneLevels x = levels_of_lane(level, t, n);
    own.low += __popc(x.low), own.high += __popc(x.high);
    own.bad = own.bad || x.bad || (x.low && !h.lower_pages);
  }
  own.low = cuda::sum_of_lanes(own.low), own.high = cuda::sum_of_lanes(own.high);
  own.bad = __any_sync(~0u, own.bad);
  if (lane == 0) parts[warp] = own;
  __syncthreads();
  Part before = {}, sum = {};
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    const Part& x = parts[team * Warps + w];
    if (w < part) before.low += x.low, before.high += x.high;
    sum.low += x.low, sum.high += x.high, sum.bad = sum.bad || x.bad;
  }
  CudaStoreLevels::Plan plan;
  plan.low = sum.low / p * p, plan.kept = sum.low + sum.high;
  std::int32_t* order = a.order + std::int64_t{of} * a.most;
  bool same = plan.kept == n && plan.low == (h.lower_pages ? *h.lower_pages * p : 0);
  int lows = before.low, others = before.high + max(0, before.low - plan.low);
  for (int chunk = begin; !sum.bad && chunk < end; chunk += warp_tokens) {
    const int t = chunk + lane * lane_tokens;
    LaneLevels x = levels_of_lane(level, t, n);
    const int low = __popc(x.low), low_through = cuda::sum_through_lane(low), rank = lows + low_through - low;
    if (rank + low > plan.low) {  // low tokens that fill no page stay in the first codec
      unsigned rest = x.low;
      for (int i = rank; i < plan.low; ++i) rest &= rest - 1;
      x.low ^= rest, x.high |= rest;
    }
    const int high = __popc(x.high), high_through = cuda::sum_through_lane(high);
    const int all_low = __shfl_sync(~0u, low_through, 31), all_high = __shfl_sync(~0u, high_through, 31),
              low_here = min(all_low, max(0, plan.low - lows));
    int low_at = rank - lows, high_at = low_here + high_through - high;
    if (x.low) {
      const int skipped = __ffs(static_cast<int>(x.low)) - 1;
      const unsigned run = x.low >> skipped;
      same = same && t + skipped == rank && (run & (run + 1)) == 0;
    }
#pragma unroll
    for (int i = 0; i < lane_tokens; ++i)
      if (x.low >> i & 1)
        places[warp][low_at++] = t + i;
      else if (x.high >> i & 1)
        places[warp][high_at++] = t + i;
    __syncwarp();
    for (int i = lane; i < low_here + all_high; i += 32)
      order[i < low_here ? lows + i : plan.low + others + i - low_here] = places[warp][i];
    __syncwarp();
    lows += all_low, others += all_high;
  }
  const bool moves = __any_sync(~0u, !same);
  __syncthreads();  // all have read the parts
  if (lane == 0) parts[warp].moves = moves && !sum.bad;
  __syncthreads();
  bool changes = false;
#pragma unroll
  for (int w = 0; w < Warps; ++w) changes = changes || parts[team * Warps + w].moves;
  const int low_pages = changes ? plan.low / p : 0, pages = changes ? (plan.kept + p - 1) / p : 0;
  if (part == 0 && lane == 0) pages_of[team][0] = low_pages, pages_of[team][1] = pages - low_pages;
  __syncthreads();
  if (mine < 2) {
    int count = 0;
    for (int i = 0; i < heads; ++i) {
      first_of[i][mine] = count;
      count += pages_of[i][mine];
    }
    const int first = count > 0 ? take_frames(s, pool_of(0, mine == 0), count) : 0;
    for (int i = 0; i < heads; ++i)
      first_of[i][mine] = first < 0 && pages_of[i][mine] > 0 ? -1 : first_of[i][mine] + first;
  }
  __syncthreads();
  if (wanted >= all) return;
  const int low_first = first_of[team][0], high_first = first_of[team][1];
  if (!changes || low_first < 0 || high_first < 0) {
    if (part == 0 && lane == 0) {
      if (sum.bad) fail(s, store_bad_list);
      a.plans[of] = {};
    }
    return;
  }
  PageEntry* fresh = a.fresh + std::int64_t{of} * ((a.most + p - 1) / p);
  for (int page = part * 32 + lane; page < pages; page += 32 * Warps) {
    const bool lower = page < low_pages;
    PageEntry e;
    e.frame = lower ? s.pool[lower_pool].at(low_first + page) : s.pool[device_pool].at(high_first + page - low_pages);
    e.tokens = static_cast<std::uint16_t>(min(p, plan.kept - page * p));
    e.codec = lower;
    fresh[page] = e;
  }
  if (part == 0 && lane == 0) a.plans[of] = plan;
}

// Grid [part, head of a row]. A warp copies a token.
__global__ void __launch_bounds__(threads)
    levels_copy_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  const int row = blockIdx.y / s.kv_heads, head = blockIdx.y % s.kv_heads, p = s.layout.page_size;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const CudaStoreLevels::Plan plan = a.plans[blockIdx.y];
  const Head h = head_of(s, a.slots[row], head);
  const std::int32_t* order = a.order + std::int64_t{blockIdx.y} * a.most;
  const PageEntry* fresh = a.fresh + std::int64_t{blockIdx.y} * ((a.most + p - 1) / p);
  for (int i = static_cast<int>(blockIdx.x) * warps + warp; i < plan.kept; i += static_cast<int>(gridDim.x) * warps) {
    const int from = order[i];
    const PageLayout& to = i < plan.low ? s.lower_layout : s.layout;
    Carried x;
    x.read(page_at(s, h, from / p), s.mixed ? layout_at(s, h, from / p) : s.layout, from % p, to, lane);
    x.write(frame_at(s, 0, fresh[i / p].frame), to, i % p, lane);
  }
}

// Gives the old frames of a head back and enters the new ones.
__global__ void __launch_bounds__(threads)
    levels_finish_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x);
  const CudaStoreLevels::Plan plan = a.plans[blockIdx.x];
  __shared__ int at;
  if (plan.kept < 0) return;
  const Head h = head_of(s, a.slots[row], head);
  const int before = (*h.length + p - 1) / p, after = (plan.kept + p - 1) / p;
  const PageEntry* fresh = a.fresh + std::int64_t{blockIdx.x} * ((a.most + p - 1) / p);
  if (s.base[1]) {
    for (int page = mine; page < before; page += threads)
      for (int tier = 0; tier < 2; ++tier) give_back(s, tier, h.table[tier][page]);
  } else {
    const int lower = h.lower_pages ? *h.lower_pages : 0;
    give_all_back(s, lower_pool, h.table[0], lower, at);
    give_all_back(s, device_pool, h.table[0] + lower, before - lower, at);
  }
  __syncthreads();
  for (int page = mine; page < before; page += threads) h.table[0][page] = page < after ? fresh[page] : PageEntry{};
  __syncthreads();
  if (mine == 0) {
    *h.length = plan.kept;
    if (h.lower_pages) *h.lower_pages = plan.low / p;
    fewer_pages(s, before - after);
    count_fired(s, a.edit);
  }
  for (int page = mine / 32; page < after; page += warps)
    summarize(s, h, page, min(p, plan.kept - page * p), mine % 32);
}

// ---- extents -------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(threads)
    grant_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool, const __grid_constant__ CudaExtents e) {
  const int fresh = e.count * e.each, at = *s.pool[pool].given;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < fresh; i += threads)
    s.pool[pool].at(at + i) =
        static_cast<std::int32_t>(e.extents[i / e.each] * (e.bytes / granule_bytes)) + i % e.each * e.step;
  __syncthreads();
  if (threadIdx.x == 0) *s.pool[pool].given = at + fresh, s.counters->frames[pool] += fresh;
}

// Calls f(i) for 0 <= i < count, over the whole grid.
template <class F>
__device__ void for_places(int count, const F& f) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x * blockDim.x))
    f(i);
}
// Calls f(frame) for the free frames of a pool, over the whole grid.
template <class F>
__device__ void for_free(const ops::FramePool& p, const F& f) {
  const int first = *p.taken;
  for_places(*p.given - first, [&](int i) { f(p.at(first + i)); });
}

__global__ void count_free_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                  const __grid_constant__ CudaExtents e) {
  for_free(s.pool[pool], [&](std::int32_t frame) { atomicAdd(&e.free[e.extent_of(frame)], 1); });
}

// Copies the frames that stay to a list of their own.
__global__ void take_out_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                const __grid_constant__ CudaExtents e) {
  for_free(s.pool[pool], [&](std::int32_t frame) {
    if (e.free[e.extent_of(frame)] < e.each) e.list[atomicAdd(e.list_count, 1)] = frame;
  });
}

__global__ void put_back_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                const __grid_constant__ CudaExtents e) {
  const ops::FramePool& p = s.pool[pool];
  const int first = *p.taken;
  for_places(*e.list_count, [&](int i) { p.at(first + i) = e.list[i]; });
}

__global__ void shrink_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                              const __grid_constant__ CudaExtents e) {
  const ops::FramePool& p = s.pool[pool];
  const int given = *p.taken + *e.list_count;
  s.counters->frames[pool] -= *p.given - given;
  *p.given = given;
}

// Writes where the frames of each extent begin in the arranged list: those of the first extents come first.
__global__ void __launch_bounds__(threads) arrange_plan_kernel(const __grid_constant__ CudaExtents e) {
  int before = 0;
  for (int from = 0; from < e.count; from += threads) {
    const int extent = from + static_cast<int>(threadIdx.x);
    const BlockSums sums = sum_block(extent < e.count ? e.free[extent] : 0);
    if (extent < e.count) e.begin[extent] = before + sums.before;
    before += sums.all;
  }
  if (threadIdx.x == 0) *e.list_count = before;
}

__global__ void arrange_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                               const __grid_constant__ CudaExtents e) {
  for_free(s.pool[pool], [&](std::int32_t frame) { e.list[atomicAdd(&e.begin[e.extent_of(frame)], 1)] = frame; });
}

constexpr int blocks = 256;  // of kernels over a pool's list

}  // namespace

namespace cuda_store {

void plan_levels(const CudaStoreLayer& s, const CudaStoreLevels& a, Stream stream) {
  // A warp takes a short head. The warps of a block share a long one.
  constexpr int most_of_warp = 4 * warp_tokens;
  const int heads = a.rows * s.kv_heads, of_block = a.most <= most_of_warp ? warps : 1;
  const auto kernel = of_block > 1 ? levels_plan_kernel<1> : levels_plan_kernel<warps>;
  kernel<<<static_cast<unsigned>((heads + of_block - 1) / of_block), threads, 0, stream_of(stream)>>>(s, a);
  check_launch("plan_levels");
}
KVLAB_ON_CUDA(plan_levels, plan_levels);

void store_levels(const CudaStoreLayer& s, const CudaStoreLevels& a, Stream to) {
  const cudaStream_t stream = stream_of(to);
  const auto heads = static_cast<unsigned>(a.rows * s.kv_heads);
  const auto parts = static_cast<unsigned>(std::clamp(a.most / (4 * warps), 1, 1024));
  levels_copy_kernel<<<dim3(parts, heads), threads, 0, stream>>>(s, a);
  levels_finish_kernel<<<heads, threads, 0, stream>>>(s, a);
  check_launch("store_levels");
}
KVLAB_ON_CUDA(store_levels, store_levels);

void grant(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream stream) {
  grant_kernel<<<1, threads, 0, stream_of(stream)>>>(s, pool, e);
  check_launch("grant");
}
KVLAB_ON_CUDA(grant, grant);

void count_free(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream stream) {
  count_free_kernel<<<blocks, threads, 0, stream_of(stream)>>>(s, pool, e);
  check_launch("count_free");
}
KVLAB_ON_CUDA(count_free, count_free);

void take_out(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream to) {
  const cudaStream_t stream = stream_of(to);
  take_out_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  put_back_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  shrink_kernel<<<1, 1, 0, stream>>>(s, pool, e);
  check_launch("take_out");
}
KVLAB_ON_CUDA(take_out, take_out);

void arrange(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream to) {
  const cudaStream_t stream = stream_of(to);
  count_free_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  arrange_plan_kernel<<<1, threads, 0, stream>>>(e);
  arrange_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  put_back_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  check_launch("arrange");
}
KVLAB_ON_CUDA(arrange, arrange);

}  // namespace cuda_store
}  // namespace kvlab
