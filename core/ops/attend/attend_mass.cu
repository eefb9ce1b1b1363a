// The mass of attend's pipelined kernel, which writes scores times log2(e): their probabilities, or their sums in a
// column of token state.
#include <algorithm>

#include "base/launch.cuh"
#include "ops/attend/attend.cuh"
#include "ops/attend/attend_unit.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 256, vector = 4;

// The log of a softmax's sum, as exp2 takes it. -inf: nothing was attended.
__device__ __forceinline__ float shift_of(const View<const float, 2>& lse, int row, int head) {
  return lse(row, head) * log2e;
}
__device__ __forceinline__ float probability(float score, float shift) {
  return score == -INFINITY ? 0.f : exp2_fast(score - shift);
}

__global__ void __launch_bounds__(threads) fill_kernel(View<float, 3> out, float value) {
  for (std::int64_t t = blockIdx.x * threads + threadIdx.x; t < out.extent[2]; t += std::int64_t(gridDim.x) * threads)
    out(blockIdx.z, blockIdx.y, t) = value;
}

__global__ void __launch_bounds__(threads) mass_kernel(View<float, 3> scores, View<const float, 2> lse) {
  const float shift = shift_of(lse, blockIdx.z, blockIdx.y);
  for (std::int64_t t = blockIdx.x * threads + threadIdx.x; t < scores.extent[2];
       t += std::int64_t(gridDim.x) * threads) {
    float& x = scores(blockIdx.z, blockIdx.y, t);
    x = probability(x, shift);
  }
}

struct AddArgs {
  DeviceKv kv;
  View<const float, 3> scores;
  View<const float, 2> lse;
  int column, group;
  GroupRule rule;
  bool wide;  // four scores, and four numbers of the column, can be one load
};

// One thread takes four tokens.
__global__ void __launch_bounds__(threads) add_kernel(const __grid_constant__ AddArgs a) {
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.y, row = blockIdx.z;
  const int n = min(a.kv.tokens(row, head), static_cast<int>(a.scores.extent[2]));
  const float* scores = &a.scores(row, head * a.group, 0);
  const std::int64_t stride = a.scores.stride[1];
  const auto add = [&](float& sum, float score, int j) {
    const float x = probability(score, shift_of(a.lse, row, head * a.group + j));
    sum = j == 0 ? x : a.rule != GroupRule::max ? sum + x : sum < x ? x : sum;
  };
  const float factor = a.rule == GroupRule::mean ? 1.f / static_cast<float>(a.group) : 1.f;
  for (int t = (blockIdx.x * threads + threadIdx.x) * vector; t < n; t += gridDim.x * threads * vector) {
    if (a.wide && t + vector <= n) {
      float* const state = a.kv.state(row, head, t, a.column);
      if (!state) continue;
      float4 sum = {};
#pragma unroll 4
      for (int j = 0; j < a.group; ++j) {
        const float4 x = *reinterpret_cast<const float4*>(scores + j * stride + t);
        add(sum.x, x.x, j), add(sum.y, x.y, j), add(sum.z, x.z, j), add(sum.w, x.w, j);
      }
      float4& to = *reinterpret_cast<float4*>(state);
      const float4 old = to;
      to = {old.x + sum.x * factor, old.y + sum.y * factor, old.z + sum.z * factor, old.w + sum.w * factor};
      continue;
    }
    for (int i = t; i < min(n, t + vector); ++i) {
      float sum = 0;
      for (int j = 0; j < a.group; ++j) add(sum, scores[j * stride + i], j);
      if (float* const state = a.kv.state(row, head, i, a.column)) *state += sum * factor;
    }
  }
}

dim3 grid_of(const View<float, 3>& mass, std::int64_t rows) {
  const auto blocks = std::clamp<std::int64_t>(mass.extent[2] / 1024, 1, 64);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(mass.extent[1]), static_cast<unsigned>(rows));
}

}  // namespace

void clear_scores(const View<float, 3>& mass, int rows, cudaStream_t stream) {
  fill_kernel<<<grid_of(mass, rows), threads, 0, stream>>>(mass, -INFINITY);
  check_launch("attend mass");
}

void scores_to_mass(const View<float, 3>& mass, const View<float, 2>& lse, int rows, cudaStream_t stream) {
  mass_kernel<<<grid_of(mass, rows), threads, 0, stream>>>(mass, lse);
  check_launch("attend mass");
}

void add_scores(const AttendArgs& in, const View<float, 2>& lse, cudaStream_t stream) {
  const PagedKv& kv = in.kv;
  AddArgs a{DeviceKv(kv),      in.mass, lse, in.mass_into.column, static_cast<int>(in.mass.extent[1]) / kv.kv_heads,
            in.mass_into.rule, false};
  a.wide = reinterpret_cast<std::uintptr_t>(in.mass.data) % 16 == 0 && in.mass.stride[0] % vector == 0 &&
           in.mass.stride[1] % vector == 0 && kv.page_size % vector == 0;
  const std::int64_t each = std::int64_t{threads} * vector, blocks = (in.mass.extent[2] + each - 1) / each,
                     most = 16384 / (std::int64_t{kv.kv_heads} * kv.rows) + 1;
  const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, most)), static_cast<unsigned>(kv.kv_heads),
                  static_cast<unsigned>(kv.rows));
  cuda::launch("attend mass", add_kernel, grid, threads, 0, stream, true, a);
}

}  // namespace kvlab::ops
