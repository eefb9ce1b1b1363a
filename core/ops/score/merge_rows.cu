#include <kvlab/rewrite.hpp>

#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/score/heads.cuh"
#include "ops/score/merge_rows.hpp"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int warps = score_threads / 32;

// A warp has a token. All its lanes get the sums.
__device__ RowPair pair_of(const float* a, const float* b, int dim) {
  RowPair p{};
  for (int d = threadIdx.x % 32; d < dim; d += 32) {
    const double x = a[d], y = b[d];
    p.aa += x * x, p.bb += y * y, p.ab += x * y;
  }
  return {sum_of_lanes(p.aa), sum_of_lanes(p.bb), sum_of_lanes(p.ab)};
}

__global__ void __launch_bounds__(score_threads)
    distance_kernel(const __grid_constant__ DeviceKv kv, View<const float, 4> a, View<const float, 4> b, Scores out) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, min(a.extent[2], out.extent[2]));
  for (int t = blockIdx.x * warps + threadIdx.x / 32; t < n; t += gridDim.x * warps) {
    const RowPair p = pair_of(&a(row, head, t, 0), &b(row, head, t, 0), kv.head_dim);
    if (threadIdx.x % 32 == 0) out(row, head, t) = p.distance();
  }
}

// Whether an ascending list has the token.
__device__ bool has(const TokenList& list, int row, int head, int t) {
  const std::int64_t at = list.at(row);
  int low = 0, high = static_cast<int>(min(static_cast<std::int64_t>(list.count(at, head)), list.index.extent[2]));
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list.index(at, head, middle) == t) return true;
    if (list.index(at, head, middle) < t)
      low = middle + 1;
    else
      high = middle;
  }
  return false;
}

__global__ void __launch_bounds__(score_threads)
    merge_kernel(const __grid_constant__ DeviceKv kv, double along, const __grid_constant__ TokenList exact,
                 View<float, 4> a, View<float, 4> b) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, min(a.extent[2], b.extent[2]));
  for (int t = blockIdx.x * warps + threadIdx.x / 32; t < n; t += gridDim.x * warps) {
    if (has(exact, row, head, t)) continue;
    float *x = &a(row, head, t, 0), *y = &b(row, head, t, 0);
    const RowPair p = pair_of(x, y, kv.head_dim);
    if (!p.defined()) continue;
    const RowPair::Weights w = p.weights(along);
    const double of_a = sqrt(p.aa), of_b = sqrt(p.bb);
    for (int d = threadIdx.x % 32; d < kv.head_dim; d += 32) {
      const double direction = w.of_a * double{x[d]} + w.of_b * double{y[d]};
      x[d] = static_cast<float>(of_a * direction), y[d] = static_cast<float>(of_b * direction);
    }
  }
}

void row_distance_cuda(const PagedKv& kv, View<const float, 4> a, View<const float, 4> b, Scores out, Stream s) {
  if (kv.rows == 0) return;
  distance_kernel<<<grid_of(kv.kv_heads, kv.rows, a.extent[2], warps), score_threads, 0, stream_of(s)>>>(DeviceKv(kv),
                                                                                                         a, b, out);
  check_launch("row_distance");
}

void merge_rows_cuda(const PagedKv& kv, float t, const TokenList& exact, View<float, 4> a, View<float, 4> b, Stream s) {
  if (kv.rows == 0) return;
  merge_kernel<<<grid_of(kv.kv_heads, kv.rows, a.extent[2], warps), score_threads, 0, stream_of(s)>>>(
      DeviceKv(kv), double{t}, exact, a, b);
  check_launch("merge_rows");
}

}  // namespace

KVLAB_ON_CUDA(row_distance, row_distance_cuda);
KVLAB_ON_CUDA(merge_rows, merge_rows_cuda);

}  // namespace kvlab::ops
