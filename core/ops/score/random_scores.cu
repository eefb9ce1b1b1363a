#include "ops/score/random_scores.hpp"

#include <kvlab/ops.hpp>

#include "base/device_op.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

__global__ void __launch_bounds__(score_threads)
    random_scores_kernel(DeviceKv kv, const std::uint64_t* keys, View<float, 3> out) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, out.extent[2]);
  const std::uint64_t start = split_mix(keys[row], head);
  for (int t = blockIdx.x * score_threads + threadIdx.x; t < n; t += gridDim.x * score_threads)
    out(row, head, t) = draw_at(start, kv.position(row, head, t));
}

void random_scores_cuda(const PagedKv& kv, const std::uint64_t* keys, Scores out, Stream s) {
  if (kv.rows == 0) return;
  random_scores_kernel<<<grid_of(kv.kv_heads, kv.rows, capacity(kv)), score_threads, 0, stream_of(s)>>>(DeviceKv(kv),
                                                                                                        keys, out);
  check_launch("random_scores");
}

}  // namespace

KVLAB_ON_CUDA(random_scores, random_scores_cuda);

}  // namespace kvlab::ops
