// Shares of clusters on a GPU, in f64 as on the CPU: a threshold parts them, so both devices should agree.
#include <algorithm>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/page/paged.cuh"
#include "ops/select/clusters.hpp"
#include "ops/select/marks.cuh"
#include "ops/select/share.cuh"

namespace kvlab::ops {
using namespace cuda;
using namespace device;
namespace {

constexpr int threads = 256, warps = threads / 32, list_threads = 256;

// Grids are [.., head, row].
struct Call {
  DeviceKv kv;
  KeyClusters clusters;
  View<const float, 4> queries;
  double scale;
  View<double, 4> share;  // [row, query head, query, cluster]: logits, then shares of the query
  View<float, 3> out;
  int group;

  __device__ int slot(int row) const { return kv.kv.slots[row]; }
};

// A warp takes a cluster, all queries of its KV head.
__global__ void __launch_bounds__(threads) cluster_logits_kernel(const __grid_constant__ Call a) {
  const int c = blockIdx.x * warps + threadIdx.x / 32, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32;
  const int slot = a.slot(row), dim = a.kv.head_dim;
  if (c >= a.clusters.bound(slot, head, 0) || a.clusters.size(slot, head, c) <= 0) return;
  const float* centroid = &a.clusters.centroid(slot, head, c, 0);
  for (int g = head * a.group; g < (head + 1) * a.group; ++g)
    for (int i = 0; i < a.queries.extent[2]; ++i) {
      const float* query = &a.queries(row, g, i, 0);
      double dot = 0;
      for (int d = lane; d < dim; d += 32) dot += double(query[d]) * double(centroid[d]);
      dot = sum_of_lanes(dot);
      if (lane == 0) a.share(row, g, i, c) = a.scale * dot;
    }
}

// A block takes the softmax of a query.
__global__ void __launch_bounds__(threads) cluster_softmax_kernel(const __grid_constant__ Call a) {
  __shared__ double parts[warps];
  const int i = blockIdx.x, q = blockIdx.y, row = blockIdx.z, head = q / a.group, slot = a.slot(row);
  const int count = a.clusters.bound(slot, head, 0), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double most = -INFINITY, sum = 0;
  for (int c = threadIdx.x; c < count; c += threads)
    if (a.clusters.size(slot, head, c) > 0) most = fmax(most, a.share(row, q, i, c));
  most = most_of_lanes(most);
  if (lane == 0) parts[warp] = most;
  __syncthreads();
  for (int w = 0; w < warps; ++w) most = fmax(most, parts[w]);
  __syncthreads();
  for (int c = threadIdx.x; c < count; c += threads) {
    const int size = a.clusters.size(slot, head, c);
    double& x = a.share(row, q, i, c);
    x = size > 0 ? exp(x - most) : 0;
    sum += size * x;
  }
  sum = sum_of_lanes(sum);
  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < warps; ++w) sum += parts[w];
  for (int c = threadIdx.x; c < count; c += threads)
    if (a.clusters.size(slot, head, c) > 0) a.share(row, q, i, c) /= sum;
}

__global__ void __launch_bounds__(threads) cluster_mean_kernel(const __grid_constant__ Call a) {
  const int c = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, row = blockIdx.z;
  if (c >= a.clusters.bound(a.slot(row), head, 0)) return;
  double sum = 0;
  for (int g = head * a.group; g < (head + 1) * a.group; ++g)
    for (int i = 0; i < a.queries.extent[2]; ++i) sum += a.share(row, g, i, c);
  a.out(row, head, c) = static_cast<float>(sum / (double(a.group) * double(a.queries.extent[2])));
}

void cluster_shares_cuda(const PagedKv& kv, View<const float, 4> queries, float scale, const KeyClusters& clusters,
                         Scores out, Workspace& w, Stream s) {
  const std::int64_t room = clusters.size.extent[2], heads = queries.extent[1], count = queries.extent[2];
  if (kv.rows == 0 || room == 0) return;
  Call a;
  a.kv = DeviceKv(kv);
  a.clusters = clusters;
  a.queries = queries;
  a.scale = double{scale};
  a.share = take_scratch<double>(w, "shares of queries", {std::int64_t{kv.rows}, heads, count, room});
  a.out = out;
  a.group = static_cast<int>(heads) / kv.kv_heads;
  const auto grid = [&](std::int64_t blocks, std::int64_t of_heads) {
    return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(of_heads), static_cast<unsigned>(kv.rows));
  };
  cluster_logits_kernel<<<grid((room + warps - 1) / warps, kv.kv_heads), threads, 0, stream_of(s)>>>(a);
  cluster_softmax_kernel<<<grid(count, heads), threads, 0, stream_of(s)>>>(a);
  cluster_mean_kernel<<<grid((room + threads - 1) / threads, kv.kv_heads), threads, 0, stream_of(s)>>>(a);
  check_launch("cluster_shares");
}

// A block takes a row. The bits of numbers that are not negative rank as the numbers do. So the share at a place of the
// order is found bit by bit, the highest first.
__global__ void __launch_bounds__(share_threads)
    share_quantile_kernel(const std::int32_t* slots, const __grid_constant__ View<const float, 3> shares, double q,
                          const __grid_constant__ KeyClusters clusters, View<float, 1> out) {
  __shared__ double parts[share_threads / 32];
  __shared__ unsigned leasts[share_threads / 32];
  const int slot = slots[blockIdx.x];
  const auto each = [&](auto f) {
    for (int h = 0; h < clusters.bound.extent[1]; ++h)
      for (int c = threadIdx.x; c < clusters.bound(slot, h, 0); c += share_threads) {
        const float x = shares(slot, h, c);
        f(x > 0 ? __float_as_uint(x) : 0u, clusters.size(slot, h, c));
      }
  };
  const auto below = [&](unsigned key) {  // tokens of smaller shares; whole numbers, exact
    double sum = 0;
    each([&](unsigned x, int size) { sum += x < key ? size : 0; });
    return block_sum(sum, parts);
  };
  const double all = below(~0u);
  if (all == 0) {
    if (threadIdx.x == 0) out(slot) = 0;
    return;
  }
  const double place = q * (all - 1), first = floor(place);
  unsigned found = 0;
  for (int bit = 30; bit >= 0; --bit)
    if (below(found | 1u << bit) <= first) found |= 1u << bit;
  unsigned next = found;
  if (place > first && below(found + 1) <= first + 1) {
    unsigned least = ~0u;
    each([&](unsigned x, int size) { least = size > 0 && x > found ? min(least, x) : least; });
    least = least_of_lanes(least);
    if (threadIdx.x % 32 == 0) leasts[threadIdx.x / 32] = least;
    __syncthreads();
    next = leasts[0];
    for (int w = 1; w < share_threads / 32; ++w) next = min(next, leasts[w]);
  }
  const double low = __uint_as_float(found), high = __uint_as_float(next);
  if (threadIdx.x == 0) out(slot) = static_cast<float>(low + (high - low) * (place - first));
}

void share_quantile_cuda(const PagedKv& kv, View<const float, 3> shares, double q, const KeyClusters& clusters,
                         View<float, 1> out, Stream s) {
  if (kv.rows == 0) return;
  share_quantile_kernel<<<static_cast<unsigned>(kv.rows), share_threads, 0, stream_of(s)>>>(kv.slots, shares, q,
                                                                                            clusters, out);
  check_launch("share_quantile");
}

// A block takes a head. A warp marks the tokens of a cluster that is taken.
__global__ void __launch_bounds__(list_threads)
    cluster_tokens_above_kernel(const __grid_constant__ DeviceKv kv,
                                const __grid_constant__ View<const float, 3> shares, View<const float, 1> threshold,
                                const __grid_constant__ KeyClusters clusters, const __grid_constant__ TokenList list) {
  __shared__ unsigned scan[32], marks[places_at_once / 32];
  __shared__ int sizes[list_threads], starts[list_threads];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row], me = threadIdx.x;
  const int n = static_cast<int>(min(static_cast<std::int64_t>(kv.tokens(row, head)), list.index.extent[2]));
  const int count = clusters.bound(slot, head, 0), end = clusters.bound(slot, head, 1);
  std::int32_t* index = &list.index(list.at(row), head, 0);
  const std::int32_t *size = &clusters.size(slot, head, 0), *token = &clusters.token(slot, head, 0);
  const auto each = [&](const auto& mark) {
    unsigned start = 0;
    for (int begin = 0; begin < count; begin += list_threads) {
      const int c = begin + me, tokens = c < count ? size[c] : 0;
      unsigned total = 0;
      starts[me] = static_cast<int>(start + block_scan(static_cast<unsigned>(tokens), scan, total));
      sizes[me] = c < count && shares(row, head, c) > threshold(slot) ? tokens : 0;
      __syncthreads();
      for (int i = me / 32; i < min(list_threads, count - begin); i += list_threads / 32)
        for (int t = me % 32; t < sizes[i]; t += 32) mark(token[starts[i] + t]);
      __syncthreads();
      start += total;
    }
  };
  const int kept = list_places(n, 0, end, index, marks, scan, each);
  if (me == 0) list.count(list.at(row), head) = kept;
}

void cluster_tokens_above_cuda(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                               const KeyClusters& clusters, TokenList list, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(1, static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  cluster_tokens_above_kernel<<<grid, list_threads, 0, stream_of(s)>>>(DeviceKv(kv), shares, threshold, clusters, list);
  check_launch("cluster_tokens_above");
}

}  // namespace

KVLAB_ON_CUDA(cluster_shares, cluster_shares_cuda);
KVLAB_ON_CUDA(share_quantile, share_quantile_cuda);
KVLAB_ON_CUDA(cluster_tokens_above, cluster_tokens_above_cuda);

}  // namespace kvlab::ops
