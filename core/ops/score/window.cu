// Keeps the newest queries of each KV head. A thread moves the same element of all steps.
#include <kvlab/ops.hpp>

#include "base/launch.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    keep_window_kernel(const __grid_constant__ View<const float, 3> queries, const std::int32_t* slots, int group,
                       const __grid_constant__ View<float, 4> kept, const __grid_constant__ View<float, 4> window,
                       const __grid_constant__ Heads heads) {
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.x, row = blockIdx.y, slot = slots[row];
  if (!heads.on(slot, head)) return;
  const int dim = static_cast<int>(kept.extent[3]), count = static_cast<int>(kept.extent[2]);
  for (int x = threadIdx.x; x < group * dim; x += threads) {
    const int g = x / dim, d = x % dim;
    for (int i = g; i < count; i += group) {
      const float value = i + group < count ? kept(slot, head, i + group, d) : queries(row, head * group + g, d);
      kept(slot, head, i, d) = value;
      if (window.data) window(row, head * count + i, 0, d) = value;
    }
  }
}

}  // namespace

static void keep_window_cuda(const Tensor<3>& queries, const PagedKv& kv, View<float, 4> kept, View<float, 4> window,
                             Stream s, const Heads& heads) {
  if (kv.rows == 0) return;
  launch("keep_window", keep_window_kernel, dim3(kv.kv_heads, kv.rows), threads, 0, stream_of(s), true, queries.f32(),
         kv.slots, static_cast<int>(queries.extent[1]) / kv.kv_heads, kept, window, heads);
}
KVLAB_ON_CUDA(keep_window, keep_window_cuda);

}  // namespace kvlab::ops
