#include <kvlab/turns.hpp>

#include "base/cuda.cuh"
#include "base/device_op.hpp"

namespace kvlab::ops {

using namespace cuda;

static __global__ void turns_kernel(const std::int32_t* slots, int rows, const std::int32_t* steps, const float* lead,
                                    bool begins, std::int32_t* turns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int slot = slots[row], step = steps[slot];
  turns[slot] = begins && step == 0 ? 0 : step + static_cast<int>(lead[slot]);
}

static void take_turns_cuda(const PagedKv& kv, const std::int32_t* steps, const float* lead, bool begins,
                            std::int32_t* turns, Stream s) {
  if (kv.rows <= 0) return;
  turns_kernel<<<static_cast<unsigned>((kv.rows + 127) / 128), 128, 0, stream_of(s)>>>(kv.slots, kv.rows, steps, lead,
                                                                                       begins, turns);
  check_launch("take_turns");
}
KVLAB_ON_CUDA(take_turns, take_turns_cuda);

}  // namespace kvlab::ops
