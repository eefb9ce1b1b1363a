// Page scores of summaries whose bytes are a multiple of 128, for at most 8 query heads of a KV head. Each
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
  int tiles, pages, y, budget;  // tiles before a pair, its pages, its first row in the maps, its page budget
};

// Order of dynamic shared memory: the stages of all warps, their barriers, queries of two pairs, the line of pairs, a
// bit and a score for each page of a row.
template <int Chunks>
struct Ring {
  static constexpr int page_bytes = Chunks * chunk_bytes, tile_bytes = tile_pages * page_bytes;
  static constexpr int page_rows = page_bytes / 128;  // rows of the maps that a page takes
  static constexpr int stages = ring_bytes / (warps * tile_bytes);
  static constexpr int barriers_at = warps * stages * tile_bytes, queries_at = barriers_at + warps * stages * 8;

  static __host__ __device__ constexpr int line_at(int group, int dim) { return queries_at + 2 * group * dim * 4; }
  static __host__ __device__ constexpr int bits_at(int group, int dim, int pairs) {
    return line_at(group, dim) + (pairs + 1) * static_cast<int>(sizeof(Place));
  }
  static constexpr int bytes(int group, int dim, int pairs, int selected_pages) {
    return bits_at(group, dim, pairs) + bit_bytes(selected_pages) + score_bytes(selected_pages);
  }
  static_assert(stages > 0);
};
static_assert(Ring<16>::bytes(most_ring_group, 256, most_ring_pairs, most_fused_pages) + sizeof(SelectShared) + 1024 <=
              227 * 1024);

struct RingArgs {
  Args all;
  int page_step;      // rows of the maps from a page to the next one
  bool dense;         // summaries have no gaps between them
  bool wide_queries;  // queries can be read 16 bytes at once
};

// Starts the copy of a pair's queries as [head, dim]. A thread may read them after all threads have waited for their
// copies and met.
__device__ __forceinline__ void copy_queries(const RingArgs& r, int pair, float* to) {
  const Args& a = r.all;
  const float* from = a.queries + pair / a.kv_heads * a.query_row + pair % a.kv_heads * a.group * a.query_head;
  for (int i = threadIdx.x * 4; i < a.group * a.dim; i += threads * 4) {
    const float* q = from + i / a.dim * a.query_head + i % a.dim;
    if (r.wide_queries) {
      cuda::copy_async16(cuda::shared_address(to + i), q);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[i + e] = q[e];
    }
  }
}

// Returns the rounded values of f(x), or with `rest` the differences that rounding leaves.
template <class T, class F>
__device__ __forceinline__ uint4 fragment_of(const float (&x)[8], bool rest, const F& f) {
  unsigned out[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float u = f(x[2 * k]), v = f(x[2 * k + 1]);
    out[k] = cuda::Pair<T>::pack(u, v);
    float rounded_u, rounded_v;
    cuda::Pair<T>::unpack(out[k], rounded_u, rounded_v);
    if (rest) out[k] = cuda::Pair<T>::pack(u - rounded_u, v - rounded_v);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Makes a lane's fragments of B from queries [head, dim] in shared memory. Column 2 h is query head h rounded, column
// 2 h + 1 the rest. Columns past the last head repeat it. Elements are in the order of stage_queries (score_pages.cu).
// A box is one row of [lo, hi]: max(q lo, q hi) = min(q, 0) lo + max(q, 0) hi.
template <class T, int Chunks, int Tiles>
__device__ __forceinline__ void load_queries(const Args& a, const float* queries, uint4 (&b)[Tiles][Chunks]) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  const bool rest = lane / 4 % 2;
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    const float* q = queries + min(t * 4 + lane / 8, a.group - 1) * a.dim + quarter * 8;
    const auto eight = [&](int c, float(&x)[8]) {
      const float4 u = reinterpret_cast<const float4*>(q + c * 32)[0],
                   v = reinterpret_cast<const float4*>(q + c * 32)[1];
      x[0] = u.x, x[1] = u.y, x[2] = u.z, x[3] = u.w, x[4] = v.x, x[5] = v.y, x[6] = v.z, x[7] = v.w;
    };
    float x[8];
    // For head_dim 64, 96, 128 or 256, the width often tells boxes from vectors at compile time.
    constexpr bool only_boxes = Chunks == 6 || Chunks == 16, no_boxes = Chunks == 2;
    if (only_boxes || (!no_boxes && a.box)) {
#pragma unroll
      for (int c = 0; c < Chunks / 2; ++c) {
        eight(c, x);
        b[t][c] = fragment_of<T>(x, rest, [](float v) { return fminf(v, 0.f); });
        b[t][c + Chunks / 2] = fragment_of<T>(x, rest, [](float v) { return fmaxf(v, 0.f); });
      }
    } else {
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        eight(c, x);
        b[t][c] = fragment_of<T>(x, rest, [](float v) { return v; });
      }
    }
  }
}

// Lays out all pairs on one line of tiles and returns the number of tiles. Pairs without pages get an empty list.
__device__ __forceinline__ unsigned lay_out(const Args& a, Place* line, SelectShared& s) {
  constexpr int most = most_ring_pairs / threads;
  const int pairs = a.rows * a.kv_heads, each = (pairs + threads - 1) / threads, begin = threadIdx.x * each;
  Place of[most];
#pragma unroll
  for (int i = 0; i < most; ++i) {  // a loop of its own, so that all loads are in flight together
    of[i] = {};
    if (i < each && begin + i < pairs) {
      const int row = (begin + i) / a.kv_heads, head = (begin + i) % a.kv_heads;
      const std::int64_t slot = a.slots[row];
      of[i].pages = pages_of(a, slot, head);
      of[i].y = static_cast<int>((slot * a.slot_stride + head * a.head_stride) / 128);
      if (a.list) of[i].budget = a.budget_of(row, head);
    }
  }
  unsigned own = 0, total;
#pragma unroll
  for (int i = 0; i < most; ++i) own += tiles_of(of[i].pages);
  int before = static_cast<int>(device::block_scan(own, s.scan, total));
#pragma unroll
  for (int i = 0; i < most; ++i)
    if (i < each && begin + i < pairs) {
      of[i].tiles = before;
      line[begin + i] = of[i];
      before += tiles_of(of[i].pages);
      if (of[i].pages == 0 && a.list && blockIdx.x == 0)
        no_pages(a, (begin + i) / a.kv_heads, (begin + i) % a.kv_heads);
    }
  if (threadIdx.x == 0) line[pairs] = {static_cast<int>(total), 0, 0, 0};
  __syncthreads();
  return total;
}

// A tile has eight columns, two for each query head. A box of tile_map is a tile of pages, one of page_map a page.
template <class T, int Chunks, int Tiles>
__global__ void __launch_bounds__(threads, 1)
    score_ring_kernel(const __grid_constant__ RingArgs r, const __grid_constant__ CUtensorMap tile_map,
                      const __grid_constant__ CUtensorMap page_map) {
  using R = Ring<Chunks>;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ SelectShared select;
  __shared__ int merges;
  const Args& a = r.all;
  const int pairs = a.rows * a.kv_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = lane % 4;
  const unsigned my_stages = cuda::shared_address(memory) + warp * R::stages * R::tile_bytes;
  const unsigned my_barriers = cuda::shared_address(memory) + R::barriers_at + warp * R::stages * 8;
  float* queries = reinterpret_cast<float*>(memory + R::queries_at);
  Place* line = reinterpret_cast<Place*>(memory + R::line_at(a.group, a.dim));  // [pairs + 1]
  unsigned* chosen = reinterpret_cast<unsigned*>(memory + R::bits_at(a.group, a.dim, pairs));
  float* own_scores =
      reinterpret_cast<float*>(memory + R::bits_at(a.group, a.dim, pairs) + bit_bytes(a.most_pages));  // with a list
  if (lane == 0) {
    for (int s = 0; s < R::stages; ++s) cuda::barrier_init(my_barriers + 8 * s, 1);
    cuda::barrier_init_fence();
  }
  __syncwarp();
  cuda::let_successor_start();
  cuda::wait_for_predecessor();

  const unsigned total = lay_out(a, line, select);
  const std::int64_t blocks = min(gridDim.x, total);
  if (blockIdx.x >= blocks) return;
  const Share share = share_of(blockIdx.x, blocks, total, pairs, [&](int i) { return line[i].tiles; });
  const int lo = share.lo, hi = share.hi, first = share.pair;
  int last = first;
  while (line[last + 1].tiles < hi) ++last;
  // A head that continues in the next block comes first, so shared heads are complete early. After the last copy only a
  // head that the block has alone is left to select.
  const bool cut_first = last != first && line[last + 1].tiles > hi;
  const int start = cut_first ? last : first, stop = cut_first ? last : last + 1;
  const int cut = cut_first ? hi - line[last].tiles : 0, items = hi - lo;
  const auto tile_of = [&](int item) { return item < cut ? hi - cut + item : lo + item - cut; };
  copy_queries(r, start, queries);

  const std::uint64_t policy = cuda::read_once_policy();
  int cursor = start;  // pair of the next tile to copy
  const auto ask = [&](int item, int stage) {
    if (item >= items) return;
    const int tile = tile_of(item);
    if (tile < line[cursor].tiles) cursor = first;
    while (line[cursor + 1].tiles <= tile) ++cursor;
    const Place at = line[cursor];
    const int page = (tile - at.tiles) * tile_pages, pages = min(tile_pages, at.pages - page);
    const int y = at.y + page * r.page_step;
    const unsigned to = my_stages + stage * R::tile_bytes, barrier = my_barriers + 8 * stage;
    if (lane == 0) cuda::barrier_expect(barrier, pages * R::page_bytes);
    if (pages == tile_pages && r.dense) {
      if (lane == 0) cuda::bulk_copy_2d(to, &tile_map, 0, y, barrier, policy);
    } else {
      __syncwarp();
      if (lane < pages)
        cuda::bulk_copy_2d(to + lane * R::page_bytes, &page_map, 0, y + lane * r.page_step, barrier, policy);
    }
  };
  int item = warp, stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int i = 0; i < R::stages; ++i) ask(item + i * warps, i);
  cuda::wait_copies();
  __syncthreads();

  for (int pair = start, turn = 0;; turn ^= 1) {
    const int begin = line[pair].tiles, end = line[pair + 1].tiles, pages = line[pair].pages;
    const int row = pair / a.kv_heads, kv_head = pair % a.kv_heads;
    const bool is_cut = cut_first && pair == last;
    int next = is_cut ? first : pair + 1;
    while (next < stop && line[next].tiles == line[next + 1].tiles) ++next;
    const int until = is_cut ? cut : cut + min(hi, end) - lo;
    float* scores = a.scores + row * a.score_row + kv_head * a.score_head;
    Softmax softmax[Tiles];
    uint4 b[Tiles][Chunks];
    load_queries<T, Chunks, Tiles>(a, queries + turn * a.group * a.dim, b);
    if (next < stop) copy_queries(r, next, queries + (turn ^ 1) * a.group * a.dim);
    for (; item < until; item += warps) {
      cuda::barrier_wait(my_barriers + 8 * stage, parity);
      const unsigned from = my_stages + stage * R::tile_bytes + lane / 4 * R::page_bytes;
      float sums[Tiles][2][4] = {};
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        const int swizzle = (lane / 4 * R::page_rows + c / 2) & 7;
        const unsigned at = from + c / 2 * 128 + ((c % 2 * 4 + quarter) ^ swizzle) * 16;
        const uint4 low = cuda::load_shared16(at), high = cuda::load_shared16(at + 8 * R::page_bytes);
#pragma unroll
        for (int t = 0; t < Tiles; ++t) {
          cuda::mma16816<T>(sums[t][0], low.x, high.x, low.y, high.y, b[t][c].x, b[t][c].y);
          cuda::mma16816<T>(sums[t][1], low.z, high.z, low.w, high.w, b[t][c].z, b[t][c].w);
        }
      }
      __syncwarp();
      ask(item + R::stages * warps, stage);
      if (++stage == R::stages) stage = 0, parity ^= 1;
      float sum[Tiles][4];
#pragma unroll
      for (int t = 0; t < Tiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[t][i] = sums[t][0][i] + sums[t][1][i];
      const int page = (tile_of(item) - begin) * tile_pages + lane / 4;
      write_tile(a, sum, row, kv_head, page, pages, scores, a.list ? own_scores : nullptr, softmax);
    }
    cuda::wait_copies();
    end_head(a, pair, {begin, end, total, blocks}, pages, line[pair].budget, true, softmax, own_scores, chosen, merges,
             select);
    if (next >= stop) break;
    pair = next;
  }
}

template <class T, int Chunks, int Tiles>
void launch_ring(const RingArgs& r, cudaStream_t stream) {
  using R = Ring<Chunks>;
  const Args& a = r.all;
  const auto kernel = score_ring_kernel<T, Chunks, Tiles>;
  static const cudaError_t once =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(cuda::shared_bytes() - sizeof(SelectShared) - 1024));
  cuda::check(once, "page_score");
  constexpr bool half = std::is_same_v<T, __half>;
  constexpr std::int64_t rows = 0x7fffffff;  // no bound is needed: the kernel copies only pages that exist
  const CUtensorMap tile_map = cuda::matrix_map(a.data, half, rows, 64, 64, tile_pages * R::page_rows),
                    page_map = cuda::matrix_map(a.data, half, rows, 64, 64, R::page_rows);
  const int bytes = R::bytes(a.group, a.dim, a.rows * a.kv_heads, a.list ? a.most_pages : 0);
  cuda::launch("page_score", kernel, cuda::step_multiprocessors(), threads, bytes, stream, true, r, tile_map, page_map);
}

// Returns whether launch_ring_width can run a's pairs, at most most_ring_pairs in one launch.
inline bool fits_ring(const Args& a, int row_bytes) {
  return row_bytes % 128 == 0 && a.group <= most_ring_group && a.kv_heads <= most_ring_pairs &&
         a.slot_stride % 128 == 0 && a.head_stride % 128 == 0 && a.page_stride % 128 == 0 &&
         a.page_stride * std::int64_t{a.most_pages} <= std::int64_t{1} << 30;
}

// Needs fits_ring(a, row_bytes), head_dim 64, 96, 128 or 256, and summaries of row_bytes each, 16-byte aligned.
template <class T>
void launch_ring_width(const Args& a, int row_bytes, cudaStream_t stream) {
  const bool wide =
      reinterpret_cast<std::uintptr_t>(a.queries) % 16 == 0 && a.query_row % 4 == 0 && a.query_head % 4 == 0;
  const RingArgs r = {a, static_cast<int>(a.page_stride / 128), a.page_stride == row_bytes, wide};
  switch (row_bytes / chunk_bytes) {  // Quest's boxes of head_dim 128 have an own kernel for up to 4 query heads
    case 2: return launch_ring<T, 2, 2>(r, stream);
    case 4: return launch_ring<T, 4, 2>(r, stream);
    case 6: return launch_ring<T, 6, 2>(r, stream);
    case 8: return a.group > 4 ? launch_ring<T, 8, 2>(r, stream) : launch_ring<T, 8, 1>(r, stream);
    default: return launch_ring<T, 16, 2>(r, stream);
  }
}

}  // namespace kvlab::ops::page_scores
