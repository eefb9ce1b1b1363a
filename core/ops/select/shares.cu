#include <kvlab/ops.hpp>

#include "base/device_op.hpp"
#include "ops/page/paged.cuh"
#include "ops/select/pins.cuh"
#include "ops/select/share.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = share_threads;

// The entries of a head of scores that pins do not name.
struct Free {
  const DeviceKv& kv;
  const View<const float, 3>& in;
  PinLimits limits;
  bool pins;
  int row, head, kv_head, n;

  // Calls f(x) for each entry of the thread.
  template <class F>
  __device__ void each(F f) const {
    for (int t = threadIdx.x; t < n; t += threads)
      if (!pins || !limits.pinned(kv.position(row, kv_head, t))) f(in(row, head, t));
  }
};

__device__ Free free_of(const DeviceKv& kv, const View<const float, 3>& in, int group, const Pins& pins,
                        SelectShared& select) {
  const int head = blockIdx.x, row = blockIdx.y;
  const int n = min(static_cast<std::int64_t>(kv.tokens(row, head / group)), in.extent[2]);
  return {
      kv,           in, pin_limits(kv, row, head / group, n, pins, select), pins.first > 0 || pins.last > 0, row, head,
      head / group, n};
}

__global__ void __launch_bounds__(threads)
    head_sum_kernel(const __grid_constant__ DeviceKv kv, const __grid_constant__ View<const float, 3> in, int group,
                    Pins pins, View<float, 2> out) {
  __shared__ SelectShared select;
  __shared__ double parts[threads / 32];
  const Free of = free_of(kv, in, group, pins, select);
  double sum = 0;
  of.each([&](float x) { sum += x; });
  sum = block_sum(sum, parts);
  if (threadIdx.x == 0) out(of.row, of.head) = static_cast<float>(sum);
}

__global__ void __launch_bounds__(threads)
    tokens_of_share_kernel(const __grid_constant__ DeviceKv kv, const __grid_constant__ View<const float, 3> in,
                           int group, double share, Pins pins, View<float, 2> out) {
  __shared__ SelectShared select;
  __shared__ double parts[share_parts];
  const Free of = free_of(kv, in, group, pins, select);
  const Share found = share_of([&](auto f) { of.each(f); }, share, parts);
  if (threadIdx.x == 0) out(of.row, of.head) = static_cast<float>(found.above + found.taken);
}

__global__ void __launch_bounds__(threads)
    set_listed_kernel(const __grid_constant__ TokenList list, float value, View<float, 3> scores) {
  const int head = blockIdx.x, row = blockIdx.y;
  const std::int64_t at = list.at(row);
  const int n = min(static_cast<std::int64_t>(list.count(at, head)), list.index.extent[2]);
  for (int i = threadIdx.x; i < n; i += threads) {
    const std::int64_t place = list.index(at, head, i);
    if (place >= 0 && place < scores.extent[2]) scores(row, head, place) = value;
  }
}

dim3 grid_of(std::int64_t heads, std::int64_t rows) {
  return dim3(static_cast<unsigned>(heads), static_cast<unsigned>(rows));
}

void head_sum_cuda(const PagedKv& kv, View<const float, 3> in, Pins leave_out, View<float, 2> out, Stream s) {
  if (kv.rows == 0) return;
  head_sum_kernel<<<grid_of(in.extent[1], kv.rows), threads, 0, stream_of(s)>>>(
      DeviceKv(kv), in, static_cast<int>(in.extent[1]) / kv.kv_heads, leave_out, out);
  check_launch("head_sum");
}

void tokens_of_share_cuda(const PagedKv& kv, View<const float, 3> scores, float share, Pins leave_out,
                          View<float, 2> out, Stream s) {
  if (kv.rows == 0) return;
  tokens_of_share_kernel<<<grid_of(scores.extent[1], kv.rows), threads, 0, stream_of(s)>>>(
      DeviceKv(kv), scores, static_cast<int>(scores.extent[1]) / kv.kv_heads, double{share}, leave_out, out);
  check_launch("tokens_of_share");
}

void set_listed_cuda(const TokenList& list, float value, Scores scores, Stream s) {
  if (scores.extent[0] <= 0 || scores.extent[1] <= 0) return;
  set_listed_kernel<<<grid_of(scores.extent[1], scores.extent[0]), threads, 0, stream_of(s)>>>(list, value, scores);
  check_launch("set_listed");
}

}  // namespace

KVLAB_ON_CUDA(head_sum, head_sum_cuda);
KVLAB_ON_CUDA(tokens_of_share, tokens_of_share_cuda);
KVLAB_ON_CUDA(set_listed, set_listed_cuda);

}  // namespace kvlab::ops
