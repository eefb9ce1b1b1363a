// Page scores and selection for few (row, KV head) pairs. Each pair has a cluster of blocks of its own, which share its
// pages evenly. They store the scores in the shared memory of the cluster's first block, which selects. A warp holds
// the summaries of a tile in registers. Products and sums have the order of the rings, so scores have the same bits.
#include <algorithm>
#include <array>

#include "base/launch.cuh"
#include "ops/select/score_pages.cuh"

namespace kvlab::ops::page_scores {
namespace {

using namespace cuda;

constexpr int cluster_threads = 512, cluster_warps = cluster_threads / 32;
// Measured choices. With more pairs the rings take over. A block of a cluster has at least least_tiles tiles, where all
// its pair's pages are in the table.
constexpr int most_cluster_pairs = 64, least_tiles = 8;
constexpr int held_chunks = 8;   // of a tile's row; a lane holds so many of two rows
constexpr int column_tiles = 2;  // at most, for 8 query heads

struct ClusterArgs {
  Args all;
  int chunks;  // of a summary; at most held_chunks or a multiple of them
  int shift;   // a cluster has 1 << shift blocks
};

using Barrier = unsigned long long;

// Tiles [begin, end) of a block.
struct Tiles {
  int begin, end;
  __device__ Tiles(int tiles, int rank, int shift) : begin(tiles * rank >> shift), end(tiles * (rank + 1) >> shift) {}
};

// Order of dynamic shared memory: fragments of the queries, the pair's scores, a bit for each of its pages. Only the
// first block of a cluster uses the last two.
__host__ __device__ constexpr int fragment_bytes(int group, int chunks) { return (2 * group + 7) / 8 * chunks * 512; }
constexpr int dynamic_bytes(int group, int chunks, int pages) {
  return fragment_bytes(group, chunks) + score_bytes(pages) + bit_bytes(pages);
}

// Asks for the summaries of the block's first tiles before earlier kernels have ended. Lengths may change until then,
// so they only say what to ask for. Reads go past the L1 cache, which would keep old values.
__device__ __forceinline__ void prefetch_tiles(const ClusterArgs& r, int row, int kv_head, int rank) {
  const Args& a = r.all;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slot = __ldcg(a.slots + row);
  const int tokens = __ldcg(a.length + slot * a.length_slot + kv_head * a.length_head);
  const int pages = min(candidates(tokens, a.page_size, a.leave_out).count(), a.most_pages);
  const Tiles mine(tiles_of(pages), rank, r.shift);
  const int tile = mine.begin + warp;
  if (tile >= mine.end) return;
  const std::byte* first =
      a.data + slot * a.slot_stride + kv_head * a.head_stride + std::int64_t{tile} * tile_pages * a.page_stride;
  for (int page = lane / 4; page < min(tile_pages, pages - tile * tile_pages); page += 8)
    for (int line = lane % 4; line < r.chunks / 2; line += 4) prefetch(first + page * a.page_stride + line * 128);
}

template <class T>
__global__ void __launch_bounds__(cluster_threads, 1) score_cluster_kernel(const __grid_constant__ ClusterArgs r) {
  extern __shared__ uint4 dynamic[];
  __shared__ SelectShared select;
  __shared__ Barrier barrier;  // of the first block: the scores of the other blocks have come
  const Args& a = r.all;
  const int rank = static_cast<int>(cluster_rank());
  const int pair = static_cast<int>(blockIdx.x >> r.shift), row = pair / a.kv_heads, kv_head = pair % a.kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = lane % 4, columns = (2 * a.group + 7) / 8;
  uint4* fragments = dynamic;
  float* own_scores = reinterpret_cast<float*>(fragments + columns * r.chunks * 32);
  unsigned* chosen = reinterpret_cast<unsigned*>(own_scores + score_bytes(a.most_pages) / 4);

  const unsigned arrived = shared_address(&barrier);
  if (rank == 0 && threadIdx.x == 0) {
    barrier_init(arrived, 1);
    barrier_init_fence();
  }
  __syncwarp();
  arrive_cluster();  // the wait below says that all blocks have started, and that the barrier is there
  let_successor_start();
  prefetch_tiles(r, row, kv_head, rank);
  wait_for_predecessor();

  const int slot = a.slots[row], pages = pages_of(a, slot, kv_head), fours = (pages + 3) / 4;
  if (pages == 0) {
    if (rank == 0 && threadIdx.x == 0) no_pages(a, row, kv_head);
    wait_cluster();
    return;
  }
  if (rank == 0 && threadIdx.x == 0) barrier_expect(arrived, static_cast<unsigned>(fours) * 16);
  const Tiles mine(tiles_of(pages), rank, r.shift);
  const int to = mine.end, width = min(r.chunks, held_chunks);
  int tile = mine.begin + warp, part = 0;
  const std::byte* summaries = a.data + slot * a.slot_stride + kv_head * a.head_stride + quarter * 16;
  // The lane reads rows lane / 4 and lane / 4 + 8 of a tile. Rows past the last page read that page again.
  const auto row_of = [&](int half, int tile, int part) {
    return summaries + min(tile * tile_pages + lane / 4 + 8 * half, pages - 1) * a.page_stride + part * chunk_bytes;
  };
  uint4 low[held_chunks], high[held_chunks];
  if (tile < to) {
    const std::byte *r0 = row_of(0, tile, 0), *r1 = row_of(1, tile, 0);
#pragma unroll
    for (int c = 0; c < held_chunks; ++c)
      if (c < width) {
        low[c] = load_once16(r0 + c * chunk_bytes);
        high[c] = load_once16(r1 + c * chunk_bytes);
      }
  }
  const int budget = rank == 0 ? a.budget_of(row, kv_head) : 0;
  stage_queries<T>(a, row, kv_head, columns, r.chunks, fragments);
  __syncthreads();
  wait_cluster();
  const unsigned to_scores = shared_of_block(shared_address(own_scores), 0), to_barrier = shared_of_block(arrived, 0);
  const unsigned fragment = shared_address(fragments + lane);
  float sums[column_tiles][2][4] = {};
  while (tile < to) {
    const bool last = part + width == r.chunks;
    const int next = last ? tile + cluster_warps : tile, next_part = last ? 0 : part + width;
    const bool more = next < to;
    const std::byte *r0 = row_of(0, more ? next : tile, next_part), *r1 = row_of(1, more ? next : tile, next_part);
#pragma unroll
    for (int c = 0; c < held_chunks; ++c)
      if (c < width) {
#pragma unroll
        for (int t = 0; t < column_tiles; ++t)
          if (t < columns) {
            const uint4 b = load_shared16(fragment + (t * r.chunks + part + c) * 512);
            mma16816<T>(sums[t][0], low[c].x, high[c].x, low[c].y, high[c].y, b.x, b.y);
            mma16816<T>(sums[t][1], low[c].z, high[c].z, low[c].w, high[c].w, b.z, b.w);
          }
        if (more) {
          low[c] = load_once16(r0 + c * chunk_bytes);
          high[c] = load_once16(r1 + c * chunk_bytes);
        }
      }
    if (last) {
      float sum[column_tiles][4];
#pragma unroll
      for (int t = 0; t < column_tiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[t][i] = sums[t][0][i] + sums[t][1][i];
          sums[t][0][i] = sums[t][1][i] = 0;
        }
      float best[2];
      reduce_tile(a, sum, row, kv_head, tile * tile_pages + lane / 4, pages, best);
      // Lanes 0 to 3 bring together four neighbouring scores each. Lane 4 p + half has the one of page p + 8 half.
      float four[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        four[e] = __shfl_sync(all_lanes, quarter % 2 ? best[1] : best[0], 4 * (4 * (lane % 2) + e) + lane / 2 % 2);
      const int at = tile * tile_pages / 4 + lane;
      if (lane < 4 && at < fours) store_async(to_scores + at * 16, four[0], four[1], four[2], four[3], to_barrier);
    }
    tile = next, part = next_part;
  }
  if (rank > 0) return;
  barrier_wait(arrived, 0);
  float* scores = a.scores + row * a.score_row + kv_head * a.score_head;
  for (int page = threadIdx.x; page < pages; page += cluster_threads) scores[page] = own_scores[page];
  write_choice<cluster_threads>(a, row, kv_head, own_scores, pages, budget, own_scores, chosen, select);
}

template <class T>
bool launch(ClusterArgs r, cudaStream_t stream) {
  const char* op = "page_score";
  const Args& a = r.all;
  const auto kernel = score_cluster_kernel<T>;
  // Clusters of 1, 2, 4, 8 and 16 blocks that the device runs at once.
  static const std::array<int, 5> at_once = [&] {
    const int most = dynamic_bytes(4 * column_tiles, 2 * held_chunks, most_fused_pages);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), op);
    allow_large_clusters(op, kernel);
    std::array<int, 5> counts;
    for (std::size_t i = 0; i < counts.size(); ++i)
      counts[i] = clusters_at_once(kernel, 1u << i, cluster_threads, static_cast<std::size_t>(most));
    return counts;
  }();
  const int pairs = a.rows * a.kv_heads;
  const auto fits = [&](int shift) { return at_once[static_cast<std::size_t>(shift)] >= pairs; };
  r.shift = static_cast<int>(at_once.size()) - 1;
  while (r.shift > 0 && (!fits(r.shift) || least_tiles << r.shift > tiles_of(a.most_pages))) --r.shift;
  if (!fits(r.shift)) return false;
  cuda::launch_clusters(op, kernel, 1u << r.shift, static_cast<unsigned>(pairs << r.shift), cluster_threads,
                        static_cast<std::size_t>(dynamic_bytes(a.group, r.chunks, a.most_pages)), stream, true, r);
  return true;
}

}  // namespace

bool launch_clusters(const Args& a, int row_bytes, bool half, cudaStream_t stream) {
  if (a.rows * a.kv_heads > most_cluster_pairs || a.rule == GroupRule::softmax_mean) return false;
  const ClusterArgs r = {a, row_bytes / chunk_bytes, 0};
  return half ? launch<__half>(r, stream) : launch<__nv_bfloat16>(r, stream);
}

}  // namespace kvlab::ops::page_scores
