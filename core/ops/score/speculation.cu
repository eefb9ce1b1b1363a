// A block sums the magnitudes of a KV head's channels. Another one counts the tokens near the greatest score of each
// head of a row.
#include "ops/score/speculation.hpp"

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 256, warps = threads / 32, most_dim = 256, parts = 4;

// Threads [part, channel]: a part takes every so manyth query.
__global__ void __launch_bounds__(parts* most_dim)
    magnitudes_kernel(DeviceKv kv, View<const float, 4> queries, View<float, 3> sums) {
  __shared__ double of_part[parts][most_dim];
  const int head = blockIdx.x, row = blockIdx.y, d = threadIdx.x % most_dim, part = threadIdx.x / most_dim;
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  double sum = 0;
  for (std::int64_t i = part; d < kv.head_dim && i < queries.extent[2]; i += parts)
    for (std::int64_t g = head * group; g < (head + 1) * group; ++g) sum += fabs(double(queries(row, g, i, d)));
  of_part[part][d] = sum;
  __syncthreads();
  if (part > 0 || d >= kv.head_dim) return;
  for (int p = 1; p < parts; ++p) sum += of_part[p][d];
  float& to = sums(kv.kv.slots[row], head, d);
  to = static_cast<float>(double(to) + sum);
}

__global__ void __launch_bounds__(threads)
    near_kernel(DeviceKv kv, View<const float, 3> scores, NearGreatest rule, View<std::int32_t, 2> out) {
  __shared__ float greatest[warps];
  __shared__ int counts[warps];
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  long long total = 0;
  int tokens = kv.tokens(row, 0);
  for (int head = 0; head < kv.kv_heads; ++head) {
    tokens = min(tokens, kv.tokens(row, head));
    const int n =
        static_cast<int>(min(std::int64_t{kv.tokens(row, head)} - rule.newest, std::int64_t{scores.extent[2]}));
    float most = -INFINITY;
    for (int t = threadIdx.x; t < n; t += threads) most = fmaxf(most, scores(row, head, t));
    most = most_of_lanes(most);
    if (lane == 0) greatest[warp] = most;
    __syncthreads();
    for (int w = 0; w < warps; ++w) most = fmaxf(most, greatest[w]);
    int count = 0;
    for (int t = threadIdx.x; t < n; t += threads) count += scores(row, head, t) > most - rule.within;
    count = sum_of_lanes(count);
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    for (int w = 0; w < warps; ++w) total += counts[w];
    __syncthreads();
  }
  for (int head = threadIdx.x; head < kv.kv_heads; head += threads)
    out(row, head) = near_number(rule, total, kv.kv_heads, tokens);
}

void add_magnitudes_cuda(const PagedKv& kv, const Tensor<4>& queries, View<float, 3> sums, Stream s) {
  if (kv.rows == 0) return;
  const dim3 heads(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  magnitudes_kernel<<<heads, parts * most_dim, 0, stream_of(s)>>>(DeviceKv(kv), queries.f32(), sums);
  check_launch("add_magnitudes");
}

void near_greatest_cuda(const PagedKv& kv, View<const float, 3> scores, const NearGreatest& rule,
                        View<std::int32_t, 2> out, Stream s) {
  if (kv.rows == 0) return;
  near_kernel<<<static_cast<unsigned>(kv.rows), threads, 0, stream_of(s)>>>(DeviceKv(kv), scores, rule, out);
  check_launch("near_greatest");
}

}  // namespace

KVLAB_ON_CUDA(add_magnitudes, add_magnitudes_cuda);
KVLAB_ON_CUDA(near_greatest, near_greatest_cuda);

}  // namespace kvlab::ops
