// Checks a plugin's numbers in one pass, without the host.
#include <algorithm>

#include "base/cuda.cuh"
#include "ops/page/paged.cuh"
#include "ops/score/verify.hpp"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 256;
using Count = unsigned long long;  // the type that atomics take

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

struct KeepArgs {
  int layer, layers;  // of the allotment
  int shown;          // the model's layer, for the finding
  View<const std::int32_t, 2> length;
  View<std::int32_t, 2> keep;
  const Pins* pins;
  const std::int32_t* total;
};

// One thread checks a row, since heads are few.
__global__ void __launch_bounds__(threads) keep_kernel(KeepArgs a, std::int64_t* kept, Finding* finding) {
  const int row = blockIdx.x * threads + threadIdx.x, heads = static_cast<int>(a.keep.extent[1]);
  if (row >= a.keep.extent[0]) return;
  std::int64_t sum = a.layer == 0 ? 0 : kept[row];
  for (int head = 0; head < heads; ++head) {
    const int own = a.keep(row, head);
    sum += own;
    if (own < 0 || own > a.length(row, head)) note(finding, Finding::key(a.shown, head, own));
  }
  kept[row] = sum;
  if (a.layer + 1 < a.layers) return;
  const std::int64_t places = std::int64_t{heads} * a.layers,
                     pinned = a.pins ? std::int64_t{a.pins[row].first} + a.pins[row].last : 0;
  if (sum > places * (a.total[row] + 1 + pinned))
    atomicMax(reinterpret_cast<Count*>(&finding->over),
              static_cast<Count>(sum) << 32 | static_cast<Count>(places * a.total[row]));
}

}  // namespace

static void find_nan_cuda(const PagedKv& kv, int layer, const Scores& scores, Finding* finding, Stream s) {
  if (kv.rows == 0) return;
  const std::int64_t blocks = (scores.extent[2] + threads - 1) / threads, wanted = 2048 / (kv.kv_heads * kv.rows) + 1;
  const dim3 grid(static_cast<unsigned>(std::max<std::int64_t>(1, std::min(blocks, wanted))),
                  static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  nan_kernel<<<grid, threads, 0, stream_of(s)>>>(DeviceKv(kv), layer, scores, finding);
  check_launch("find_nan");
}
KVLAB_ON_CUDA(find_nan, find_nan_cuda);

static void find_keep_cuda(const Allotment& a, std::int64_t* kept, Finding* finding, Stream s) {
  const std::int64_t rows = a.keep.extent[0];
  if (rows <= 0) return;
  const KeepArgs args{a.layer, a.layers, a.kv ? a.kv->layer : a.layer, a.length, a.keep, a.pins, a.total};
  keep_kernel<<<static_cast<unsigned>((rows + threads - 1) / threads), threads, 0, stream_of(s)>>>(args, kept, finding);
  check_launch("find_keep");
}
KVLAB_ON_CUDA(find_keep, find_keep_cuda);

}  // namespace kvlab::ops
