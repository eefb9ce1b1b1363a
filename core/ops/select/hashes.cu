// Hashes of keys and queries on a GPU. A block hashes a tile of vectors, a thread takes tables of theirs. Sums run in
// the order of the CPU's, in f64, and products of two f32 are exact there: codes have the same bits.
#include "ops/select/hashes.hpp"

#include <algorithm>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 128, warps = threads / 32, tile = 8, most_dim = 256, at_once = 8;

__global__ void __launch_bounds__(threads)
    mean_kernel(DeviceKv kv, int from, int to, const __grid_constant__ KeyHashes h) {
  const int head = blockIdx.x, row = blockIdx.y, slot = kv.kv.slots[row];
  const int end = max(from, min(to, kv.tokens(row, head)));
  for (int d = threadIdx.x; d < kv.head_dim; d += threads) {
    double sum = 0;
    for (int t = from; t < end; t += at_once) {  // several loads are under way at once
      float x[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) x[i] = t + i < end ? kv.token(row, head, t + i).key(d) : 0.f;
#pragma unroll
      for (int i = 0; i < at_once; ++i) sum += double(x[i]);
    }
    h.mean(slot, head, d) = end > from ? static_cast<float>(sum / (end - from)) : 0.f;
  }
  if (threadIdx.x == 0) h.bound(slot, head, 0) = from, h.bound(slot, head, 1) = end;
}

// put(i, table, code) for `count` vectors of shared memory.
template <class F>
__device__ void hash_tile(const float (&x)[tile][most_dim], int count, const View<const float, 4>& planes, int head,
                          const F& put) {
  const int dim = static_cast<int>(planes.extent[1]), bits = static_cast<int>(planes.extent[2]),
            tables = static_cast<int>(planes.extent[3]);
  for (int table = threadIdx.x; table < tables; table += threads) {
    int code[tile] = {};
    for (int bit = 0; bit < bits; ++bit) {
      double sum[tile] = {};
      for (int d = 0; d < dim; ++d) {
        const double plane = planes(head, d, bit, table);
#pragma unroll
        for (int i = 0; i < tile; ++i) sum[i] += double(x[i][d]) * plane;
      }
#pragma unroll
      for (int i = 0; i < tile; ++i) code[i] |= (sum[i] > 0) << bit;
    }
#pragma unroll
    for (int i = 0; i < tile; ++i)
      if (i < count) put(i, table, static_cast<std::int16_t>(code[i]));
  }
}

__global__ void __launch_bounds__(threads)
    keys_kernel(DeviceKv kv, int from, int to, const __grid_constant__ KeyHashes h) {
  __shared__ float x[tile][most_dim];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row], dim = kv.head_dim;
  const int first = from + static_cast<int>(blockIdx.x) * tile,
            count = min(tile, min(to, kv.tokens(row, head)) - first);
  if (count <= 0) return;
  for (int i = threadIdx.x; i < tile * dim; i += threads)
    x[i / dim][i % dim] =
        i / dim < count ? kv.token(row, head, first + i / dim).key(i % dim) - h.mean(slot, head, i % dim) : 0.f;
  __syncthreads();
  hash_tile(x, count, h.planes, head,
            [&](int i, int table, std::int16_t code) { h.code(slot, head, first + i, table) = code; });
}

__global__ void __launch_bounds__(threads)
    queries_kernel(View<const float, 3> queries, int group, const __grid_constant__ View<const float, 4> planes,
                   View<std::int16_t, 3> codes) {
  __shared__ float x[tile][most_dim];
  const int head = blockIdx.y, row = blockIdx.z, dim = static_cast<int>(planes.extent[1]);
  const int first = static_cast<int>(blockIdx.x) * tile, count = min(tile, group - first);
  for (int i = threadIdx.x; i < tile * dim; i += threads)
    x[i / dim][i % dim] = i / dim < count ? queries(row, head * group + first + i / dim, i % dim) : 0.f;
  __syncthreads();
  hash_tile(x, count, planes, head,
            [&](int i, int table, std::int16_t code) { codes(row, head * group + first + i, table) = code; });
}

struct Weighing {
  DeviceKv kv;
  View<const float, 3> queries;
  View<const std::int16_t, 3> codes;  // [row, query head, table]
  KeyHashes hashes;
  Collisions rule;
  Scores out;
};

// What a sampled token counts as; the lanes take elements.
__device__ float weight_of(const Weighing& a, int row, int head, int query_head, int t, int lane) {
  const DeviceKv::Token token = a.kv.token(row, head, t);
  const float *query = &a.queries(row, query_head, 0), *mean = &a.hashes.mean(a.kv.kv.slots[row], head, 0);
  double dot = 0, of_query = 0, of_key = 0;
  for (int d = lane; d < a.kv.head_dim; d += 32) {
    const double x = query[d], y = token.key(d) - mean[d];
    dot += x * y, of_query += x * x, of_key += y * y;
  }
  const double cosine = cosine_of(sum_of_lanes(dot), sum_of_lanes(of_query), sum_of_lanes(of_key));
  const double chance = collision_probability(cosine, static_cast<int>(a.hashes.planes.extent[2]),
                                              static_cast<int>(a.hashes.planes.extent[3]), a.rule.least);
  return static_cast<float>(1 / (chance + double(a.rule.floor)));
}

// A warp takes a token.
__global__ void __launch_bounds__(threads) weights_kernel(const __grid_constant__ Weighing a) {
  const int head = blockIdx.y, row = blockIdx.z, slot = a.kv.kv.slots[row], lane = threadIdx.x % 32;
  const int group = static_cast<int>(a.queries.extent[1]) / a.kv.kv_heads;
  const int tables = static_cast<int>(a.hashes.code.extent[3]);
  const int tokens = static_cast<int>(min(std::int64_t{a.kv.tokens(row, head)}, a.out.extent[2]));
  const int first = a.hashes.bound(slot, head, 0), end = a.hashes.bound(slot, head, 1);
  for (int t = blockIdx.x * warps + threadIdx.x / 32; t < tokens; t += gridDim.x * warps) {
    const bool hashed = t >= first && t < end;
    for (int q = head * group; q < (head + 1) * group; ++q) {
      float weight = 1;
      if (hashed) {
        const std::int16_t *own = &a.hashes.code(slot, head, t, 0), *wanted = &a.codes(row, q, 0);
        int equal = 0;
        for (int i = lane; i < tables; i += 32) equal += own[i] == wanted[i];
        weight = sum_of_lanes(equal) >= a.rule.least ? weight_of(a, row, head, q, t, lane) : 0.f;
      }
      if (lane == 0) a.out(row, q, t) = weight;
    }
  }
}

dim3 grid_of(std::int64_t blocks, const PagedKv& kv) {
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
}

void hash_keys_cuda(const PagedKv& kv, int from, int to, const KeyHashes& hashes, Stream s) {
  if (kv.rows == 0) return;
  const dim3 heads(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  mean_kernel<<<heads, threads, 0, stream_of(s)>>>(DeviceKv(kv), from, to, hashes);
  if (to > from)
    keys_kernel<<<grid_of((to - from + tile - 1) / tile, kv), threads, 0, stream_of(s)>>>(DeviceKv(kv), from, to,
                                                                                          hashes);
  check_launch("hash_keys");
}

void collision_weights_cuda(const PagedKv& kv, View<const float, 3> queries, const Collisions& rule,
                            const KeyHashes& hashes, Scores out, Workspace& w, Stream s) {
  if (kv.rows == 0) return;
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads;
  const auto codes =
      take_scratch<std::int16_t>(w, "codes of queries", {kv.rows, queries.extent[1], hashes.code.extent[3]});
  queries_kernel<<<grid_of((group + tile - 1) / tile, kv), threads, 0, stream_of(s)>>>(queries, group, hashes.planes,
                                                                                       codes);
  const std::int64_t blocks = std::clamp<std::int64_t>((out.extent[2] + warps - 1) / warps, 1, 1024);
  weights_kernel<<<grid_of(blocks, kv), threads, 0, stream_of(s)>>>(
      Weighing{DeviceKv(kv), queries, codes, hashes, rule, out});
  check_launch("collision_weights");
}

}  // namespace

KVLAB_ON_CUDA(hash_keys, hash_keys_cuda);
KVLAB_ON_CUDA(collision_weights, collision_weights_cuda);

}  // namespace kvlab::ops
