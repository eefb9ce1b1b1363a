#include <kvlab/ops.hpp>

#include <algorithm>
#include <string>

#include "base/device_op.hpp"
#include "ops/page/paged.cuh"
#include "ops/select/pins.cuh"
#include "ops/select/share.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = share_threads;

struct Args {
  DeviceKv kv;
  View<const float, 3> weights;
  TokenList list;
  Pins pins;
  double p;
  int group, most;  // most: entries of a row
};

// One block serves all query heads of a KV head. A bit of shared memory marks each token that is taken. Words are
// always written by the same warp.
__global__ void __launch_bounds__(threads) top_p_tokens_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned taken[];
  __shared__ SelectShared select;
  __shared__ double parts[threads / 32];
  const int head = blockIdx.x, row = blockIdx.y, n = min(a.kv.tokens(row, head), a.most), lane = threadIdx.x % 32;
  const bool pins = a.pins.first > 0 || a.pins.last > 0;
  const PinLimits limits = pin_limits(a.kv, row, head, n, a.pins, select);
  for (int base = threadIdx.x - lane; base < n; base += threads) {
    const int t = base + lane;
    const unsigned bits = __ballot_sync(all_lanes, pins && t < n && limits.pinned(a.kv.position(row, head, t)));
    if (lane == 0) taken[base >> 5] = bits;
  }
  for (int q = head * a.group; q < (head + 1) * a.group; ++q) {
    const float* weight = a.weights.data + row * a.weights.stride[0] + q * a.weights.stride[1];
    Share share;  // of p = 1: everything above 0
    if (a.p < 1) {
      const auto each = [&](auto f) {
        for (int t = threadIdx.x; t < n; t += threads) f(weight[t]);
      };
      share = share_of(each, a.p, parts);
      if (share.taken == 0) continue;  // there is nothing above 0
    }
    unsigned equal = 0;
    for (int first = 0; first < n; first += threads) {
      const int t = first + threadIdx.x;
      const float x = t < n ? weight[t] : 0.f;
      const unsigned key = x > 0 ? __float_as_uint(x) : 0;
      bool take = key > share.least;
      if (share.taken > 0) {
        const bool same = key == share.least;
        unsigned total = 0;
        const unsigned before = share.taken < share.equal ? equal + block_scan(same, select.scan, total) : 0;
        take = take || (same && before < share.taken);
        equal += total;
      }
      const unsigned bits = __ballot_sync(all_lanes, take);
      if (lane == 0 && first + static_cast<int>(threadIdx.x) < n) taken[t >> 5] |= bits;
    }
  }
  __syncthreads();
  const std::int64_t at = a.list.at(row);
  std::int32_t* to = a.list.index.data + at * a.list.index.stride[0] + head * a.list.index.stride[1];
  const int count = write_list(taken, n, to, a.list.index.stride[2], static_cast<int>(a.list.index.extent[2]), select);
  if (threadIdx.x == 0) a.list.count(at, head) = count;
}

void top_p_tokens_cuda(const PagedKv& kv, View<const float, 3> weights, float p, Pins pins, TokenList list, Stream s) {
  if (kv.rows == 0) return;
  const std::int64_t most = std::min(kv.table.extent[2] * kv.page_size, weights.extent[2]);
  const std::int64_t bytes = (most + 31) / 32 * 4;
  const std::int64_t room = shared_bytes() - static_cast<std::int64_t>(sizeof(SelectShared)) - 1024;
  if (bytes > room)
    throw Error(Errc::unsupported,
                "got rows of up to " + std::to_string(most) + " weights, wanted at most " + std::to_string(room * 8),
                "op top_p_tokens");
  const Args a{DeviceKv(kv),          weights, list, pins, double{p}, static_cast<int>(weights.extent[1]) / kv.kv_heads,
               static_cast<int>(most)};
  check(cudaFuncSetAttribute(top_p_tokens_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)),
        "top_p_tokens");
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  top_p_tokens_kernel<<<grid, threads, static_cast<unsigned>(bytes), stream_of(s)>>>(a);
  check_launch("top_p_tokens");
}

}  // namespace

KVLAB_ON_CUDA(top_p_tokens, top_p_tokens_cuda);

}  // namespace kvlab::ops
