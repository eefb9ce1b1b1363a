// Archives: copies of heads on the host, and tokens that come back from them.
#include "base/launch.cuh"
#include "base/relay.cuh"
#include "base/scratch.cuh"
#include "base/side_stream.hpp"
#include "ops/select/select.cuh"
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

constexpr int copy_threads = 1024;
constexpr int tokens_of_warp = 4;    // tokens that a warp has under way
constexpr int planned_of_warp = 16;  // tokens whose places it reads at once
static_assert(tokens_of_warp * most_fields == 32, "a lane has one field");

struct Fetches {
  CudaStoreLayer first;
  CudaStoreFetch of[most_fetches];  // of as many rows each
  int count;
};

// A KV head of a fetch.
struct FetchedHead {
  const CudaStoreFetch* a;
  int fetch, slot, head;
  std::int64_t at;  // of archived
  Head h;

  __device__ FetchedHead(const Fetches& f, int i)
      : fetch(i / (f.of[0].rows * f.first.kv_heads)),
        head(i % f.first.kv_heads),
        row_(i / f.first.kv_heads % f.of[0].rows) {
    a = &f.of[fetch], slot = a->slots[row_];
    // Slots of later layers follow those of the first.
    const int of_layers = a->layer * static_cast<int>(f.first.heads_per_layer / f.first.kv_heads) + slot;
    at = std::int64_t{of_layers} * f.first.kv_heads + head, h = head_of(f.first, of_layers, head);
  }
  __device__ bool on() const { return a->heads.on(slot, head); }
  __device__ int count() const { return a->count(list(), head); }
  __device__ int place(int i) const { return a->index(list(), head, i); }

 private:
  __device__ std::int64_t list() const { return a->list_slots ? slot : row_; }
  int row_;
};

struct FetchShared {
  unsigned scan[32];
  unsigned tokens[copy_threads];  // of a head
  unsigned before[copy_threads];  // of the heads before
  unsigned on[copy_threads];      // heads with tokens
  std::uint8_t fired[most_fetches];
};

struct TokenCopy {
  std::byte *from, *to;
  int offset, target;
};

// The copy of a token that these heads fetch.
__device__ inline TokenCopy copy_of(const Fetches& f, const FetchShared& s, int first_head, unsigned token) {
  int low = 0, high = copy_threads;  // the last head that begins at the token or before it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (s.before[middle] <= token ? low : high) = middle;
  }
  const FetchedHead fetched(f, first_head + low);
  const int i = static_cast<int>(token - s.before[low]), place = fetched.place(i), p = f.first.layout.page_size;
  return {frame_at(f.first, 1, f.first.archive[fetched.at * f.first.pages + place / p].frame),
          frame_at(f.first, 0, fetched.h.table[0][i / p].frame), place % p, i % p};
}

__device__ inline std::byte* pointer_of(std::byte* p, int lane) {
  return reinterpret_cast<std::byte*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(p), lane));
}

// Copies the tokens of lanes first .. first + tokens - 1.
template <class Unit>
__device__ inline void copy_tokens(const PageLayout& l, const TokenCopy& mine, int first, int tokens) {
  constexpr int each = tokens_of_warp;
  const int lane = static_cast<int>(threadIdx.x) % 32, units = Token<Unit>::units(l), fields = fields_of(l);
  for (int begin = 0; begin < units; begin += 32) {
    const int unit = begin + lane;
    Unit x[each];
#pragma unroll
    for (int j = 0; j < each; ++j) {
      std::byte* from = pointer_of(mine.from, first + j);
      const int offset = __shfl_sync(~0u, mine.offset, first + j);
      if (j < tokens && unit < units) x[j] = *Token<Unit>::unit(from, l, offset, unit);
    }
#pragma unroll
    for (int j = 0; j < each; ++j) {
      std::byte* to = pointer_of(mine.to, first + j);
      const int target = __shfl_sync(~0u, mine.target, first + j);
      if (j < tokens && unit < units) *Token<Unit>::unit(to, l, target, unit) = x[j];
    }
  }
  const int token = lane / most_fields, which = lane % most_fields;
  std::byte *from = pointer_of(mine.from, first + token), *to = pointer_of(mine.to, first + token);
  const int offset = __shfl_sync(~0u, mine.offset, first + token),
            target = __shfl_sync(~0u, mine.target, first + token);
  if (token < tokens && which < fields) *field(to, l, target, which) = *field(from, l, offset, which);
}

// Whether an entry of a list that falls to this thread is bad.
template <class Place>
__device__ inline bool bad_entries(const Place& place, int count, int archived) {
  bool bad = false;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    const int token = place(i);
    bad = bad || token < 0 || token >= archived || (i > 0 && token <= place(i - 1));
  }
  return bad;
}

// Sets tokens[] of heads, one for each thread. A bad list gives none. All blocks find the same.
__device__ inline void check_lists(const Fetches& f, FetchShared& s, int first_head, int heads) {
  const int mine = static_cast<int>(threadIdx.x);
  int count = 0;
  bool bad = false;
  if (mine < heads) {
    const FetchedHead fetched(f, first_head + mine);
    if (fetched.on())
      count = fetched.count(), bad = count < 0 || count > fetched.a->index.extent[2] || count > *fetched.h.length;
  }
  if (bad && blockIdx.x == 0) fail(f.first, store_bad_list);
  s.tokens[mine] = bad ? 0 : static_cast<unsigned>(count);
  unsigned all;
  const unsigned place = ops::device::block_scan(s.tokens[mine] > 0, s.scan, all);
  if (s.tokens[mine] > 0) s.on[place] = static_cast<unsigned>(mine);
  __syncthreads();
  for (unsigned u = 0; u < all; ++u) {
    const int of = static_cast<int>(s.on[u]), tokens = static_cast<int>(s.tokens[of]);
    const FetchedHead fetched(f, first_head + of);
    if (fetched.a->held) continue;
    const int archived = f.first.archived[fetched.at];
    bad = bad_entries([&](int i) { return fetched.place(i); }, tokens, archived);
    if (!__syncthreads_or(bad)) continue;
    if (mine == 0) s.tokens[of] = 0;
    if (mine == 0 && blockIdx.x == 0) fail(f.first, store_bad_list);
  }
  __syncthreads();
}

// A few blocks that have their multiprocessors to themselves: a block that reads the host would keep a step's kernel
// waiting. They share the tokens of all lists.
template <class Wide>
__global__ void __launch_bounds__(copy_threads) fetch_kernel(const __grid_constant__ Fetches f) {
  extern __shared__ uint4 memory[];
  FetchShared& s = *reinterpret_cast<FetchShared*>(memory);
  const int mine = static_cast<int>(threadIdx.x), lane = mine % 32, heads = f.count * f.of[0].rows * f.first.kv_heads;
  if (mine < most_fetches) s.fired[mine] = 0;
  for (int begin = 0; begin < heads; begin += copy_threads) {
    check_lists(f, s, begin, min(heads - begin, copy_threads));
    unsigned all;
    const unsigned before = ops::device::block_scan(s.tokens[mine], s.scan, all);
    s.before[mine] = before;
    if (s.tokens[mine] > 0) s.fired[FetchedHead(f, begin + mine).fetch] = 1;
    if (mine == 0 && blockIdx.x == 0 && all > 0)
      atomicAdd(&f.first.counters->fetched, static_cast<unsigned long long>(all));
    __syncthreads();
    const unsigned step = gridDim.x * (copy_threads / 32) * planned_of_warp;
    for (unsigned first = (blockIdx.x * (copy_threads / 32) + mine / 32) * planned_of_warp; first < all;
         first += step) {
      const int tokens = static_cast<int>(min(all - first, static_cast<unsigned>(planned_of_warp)));
      TokenCopy copy = {};
      if (lane < tokens) copy = copy_of(f, s, begin, first + lane);
      for (int i = 0; i < tokens; i += tokens_of_warp)
        copy_tokens<Wide>(f.first.layout, copy, i, min(tokens - i, tokens_of_warp));
    }
    __syncthreads();
  }
  // Edits of the stream may count themselves beside it, so `last_edit` is theirs.
  for (int i = 0; mine == 0 && blockIdx.x == 0 && i < f.count; ++i)
    if (s.fired[i] && !f.of[i].held) atomicAdd(&f.first.counters->fired, 1ull);
}

// Grid [row and kv_head]. out, out_count: [row, kv_head], dense. A bad list becomes an empty one. It counts the edit
// here, in the order of the stream's edits.
__global__ void hold_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreFetch a,
                            std::int32_t* out, std::int32_t* out_count, std::int32_t* out_slots) {
  const int row = static_cast<int>(blockIdx.x) / s.kv_heads, head = static_cast<int>(blockIdx.x) % s.kv_heads,
            slot = a.slots[row], mine = static_cast<int>(threadIdx.x);
  const std::int64_t of = a.list_slots ? slot : row, room = a.index.extent[2];
  int count = a.heads.on(slot, head) ? a.count(of, head) : 0;
  const std::int64_t at = std::int64_t{slot} * s.kv_heads + head;
  bool bad = count < 0 || count > room || count > *head_of(s, slot, head).length;
  if (!bad) bad = bad_entries([&](int i) { return a.index(of, head, i); }, count, s.archived[at]);
  if (__syncthreads_or(bad)) {
    if (mine == 0) fail(s, store_bad_list);
    count = 0;
  }
  if (mine == 0) {
    out_count[blockIdx.x] = count, out_slots[row] = slot;
    if (count > 0) count_fired(s, a.edit);
  }
  for (int i = mine; i < count; i += static_cast<int>(blockDim.x)) out[blockIdx.x * room + i] = a.index(of, head, i);
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

void fetch(const CudaStoreLayer& first, const std::vector<CudaStoreFetch>& all, Stream stream) {
  Fetches f = {first, {}, static_cast<int>(all.size())};
  std::copy(all.begin(), all.end(), f.of);
  const auto kernel = wide(first.layout) ? fetch_kernel<uint4> : fetch_kernel<unsigned>;
  launch_apart("fetch", kernel, copying_multiprocessors, copy_threads, stream, f);
}
KVLAB_ON_CUDA(fetch, fetch);

// The first call takes the memory of all lanes, since a graph may hold later ones.
CudaStoreFetch hold_list(const CudaStoreLayer& s, const CudaStoreFetch& a, Stream home, int lane, Stream stream) {
  const std::int64_t heads = std::int64_t{a.rows} * s.kv_heads, room = a.index.extent[2];
  const auto numbers = [&](const char* tag, std::int64_t each) {
    const std::size_t of_lane = std::bit_ceil(static_cast<std::size_t>(each));
    void* all = fixed_scratch(home.handle(), tag, SideStream::lanes * of_lane * sizeof(std::int32_t));
    return static_cast<std::int32_t*>(all) + static_cast<std::size_t>(lane) * of_lane;
  };
  auto *index = numbers("fetched", heads * room), *count = numbers("fetched counts", heads),
       *slots = numbers("fetched slots", a.rows);
  hold_kernel<<<static_cast<unsigned>(heads), threads, 0, stream_of(stream)>>>(s, a, index, count, slots);
  check_launch("hold_list");
  CudaStoreFetch held = a;
  held.index = View<const std::int32_t, 3>::dense(index, {a.rows, s.kv_heads, room});
  held.count = View<const std::int32_t, 2>::dense(count, {a.rows, s.kv_heads});
  held.slots = slots, held.list_slots = nullptr, held.heads = Heads{}, held.held = true;
  return held;
}
KVLAB_ON_CUDA(hold_list, hold_list);

}  // namespace cuda_store

}  // namespace kvlab
