// Page scores of summaries whose bytes are a multiple of 128, or of codes, for at most 8 query heads of a KV head. Each
// multiprocessor runs one block. Each warp has a ring of bulk copies (TMA) that runs on over the block's (row, KV head)
// pairs. The queries are fragments of B in registers, and the block copies the next pair's queries meanwhile. A block
// that has a whole head selects from shared memory. The kernel may start early (base/launch.cuh), but it reads nothing
// before its predecessor has ended.
#pragma once
#include <algorithm>

#include "base/launch.cuh"
#include "base/tensor_map.hpp"
#include "ops/select/score_pages.cuh"

namespace kvlab::ops::page_scores {

constexpr int most_ring_group = 8, most_ring_pairs = 3 * threads;  // pairs of one launch
constexpr int ring_bytes = 128 * 1024;  // bytes that a block has in flight; more lengthens the queue and gains nothing

struct alignas(16) Place {
  // Tiles before a pair, its pages, its first row in the maps (its first step of 16 bytes for codes), its page budget.
  int tiles, pages, y, budget;
};

struct FirstTile {
  const Place* places;
  __device__ __forceinline__ int operator()(int pair) const { return places[pair].tiles; }
};

// Order of dynamic shared memory: the stages of all warps, their barriers, the fragments of a pair's queries, the next
// pair's queries, the line of pairs, a bit and a score for each page of a row.
template <class T, int Chunks, int Tiles>
struct Ring {
  using F = Format<T, Chunks>;
  static constexpr int page_bytes = F::page_bytes, tile_bytes = tile_pages * page_bytes;
  static constexpr int page_rows = page_bytes / 128;  // rows of the maps that a page takes
  static constexpr int stages = ring_bytes / (warps * tile_bytes);
  static constexpr int barriers_at = warps * stages * tile_bytes, fragments_at = barriers_at + warps * stages * 8,
                       queries_at = fragments_at + Tiles * Chunks * 512;

  static __host__ __device__ constexpr int line_at(int group, int dim) { return queries_at + group * dim * 4; }
  static __host__ __device__ constexpr int bits_at(int group, int dim, int pairs) {
    return line_at(group, dim) + (pairs + 1) * static_cast<int>(sizeof(Place));
  }
  static constexpr int bytes(int group, int dim, int pairs, int selected_pages) {
    return bits_at(group, dim, pairs) + bit_bytes(selected_pages) + score_bytes(selected_pages);
  }
  static_assert(stages > 0);
};
static_assert(Ring<__half, 16, 2>::bytes(most_ring_group, 256, most_ring_pairs, most_fused_pages) +
                  sizeof(SelectShared) + 1024 <=
              227 * 1024);

struct RingArgs {
  Args all;
  int page_step;      // rows of the maps, or steps, from a page to the next one
  bool dense;         // summaries have no gaps between them
  bool wide_queries;  // queries can be read 16 bytes at once
};

// Starts the copy of a pair's queries as [head, dim]. A thread may read them after all threads have waited for their
// copies and met.
__device__ __forceinline__ void copy_queries(const RingArgs& r, int pair, float* to) {
  const Args& a = r.all;
  const int row = a.pair_of.row(pair), kv_head = pair - row * a.kv_heads;
  const float* from =
      a.queries + a.layer_of(row) * a.layers.queries + a.row_of(row) * a.query_row + kv_head * a.group * a.query_head;
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < a.group * a.dim; i += threads * 4) {
    const int head = i / a.dim;
    const float* q = from + head * a.query_head + (i - head * a.dim);
    if (r.wide_queries) {
      cuda::copy_async16(cuda::shared_address(to + i), q);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[i + e] = q[e];
    }
  }
}

// Lays out all pairs on one line of tiles and returns the tiles of the longest. Pairs without pages get an empty list.
template <int StepBytes>
__device__ __forceinline__ int lay_out(const Args& a, Place* line, SelectShared& s) {
  const int pairs = a.rows * a.kv_heads, each = (pairs + threads - 1) / threads, begin = threadIdx.x * each,
            end = min(begin + each, pairs);
  unsigned own = 0, total, longest = 0;
#pragma unroll 1
  for (int pair = begin; pair < end; ++pair) {
    const int row = a.pair_of.row(pair), head = pair - row * a.kv_heads;
    const std::int64_t slot = a.slots[a.row_of(row)];
    const int layer = a.layer_of(row), pages = pages_of(a, slot, head, layer), tiles = tiles_of(pages);
    line[pair] = {static_cast<int>(own), pages,
                  static_cast<int>((layer * a.layers.data + slot * a.slot_stride + head * a.head_stride) / StepBytes),
                  a.list ? a.budget_of(row, head) : 0};
    own += tiles, longest = max(longest, static_cast<unsigned>(tiles));
    if (pages == 0 && a.list && blockIdx.x == 0) no_pages(a, row, head);
  }
  longest = __reduce_max_sync(device::all_lanes, longest);
  if (threadIdx.x % 32 == 0) s.bins[threadIdx.x / 32] = longest;
  const int before = static_cast<int>(device::block_scan(own, s.scan, total));
  for (int w = 0; w < warps; ++w) longest = max(longest, s.bins[w]);
#pragma unroll 1
  for (int pair = begin; pair < end; ++pair) line[pair].tiles += before;
  if (threadIdx.x == 0) line[pairs] = {static_cast<int>(total), 0, 0, 0};
  __syncthreads();
  return static_cast<int>(longest);
}

// A tile has eight columns, two for each query head. A box of tile_map is a tile of pages, one of page_map a page.
template <class T, int Chunks, int Tiles>
__global__ void __launch_bounds__(threads, 1)
    score_ring_kernel(const __grid_constant__ RingArgs r, const __grid_constant__ CUtensorMap tile_map,
                      const __grid_constant__ CUtensorMap page_map) {
  using R = Ring<T, Chunks, Tiles>;
  using F = typename R::F;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ SelectShared select;
  __shared__ int merges;
  __shared__ QueryHead of_head[most_ring_group];
  const Args& a = r.all;
  const int pairs = a.rows * a.kv_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned my_stages = cuda::shared_address(memory) + warp * R::stages * R::tile_bytes;
  const unsigned my_barriers = cuda::shared_address(memory) + R::barriers_at + warp * R::stages * 8;
  uint4* fragments = reinterpret_cast<uint4*>(memory + R::fragments_at);
  float* queries = reinterpret_cast<float*>(memory + R::queries_at);
  Place* places = reinterpret_cast<Place*>(memory + R::line_at(a.group, a.dim));  // [pairs + 1]
  unsigned* chosen = reinterpret_cast<unsigned*>(memory + R::bits_at(a.group, a.dim, pairs));
  float* own_scores =
      reinterpret_cast<float*>(memory + R::bits_at(a.group, a.dim, pairs) + bit_bytes(a.most_pages));  // with a list
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < R::stages; ++s) cuda::barrier_init(my_barriers + 8 * s, 1);
    cuda::barrier_init_fence();
  }
  __syncwarp();
  cuda::let_successor_start();
  if (!F::codes && threadIdx.x == 0) cuda::fetch_map(&tile_map);
  if (static_cast<int>(threadIdx.x) < (a.layers.rows ? a.layers.rows : a.rows))
    cuda::keep_load(a.slots[threadIdx.x]);  // into L1; no kernel writes them
  cuda::wait_for_predecessor();

  const int longest = lay_out<F::step_bytes>(a, places, select);
  const cuda::Line line(FirstTile{places}, pairs, longest, a.blocks_each);
  const auto part = line.part(blockIdx.x);
  const int lo = part.begin, hi = part.end;
  if (lo >= hi) return;
  const int first = line.pair_of(lo);
  int last = first;
  while (places[last + 1].tiles < hi) ++last;
  // A head that continues in the next block comes first, so shared heads are complete early. After the last copy only a
  // head that the block has alone is left to select.
  const bool cut_first = last != first && places[last + 1].tiles > hi;
  const int start = cut_first ? last : first, stop = cut_first ? last : last + 1;
  const int cut = cut_first ? hi - places[last].tiles : 0, items = hi - lo;
  const auto tile_of = [&](int item) { return item < cut ? hi - cut + item : lo + item - cut; };
  copy_queries(r, start, queries);

  const std::uint64_t policy = cuda::read_once_policy();
  int cursor = start;  // pair of the next tile to copy
  const auto ask = [&](int item, int stage) {
    if (item >= items) return;
    const int tile = tile_of(item);
    if (tile < places[cursor].tiles) cursor = first;
    while (places[cursor + 1].tiles <= tile) ++cursor;
    const Place at = places[cursor];
    const int page = (tile - at.tiles) * tile_pages, pages = min(tile_pages, at.pages - page);
    const int y = at.y + page * r.page_step;
    const unsigned to = my_stages + stage * R::tile_bytes, barrier = my_barriers + 8 * stage;
    const std::byte* from = F::codes ? a.data + std::int64_t{y} * F::step_bytes : nullptr;
    if (r.dense && (F::codes || pages == tile_pages)) {
      if (!cuda::elect_lane()) return;
      cuda::barrier_expect(barrier, pages * R::page_bytes);
      if constexpr (F::codes)
        cuda::bulk_load(to, from, pages * R::page_bytes, barrier, policy);
      else
        cuda::bulk_copy_2d(to, &tile_map, 0, y, barrier, policy);
      return;
    }
    if (lane == 0) cuda::barrier_expect(barrier, pages * R::page_bytes);
    __syncwarp();
    if (lane >= pages) return;
    if constexpr (F::codes)
      cuda::bulk_load(to + lane * R::page_bytes, from + lane * a.page_stride, R::page_bytes, barrier, policy);
    else
      cuda::bulk_copy_2d(to + lane * R::page_bytes, &page_map, 0, y + lane * r.page_step, barrier, policy);
  };
  int item = warp, stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int i = 0; i < R::stages; ++i) ask(item + i * warps, i);
  cuda::wait_copies();
  __syncthreads();

  for (int pair = start;;) {
    const int begin = places[pair].tiles, end = places[pair + 1].tiles, pages = places[pair].pages;
    const int row = a.pair_of.row(pair), kv_head = pair - row * a.kv_heads;
    const bool is_cut = cut_first && pair == last;
    int next = is_cut ? first : pair + 1;
    while (next < stop && places[next].tiles == places[next + 1].tiles) ++next;
    const int until = is_cut ? cut : cut + min(hi, end) - lo;
    float* scores = a.scores + row * a.score_row + kv_head * a.score_head;
    Softmax softmax[Tiles];
    float2 heads[Tiles];
    if constexpr (F::codes) {
      sum_queries(a, queries, of_head);
      __syncthreads();
      load_heads(a, of_head, heads);
    }
    stage_queries<typename F::Element, F::codes>(a, queries, a.dim, Tiles, Chunks, fragments, of_head);
    __syncthreads();
    uint4 b[Tiles][Chunks];
#pragma unroll
    for (int t = 0; t < Tiles; ++t)
#pragma unroll
      for (int c = 0; c < Chunks; ++c) b[t][c] = fragments[(t * Chunks + c) * 32 + lane];
    if (next < stop) copy_queries(r, next, queries);
    for (; item < until; item += warps) {
      cuda::barrier_wait(my_barriers + 8 * stage, parity);
      float sum[Tiles][4];
      if constexpr (F::codes)
        multiply_codes(my_stages + stage * R::tile_bytes, b, heads, sum);
      else
        multiply_tile<T>(my_stages + stage * R::tile_bytes, b, sum);
      __syncwarp();
      ask(item + R::stages * warps, stage);
      if (++stage == R::stages) stage = 0, parity ^= 1;
      const int page = (tile_of(item) - begin) * tile_pages + page_of_row<F::codes>(lane / 4);
      write_tile(a, sum, row, kv_head, page, pages, scores, a.list ? own_scores : nullptr, softmax);
    }
    cuda::wait_copies();
    end_head(a, line, pair, begin, pages, places[pair].budget, true, softmax, own_scores, chosen, merges, select);
    if (next >= stop) break;
    pair = next;
  }
}

template <class T, int Chunks, int Tiles>
void launch_ring(RingArgs r, cudaStream_t stream) {
  using R = Ring<T, Chunks, Tiles>;
  const Args& a = r.all;
  const auto kernel = score_ring_kernel<T, Chunks, Tiles>;
  static const cudaError_t once =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(cuda::shared_bytes() - sizeof(SelectShared) - 1024));
  cuda::check(once, "page_score");
  constexpr bool half = std::is_same_v<T, __half>;
  constexpr std::int64_t rows = 0x7fffffff;  // no bound is needed: the kernel copies only pages that exist
  CUtensorMap tile_map = {}, page_map = {};  // codes need none
  if constexpr (!R::F::codes) {
    tile_map = cuda::matrix_map(a.data, half, rows, 64, 64, tile_pages * R::page_rows);
    page_map = cuda::matrix_map(a.data, half, rows, 64, 64, R::page_rows);
  }
  const int pairs = a.rows * a.kv_heads, blocks = cuda::step_multiprocessors(),
            bytes = R::bytes(a.group, a.dim, pairs, a.list ? a.most_pages : 0);
  r.all.blocks_each = pairs > 0 ? blocks / pairs : 0;
  cuda::launch("page_score", kernel, blocks, threads, bytes, stream, true, r, tile_map, page_map);
}

inline int chunks_of(const Args& a) { return (a.box ? 2 : 1) * a.dim / chunk_numbers; }
inline int row_bytes_of(const Args& a) {
  return a.codes ? chunks_of(a) * chunk_numbers + 16 : chunks_of(a) * chunk_bytes;
}
inline int step_bytes_of(const Args& a) { return a.codes ? 16 : 128; }

// Returns whether launch_ring can run a's pairs, at most most_ring_pairs in one launch.
inline bool fits_ring(const Args& a) {
  const int step = step_bytes_of(a);
  return chunks_of(a) % 2 == 0 && a.group <= most_ring_group && a.kv_heads <= most_ring_pairs &&
         a.slot_stride % step == 0 && a.head_stride % step == 0 && a.page_stride % step == 0 &&
         a.page_stride * std::int64_t{a.most_pages} <= std::int64_t{1} << 30;
}

template <class T>
void launch_ring_width(const Args& a, cudaStream_t stream) {
  const bool wide =
      reinterpret_cast<std::uintptr_t>(a.queries) % 16 == 0 && a.query_row % 4 == 0 && a.query_head % 4 == 0;
  const RingArgs r = {a, static_cast<int>(a.page_stride / step_bytes_of(a)), a.page_stride == row_bytes_of(a), wide};
  switch (chunks_of(a)) {  // Quest's boxes of head_dim 128 have an own kernel for up to 4 query heads
    case 2: return launch_ring<T, 2, 2>(r, stream);
    case 4: return launch_ring<T, 4, 2>(r, stream);
    case 6: return launch_ring<T, 6, 2>(r, stream);
    case 8: return a.group > 4 ? launch_ring<T, 8, 2>(r, stream) : launch_ring<T, 8, 1>(r, stream);
    default: return launch_ring<T, 16, 2>(r, stream);
  }
}

// Needs fits_ring(a), head_dim 64, 96, 128 or 256, and summaries that are 16-byte aligned. half: they are f16, not
// bf16.
inline void launch_ring(const Args& a, bool half, cudaStream_t stream) {
  a.codes ? launch_ring_width<Codes>(a, stream)
  : half  ? launch_ring_width<__half>(a, stream)
          : launch_ring_width<__nv_bfloat16>(a, stream);
}

}  // namespace kvlab::ops::page_scores
