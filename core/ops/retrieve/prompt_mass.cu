#include "ops/retrieve/prompt_mass.hpp"

#include "base/device_op.hpp"
#include "ops/attend/attend_prompt.cuh"

namespace kvlab::ops {

static bool prompt_mass_at_once_cuda(const LayerPrefill& kv, int newest, const KeyBlocks& blocks, Stream s) {
  const View<const float, 4> q = kv.chunk_queries.f32();
  NearSums sums;
  sums.kv = kv.pages;
  sums.queries = {q.data, {q.extent[2], q.extent[1], q.extent[3]}, {q.stride[2], q.stride[1], q.stride[3]}};
  sums.lse = {kv.lse.data, kv.lse.stride[2], kv.lse.stride[1]};
  sums.seen = kv.position[0] - static_cast<int>(q.extent[2]) + 1;
  sums.window = newest;
  sums.sums = blocks.mass[kv.slots[0]];
  return attend_prompt_near(sums, s);
}
KVLAB_ON_CUDA(prompt_mass_at_once, prompt_mass_at_once_cuda);

}  // namespace kvlab::ops
