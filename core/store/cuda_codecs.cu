// Tokens of a device with two codecs by their levels, and extents of frames. Pages of the second codec come first in a
// head's table.
#include <algorithm>

#include "base/cuda.cuh"
#include "base/lanes.cuh"
#include "base/ptx.cuh"
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

// A lane's tokens of a head. Bit 8 b + w of a mask is token 4 w + b, as words of four levels have them.
constexpr int lane_tokens = 16, warp_tokens = 32 * lane_tokens;
static_assert(warp_tokens == CudaStoreLevels::chunk);
constexpr unsigned lowest_bits = 0x01010101u;  // of a word's bytes
struct LaneLevels {
  unsigned low = 0, gone = 0;  // tokens of level 1, and those that leave
  bool bad = false;

  __device__ unsigned others() const { return ~(low | gone) & 15 * lowest_bits; }
  // The sums of the lane's low tokens and, times 65536, its others.
  __device__ int sums() const { return __popc(low) + (__popc(others()) << 16); }
  static __device__ unsigned bit(int token) { return 1u << (8 * (token % 4) + token / 4); }
  static __device__ unsigned before(int token) {
    return lowest_bits * ((1u << token / 4) - 1) | (lowest_bits & ((1u << 8 * (token % 4)) - 1)) << token / 4;
  }
};

// The lane's levels, or any numbers behind the head's n tokens. room: tokens of the list.
__device__ uint4 lane_levels(const std::uint8_t* level, int first, int n, std::int64_t room) {
  const std::uint8_t* from = level + first;
  if (first + lane_tokens <= room && reinterpret_cast<std::uintptr_t>(from) % 16 == 0)
    return *reinterpret_cast<const uint4*>(from);
  unsigned word[lane_tokens / 4] = {};
#pragma unroll
  for (int i = 0; i < lane_tokens; ++i)
    if (first + i < n) word[i / 4] |= unsigned{from[i]} << 8 * (i % 4);
  return make_uint4(word[0], word[1], word[2], word[3]);
}
// count: of the levels, so many are of the head's tokens.
__device__ LaneLevels levels_of(uint4 x, int count) {
  unsigned word[] = {x.x, x.y, x.z, x.w};
  LaneLevels out;
#pragma unroll
  for (int i = 0; i < lane_tokens / 4; ++i) {
    if (const int own = count - 4 * i; own < 4) word[i] |= own > 0 ? ~0u << 8 * own : ~0u;
    const unsigned gone = word[i] >> 7 & lowest_bits, low = word[i] & lowest_bits & ~gone;
    out.bad = out.bad || word[i] != (low | gone * level_gone);
    out.low |= low << i, out.gone |= gone << i;
  }
  return out;
}

// Says where heads' tokens go, and takes frames for them. `Warps` warps have a head, one part each. Sums over a warp's
// lanes, a head's warps and a block's heads say where chunks begin and which frames pages take. So a block asks each
// pool once.
template <int Warps>
__global__ void __launch_bounds__(threads, Warps == 1 ? 6 : 5)
    levels_plan_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  constexpr int heads = warps / Warps, batch = 2;  // batch: chunks whose levels are on their way together
  struct Part {
    int lows, others;
    bool bad;
  };
  __shared__ Part parts[warps];
  __shared__ int pages_of[heads][2], first_of[heads][2];
  const int mine = static_cast<int>(threadIdx.x), warp = mine / 32, lane = mine % 32, team = warp / Warps,
            part = warp % Warps, p = s.layout.page_size;
  const int all = a.rows * s.kv_heads, wanted = static_cast<int>(blockIdx.x) * heads + team, of = min(wanted, all - 1);
  const int row = of / s.kv_heads, head = of % s.kv_heads;
  // Levels are under way before the length is known.
  if (const int line = 128 * (part * 32 + lane); line < min(a.levels.extent[2], std::int64_t{a.most}))
    fetch_line(&a.levels(row, head, line));
  const Head h = head_of(s, a.slots[row], head);
  int n = wanted < all ? *h.length : 0;
  const int low_before = h.lower_pages ? *h.lower_pages * p : 0;
  const bool too_long = n > a.levels.extent[2] || n > a.most;
  if (too_long) n = 0;
  const std::uint8_t* level = n > 0 ? &a.levels(row, head, 0) : nullptr;
  const int chunks = (n + warp_tokens - 1) / warp_tokens, each = (chunks + Warps - 1) / Warps,
            begin = min(chunks, part * each), end = min(chunks, begin + each), own_token = lane * lane_tokens;
  CudaStoreLevels::Begin* begins = a.begins + std::int64_t{of} * a.chunks();
  Part own = {0, 0, too_long};
  for (int first = begin; first < end; first += batch) {
    uint4 words[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i)
      if (first + i < end) words[i] = lane_levels(level, (first + i) * warp_tokens + own_token, n, a.levels.extent[2]);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (first + i >= end) break;
      const LaneLevels x = levels_of(words[i], n - (first + i) * warp_tokens - own_token);
      own.bad = own.bad || x.bad || (x.low && !h.lower_pages);
      if (lane == 0) begins[first + i] = {own.lows, own.others};
      const int sums = cuda::sum_of_lanes(x.sums());
      own.lows += sums & 0xffff, own.others += sums >> 16;
    }
  }
  own.bad = __any_sync(~0u, own.bad);
  if (lane == 0) parts[warp] = own;
  __syncthreads();
  Part before = {}, sum = {};
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    const Part& x = parts[team * Warps + w];
    if (w < part) before.lows += x.lows, before.others += x.others;
    sum.lows += x.lows, sum.others += x.others, sum.bad = sum.bad || x.bad;
  }
  if (part > 0)
    for (int i = begin + lane; i < end; i += 32) begins[i].lows += before.lows, begins[i].others += before.others;
  const CudaStoreLevels::Plan plan = {sum.lows + sum.others, sum.lows / p * p};
  bool changes = !sum.bad && (plan.kept != n || plan.low != low_before);
  if (!sum.bad && !changes) {  // all stays as it is if the first tokens are the low ones
    bool stays = true;
    for (int t = lane; t < plan.low; t += 32) stays = stays && level[t] == 1;
    changes = __any_sync(~0u, !stays);
  }
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
  for (int first = part * 32 + lane; first < pages; first += 2 * 32 * Warps) {
    const int page[] = {first, first + 32 * Warps};
    std::int32_t frame[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      frame[i] = page[i] < low_pages ? s.pool[lower_pool].at(low_first + page[i])
                 : page[i] < pages   ? s.pool[device_pool].at(high_first + page[i] - low_pages)
                                     : null_frame;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (page[i] < pages) fresh[page[i]] = entry_of(frame[i], min(p, plan.kept - page[i] * p), page[i] < low_pages);
  }
  if (part == 0 && lane == 0) a.plans[of] = plan;
}

// Grid [part, head of a row]. A warp copies tokens that follow each other. It counts on from where their chunk begins.
constexpr int copied = 4;  // tokens of a warp
__global__ void __launch_bounds__(threads, 4)
    levels_copy_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  const int row = blockIdx.y / s.kv_heads, head = blockIdx.y % s.kv_heads, p = s.layout.page_size;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const CudaStoreLevels::Plan plan = a.plans[blockIdx.y];
  if (plan.kept < 0) return;
  const Head h = head_of(s, a.slots[row], head);
  const int n = *h.length;
  const std::uint8_t* level = n > 0 ? &a.levels(row, head, 0) : nullptr;
  const PageEntry* fresh = a.fresh + std::int64_t{blockIdx.y} * ((a.most + p - 1) / p);
  for (int first = (static_cast<int>(blockIdx.x) * warps + warp) * copied; first < n;
       first += static_cast<int>(gridDim.x) * warps * copied) {
    const int chunk = first / warp_tokens, own_token = chunk * warp_tokens + lane * lane_tokens;
    const LaneLevels x = levels_of(lane_levels(level, own_token, n, a.levels.extent[2]), n - own_token);
    const CudaStoreLevels::Begin begin = a.begins[std::int64_t{blockIdx.y} * a.chunks() + chunk];
    const int sums = cuda::sum_through_lane(x.sums()) - x.sums();
    // Lanes find the places of a token each.
    const int t = first % warp_tokens + lane % copied, from = t / lane_tokens;
    const unsigned low = __shfl_sync(~0u, x.low, from), gone = __shfl_sync(~0u, x.gone, from),
                   others = __shfl_sync(~0u, x.others(), from), bit = LaneLevels::bit(t % lane_tokens),
                   before = LaneLevels::before(t % lane_tokens);
    const int of_lanes = __shfl_sync(~0u, sums, from);
    const int place = gone & bit ? -1
                                 : plan.place(low & bit, begin.lows + (of_lanes & 0xffff) + __popc(low & before),
                                              begin.others + (of_lanes >> 16) + __popc(others & before));
    const int page = min(first + lane % copied, n - 1) / p;
    const PageEntry to = place < 0 ? PageEntry{} : fresh[place / p];
    for (int i = 0; i < copied; ++i) {
      const int goes_to = __shfl_sync(~0u, place, i), frame = __shfl_sync(~0u, to.frame, i),
                old = __shfl_sync(~0u, page, i);
      if (goes_to < 0) continue;
      const PageLayout& layout = goes_to < plan.low ? s.lower_layout : s.layout;
      Carried token;
      token.read(page_at(s, h, old), s.mixed ? layout_at(s, h, old) : s.layout, (first + i) % p, layout, lane);
      token.write(frame_at(s, 0, frame), layout, goes_to % p, lane);
    }
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
  const auto parts = static_cast<unsigned>(std::clamp(a.most / (copied * warps), 1, 1024));
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
