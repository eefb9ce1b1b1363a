#include <kvlab/ops.hpp>

#include "base/device_op.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

struct Above {
  float threshold;
  __device__ float operator()(float x) const { return x > threshold ? 1.f : 0.f; }
};
struct Logarithm {
  float add;
  __device__ float operator()(float x) const { return logf(x + add); }
};

template <class F>
__global__ void __launch_bounds__(score_threads) each_kernel(View<float, 3> x, F f) {
  for (std::int64_t t = blockIdx.x * score_threads + threadIdx.x; t < x.extent[2];
       t += std::int64_t(gridDim.x) * score_threads)
    x(blockIdx.z, blockIdx.y, t) = f(x(blockIdx.z, blockIdx.y, t));
}

template <class F>
void each(const Scores& x, const char* op, Stream s, F f) {
  if (x.extent[0] <= 0 || x.extent[1] <= 0 || x.extent[2] <= 0) return;
  const auto kernel = each_kernel<F>;
  kernel<<<grid_of(x.extent[1], x.extent[0], x.extent[2]), score_threads, 0, stream_of(s)>>>(x, f);
  check_launch(op);
}

void above_cuda(Scores x, float threshold, Stream s) { each(x, "above", s, Above{threshold}); }
void logarithm_cuda(Scores x, float add, Stream s) { each(x, "logarithm", s, Logarithm{add}); }

}  // namespace

KVLAB_ON_CUDA(above, above_cuda);
KVLAB_ON_CUDA(logarithm, logarithm_cuda);

}  // namespace kvlab::ops
