// Clusters of keys on a GPU. A thread gives a key to its centroid; a block moves one centroid. Sums run in the order of
// the CPU's, in f64, and products of two f32 are exact there: labels and centroids have the same bits.
#include "ops/select/clusters.hpp"

#include <algorithm>
#include <vector>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "ops/page/paged.cuh"
#include "ops/select/marks.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 128, list_threads = 512, label_threads = 32, most_dim = 256, at_once = 4;

// A row to cluster: a key of the cache or a centroid.
struct ClusterRow {
  DeviceKv::Token token;
  const float* centroid;  // or null

  __device__ float at(int d) const { return centroid ? centroid[d] : token.key(d); }
};

// A call on the device. Grids are [.., kv_head, row].
struct Call {
  DeviceKv kv;
  KeyClusters out;
  KeyClusters finer;            // whose centroids are the rows; empty = keys are
  const ClusterRange* ranges;   // [row]
  View<std::int32_t, 3> drawn;  // [row, kv_head, new cluster]
  View<std::int32_t, 3> label;  // [row, kv_head, token of the range]
  View<double, 3> norm;         // [row, kv_head, new cluster]

  __device__ int slot(int row) const { return kv.kv.slots[row]; }
  __device__ bool of_keys() const { return finer.centroid.data == nullptr; }
  __device__ ClusterPlan plan(int row, int head) const {
    const int rows = of_keys() ? kv.tokens(row, head) : finer.bound(slot(row), head, 0);
    return plan_of(ranges[row], rows, &out.bound(slot(row), head, 0), out.size.extent[2]);
  }
  __device__ ClusterRow row_at(int row, int head, int i) const {
    if (of_keys()) return {kv.token(row, head, i), nullptr};
    return {{}, &finer.centroid(slot(row), head, i, 0)};
  }
  __device__ float* centroid(int row, int head, const ClusterPlan& p, int c) const {
    return &out.centroid(slot(row), head, p.first + c, 0);
  }
};

__global__ void __launch_bounds__(threads) seed_kernel(const __grid_constant__ Call call) {
  const int c = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const ClusterPlan p = call.plan(row, head);
  if (c >= p.clusters) return;
  const ClusterRow from = call.row_at(row, head, p.from + call.drawn(row, head, c));
  for (int d = threadIdx.x; d < call.kv.head_dim; d += threads) call.centroid(row, head, p, c)[d] = from.at(d);
}

__global__ void __launch_bounds__(threads) norm_kernel(const __grid_constant__ Call call) {
  const int c = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, row = blockIdx.z;
  const ClusterPlan p = call.plan(row, head);
  if (c >= p.clusters) return;
  const float* x = call.centroid(row, head, p, c);
  double squares = 0;
  for (int d = 0; d < call.kv.head_dim; ++d) squares += double(x[d]) * double(x[d]);
  call.norm(row, head, c) = sqrt(squares);
}

__global__ void __launch_bounds__(label_threads) label_kernel(const __grid_constant__ Call call) {
  __shared__ float keys[most_dim * label_threads];  // [d][thread]: each thread's own key
  const int t = blockIdx.x * label_threads + threadIdx.x, head = blockIdx.y, row = blockIdx.z;
  const ClusterPlan p = call.plan(row, head);
  if (p.clusters <= 0 || t >= p.to - p.from) return;
  const int dim = call.kv.head_dim;
  const ClusterRow from = call.row_at(row, head, p.from + t);
  for (int d = 0; d < dim; ++d) keys[d * label_threads + threadIdx.x] = from.at(d);
  double most = -INFINITY;
  int label = 0;
  for (int c = 0; c < p.clusters; c += at_once) {
    double dot[at_once] = {};
    const float* x[at_once];
    for (int i = 0; i < at_once; ++i) x[i] = call.centroid(row, head, p, min(c + i, p.clusters - 1));
    for (int d = 0; d < dim; ++d)
      for (int i = 0; i < at_once; ++i) dot[i] += double(keys[d * label_threads + threadIdx.x]) * double(x[i][d]);
    for (int i = 0; i < at_once && c + i < p.clusters; ++i) {
      const double norm = call.norm(row, head, c + i), cosine = norm > 0 ? dot[i] / norm : 0;
      if (cosine > most) most = cosine, label = c + i;
    }
  }
  call.label(row, head, t) = label;
}

__global__ void __launch_bounds__(threads) move_kernel(const __grid_constant__ Call call) {
  const int c = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const ClusterPlan p = call.plan(row, head);
  if (c >= p.clusters) return;
  const std::int32_t* label = &call.label(row, head, 0);
  for (int d = threadIdx.x; d < call.kv.head_dim; d += threads) {
    double sum = 0;
    int members = 0;
    for (int t = 0; t < p.to - p.from; ++t)
      if (label[t] == c) sum += double(call.row_at(row, head, p.from + t).at(d)), ++members;
    if (members) call.centroid(row, head, p, c)[d] = static_cast<float>(sum / members);
  }
}

// Sizes, then each cluster's places in order. A thread takes a cluster.
__global__ void __launch_bounds__(list_threads) members_kernel(const __grid_constant__ Call call) {
  const int head = blockIdx.y, row = blockIdx.z;
  const ClusterPlan p = call.plan(row, head);
  if (p.clusters < 0) return;
  const std::int32_t* label = &call.label(row, head, 0);
  std::int32_t *size = &call.out.size(call.slot(row), head, 0), *token = &call.out.token(call.slot(row), head, 0);
  const int n = p.to - p.from;
  for (int c = threadIdx.x; c < p.clusters; c += list_threads) {
    int members = 0;
    for (int t = 0; t < n; ++t) members += label[t] == c;
    size[p.first + c] = members;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < p.clusters; c += list_threads) {
    std::int32_t* to = token;
    for (int i = 0; i < p.first + c; ++i) to += size[i];
    for (int t = 0; t < n; ++t)
      if (label[t] == c) *to++ = p.from + t;
  }
  if (threadIdx.x == 0) {
    std::int32_t* bound = &call.out.bound(call.slot(row), head, 0);
    bound[0] = p.first + p.clusters, bound[1] = p.to;
  }
}

// The labels are the clusters' `token` already. Sizes add up those of the finer level. A block takes a head.
__global__ void __launch_bounds__(list_threads) sizes_kernel(const __grid_constant__ Call call) {
  const int head = blockIdx.y, row = blockIdx.z, slot = call.slot(row);
  const ClusterPlan p = call.plan(row, head);
  if (p.clusters < 0) return;
  for (int c = threadIdx.x; c < p.clusters; c += list_threads) {
    int tokens = 0;
    for (int i = 0; i < p.to; ++i) tokens += call.label(row, head, i) == c ? call.finer.size(slot, head, i) : 0;
    call.out.size(slot, head, c) = tokens;
  }
  for (int i = threadIdx.x; i < p.to; i += list_threads) call.out.token(slot, head, i) = call.label(row, head, i);
  if (threadIdx.x == 0) call.out.bound(slot, head, 0) = p.clusters, call.out.bound(slot, head, 1) = p.to;
}

// finer: its centroids are clustered; empty = keys are.
void make_clusters(const PagedKv& kv, const KeyClusters& finer, const std::vector<ClusterRange>& ranges,
                   const ClusterRule& rule, const KeyClusters& clusters, Workspace& w, Stream s, const char* op) {
  int count = -1, tokens = 0;
  for (const ClusterRange& range : ranges)
    if (range.clusters >= 0) count = std::max(count, range.clusters), tokens = std::max(tokens, range.tokens);
  if (kv.rows == 0 || count < 0) return;
  const std::int64_t rows = kv.rows, heads = kv.kv_heads, width = std::max(count, 1);
  std::vector<std::int32_t> drawn(static_cast<std::size_t>(rows * heads * width));
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t h = 0; h < heads; ++h)
      draw_centroids(ranges[static_cast<std::size_t>(r)], rule.seed, static_cast<int>(h),
                     drawn.data() + (r * heads + h) * width);
  Call call;
  call.kv = DeviceKv(kv);
  call.out = clusters;
  call.finer = finer;
  call.ranges =
      static_cast<const ClusterRange*>(w.upload("cluster ranges", ranges.data(), ranges.size() * sizeof(ClusterRange)));
  call.drawn = View<std::int32_t, 3>::dense(static_cast<std::int32_t*>(const_cast<void*>(w.upload(
                                                "cluster draws", drawn.data(), drawn.size() * sizeof(std::int32_t)))),
                                            {rows, heads, width});
  call.label = take_scratch<std::int32_t>(w, "cluster labels", {rows, heads, std::max(tokens, 1)});
  call.norm = take_scratch<double>(w, "cluster norms", {rows, heads, width});
  const auto grid = [&](std::int64_t blocks) {
    return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(heads), static_cast<unsigned>(rows));
  };
  const auto label = [&] {
    norm_kernel<<<grid((count + threads - 1) / threads), threads, 0, stream_of(s)>>>(call);
    label_kernel<<<grid((tokens + label_threads - 1) / label_threads), label_threads, 0, stream_of(s)>>>(call);
  };
  if (count > 0) {
    seed_kernel<<<grid(count), threads, 0, stream_of(s)>>>(call);
    for (int i = 0; i < rule.iterations; ++i) {
      label();
      move_kernel<<<grid(count), threads, 0, stream_of(s)>>>(call);
    }
    label();
  }
  if (finer.centroid)
    sizes_kernel<<<grid(1), list_threads, 0, stream_of(s)>>>(call);
  else
    members_kernel<<<grid(1), list_threads, 0, stream_of(s)>>>(call);
  check_launch(op);
}

void cluster_keys_cuda(const PagedKv& kv, const std::vector<ClusterRange>& ranges, const ClusterRule& rule,
                       const KeyClusters& clusters, Workspace& w, Stream s) {
  make_clusters(kv, {}, ranges, rule, clusters, w, s, "cluster_keys");
}

void cluster_centroids_cuda(const PagedKv& kv, const KeyClusters& finer, const std::vector<ClusterRange>& ranges,
                            const ClusterRule& rule, const KeyClusters& coarse, Workspace& w, Stream s) {
  make_clusters(kv, finer, ranges, rule, coarse, w, s, "cluster_centroids");
}

__global__ void __launch_bounds__(threads)
    within_kernel(DeviceKv kv, View<const float, 3> shares, View<const float, 1> threshold,
                  const __grid_constant__ KeyClusters coarse, const __grid_constant__ KeyClusters finer,
                  View<std::int32_t, 3> out) {
  const int c = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row];
  if (c >= finer.bound(slot, head, 0)) return;
  const bool stays =
      c >= coarse.bound(slot, head, 1) || shares(row, head, coarse.token(slot, head, c)) > threshold(slot);
  out(slot, head, c) = stays ? finer.size(slot, head, c) : 0;
}

void sizes_within_cuda(const PagedKv& kv, View<const float, 3> shares, View<const float, 1> threshold,
                       const KeyClusters& coarse, const KeyClusters& finer, View<std::int32_t, 3> out, Stream s) {
  if (kv.rows == 0 || finer.size.extent[2] == 0) return;
  const dim3 grid(static_cast<unsigned>((finer.size.extent[2] + threads - 1) / threads),
                  static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  within_kernel<<<grid, threads, 0, stream_of(s)>>>(DeviceKv(kv), shares, threshold, coarse, finer, out);
  check_launch("sizes_within");
}

// A block takes some clusters of a head. A warp takes a query head, whose lanes take a cluster each.
__global__ void __launch_bounds__(threads)
    cluster_scores_kernel(DeviceKv kv, View<const float, 3> queries, const __grid_constant__ KeyClusters clusters,
                          View<float, 3> out) {
  constexpr int each = 32, warps = threads / 32;  // clusters of a block
  __shared__ float centroids[each][most_dim + 1], query[warps][most_dim];
  __shared__ double dots[warps][each];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row], begin = blockIdx.x * each;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = kv.head_dim;
  const int count = min(each, clusters.bound(slot, head, 0) - begin);
  if (count <= 0) return;
  for (int c = warp; c < count; c += warps) {
    const float* from = &clusters.centroid(slot, head, begin + c, 0);
    for (int d = lane; d < dim; d += 32) centroids[c][d] = from[d];
  }
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads;
  double sum = 0;
  for (int first = 0; first < group; first += warps) {
    const int g = first + warp;
    if (g < group)
      for (int d = lane; d < dim; d += 32) query[warp][d] = queries(row, head * group + g, d);
    __syncthreads();
    if (g < group && lane < count) {
      double dot = 0;
#pragma unroll 8
      for (int d = 0; d < dim; ++d) dot += double(query[warp][d]) * double(centroids[lane][d]);
      dots[warp][lane] = dot;
    }
    __syncthreads();
    if (warp == 0 && lane < count)
      for (int w = 0; w < min(warps, group - first); ++w) sum += dots[w][lane];
    __syncthreads();
  }
  if (warp == 0 && lane < count) out(row, head, begin + lane) = static_cast<float>(sum / group);
}

void cluster_scores_cuda(const PagedKv& kv, View<const float, 3> queries, const KeyClusters& clusters, Scores out,
                         Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(static_cast<unsigned>((clusters.size.extent[2] + 31) / 32), static_cast<unsigned>(kv.kv_heads),
                  static_cast<unsigned>(kv.rows));
  cluster_scores_kernel<<<grid, threads, 0, stream_of(s)>>>(DeviceKv(kv), queries, clusters, out);
  check_launch("cluster_scores");
}

struct Scored {
  float score;
  int size;
};

// A block takes a head. Two threads find a cluster's place among all; a warp marks the tokens of one that is taken.
__global__ void __launch_bounds__(2 * list_threads)
    cluster_tokens_kernel(DeviceKv kv, View<const float, 3> scores, View<const std::int32_t, 2> most, int first,
                          const __grid_constant__ KeyClusters clusters, const __grid_constant__ TokenList list) {
  __shared__ unsigned scan[32], marks[device::places_at_once / 32];
  __shared__ Scored others[list_threads];
  __shared__ int sizes[list_threads], starts[list_threads], befores[list_threads];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row];
  const int me = threadIdx.x % list_threads, half = threadIdx.x / list_threads;
  const int n = static_cast<int>(min(static_cast<std::int64_t>(kv.tokens(row, head)), list.index.extent[2]));
  const int count = clusters.bound(slot, head, 0), end = clusters.bound(slot, head, 1), room = most(row, head);
  const std::int32_t *size = &clusters.size(slot, head, 0), *token = &clusters.token(slot, head, 0);
  const auto each = [&](const auto& mark) {
    for (int begin = 0; begin < count; begin += list_threads) {
      const int c = begin + me, own = c < count ? size[c] : 0;
      const float of_own = c < count ? scores(row, head, c) : 0;
      int before = 0, start = 0;  // tokens of better clusters, and of those with a lower index
      for (int from = 0; from < count; from += list_threads) {
        if (half == 0 && from + me < count) others[me] = {scores(row, head, from + me), size[from + me]};
        __syncthreads();
        const int there = min(list_threads, count - from);
#pragma unroll 8
        for (int i = half; i < there; i += 2) {
          const auto other = others[i];
          const int b = from + i;
          if (b < c) start += other.size;
          if (b != c && comes_before(other.score, b, of_own, c)) before += other.size;
        }
        __syncthreads();
      }
      if (half == 1) starts[me] = start, befores[me] = before;
      __syncthreads();
      if (half == 0) starts[me] += start, sizes[me] = min(own, max(room - before - befores[me], 0));
      __syncthreads();
      for (int i = threadIdx.x / 32; i < min(list_threads, count - begin); i += 2 * list_threads / 32)
        for (int t = threadIdx.x % 32; t < sizes[i]; t += 32) mark(token[starts[i] + t]);
      __syncthreads();
    }
  };
  const int kept = device::list_places(n, first, end, &list.index(list.at(row), head, 0), marks, scan, each);
  if (threadIdx.x == 0) list.count(list.at(row), head) = kept;
}

void cluster_tokens_cuda(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> most, int first,
                         const KeyClusters& clusters, TokenList list, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(1, static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  cluster_tokens_kernel<<<grid, 2 * list_threads, 0, stream_of(s)>>>(DeviceKv(kv), scores, most, first, clusters, list);
  check_launch("cluster_tokens");
}

}  // namespace

KVLAB_ON_CUDA(cluster_keys, cluster_keys_cuda);
KVLAB_ON_CUDA(cluster_centroids, cluster_centroids_cuda);
KVLAB_ON_CUDA(sizes_within, sizes_within_cuda);
KVLAB_ON_CUDA(cluster_scores, cluster_scores_cuda);
KVLAB_ON_CUDA(cluster_tokens, cluster_tokens_cuda);

}  // namespace kvlab::ops
