// Tokens of a device with two codecs by their levels, and extents of frames. Pages of the second codec come first in a
// head's table. No kernel here takes frames of a pool and also gives some back.
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

// Takes frames for pages [first, end) of a head. The whole block calls it.
__device__ bool take_pages(const CudaStoreLayer& s, PageEntry* fresh, int first, int end, int kept, int codec) {
  __shared__ int left;
  const ops::FramePool& pool = s.pool[pool_of(0, codec)];
  const int count = end - first, p = s.layout.page_size;
  __syncthreads();
  if (threadIdx.x == 0) left = take_frames(s, pool_of(0, codec), count);
  __syncthreads();
  if (left < 0) return false;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
    PageEntry e;
    e.frame = pool.free[left - 1 - i];
    e.tokens = static_cast<std::uint16_t>(min(p, kept - (first + i) * p));
    e.codec = static_cast<std::uint8_t>(codec);
    fresh[first + i] = e;
  }
  return true;
}

// Writes the order of a head's tokens by their places to come, and takes frames for them.
__global__ void __launch_bounds__(threads)
    levels_plan_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x), pages = (a.most + p - 1) / p;
  const Head h = head_of(s, a.slots[row], head);
  const int n = *h.length, codecs = h.lower_pages ? 2 : 1;
  CudaStoreLevels::Plan plan;
  std::int32_t* order = a.order + std::int64_t{blockIdx.x} * a.most;
  const auto level = [&](int t) { return t < n ? a.levels(row, head, t) : level_gone; };
  bool bad = n > a.levels.extent[2] || n > a.most;
  int lower = 0;
  for (int t = mine; !bad && t < n; t += threads) {
    bad = level(t) != level_gone && level(t) >= codecs;
    lower += level(t) == 1;
  }
  if (__syncthreads_or(bad)) {
    if (mine == 0) fail(s, store_bad_list), a.plans[blockIdx.x] = plan;
    return;
  }
  plan.low = sum_block(lower).all / p * p;
  int lows = 0, others = 0;
  bool same = true;
  for (int begin = 0; begin < n; begin += threads) {
    const int t = begin + mine, own = level(t);
    const BlockSums low = sum_block(own == 1);
    const bool is_low = own == 1 && lows + low.before < plan.low, stays = !is_low && own != level_gone;
    const BlockSums other = sum_block(stays);
    const int to = is_low ? lows + low.before : plan.low + others + other.before;
    if (is_low || stays) order[to] = t;
    same = same && (t >= n || ((is_low || stays) && to == t));
    lows += low.all, others += other.all;
  }
  plan.kept = plan.low + others;
  same = same && plan.low == (h.lower_pages ? *h.lower_pages * p : 0);
  PageEntry* fresh = a.fresh + std::int64_t{blockIdx.x} * pages;
  if (!__syncthreads_or(!same) || !take_pages(s, fresh, 0, plan.low / p, plan.kept, 1) ||
      !take_pages(s, fresh, plan.low / p, (plan.kept + p - 1) / p, plan.kept, 0))
    plan.kept = -1;
  if (mine == 0) a.plans[blockIdx.x] = plan;
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
  if (plan.kept < 0) return;
  const Head h = head_of(s, a.slots[row], head);
  const int before = (*h.length + p - 1) / p, after = (plan.kept + p - 1) / p;
  const PageEntry* fresh = a.fresh + std::int64_t{blockIdx.x} * ((a.most + p - 1) / p);
  for (int page = mine; page < before; page += threads) {
    for (int tier = 0; tier < 2; ++tier) give_back(s, tier, h.table[tier][page]);
    if (page < after) h.table[0][page] = fresh[page];
  }
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
  const int fresh = e.count * e.each, at = *s.pool[pool].free_count;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < fresh; i += threads) {
    // A pool gives its last frames first: those of the first extents.
    const int from = fresh - 1 - i, extent = e.extents[from / e.each];
    s.pool[pool].free[at + i] = static_cast<std::int32_t>(extent * (e.bytes / granule_bytes)) + from % e.each * e.step;
  }
  __syncthreads();
  if (threadIdx.x == 0) *s.pool[pool].free_count = at + fresh, s.counters->frames[pool] += fresh;
}

// Calls f(i) for the places of a list, over the whole grid.
template <class F>
__device__ void for_places(int count, const F& f) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x * blockDim.x))
    f(i);
}

__global__ void count_free_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                  const __grid_constant__ CudaExtents e) {
  const ops::FramePool& p = s.pool[pool];
  for_places(*p.free_count, [&](int i) { atomicAdd(&e.free[e.extent_of(p.free[i])], 1); });
}

// Copies the frames that stay to a list of their own.
__global__ void take_out_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                const __grid_constant__ CudaExtents e) {
  const ops::FramePool& p = s.pool[pool];
  for_places(*p.free_count, [&](int i) {
    if (e.free[e.extent_of(p.free[i])] < e.each) e.list[atomicAdd(e.list_count, 1)] = p.free[i];
  });
}

__global__ void put_back_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                const __grid_constant__ CudaExtents e) {
  for_places(*e.list_count, [&](int i) { s.pool[pool].free[i] = e.list[i]; });
}

__global__ void shrink_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                              const __grid_constant__ CudaExtents e) {
  s.counters->frames[pool] -= *s.pool[pool].free_count - *e.list_count;
  *s.pool[pool].free_count = *e.list_count;
}

// Writes where the frames of each extent begin in the arranged list: those of the last extents come first.
__global__ void __launch_bounds__(threads) arrange_plan_kernel(const __grid_constant__ CudaExtents e) {
  int before = 0;
  for (int from = 0; from < e.count; from += threads) {
    const int extent = e.count - 1 - from - static_cast<int>(threadIdx.x);
    const BlockSums sums = sum_block(extent >= 0 ? e.free[extent] : 0);
    if (extent >= 0) e.begin[extent] = before + sums.before;
    before += sums.all;
  }
  if (threadIdx.x == 0) *e.list_count = before;
}

__global__ void arrange_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                               const __grid_constant__ CudaExtents e) {
  const ops::FramePool& p = s.pool[pool];
  for_places(*p.free_count, [&](int i) { e.list[atomicAdd(&e.begin[e.extent_of(p.free[i])], 1)] = p.free[i]; });
}

constexpr int blocks = 256;  // of kernels over a pool's list

}  // namespace

namespace cuda_store {

void plan_levels(const CudaStoreLayer& s, const CudaStoreLevels& a, Stream stream) {
  levels_plan_kernel<<<static_cast<unsigned>(a.rows * s.kv_heads), threads, 0, stream_of(stream)>>>(s, a);
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
