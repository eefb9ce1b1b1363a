// Page scores of summaries whose bytes are a multiple of 128, or of codes, for at most 8 query heads of a KV head. Each
// multiprocessor runs one block, or two of a launch of several layers: while one selects, the other reads. Each warp
// that reads has a ring of bulk copies (TMA) that runs on over the block's (row, KV head) pairs. The queries are
// fragments of B in registers, and the block copies the next pair's queries meanwhile. A block that has a whole head
// selects from shared memory. The kernel may start early (base/launch.cuh), but it reads nothing before its predecessor
// has ended.
#pragma once
#include <algorithm>

#include "base/launch.cuh"
#include "base/tensor_map.hpp"
#include "ops/select/score_pages.cuh"

namespace kvlab::ops::page_scores {

constexpr int most_ring_group = 8, most_ring_pairs = 3 * threads;  // pairs of one launch, of one layer
constexpr int ring_bytes = 128 * 1024;  // bytes that a block has in flight; more lengthens the queue and gains nothing

// Pairs of a launch of several layers, whose sums each 32 of them have a place in SelectShared::bins. window: pairs
// with pages that such a block lays out at once.
constexpr int most_layer_pairs = device::select_bins / 2 * 32, window = 128;

struct alignas(16) Place {
  // Tiles before a pair, its pages, its first row in the maps (its first step of 16 bytes for codes), its page budget,
  // or of several layers, which have one budget, the pair itself.
  int tiles, pages, y, of;
};

// all: tiles of the whole line, where the places are those of a window.
struct FirstTile {
  static constexpr int end = 0x7fffffff;
  const Place* places;
  int all = 0;
  __device__ __forceinline__ int operator()(int pair) const { return pair == end ? all : places[pair].tiles; }
};

// Stages of a warp, and the warps that read.
struct RingShape {
  int readers, stages;
  __host__ __device__ constexpr int tiles() const { return readers * stages; }
};

// Order of dynamic shared memory: the stages of all warps, their barriers, the fragments of a pair's queries, the next
// pair's queries, the line of pairs, a bit and a score for each page of a row.
template <class T, int Chunks, int Tiles>
struct Ring {
  using F = Format<T, Chunks>;
  static constexpr int page_bytes = F::page_bytes, tile_bytes = tile_pages * page_bytes;
  static constexpr int page_rows = page_bytes / 128;                              // rows of the maps that a page takes
  static constexpr RingShape shape = {warps, ring_bytes / (warps * tile_bytes)};  // of one layer
  // Blocks of a multiprocessor that have registers, of several layers.
  static constexpr int most_blocks = Chunks * Tiles <= 16 ? 2 : 1;

  static __host__ __device__ constexpr int fragments_at(RingShape ring) {
    return (ring.tiles() * (tile_bytes + 8) + 15) / 16 * 16;
  }
  static __host__ __device__ constexpr int queries_at(RingShape ring) {
    return fragments_at(ring) + Tiles * Chunks * 512;
  }
  static __host__ __device__ constexpr int line_at(RingShape ring, int group, int dim) {
    return queries_at(ring) + group * dim * 4;
  }
  static __host__ __device__ constexpr int bits_at(RingShape ring, int group, int dim, int pairs) {
    return line_at(ring, group, dim) + (pairs + 1) * static_cast<int>(sizeof(Place));
  }
  static constexpr int bytes(RingShape ring, int group, int dim, int pairs, int selected_pages) {
    return bits_at(ring, group, dim, pairs) + bit_bytes(selected_pages) + score_bytes(selected_pages);
  }
  static_assert(shape.stages > 0);
};
template <class T, int Chunks, int Tiles>
constexpr int most_ring_bytes = Ring<T, Chunks, Tiles>::bytes(Ring<T, Chunks, Tiles>::shape, most_ring_group, 256,
                                                              most_ring_pairs, most_fused_pages);
static_assert(most_ring_bytes<__half, 16, 2> + sizeof(SelectShared) + 1024 <= 227 * 1024);

struct RingArgs {
  Args all;
  RingShape ring;     // of several layers
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
    const std::int64_t slot = a.slots[row];
    const int pages = pages_of(a, slot, head), tiles = tiles_of(pages);
    line[pair] = {static_cast<int>(own), pages,
                  static_cast<int>((slot * a.slot_stride + head * a.head_stride) / StepBytes),
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

// The candidates of the lane's pair in each of the `Count` runs of 32 from `chunk` on, `warps` runs apart; -1 of a head
// that is left out. Loads of all runs are under way at once.
template <int Count>
__device__ __forceinline__ void pages_of_layers(const Args& a, int chunk, int (&pages)[Count]) {
  const int pairs = a.rows * a.kv_heads, lane = threadIdx.x % 32;
  const bool flags_alone = !a.heads.steps && !a.heads.classes;
  int tokens[Count], flags[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const int pair = min((chunk + i * warps) * 32 + lane, pairs - 1), row = a.pair_of.row(pair),
              head = pair - row * a.kv_heads, layer = a.layer_of(row);
    const std::int64_t slot = a.slots[a.row_of(row)];
    tokens[i] = a.length[layer * a.layers.length + slot * a.length_slot + head * a.length_head];
    const auto& f = a.heads.flags;
    flags[i] = f.data ? f.data[layer * a.layers.flags + slot * f.stride[0] + head * f.stride[1]] : 1;
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const int pair = (chunk + i * warps) * 32 + lane;
    bool on = pair < pairs;
    if (flags_alone) {
      on = on && (!a.heads.flags.data || (flags[i] != 0) != a.heads.unflagged);
    } else if (on) {
      const int row = a.pair_of.row(pair);
      on = a.heads_of(a.layer_of(row)).on(a.slots[a.row_of(row)], pair - row * a.kv_heads);
    }
    pages[i] = on ? min(a.candidates_of_layers(tokens[i]), a.most_pages) : -1;
  }
}

// Of several layers: writes to s.bins how many tiles, and how many pairs with pages, lie before each 32 pairs, and
// returns all tiles. Pairs without pages get an empty list.
__device__ __forceinline__ int count_tiles(const Args& a, SelectShared& s) {
  constexpr int at_once = 4;
  const int chunks = (a.rows * a.kv_heads + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // a selection may still read s.bins
#pragma unroll 1
  for (int c = warp; c < chunks; c += at_once * warps) {
    int pages[at_once];
    pages_of_layers(a, c, pages);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const unsigned tiles = __reduce_add_sync(all_lanes, static_cast<unsigned>(tiles_of(max(pages[i], 0)))),
                     some = __popc(__ballot_sync(all_lanes, pages[i] > 0));
      const int at = c + i * warps;
      if (lane == 0 && at < chunks) s.bins[2 * at] = tiles, s.bins[2 * at + 1] = some;
      if (pages[i] == 0 && blockIdx.x == 0) {
        const int pair = at * 32 + lane, row = a.pair_of.row(pair);
        no_pages(a, row, pair - row * a.kv_heads);
      }
    }
  }
  __syncthreads();
  const int each = (chunks + threads - 1) / threads, begin = threadIdx.x * each, end = min(begin + each, chunks);
  unsigned tiles = 0, some = 0, all_tiles, all_some;
#pragma unroll 1
  for (int c = begin; c < end; ++c) tiles += s.bins[2 * c], some += s.bins[2 * c + 1];
  tiles = device::block_scan(tiles, s.scan, all_tiles), some = device::block_scan(some, s.scan, all_some);
#pragma unroll 1
  for (int c = begin; c < end; ++c) {
    const unsigned of_tiles = s.bins[2 * c], of_some = s.bins[2 * c + 1];
    s.bins[2 * c] = tiles, s.bins[2 * c + 1] = some;
    tiles += of_tiles, some += of_some;
  }
  __syncthreads();
  return static_cast<int>(all_tiles);
}

// Places of the pairs that have tiles in [lo, hi), after count_tiles; fewer if they have no room.
struct Window {
  int first, last;  // places; the tiles of place last + 1 are those before the pair after it
};
template <int StepBytes>
__device__ __forceinline__ Window lay_out_window(const Args& a, int lo, int hi, Place* places, SelectShared& s) {
  const int chunks = (a.rows * a.kv_heads + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int from = 0, to = chunks;  // the run of 32 pairs that has tile lo
#pragma unroll 1
  while (to - from > 1) {
    const int mid = (from + to) / 2;
    (static_cast<int>(s.bins[2 * mid]) <= lo ? from : to) = mid;
  }
  const auto before = static_cast<int>(s.bins[2 * from + 1]);
  if (threadIdx.x == 0) s.above = window - 1;
  __syncthreads();
#pragma unroll 1
  for (int c = from + warp; c < chunks; c += warps) {
    if (static_cast<int>(s.bins[2 * c]) >= hi || static_cast<int>(s.bins[2 * c + 1]) - before >= window) break;
    int pages[1];
    pages_of_layers(a, c, pages);
    const int tiles = tiles_of(max(pages[0], 0)),
              end = static_cast<int>(s.bins[2 * c] + cuda::sum_through_lane(static_cast<unsigned>(tiles))),
              place = static_cast<int>(s.bins[2 * c + 1]) - before +
                      __popc(__ballot_sync(all_lanes, tiles > 0) & ((1u << lane) - 1));
    if (tiles == 0 || place >= window) continue;
    const int pair = c * 32 + lane, row = a.pair_of.row(pair), head = pair - row * a.kv_heads;
    const std::int64_t slot = a.slots[a.row_of(row)];
    places[place] = {
        end - tiles, pages[0],
        static_cast<int>((a.layer_of(row) * a.layers.data + slot * a.slot_stride + head * a.head_stride) / StepBytes),
        pair};
    if (end - tiles <= lo && lo < end) s.bin = place;
    if (end - tiles < hi && hi <= end) s.above = place;
    if (end >= hi || place == window - 1) places[place + 1].tiles = end;
  }
  __syncthreads();
  return {static_cast<int>(s.bin), static_cast<int>(s.above)};
}

// A tile has eight columns, two for each query head. A box of tile_map is a tile of pages, one of page_map a page.
// Layers: the launch is of several layers.
template <class T, int Chunks, int Tiles, bool Layers>
__global__ void __launch_bounds__(threads, Layers ? Ring<T, Chunks, Tiles>::most_blocks : 1)
    score_ring_kernel(const __grid_constant__ RingArgs r, const __grid_constant__ CUtensorMap tile_map,
                      const __grid_constant__ CUtensorMap page_map) {
  using R = Ring<T, Chunks, Tiles>;
  using F = typename R::F;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ SelectShared select;
  __shared__ int merges;
  __shared__ QueryHead of_head[most_ring_group];
  const Args& a = r.all;
  const RingShape ring = Layers ? r.ring : R::shape;
  const int pairs = a.rows * a.kv_heads, line_pairs = Layers ? window : pairs, lane = threadIdx.x % 32,
            warp = threadIdx.x / 32;
  const bool reads = !Layers || warp < ring.readers;
  const unsigned my_stages = cuda::shared_address(memory) + warp * ring.stages * R::tile_bytes;
  const unsigned my_barriers = cuda::shared_address(memory) + ring.tiles() * R::tile_bytes + warp * ring.stages * 8;
  uint4* fragments = reinterpret_cast<uint4*>(memory + R::fragments_at(ring));
  float* queries = reinterpret_cast<float*>(memory + R::queries_at(ring));
  Place* places = reinterpret_cast<Place*>(memory + R::line_at(ring, a.group, a.dim));  // [line_pairs + 1]
  unsigned* chosen = reinterpret_cast<unsigned*>(memory + R::bits_at(ring, a.group, a.dim, line_pairs));
  float* own_scores = reinterpret_cast<float*>(memory + R::bits_at(ring, a.group, a.dim, line_pairs) +
                                               bit_bytes(a.most_pages));  // with a list
  if (lane == 0 && reads) {
#pragma unroll 1
    for (int s = 0; s < ring.stages; ++s) cuda::barrier_init(my_barriers + 8 * s, 1);
    cuda::barrier_init_fence();
  }
  __syncwarp();
  cuda::let_successor_start();
  if (!F::codes && threadIdx.x == 0) cuda::fetch_map(&tile_map);
  if (static_cast<int>(threadIdx.x) < (a.layers.rows ? a.layers.rows : a.rows))
    cuda::keep_load(a.slots[threadIdx.x]);  // into L1; no kernel writes them
  cuda::wait_for_predecessor();

  const std::uint64_t policy = cuda::read_once_policy();
  int stage = 0;
  unsigned parity = 0;
  // Reads tiles [lo, hi) of pairs [first, last] and selects where it has the last scores of one.
  const auto run = [&](const auto& line, int first, int last, const int lo, const int hi) {
    // A head that continues in the next block comes first, so shared heads are complete early. After the last copy only
    // a head that the block has alone is left to select. But blocks of many equal heads would then all select at the
    // same times, in which nothing is read. From their parts' beginnings on they select at different times.
    const bool cut_first = !Layers && last != first && places[last + 1].tiles > hi;
    const int start = cut_first ? last : first, stop = cut_first ? last : last + 1;
    const int cut = cut_first ? hi - places[last].tiles : 0, items = hi - lo;
    const auto tile_of = [&](int item) { return item < cut ? hi - cut + item : lo + item - cut; };
    const auto pair_at = [&](int place) { return Layers ? places[place].of : place; };
    copy_queries(r, pair_at(start), queries);

    int cursor = start;  // place of the next tile to copy
    const auto ask = [&](int item, int stage) {
      if (item >= items) return;
      const int tile = tile_of(item);
      if (tile < places[cursor].tiles) cursor = first;
      while (places[cursor + 1].tiles <= tile) ++cursor;
      const Place at = places[cursor];
      const int page = (tile - at.tiles) * tile_pages, pages = min(tile_pages, at.pages - page);
      const int y = at.y + page * r.page_step;
      const unsigned to = my_stages + stage * R::tile_bytes, barrier = my_barriers + 8 * stage;
      [[maybe_unused]] const std::byte* from = F::codes ? a.data + std::int64_t{y} * F::step_bytes : nullptr;
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
    const auto after = [&](int stage) { return stage + 1 == ring.stages ? 0 : stage + 1; };
    int item = reads ? warp : items;
    for (int i = 0, at = stage; i < ring.stages; ++i, at = after(at)) ask(item + i * ring.readers, at);
    cuda::wait_copies();
    __syncthreads();

    for (int at = start;;) {
      const int begin = places[at].tiles, end = places[at + 1].tiles, pages = places[at].pages, pair = pair_at(at);
      const int row = a.pair_of.row(pair), kv_head = pair - row * a.kv_heads;
      const bool is_cut = cut_first && at == last;
      int next = is_cut ? first : at + 1;
      if (!Layers)
        while (next < stop && places[next].tiles == places[next + 1].tiles) ++next;
      const int until = is_cut ? cut : cut + min(hi, end) - lo;
      int room = pair;
      float* scores = a.scores + row * a.score_row + kv_head * a.score_head;
      if constexpr (Layers) {
        const int first_block = line.first_block(at);
        room = first_block == line.last_block(at) ? gridDim.x + blockIdx.x : first_block;
        scores = a.scores + room * a.score_head;
      }
      Softmax softmax[Tiles];
      [[maybe_unused]] float2 heads[Tiles];
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
      if (next < stop) copy_queries(r, pair_at(next), queries);
      for (; item < until; item += ring.readers) {
        cuda::barrier_wait(my_barriers + 8 * stage, parity);
        float sum[Tiles][4];
        if constexpr (F::codes)
          multiply_codes(my_stages + stage * R::tile_bytes, b, heads, sum);
        else
          multiply_tile<T>(my_stages + stage * R::tile_bytes, b, sum);
        __syncwarp();
        ask(item + ring.tiles(), stage);
        if (++stage == ring.stages) stage = 0, parity ^= 1;
        const int page = (tile_of(item) - begin) * tile_pages + page_of_row<F::codes>(lane / 4);
        write_tile(a, sum, room, page, pages, scores, a.list ? own_scores : nullptr, softmax);
      }
      cuda::wait_copies();
      end_head(a, line, Head{at, begin, row, kv_head, pages, Layers ? a.budget : places[at].of, room, scores}, true,
               softmax, own_scores, chosen, merges, select);
      if (next >= stop) break;
      at = next;
    }
  };
  if constexpr (Layers) {
    for (int lo = -1;;) {
      const int all = count_tiles(a, select);
      const cuda::Line line(FirstTile{places, all}, FirstTile::end, 0, 0);
      const auto part = line.part(blockIdx.x);
      if (lo < 0) lo = part.begin;
      if (lo >= part.end) return;
      const Window w = lay_out_window<F::step_bytes>(a, lo, part.end, places, select);
      const int hi = min(part.end, places[w.last + 1].tiles);
      run(line, w.first, w.last, lo, hi);
      lo = hi;
      if (lo >= part.end) return;
    }
  } else {
    const int longest = lay_out<F::step_bytes>(a, places, select);
    const cuda::Line line(FirstTile{places}, pairs, longest, a.blocks_each);
    const auto part = line.part(blockIdx.x);
    if (part.begin >= part.end) return;
    const int first = line.pair_of(part.begin);
    int last = first;
    while (places[last + 1].tiles < part.end) ++last;
    run(line, first, last, part.begin, part.end);
  }
}

// The ring of blocks of a launch of several layers, and how many of them a multiprocessor has. A warp that reads has
// two stages or more. Where two blocks would have few tiles on their way, one has more.
template <class R>
int shape_of_layers(const Args& a, RingShape& ring) {
  // Bytes of each block that CUDA takes; static ones, and those that align what follows them.
  constexpr int of_system = 1024, own = sizeof(SelectShared) + 1536, least = warps;
  const int all = static_cast<int>(cuda::shared_bytes()) + of_system,
            other = R::bytes({0, 0}, a.group, a.dim, window, a.most_pages) + own + of_system + 16;
  int blocks = R::most_blocks, tiles = (all / blocks - other) / (R::tile_bytes + 8);
  if (tiles < least) blocks = 1, tiles = (all - other) / (R::tile_bytes + 8);
  constexpr int most = std::max(2, ring_bytes / (warps * R::tile_bytes));  // stages of a warp
  ring.readers = std::clamp(tiles / 2, 1, warps);
  ring.stages = std::clamp(tiles / ring.readers, 1, most);
  return blocks;
}

template <class T, int Chunks, int Tiles, bool Layers>
void launch_ring(RingArgs r, cudaStream_t stream) {
  using R = Ring<T, Chunks, Tiles>;
  const Args& a = r.all;
  const auto kernel = score_ring_kernel<T, Chunks, Tiles, Layers>;
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
  const int pairs = a.rows * a.kv_heads;
  int blocks = cuda::step_multiprocessors(),
      bytes = R::bytes(R::shape, a.group, a.dim, pairs, a.list ? a.most_pages : 0);
  if constexpr (Layers) {
    blocks *= shape_of_layers<R>(a, r.ring);
    bytes = R::bytes(r.ring, a.group, a.dim, window, a.most_pages);
  } else {
    r.all.blocks_each = pairs > 0 ? blocks / pairs : 0;
  }
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

template <class T, bool Layers>
void launch_ring_width(const Args& a, cudaStream_t stream) {
  const bool wide =
      reinterpret_cast<std::uintptr_t>(a.queries) % 16 == 0 && a.query_row % 4 == 0 && a.query_head % 4 == 0;
  const RingArgs r = {
      a, {}, static_cast<int>(a.page_stride / step_bytes_of(a)), a.page_stride == row_bytes_of(a), wide};
  switch (chunks_of(a)) {  // Quest's boxes of head_dim 128 have an own kernel for up to 4 query heads
    case 2: return launch_ring<T, 2, 2, Layers>(r, stream);
    case 4: return launch_ring<T, 4, 2, Layers>(r, stream);
    case 6: return launch_ring<T, 6, 2, Layers>(r, stream);
    case 8: return a.group > 4 ? launch_ring<T, 8, 2, Layers>(r, stream) : launch_ring<T, 8, 1, Layers>(r, stream);
    default: return launch_ring<T, 16, 2, Layers>(r, stream);
  }
}

// Needs fits_ring(a), head_dim 64, 96, 128 or 256, and summaries that are 16-byte aligned. half: they are f16, not
// bf16.
template <bool Layers>
void launch_ring(const Args& a, bool half, cudaStream_t stream) {
  a.codes ? launch_ring_width<Codes, Layers>(a, stream)
  : half  ? launch_ring_width<__half, Layers>(a, stream)
          : launch_ring_width<__nv_bfloat16, Layers>(a, stream);
}

}  // namespace kvlab::ops::page_scores
