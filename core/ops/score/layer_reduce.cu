#include <kvlab/ops.hpp>

#include "base/device_op.hpp"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

struct Reduce {
  DeviceKv kv;
  View<const float, 3> in;
  View<float, 3> out;
  int group;
  GroupRule rule;

  __device__ int tokens(int row, int head) const {
    return entries_of(kv, row, head, 1, in.extent[2] < out.extent[2] ? in.extent[2] : out.extent[2]);
  }
  // Joins the scores of a head's query heads at a place to x, which has joined `held` scores.
  __device__ void join(int row, int head, int place, float& x, int& held) const {
    for (int q = head * group; q < (head + 1) * group; ++q, ++held) {
      const float y = in(row, q, place);
      x = held == 0 ? y : rule != GroupRule::max ? x + y : x < y ? y : x;
    }
  }
  __device__ float finish(float x, int held) const {
    return rule == GroupRule::mean ? x / static_cast<float>(held) : x;
  }
};

// The warp searches a head for a text position and returns its place; -1 = the head does not hold it.
__device__ int place_of(const Reduce& a, int row, int head, int position) {
  const int n = a.tokens(row, head), lane = threadIdx.x % 32;
  for (int base = 0; base < n; base += 32) {
    const bool here = base + lane < n && a.kv.position(row, head, base + lane) == position;
    if (const unsigned found = __ballot_sync(all_lanes, here)) return base + __ffs(found) - 1;
  }
  return -1;
}

// Where all heads hold the same token at a place, a thread reduces the place. Elsewhere a warp searches the other heads
// for the place's token.
__global__ void __launch_bounds__(score_threads) layer_reduce_kernel(const __grid_constant__ Reduce a) {
  const int row = blockIdx.z, lane = threadIdx.x % 32, heads = a.kv.kv_heads;
  int most = 0;
  for (int h = 0; h < heads; ++h) most = max(most, a.tokens(row, h));
  for (int first = blockIdx.x * score_threads; first < most; first += gridDim.x * score_threads) {
    const int t = first + threadIdx.x;
    const bool all = t < most && t < a.tokens(row, 0);
    bool equal = all;
    const int position = all ? a.kv.position(row, 0, t) : 0;
    for (int h = 1; equal && h < heads; ++h) equal = t < a.tokens(row, h) && a.kv.position(row, h, t) == position;
    if (equal) {
      float x = 0;
      int held = 0;
      for (int h = 0; h < heads; ++h) a.join(row, h, t, x, held);
      x = a.finish(x, held);
      for (int h = 0; h < heads; ++h) a.out(row, h, t) = x;
    }
    for (unsigned left = __ballot_sync(all_lanes, t < most && !equal); left; left &= left - 1) {
      const int place = __shfl_sync(all_lanes, t, __ffs(left) - 1);
      for (int h = 0; h < heads; ++h) {
        if (place >= a.tokens(row, h)) continue;
        const int wanted = a.kv.position(row, h, place);
        float x = 0;
        int held = 0;
        for (int other = 0; other < heads; ++other)
          if (const int there = place_of(a, row, other, wanted); there >= 0) a.join(row, other, there, x, held);
        if (lane == 0) a.out(row, h, place) = a.finish(x, held);
      }
    }
  }
}

void layer_reduce_cuda(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s) {
  if (kv.rows == 0) return;
  const Reduce a{DeviceKv(kv), in, out, static_cast<int>(in.extent[1]) / kv.kv_heads, rule};
  layer_reduce_kernel<<<grid_of(1, kv.rows, capacity(kv)), score_threads, 0, stream_of(s)>>>(a);
  check_launch("layer_reduce");
}

}  // namespace

KVLAB_ON_CUDA(layer_reduce, layer_reduce_cuda);

}  // namespace kvlab::ops
