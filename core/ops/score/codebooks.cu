#include "ops/score/codebooks.hpp"

#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int warps = score_threads / 32;

// A warp has a token of a head.
__global__ void __launch_bounds__(score_threads)
    channels_kernel(const __grid_constant__ DeviceKv kv, View<const float, 2> lower, View<const float, 2> upper,
                    const __grid_constant__ Coding how, View<float, 4> rows) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(kv, row, head, 1, rows.extent[2]);
  for (int t = how.range.first(row, head) + blockIdx.x * warps + threadIdx.x / 32; t < n; t += gridDim.x * warps)
    for (int d = threadIdx.x % 32; d < kv.head_dim; d += 32) {
      float& x = rows(row, head, t, d);
      x = coded(x, {double{lower(head, d)}, double{upper(head, d)}}, how);
    }
}

// The numbers of a token, which a warp has: those of all heads that are in range.
struct TokenNumbers {
  const DeviceKv& kv;
  const Coding& how;
  const View<float, 4>& rows;
  int row, token;

  // Calls visit(number) for those of the lane.
  template <class Visit>
  __device__ void each(const Visit& visit) const {
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (token < how.range.first(row, h) || token >= entries_of(kv, row, h, 1, rows.extent[2])) continue;
      for (int d = threadIdx.x % 32; d < kv.head_dim; d += 32) visit(rows(row, h, token, d));
    }
  }
  template <class If>
  __device__ int count(const If& counts) const {
    int own = 0;
    each([&](float x) { own += counts(ordered(x)); });
    return sum_of_lanes(own);
  }
  // The number at place k of the ascending ones, bit by bit.
  __device__ double at(int k) const {
    std::uint32_t order = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const std::uint32_t next = order | 1u << bit;
      if (count([&](std::uint32_t x) { return x < next; }) <= k) order = next;
    }
    return from_ordered(order);
  }
  __device__ double quantile(double q, int n) const {
    const QuantileAt place(q, n);
    const double a = at(place.low);
    return place.part > 0 ? a + place.part * (at(place.low + 1) - a) : a;
  }
};

// A warp has a token of all heads. Grid [part, row].
__global__ void __launch_bounds__(score_threads)
    tokens_kernel(const __grid_constant__ DeviceKv kv, double outliers, const __grid_constant__ Coding how,
                  View<float, 4> rows) {
  const int row = blockIdx.y;
  for (int t = blockIdx.x * warps + threadIdx.x / 32; t < rows.extent[2]; t += gridDim.x * warps) {
    const TokenNumbers numbers{kv, how, rows, row, t};
    const int n = numbers.count([](std::uint32_t) { return 1; });
    if (n == 0) continue;
    const Thresholds of_token{numbers.quantile(outliers / 2, n), numbers.quantile(1 - outliers / 2, n)};
    numbers.each([&](float& x) { x = coded(x, of_token, how); });
  }
}

void code_channels_cuda(const PagedKv& kv, View<const float, 2> lower, View<const float, 2> upper, const Coding& how,
                        View<float, 4> rows, Stream s) {
  if (kv.rows == 0) return;
  channels_kernel<<<grid_of(kv.kv_heads, kv.rows, rows.extent[2], warps), score_threads, 0, stream_of(s)>>>(
      DeviceKv(kv), lower, upper, how, rows);
  check_launch("code_channels");
}

void code_tokens_cuda(const PagedKv& kv, double outliers, const Coding& how, View<float, 4> rows, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid = grid_of(1, kv.rows, rows.extent[2], warps);
  tokens_kernel<<<dim3(grid.x, grid.z), score_threads, 0, stream_of(s)>>>(DeviceKv(kv), outliers, how, rows);
  check_launch("code_tokens");
}

}  // namespace

KVLAB_ON_CUDA(code_channels, code_channels_cuda);
KVLAB_ON_CUDA(code_tokens, code_tokens_cuda);

}  // namespace kvlab::ops
