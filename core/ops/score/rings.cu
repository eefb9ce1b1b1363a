#include <kvlab/rings.hpp>

#include "base/cuda.cuh"
#include "base/device_op.hpp"

namespace kvlab::ops {

using namespace cuda;

static __global__ void rings_kernel(View<const float, 3> rows, const std::int32_t* slots, const std::int32_t* place,
                                    View<float, 4> ring) {
  const int head = blockIdx.x, row = blockIdx.y;
  for (int i = threadIdx.x; i < static_cast<int>(rows.extent[2]); i += blockDim.x)
    ring(slots[row], head, place[row], i) = rows(row, head, i);
}

static void put_in_rings_cuda(const PagedKv& kv, View<const float, 3> rows, const std::int32_t* place,
                              View<float, 4> ring, Stream s) {
  if (kv.rows <= 0 || rows.extent[1] <= 0) return;
  const dim3 grid(static_cast<unsigned>(rows.extent[1]), static_cast<unsigned>(kv.rows));
  rings_kernel<<<grid, 128, 0, stream_of(s)>>>(rows, kv.slots, place, ring);
  check_launch("put_in_rings");
}
KVLAB_ON_CUDA(put_in_rings, put_in_rings_cuda);

}  // namespace kvlab::ops
