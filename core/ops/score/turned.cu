// Finds heads whose query turned. One block takes a row, one warp a query head at a time.
#include <kvlab/ops.hpp>

#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "ops/score/turned.hpp"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 512, warps = threads / 32, most_heads = 1024;

__global__ void __launch_bounds__(threads)
    turned_kernel(const __grid_constant__ View<const float, 3> queries, const std::int32_t* slots, int kv_heads,
                  const __grid_constant__ View<float, 3> last, float threshold,
                  const __grid_constant__ HeadFlags turned, const __grid_constant__ InjectedTurns injected) {
  __shared__ float cosine[most_heads];
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.x, lane = threadIdx.x % 32, heads = static_cast<int>(queries.extent[1]),
            dim = static_cast<int>(queries.extent[2]), group = heads / kv_heads;
  const int slot = slots[row];
  const std::uint32_t call = injected.calls.data ? injected.calls(slot) : 0;
  for (int h = threadIdx.x / 32; h < heads; h += warps) {
    const float* now = queries.data + row * queries.stride[0] + h * queries.stride[1];
    float* then = last.data + slot * last.stride[0] + h * last.stride[1];
    float dot = 0, a = 0, b = 0;
    for (int d = lane; d < dim; d += 32) {
      const float x = now[d], y = then[d];
      dot += x * y, a += x * x, b += y * y;
      then[d] = x;
    }
    dot = sum_of_lanes(dot), a = sum_of_lanes(a), b = sum_of_lanes(b);
    if (lane == 0)
      cosine[h] =
          injected.calls.data && b > 0 ? injected.cosine(slot, h / group, call) : dot / (sqrtf(a) * sqrtf(b) + 1e-12f);
  }
  __syncthreads();
  if (threadIdx.x == 0 && injected.calls.data) injected.calls(slot) = call + 1;
  for (int h = threadIdx.x; h < kv_heads; h += threads) {
    float sum = 0;
    for (int g = h * group; g < (h + 1) * group; ++g) sum += cosine[g];
    turned(slot, h) = sum / static_cast<float>(group) < threshold;
  }
}

}  // namespace

static void turned_heads_cuda(const Tensor<3>& queries, const PagedKv& kv, View<float, 3> last, float threshold,
                              HeadFlags turned, Stream s) {
  if (kv.rows == 0) return;
  if (queries.extent[1] > most_heads)
    throw Error(
        Errc::unsupported,
        "got " + std::to_string(queries.extent[1]) + " query heads, wanted at most " + std::to_string(most_heads),
        "op turned_heads (CUDA)");
  const InjectedTurns* injected = kv.injected ? kv.injected->turns : nullptr;
  launch("turned_heads", turned_kernel, kv.rows, threads, 0, stream_of(s), true, queries.f32(), kv.slots, kv.kv_heads,
         last, threshold, turned, injected ? *injected : InjectedTurns{});
}
KVLAB_ON_CUDA(turned_heads, turned_heads_cuda);

}  // namespace kvlab::ops
