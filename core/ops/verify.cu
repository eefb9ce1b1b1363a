// One pass over what a plugin gave, without the host.
#include <algorithm>

#include "base/cuda.cuh"
#include "ops/paged.cuh"
#include "ops/policy_cuda.hpp"
#include "ops/verify.hpp"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 256;
using Count = unsigned long long;  // of atomics

__device__ __forceinline__ void note(Finding* finding, Count key) {
  atomicAdd(reinterpret_cast<Count*>(&finding->count), Count{1});
  atomicMax(reinterpret_cast<Count*>(&finding->first), key);
}

__global__ void __launch_bounds__(threads) nan_kernel(DeviceKv kv, int layer, View<float, 3> scores, Finding* finding) {
  const int head = blockIdx.y, row = blockIdx.z;
  const int n = static_cast<int>(min(static_cast<std::int64_t>(kv.tokens(row, head)), scores.extent[2]));
  for (int t = blockIdx.x * threads + threadIdx.x; t < n; t += gridDim.x * threads) {
    const float x = scores(row, head, t);
    if (x != x) note(finding, Finding::key(layer, head, kv.position(row, head, t)));
  }
}

__global__ void __launch_bounds__(threads) keep_kernel(int layer, bool begin, View<const std::int32_t, 2> length,
                                                       View<std::int32_t, 2> keep, Finding* finding) {
  __shared__ Count sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  const int heads = static_cast<int>(keep.extent[1]), entries = static_cast<int>(keep.extent[0]) * heads;
  for (int i = threadIdx.x; i < entries; i += threads) {
    const int row = i / heads, head = i % heads, own = keep(row, head);
    atomicAdd(&sum, static_cast<Count>(static_cast<long long>(own)));
    if (own < 0 || own > length(row, head)) note(finding, Finding::key(layer, head, own));
  }
  __syncthreads();
  if (threadIdx.x == 0) finding->kept = static_cast<std::int64_t>(sum) + (begin ? 0 : finding->kept);
}

}  // namespace

void find_nan_cuda(const PagedKv& kv, int layer, const Scores& scores, Finding* finding, void* handle) {
  if (kv.rows == 0) return;
  const std::int64_t blocks = (scores.extent[2] + threads - 1) / threads, wanted = 2048 / (kv.kv_heads * kv.rows) + 1;
  const dim3 grid(static_cast<unsigned>(std::max<std::int64_t>(1, std::min(blocks, wanted))),
                  static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  nan_kernel<<<grid, threads, 0, stream_of(handle)>>>(DeviceKv(kv), layer, scores, finding);
  check_launch("find_nan");
}

void find_keep_cuda(const Allotment& a, Finding* finding, void* handle) {
  if (a.keep.extent[0] <= 0) return;
  keep_kernel<<<1, threads, 0, stream_of(handle)>>>(a.kv ? a.kv->layer : a.layer, a.layer == 0, a.length, a.keep,
                                                    finding);
  check_launch("find_keep");
}

}  // namespace kvlab::ops
