#include <kvlab/error.hpp>
#include <kvlab/ops.hpp>

#include "base/device_op.hpp"
#include "ops/page/paged.cuh"
#include "ops/select/surplus.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 512, warps = threads / 32, most_dim = 256, most_parts = most_dim / 32;

struct Args {
  DeviceKv kv;
  Surplus of;
  MadeUpTokens to;
  int token;
};

// mean = the mean of `weight` rows that it stands for and of `count` rows of the sum.
__device__ __forceinline__ void join(float& mean, float sum, float weight, float count) {
  mean += (sum - count * mean) / (weight + count);
}

// A block finds what leaves a head. Its warps then sum these tokens' keys and values, each those of some words of bits.
__global__ void __launch_bounds__(threads) fold_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned chosen[];  // bits of the tokens that leave
  __shared__ device::SelectShared shared;
  __shared__ float sums[warps][most_dim];
  const int head = blockIdx.x, row = blockIdx.y, slot = a.kv.kv.slots[row], dim = a.kv.head_dim;
  const int n = a.kv.tokens(row, head), wanted = a.of.keep(row, head);
  if (wanted >= n || (a.of.scores.data && n > a.of.scores.extent[2])) return;
  const auto at = [&](int t) { return a.kv.position(row, head, t); };
  const auto score = [&](int t) {
    return a.of.scores.data ? a.of.scores(row, head, t) : *a.kv.token(row, head, t).state(a.of.column);
  };
  const device::Leaving leaving =
      device::find_surplus(at, score, !a.of.scores.data && a.of.column < 0, n, max(0, wanted),
                           a.of.pins ? a.of.pins[row] : Pins{}, chosen, shared);
  if (leaving.count == 0) return;
  float &weight = a.to.weights(slot, head, a.token), *key = &a.to.keys(slot, head, a.token, 0),
        *value = &a.to.values(slot, head, a.token, 0);
  const float before = weight, count = static_cast<float>(leaving.count);
  __syncthreads();
  if (threadIdx.x == 0) weight = before + count;
  if (leaving.count == 1) {
    const auto token = a.kv.token(row, head, leaving.place);
    for (int d = threadIdx.x; d < 2 * dim; d += threads)
      if (d < dim)
        join(key[d], token.key(d), before, 1);
      else
        join(value[d - dim], token.value(d - dim), before, 1);
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float of_keys[most_parts] = {}, of_values[most_parts] = {};
  for (int word = warp; word < (n + 31) / 32; word += warps)
    for (unsigned bits = chosen[word]; bits; bits &= bits - 1) {
      const auto token = a.kv.token(row, head, word * 32 + __ffs(bits) - 1);
#pragma unroll
      for (int i = 0; i < most_parts; ++i)
        if (const int d = lane + 32 * i; d < dim) of_keys[i] += token.key(d), of_values[i] += token.value(d);
    }
  for (int values = 0; values < 2; ++values) {
#pragma unroll
    for (int i = 0; i < most_parts; ++i) sums[warp][lane + 32 * i] = values ? of_values[i] : of_keys[i];
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += threads) {
      float sum = 0;
      for (int w = 0; w < warps; ++w) sum += sums[w][d];
      join(values ? value[d] : key[d], sum, before, count);
    }
    __syncthreads();
  }
}

void fold_surplus_cuda(const PagedKv& kv, const Surplus& surplus, int i, const MadeUpTokens& to, Stream s) {
  if (kv.rows == 0) return;
  const std::int64_t most = kv.table.extent[2] * kv.page_size, bytes = (most + 31) / 32 * 4;
  const std::int64_t room = shared_bytes() -
                            static_cast<std::int64_t>(sizeof(device::SelectShared) + sizeof(float) * warps * most_dim) -
                            1024;
  if (bytes > room)
    throw Error(Errc::unsupported,
                "got heads of up to " + std::to_string(most) + " tokens, wanted at most " + std::to_string(room * 8),
                "op fold_surplus (CUDA)");
  if (bytes > 16 * 1024)
    check(cudaFuncSetAttribute(fold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)),
          "fold_surplus");
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  fold_kernel<<<grid, threads, static_cast<std::size_t>(bytes), stream_of(s)>>>(Args{DeviceKv(kv), surplus, to, i});
  check_launch("fold_surplus");
}

}  // namespace

KVLAB_ON_CUDA(fold_surplus, fold_surplus_cuda);

}  // namespace kvlab::ops
