#include "ops/score/combine.hpp"

#include <kvlab/ops.hpp>

#include "base/device_op.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int softmax_threads = 1024;

__global__ void __launch_bounds__(score_threads)
    combine_kernel(View<float, 3> out, View<const float, 3> in, int group, Combine rule, float factor) {
  const int head = blockIdx.y, row = blockIdx.z;
  for (std::int64_t t = blockIdx.x * score_threads + threadIdx.x; t < out.extent[2];
       t += std::int64_t(gridDim.x) * score_threads) {
    const float y = in(row, head / group, t);
    float& x = out(row, head, t);
    switch (rule) {
      case Combine::copy: x = y; break;
      case Combine::add: x += factor * y; break;
      case Combine::multiply: x *= y; break;
      case Combine::divide: x = y == 0 ? 0.f : x / y; break;
    }
  }
}

// Joins the x of all threads of the block; each thread gets the result. parts [warps] is shared memory.
template <class Join>
__device__ float over_block(float x, Join join, float* parts) {
  const int lane = threadIdx.x % 32;
  x = join_lanes(x, join);
  if (lane == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
  for (int w = 1; w < softmax_threads / 32; ++w) x = join(x, parts[w]);
  __syncthreads();
  return x;
}

// One block computes the softmax of a head.
__global__ void __launch_bounds__(softmax_threads)
    softmax_kernel(const __grid_constant__ DeviceKv kv, View<float, 3> scores, int group, float scale) {
  __shared__ float parts[softmax_threads / 32];
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head / group, 1, scores.extent[2]);
  float most = -INFINITY, sum = 0;
  for (int t = threadIdx.x; t < n; t += softmax_threads) most = fmaxf(most, scores(row, head, t) * scale);
  most = over_block(
      most, [](float a, float b) { return fmaxf(a, b); }, parts);
  const bool any = fabsf(most) < INFINITY;
  for (int t = threadIdx.x; any && t < n; t += softmax_threads) sum += expf(scores(row, head, t) * scale - most);
  sum = over_block(
      sum, [](float a, float b) { return a + b; }, parts);
  for (int t = threadIdx.x; t < n; t += softmax_threads) {
    float& x = scores(row, head, t);
    x = sum > 0 ? expf(x * scale - most) / sum : 0.f;
  }
}

void combine_cuda(Scores out, View<const float, 3> in, Combine rule, float factor, Stream s) {
  if (out.extent[0] <= 0 || out.extent[1] <= 0 || out.extent[2] <= 0) return;
  combine_kernel<<<grid_of(out.extent[1], out.extent[0], out.extent[2]), score_threads, 0, stream_of(s)>>>(
      out, in, static_cast<int>(out.extent[1] / in.extent[1]), rule, factor);
  check_launch("combine");
}

void softmax_cuda(const PagedKv& kv, Scores scores, float temperature, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(1, static_cast<unsigned>(scores.extent[1]), static_cast<unsigned>(kv.rows));
  softmax_kernel<<<grid, softmax_threads, 0, stream_of(s)>>>(
      DeviceKv(kv), scores, static_cast<int>(scores.extent[1]) / kv.kv_heads, 1.f / temperature);
  check_launch("softmax");
}

}  // namespace

KVLAB_ON_CUDA(combine, combine_cuda);
KVLAB_ON_CUDA(softmax, softmax_cuda);

}  // namespace kvlab::ops
