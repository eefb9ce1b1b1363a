#include "ops/retrieve/prompt_mass.hpp"

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/attend/attend_prompt.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int warps = 4, most_of_lane = 8;  // numbers of a key: head_dim is 256 at most

// For rows that tensor cores do not take. A warp takes a place of a query head.
__global__ void __launch_bounds__(32 * warps)
    near_kernel(DeviceKv kv, View<const float, 4> queries, View<const float, 3> lse, int newest, int from, int end,
                View<float, 2> mass) {
  const int head = blockIdx.y, place = from + blockIdx.x * warps + threadIdx.x / 32, lane = threadIdx.x % 32,
            count = static_cast<int>(queries.extent[2]), first = end - count;
  if (place >= end) return;
  const DeviceKv::Token token = kv.token(0, head / static_cast<int>(queries.extent[1] / kv.kv_heads), place);
  float key[most_of_lane];
  for (int i = 0; i < most_of_lane; ++i) key[i] = i * 32 + lane < kv.head_dim ? token.key(i * 32 + lane) : 0;
  const double scale = 1 / sqrt(double(kv.head_dim));
  double sum = 0;
  for (int q = max(0, place - first); q < min(count, place - first + newest); ++q) {
    double x = 0;
    for (int i = 0; i < most_of_lane; ++i)
      if (i * 32 + lane < kv.head_dim) x += double(queries(0, head, q, i * 32 + lane)) * double(key[i]);
    sum += exp(sum_of_lanes(x) * scale - double(lse(0, head, q)));
  }
  if (lane == 0) mass(head, place) += static_cast<float>(sum);
}

}  // namespace

static bool prompt_mass_at_once_cuda(const LayerPrefill& kv, int newest, const KeyBlocks& blocks, Stream s) {
  const View<const float, 4> q = kv.chunk_queries.f32();
  NearSums sums;
  sums.kv = kv.pages;
  sums.queries = {q.data, {q.extent[2], q.extent[1], q.extent[3]}, {q.stride[2], q.stride[1], q.stride[3]}};
  sums.lse = {kv.lse.data, kv.lse.stride[2], kv.lse.stride[1]};
  sums.seen = kv.position[0] - static_cast<int>(q.extent[2]) + 1;
  sums.window = newest;
  sums.sums = blocks.mass[kv.slots[0]];
  if (attend_prompt_near(sums, s)) return true;
  const int end = kv.position[0], from = std::max(0, end - static_cast<int>(q.extent[2]) + 1 - newest);
  const dim3 grid(static_cast<unsigned>((end - from + warps - 1) / warps), static_cast<unsigned>(q.extent[1]));
  near_kernel<<<grid, 32 * warps, 0, stream_of(s)>>>(DeviceKv(kv.pages), q, kv.lse, newest, from, end,
                                                     blocks.mass[kv.slots[0]]);
  check_launch("add_prompt_mass");
  return true;
}
KVLAB_ON_CUDA(prompt_mass_at_once, prompt_mass_at_once_cuda);

}  // namespace kvlab::ops
