// The mass of attend's pipelined kernel. It writes scores times log2(e), which become probabilities.
#include <algorithm>
#include <limits>

#include "base/cuda.cuh"
#include "ops/attend/attend.cuh"
#include "ops/attend/attend_unit.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads) fill_kernel(View<float, 3> out, float value) {
  for (std::int64_t t = blockIdx.x * threads + threadIdx.x; t < out.extent[2]; t += std::int64_t(gridDim.x) * threads)
    out(blockIdx.z, blockIdx.y, t) = value;
}

__global__ void __launch_bounds__(threads) mass_kernel(View<float, 3> scores, View<const float, 2> lse) {
  const float shift = lse(blockIdx.z, blockIdx.y) * log2e;  // -inf: nothing was attended
  for (std::int64_t t = blockIdx.x * threads + threadIdx.x; t < scores.extent[2];
       t += std::int64_t(gridDim.x) * threads) {
    float& x = scores(blockIdx.z, blockIdx.y, t);
    x = x == -INFINITY ? 0.f : exp2_fast(x - shift);
  }
}

dim3 grid_of(const View<float, 3>& mass, std::int64_t rows) {
  const auto blocks = std::clamp<std::int64_t>(mass.extent[2] / 1024, 1, 64);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(mass.extent[1]), static_cast<unsigned>(rows));
}

}  // namespace

void clear_scores(const AttendArgs& in, cudaStream_t stream) {
  fill_kernel<<<grid_of(in.mass, in.kv.rows), threads, 0, stream>>>(in.mass, -INFINITY);
  check_launch("attend mass");
}

void scores_to_mass(const View<float, 3>& mass, const View<float, 2>& lse, int rows, cudaStream_t stream) {
  mass_kernel<<<grid_of(mass, rows), threads, 0, stream>>>(mass, lse);
  check_launch("attend mass");
}

// A store of several needs 32 bits for a token's place times the group.
int logits_at_once(const HeadLogits& logits) {
  const auto& out = logits.out;
  const auto even = [](std::int64_t x) { return x % 2 == 0; };
  return even(out.extent[3]) && even(out.stride[0]) && even(out.stride[1]) &&
                 reinterpret_cast<std::uintptr_t>(out.data) % 8 == 0 &&
                 out.extent[2] * out.extent[3] < std::numeric_limits<std::int32_t>::max()
             ? 2
             : 1;
}

}  // namespace kvlab::ops
