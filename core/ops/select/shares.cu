#include <kvlab/ops.hpp>

#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/page/paged.cuh"
#include "ops/select/pins.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 512;

// Each thread gets the sum over the block. parts: [threads / 32] shared memory.
__device__ double block_sum(double x, double* parts) {
  x = sum_of_lanes(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < threads / 32; ++w) x += parts[w];
  __syncthreads();
  return x;
}

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

// The bits of numbers above 0 rank as the numbers do. So the threshold that just enough entries reach is found bit by
// bit, the highest first. Entries at the threshold are equal, so a division says how many of them it takes.
__global__ void __launch_bounds__(threads)
    tokens_of_share_kernel(const __grid_constant__ DeviceKv kv, const __grid_constant__ View<const float, 3> in,
                           int group, double share, Pins pins, View<float, 2> out) {
  __shared__ SelectShared select;
  __shared__ double parts[threads / 32];
  const Free of = free_of(kv, in, group, pins, select);
  const auto sum_from = [&](unsigned least) {
    double sum = 0;
    of.each([&](float x) {
      if (x > 0 && __float_as_uint(x) >= least) sum += x;
    });
    return block_sum(sum, parts);
  };
  const double wanted = share * sum_from(0);
  unsigned least = 0;
  if (wanted > 0)
    for (int bit = 30; bit >= 0; --bit)
      if (sum_from(least | 1u << bit) >= wanted) least |= 1u << bit;
  int more = 0, same = 0;
  double sum = 0;
  of.each([&](float x) {
    if (!(x > 0)) return;
    const unsigned key = __float_as_uint(x);
    same += key == least;
    more += key > least;
    if (key > least) sum += x;
  });
  sum = block_sum(sum, parts);
  const double counts = block_sum(same + more * 0x1p32, parts);  // two whole numbers, exact
  if (threadIdx.x != 0) return;
  const double upper = floor(counts * 0x1p-32), equal = counts - upper * 0x1p32;
  double taken = 0;
  if (wanted > 0)
    taken = least >= 0x7f800000u ? 1 : fmin(equal, fmax(1., ceil((wanted - sum) / __uint_as_float(least))));
  out(of.row, of.head) = wanted > 0 ? static_cast<float>(upper + taken) : 0.f;
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
