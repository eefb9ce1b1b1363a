#include "ops/score/abs_sums.hpp"

#include "base/device_op.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

// A warp sums a row.
__global__ void __launch_bounds__(score_threads)
    abs_sums_kernel(const __grid_constant__ DeviceKv kv, int kv_head, int first, View<const float, 2> rows,
                    float factor, bool begins, View<float, 3> scores) {
  const std::int64_t i = std::int64_t{blockIdx.x} * (score_threads / 32) + threadIdx.x / 32;
  if (i >= rows.extent[0] || first + i >= kv.tokens(0, kv_head)) return;
  double sum = 0;
  for (std::int64_t d = threadIdx.x % 32; d < rows.extent[1]; d += 32) sum += fabsf(rows(i, d));
  sum = sum_of_lanes(sum);
  if (threadIdx.x % 32 != 0) return;
  float& to = scores(0, kv_head, first + i);
  to = (begins ? 0.f : to) + factor * static_cast<float>(sum);
}

void add_abs_sums_cuda(const PagedKv& kv, int kv_head, int first, View<const float, 2> rows, float factor, bool begins,
                       Scores scores, Stream s) {
  if (rows.extent[0] <= 0) return;
  constexpr int rows_of_block = score_threads / 32;
  abs_sums_kernel<<<static_cast<unsigned>((rows.extent[0] + rows_of_block - 1) / rows_of_block), score_threads, 0,
                    stream_of(s)>>>(DeviceKv(kv), kv_head, first, rows, factor, begins, scores);
  check_launch("add_abs_sums");
}

}  // namespace

KVLAB_ON_CUDA(add_abs_sums, add_abs_sums_cuda);

}  // namespace kvlab::ops
