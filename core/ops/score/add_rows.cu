#include "ops/score/add_rows.hpp"

#include "base/cuda.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

__global__ void add_rows_kernel(View<const float, 3> mass, View<float, 2> sums) {
  const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int head = blockIdx.y;
  if (i >= sums.extent[1]) return;
  float sum = sums(head, i);
  for (std::int64_t row = 0; row < mass.extent[0]; ++row) sum += mass(row, head, i);
  sums(head, i) = sum;
}

}  // namespace

static void add_rows_cuda(View<const float, 3> mass, View<float, 2> sums, Stream s) {
  constexpr unsigned threads = 256;
  const dim3 grid(static_cast<unsigned>((sums.extent[1] + threads - 1) / threads),
                  static_cast<unsigned>(sums.extent[0]));
  add_rows_kernel<<<grid, threads, 0, stream_of(s)>>>(mass, sums);
  check_launch("add_rows");
}
KVLAB_ON_CUDA(add_rows, add_rows_cuda);

}  // namespace kvlab::ops
