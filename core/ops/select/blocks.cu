// Blocks of tokens on a GPU. Vectors of blocks are summed in the order of the CPU's, in f64: they have the same bits,
// but for keys that are turned back.
#include "ops/select/blocks.hpp"

#include <algorithm>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/page/paged.cuh"
#include "ops/select/clusters.hpp"
#include "ops/select/marks.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 128, warps = threads / 32, list_threads = 256;

// Grids are [.., head, row].
__global__ void __launch_bounds__(threads)
    mass_kernel(DeviceKv kv, View<const float, 3> mass, int newest, const __grid_constant__ KeyBlocks blocks) {
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row];
  const int n = static_cast<int>(
                min(min(std::int64_t{kv.tokens(row, 0)}, blocks.mass.extent[2]), std::int64_t{mass.extent[2]})),
            from = newest > 0 ? max(0, n - newest) : 0;
  for (int t = from + blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads)
    blocks.mass(slot, head, t) += mass(row, head, t);
}

// The blocks of a row that have vectors, once this call is over.
__device__ int wanted_blocks(const DeviceKv& kv, const BlockRule& rule, const KeyBlocks& blocks, int row) {
  const int all = max(0, kv.tokens(row, 0) - rule.first - rule.window) / rule.block;
  return static_cast<int>(min(std::int64_t{all}, blocks.key.extent[2]));
}

// A thread block takes a block of tokens for one query head.
__global__ void __launch_bounds__(threads)
    make_kernel(DeviceKv kv, BlockRule rule, const __grid_constant__ KeyBlocks blocks) {
  __shared__ unsigned chosen[most_block / 32];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row];
  const int kv_head = head / static_cast<int>(blocks.key.extent[1] / kv.kv_heads);
  const int end = wanted_blocks(kv, rule, blocks, row);
  for (int b = blocks.made(slot) + blockIdx.x; b < end; b += gridDim.x) {
    const int first = rule.first + b * rule.block;
    const float* mass = &blocks.mass(slot, head, first);
    for (int i = threadIdx.x; i < (rule.block + 31) / 32; i += threads) chosen[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rule.block; i += threads) {
      const float own = mass[i];
      int before = 0;
      for (int j = 0; j < rule.block && before < rule.representatives; ++j)
        before += j != i && comes_before(mass[j], j, own, i);
      if (before < rule.representatives) atomicOr(&chosen[i / 32], 1u << i % 32);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < kv.head_dim; d += threads) {
      double sum = 0;
      for (int i = 0; i < rule.block; ++i)
        if (chosen[i / 32] >> i % 32 & 1) {
          const DeviceKv::Token token = kv.token(row, kv_head, first + i);
          sum += double(rule.unturned ? kv.rotated_key(token, d, -(first + i)) : token.key(d));
        }
      blocks.key(slot, head, b, d) = static_cast<float>(sum / rule.representatives);
    }
    __syncthreads();
  }
}

__global__ void made_kernel(DeviceKv kv, BlockRule rule, const __grid_constant__ KeyBlocks blocks) {
  const int row = blockIdx.x;
  std::int32_t& made = blocks.made(kv.kv.slots[row]);
  if (threadIdx.x == 0) made = max(made, wanted_blocks(kv, rule, blocks, row));
}

__global__ void __launch_bounds__(threads)
    turn_kernel(DeviceKv kv, View<const float, 3> queries, int position, View<float, 3> out) {
  const int head = blockIdx.x, row = blockIdx.y, half = kv.head_dim / 2, turn = position - (kv.tokens(row, 0) - 1);
  for (int i = threadIdx.x; i < half; i += threads) {
    double sine, cosine;
    sincos(double(turn) * kv.kv.rope_table.inv_freq[i], &sine, &cosine);
    const float x = queries(row, head, i), y = queries(row, head, i + half), c = static_cast<float>(cosine),
                s = static_cast<float>(sine);
    out(row, head, i) = x * c - y * s;
    out(row, head, i + half) = y * c + x * s;
  }
}

__global__ void __launch_bounds__(threads)
    mean_kernel(DeviceKv kv, View<const float, 4> queries, int position, View<float, 3> out) {
  const int head = blockIdx.x, row = blockIdx.y, half = kv.head_dim / 2, count = static_cast<int>(queries.extent[2]),
            first = kv.tokens(row, 0) - count;
  for (int i = threadIdx.x; i < half; i += threads) {
    double low = 0, high = 0;
    for (int q = 0; q < count; ++q) {
      const float x = queries(row, head, q, i), y = queries(row, head, q, i + half);
      float c = 1, s = 0;
      if (position >= 0) {
        double sine, cosine;
        sincos(double(position - (first + q)) * kv.kv.rope_table.inv_freq[i], &sine, &cosine);
        c = static_cast<float>(cosine), s = static_cast<float>(sine);
      }
      low += double(x * c - y * s), high += double(y * c + x * s);
    }
    out(row, head, i) = static_cast<float>(low / count);
    out(row, head, i + half) = static_cast<float>(high / count);
  }
}

// A warp takes a block of tokens, all query heads.
__global__ void __launch_bounds__(threads) scores_kernel(DeviceKv kv, View<const float, 3> queries,
                                                         const __grid_constant__ KeyBlocks blocks, View<float, 3> out) {
  const int row = blockIdx.y, slot = kv.kv.slots[row], lane = threadIdx.x % 32;
  const int made = static_cast<int>(min(std::int64_t{blocks.made(slot)}, blocks.key.extent[2]));
  for (int b = blockIdx.x * warps + threadIdx.x / 32; b < made; b += gridDim.x * warps) {
    double sum = 0;
    for (int q = 0; q < queries.extent[1]; ++q) {
      const float *x = &queries(row, q, 0), *key = &blocks.key(slot, q, b, 0);
      for (int d = lane; d < kv.head_dim; d += 32) sum += double(x[d]) * double(key[d]);
    }
    sum = sum_of_lanes(sum);
    if (lane == 0) out(row, 0, b) = static_cast<float>(sum);
  }
}

struct Radix {
  unsigned bins[256], scan[32], bin, above, inside;
};

// A thread block takes a KV head.
__global__ void __launch_bounds__(list_threads)
    pages_kernel(DeviceKv kv, View<const float, 3> scores, BlockRule rule, const std::int32_t* most,
                 const __grid_constant__ KeyBlocks blocks, const __grid_constant__ PageList list) {
  __shared__ Radix s;
  __shared__ unsigned marks[device::places_at_once / 32];
  const int head = blockIdx.x, row = blockIdx.y, slot = kv.kv.slots[row], me = threadIdx.x;
  const int n = static_cast<int>(min(std::int64_t{kv.pages(row, head)}, list.index.extent[2]));
  const int made = static_cast<int>(min(std::int64_t{blocks.made(slot)}, blocks.key.extent[2]));
  const int pages = rule.block / kv.page_size, first = rule.first / kv.page_size, end = first + made * pages;
  const int chosen = min(made, most[row]), of_blocks[] = {0, made};
  const auto key = [&](int, int b, unsigned i, unsigned long long& k) {
    k = device::selection_key(scores(row, 0, b), i);
    return true;
  };
  const unsigned long long least =
      chosen > 0 ? device::radix_threshold(key, of_blocks, 1, static_cast<unsigned>(chosen), 0, s) : 0;
  const auto each = [&](const auto& mark) {
    for (int b = me; b < made && chosen > 0; b += list_threads)
      if (device::selection_key(scores(row, 0, b), static_cast<unsigned>(b)) >= least)
        for (int p = first + b * pages; p < first + (b + 1) * pages; ++p) mark(p);
  };
  const int kept = device::list_places(n, first, end, &list.index(list.at(row), head, 0), marks, s.scan, each);
  if (me == 0) list.count(list.at(row), head) = kept;
}

unsigned count_of(std::int64_t n) { return static_cast<unsigned>(n); }

void add_block_mass_cuda(const PagedKv& kv, View<const float, 3> mass, int newest, const KeyBlocks& blocks, Stream s) {
  if (kv.rows == 0) return;
  const std::int64_t tokens = newest > 0 ? newest : mass.extent[2];
  const dim3 grid(count_of(std::clamp<std::int64_t>((tokens + threads - 1) / threads, 1, 1024)),
                  count_of(mass.extent[1]), count_of(kv.rows));
  mass_kernel<<<grid, threads, 0, stream_of(s)>>>(DeviceKv(kv), mass, newest, blocks);
  check_launch("add_block_mass");
}

void make_blocks_cuda(const PagedKv& kv, const BlockRule& rule, const KeyBlocks& blocks, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(count_of(std::clamp<std::int64_t>(blocks.key.extent[2], 1, 32)), count_of(blocks.key.extent[1]),
                  count_of(kv.rows));
  DeviceKv keys(kv);
  keys.kv.rope_table.attention_scale = 1;  // cached keys carry it already
  make_kernel<<<grid, threads, 0, stream_of(s)>>>(keys, rule, blocks);
  made_kernel<<<count_of(kv.rows), 32, 0, stream_of(s)>>>(DeviceKv(kv), rule, blocks);
  check_launch("make_blocks");
}

void turn_queries_cuda(const PagedKv& kv, View<const float, 3> queries, int position, View<float, 3> out, Stream s) {
  if (kv.rows == 0) return;
  turn_kernel<<<dim3(count_of(queries.extent[1]), count_of(kv.rows)), threads, 0, stream_of(s)>>>(DeviceKv(kv), queries,
                                                                                                  position, out);
  check_launch("turn_queries");
}

void mean_query_cuda(const PagedKv& kv, View<const float, 4> queries, int position, View<float, 3> out, Stream s) {
  if (kv.rows == 0) return;
  mean_kernel<<<dim3(count_of(queries.extent[1]), count_of(kv.rows)), threads, 0, stream_of(s)>>>(DeviceKv(kv), queries,
                                                                                                  position, out);
  check_launch("mean_query");
}

void block_pages_cuda(const PagedKv& kv, View<const float, 3> queries, const BlockRule& rule, const std::int32_t* most,
                      const KeyBlocks& blocks, Scores scores, PageList list, Stream s) {
  if (kv.rows == 0) return;
  const std::int64_t groups = std::clamp<std::int64_t>((blocks.key.extent[2] + warps - 1) / warps, 1, 1024);
  scores_kernel<<<dim3(count_of(groups), count_of(kv.rows)), threads, 0, stream_of(s)>>>(DeviceKv(kv), queries, blocks,
                                                                                         scores);
  pages_kernel<<<dim3(count_of(kv.kv_heads), count_of(kv.rows)), list_threads, 0, stream_of(s)>>>(
      DeviceKv(kv), scores, rule, most, blocks, list);
  check_launch("block_pages");
}

}  // namespace

KVLAB_ON_CUDA(add_block_mass, add_block_mass_cuda);
KVLAB_ON_CUDA(make_blocks, make_blocks_cuda);
KVLAB_ON_CUDA(turn_queries, turn_queries_cuda);
KVLAB_ON_CUDA(mean_query, mean_query_cuda);
KVLAB_ON_CUDA(block_pages, block_pages_cuda);

}  // namespace kvlab::ops
