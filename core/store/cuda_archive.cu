// Archives: copies of heads on the host, and tokens that come back from them.
#include "base/launch.cuh"
#include "base/relay.cuh"
#include "base/scratch.cuh"
#include "base/side_stream.hpp"
#include "store/cuda_tokens.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int threads = 256;  // of a block, but for copies beside a step

// Grid [row and kv_head, layer].
__global__ void free_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ Heads heads,
                            const __grid_constant__ CudaStoreRows r) {
  const int row = static_cast<int>(blockIdx.x) / s.kv_heads, head = static_cast<int>(blockIdx.x) % s.kv_heads;
  if (!heads.on(r.slots[row], head)) return;
  const std::int64_t at = s.heads_per_layer * blockIdx.y + std::int64_t{r.slots[row]} * s.kv_heads + head;
  const int pages = (s.archived[at] + s.layout.page_size - 1) / s.layout.page_size;
  __syncthreads();
  for (int page = static_cast<int>(threadIdx.x); page < pages; page += static_cast<int>(blockDim.x))
    give_back(s, 1, s.archive[at * s.pages + page]);
  if (threadIdx.x == 0) s.archived[at] = 0;
}

// Grid [row and kv_head, part of the pages]. A warp copies one page at a time.
__global__ void __launch_bounds__(threads)
    archive_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ Heads heads,
                   const __grid_constant__ CudaStoreRows r) {
  const int row = static_cast<int>(blockIdx.x) / s.kv_heads, head = static_cast<int>(blockIdx.x) % s.kv_heads,
            slot = r.slots[row], p = s.layout.page_size, lane = static_cast<int>(threadIdx.x) % 32;
  if (!heads.on(slot, head)) return;
  const Head h = head_of(s, slot, head);
  const std::int64_t at = std::int64_t{slot} * s.kv_heads + head;
  const int n = *h.length, warps = static_cast<int>(gridDim.y) * threads / 32;
  if (blockIdx.y == 0 && threadIdx.x == 0) s.archived[at] = n;
  int copied = 0;
  for (int page = static_cast<int>(blockIdx.y * threads + threadIdx.x) / 32; page * p < n; page += warps) {
    std::int32_t frame = null_frame;
    PageEntry& copy = s.archive[at * s.pages + page];
    if (lane == 0 && take(s, 1, copy, min(p, n - page * p))) frame = copy.frame;
    frame = __shfl_sync(~0u, frame, 0);
    if (frame < 0) continue;
    copy_frame(s, frame_at(s, 0, h.table[0][page].frame), frame_at(s, 1, frame), lane, 32);
    ++copied;
  }
  if (lane == 0 && copied) atomicAdd(&s.counters->moved[1], static_cast<unsigned long long>(copied));
}

// A job: the frames of the host and of the device, and the token's places in them.
using Job = int4;

// A block takes a head.
__global__ void __launch_bounds__(threads)
    plan_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreFetch a, Job* jobs,
                std::int32_t* counts) {
  __shared__ int first;
  let_successor_start();
  wait_for_predecessor();
  const int row = static_cast<int>(blockIdx.x) / s.kv_heads, head = static_cast<int>(blockIdx.x) % s.kv_heads,
            slot = a.slots[row], p = s.layout.page_size, mine = static_cast<int>(threadIdx.x);
  if (!a.heads.on(slot, head)) return;
  const Head h = head_of(s, slot, head);
  const std::int64_t at = std::int64_t{slot} * s.kv_heads + head, of = a.list_slots ? a.list_slots[row] : row;
  const int archived = s.archived[at], count = a.count(of, head);
  bool bad = count < 0 || count > a.index.extent[2] || count > *h.length;
  for (int i = mine; !bad && i < count; i += threads) {
    const int place = a.index(of, head, i);
    bad = place < 0 || place >= archived || (i > 0 && place <= a.index(of, head, i - 1));
  }
  if (__syncthreads_or(bad)) {
    if (mine == 0) fail(s, store_bad_list);
    return;
  }
  if (count == 0) return;
  if (mine == 0) {
    first = atomicAdd(counts, count);
    atomicAdd(&s.counters->fetched, static_cast<unsigned long long>(count));
    count_fired(s, a.edit);
  }
  __syncthreads();
  for (int i = mine; i < count; i += threads) {
    const int place = a.index(of, head, i);
    jobs[first + i] = Job{s.archive[at * s.pages + place / p].frame, h.table[0][i / p].frame, place % p, i % p};
  }
}

constexpr int copy_threads = 1024;
constexpr int tokens_of_warp = 4;  // tokens that a warp has under way
static_assert(tokens_of_warp * most_fields == 32, "a lane has one field");

// A few blocks that have their multiprocessors to themselves: a block that reads the host would keep a step's kernel
// waiting.
template <class Unit>
__global__ void __launch_bounds__(copy_threads)
    fetch_kernel(const __grid_constant__ CudaStoreLayer s, const Job* jobs, std::int32_t* counts) {
  constexpr int each = tokens_of_warp, warps = copy_threads / 32;
  const PageLayout& l = s.layout;
  const int lane = static_cast<int>(threadIdx.x) % 32, units = Token<Unit>::units(l), fields = fields_of(l);
  const int count = counts[0], step = static_cast<int>(gridDim.x) * warps * each;
  for (int first = (static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32) * each; first < count;
       first += step) {
    const int tokens = min(each, count - first);
    Job mine = {};
    if (lane < tokens) mine = jobs[first + lane];
    const auto frame_of = [&](int tier, int token) {
      return frame_at(s, tier, __shfl_sync(~0u, tier ? mine.x : mine.y, token));
    };
    for (int begin = 0; begin < units; begin += 32) {
      const int unit = begin + lane;
      Unit x[each];
#pragma unroll
      for (int j = 0; j < each; ++j) {
        std::byte* from = frame_of(1, j);
        const int offset = __shfl_sync(~0u, mine.z, j);
        if (j < tokens && unit < units) x[j] = *Token<Unit>::unit(from, l, offset, unit);
      }
#pragma unroll
      for (int j = 0; j < each; ++j) {
        std::byte* to = frame_of(0, j);
        const int offset = __shfl_sync(~0u, mine.w, j);
        if (j < tokens && unit < units) *Token<Unit>::unit(to, l, offset, unit) = x[j];
      }
    }
    const int token = lane / most_fields, which = lane % most_fields;
    std::byte *from = frame_of(1, token), *to = frame_of(0, token);
    const int offset = __shfl_sync(~0u, mine.z, token), target = __shfl_sync(~0u, mine.w, token);
    if (token < tokens && which < fields) *field(to, l, target, which) = *field(from, l, offset, which);
  }
  __syncthreads();
  if (threadIdx.x == 0) end_copies(counts);
}

__global__ void forget_kernel(std::int32_t* counts) {
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
}

struct Jobs {
  Job* list;
  std::int32_t* counts;
};

// The first call takes the memory of all lanes, since a graph may hold later ones. Fetches beside a step, as many as
// there are lanes, fill all of it from the first lane on.
Jobs jobs_of(const CudaStoreLayer& s, const CudaStoreFetch& a) {
  constexpr std::size_t lanes = SideStream::lanes;
  const auto most = static_cast<std::size_t>(std::int64_t{a.rows} * s.kv_heads * a.index.extent[2]),
             each = std::bit_ceil(most), lane = static_cast<std::size_t>(a.lane);
  void* home = a.home.handle();
  return {static_cast<Job*>(fixed_scratch(home, "fetches", lanes * each * sizeof(Job))) + lane * each,
          static_cast<std::int32_t*>(zeroed(home, "fetch counts", lanes * 2 * sizeof(std::int32_t))) + lane * 2};
}

}  // namespace

namespace cuda_store {

void free_archives(const CudaStoreLayer& first, int layers, const Heads& heads, const CudaStoreRows& r, Stream stream) {
  free_kernel<<<dim3(static_cast<unsigned>(r.rows * first.kv_heads), static_cast<unsigned>(layers)), 128, 0,
                stream_of(stream)>>>(first, heads, r);
  check_launch("free_archives");
}
KVLAB_ON_CUDA(free_archives, free_archives);

void archive(const CudaStoreLayer& s, const Heads& heads, const CudaStoreRows& r, Stream stream) {
  constexpr unsigned parts = 8;
  archive_kernel<<<dim3(static_cast<unsigned>(r.rows * s.kv_heads), parts), threads, 0, stream_of(stream)>>>(s, heads,
                                                                                                             r);
  check_launch("archive");
}
KVLAB_ON_CUDA(archive, archive);

void plan_fetch(const CudaStoreLayer& s, const CudaStoreFetch& a, Stream stream) {
  const Jobs jobs = jobs_of(s, a);
  launch("plan_fetch", plan_kernel, a.rows * s.kv_heads, threads, 0, stream_of(stream), true, s, a, jobs.list,
         jobs.counts);
}
KVLAB_ON_CUDA(plan_fetch, plan_fetch);

void copy_fetched(const CudaStoreLayer& s, const CudaStoreFetch& a, Stream stream) {
  const Jobs jobs = jobs_of(s, a);
  const auto kernel = wide(s.layout) ? fetch_kernel<uint4> : fetch_kernel<unsigned>;
  launch_apart("copy_fetched", kernel, copying_multiprocessors, copy_threads, stream, s, jobs.list, jobs.counts);
}
KVLAB_ON_CUDA(copy_fetched, copy_fetched);

void forget_fetches(const CudaStoreLayer& s, const CudaStoreFetch& a, Stream stream) {
  forget_kernel<<<1, 32, 0, stream_of(stream)>>>(jobs_of(s, a).counts);
  check_launch("forget_fetches");
}
KVLAB_ON_CUDA(forget_fetches, forget_fetches);

}  // namespace cuda_store

}  // namespace kvlab
