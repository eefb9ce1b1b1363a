#include <kvlab/ops.hpp>

#include <algorithm>
#include <string>

#include "base/device_op.hpp"
#include "base/scratch.cuh"
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
  int words;        // of a KV head's marks
  int held;         // so many weights above 0 of a row have room in shared memory
  unsigned* marks;  // [row, kv_head, word], a bit for each token that is taken

  __device__ unsigned* marks_of(int row, int head) const {
    return marks + (std::int64_t(row) * kv.kv_heads + head) * words;
  }
};

__global__ void __launch_bounds__(threads) clear_marks_kernel(const __grid_constant__ Args a) {
  unsigned* marks = a.marks_of(blockIdx.y, blockIdx.x);
  for (int i = threadIdx.x; i < a.words; i += threads) marks[i] = 0;
}

// One block serves a query head. Its KV head's other query heads set bits of the same words.
__global__ void __launch_bounds__(threads) mark_top_p_kernel(const __grid_constant__ Args a) {
  extern __shared__ float row_of_weights[];
  __shared__ double parts[share_parts];
  __shared__ unsigned scan[threads / 32];
  const int q = blockIdx.x, head = q / a.group, row = blockIdx.y, n = min(a.kv.tokens(row, head), a.most);
  const float* weight = a.weights.data + row * a.weights.stride[0] + q * a.weights.stride[1];
  const float* counted = weight;  // what may count
  int count = n;
  if (a.held > 0 && a.p < 1) {
    constexpr int each = 4;
    unsigned kept = 0;
    for (int first = 0; first < n; first += each * threads) {
      float x[each];
      unsigned own = 0, total = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int t = first + static_cast<int>(threadIdx.x) * each + i;
        x[i] = t < n ? weight[t] : 0.f;
        own += x[i] > 0;
      }
      unsigned at = kept + block_scan(own, scan, total);
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (x[i] > 0 && at < static_cast<unsigned>(a.held)) row_of_weights[at++] = x[i];
      kept += total;
    }
    __syncthreads();
    if (kept <= static_cast<unsigned>(a.held)) counted = row_of_weights, count = static_cast<int>(kept);
  }
  Share share;  // of p = 1: everything above 0
  if (a.p < 1) {
    const auto each = [&](auto f) {
      for (int i = threadIdx.x; i < count; i += threads) f(counted[i]);
    };
    share = share_of(each, a.p, parts);
    if (share.taken == 0) return;  // there is nothing above 0
  }
  unsigned* marks = a.marks_of(row, head);
  unsigned equal = 0;
  constexpr int each = 4;
  for (int first = 0; first < n; first += each * threads) {
    float x[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int t = first + i * threads + static_cast<int>(threadIdx.x);
      x[i] = t < n ? weight[t] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int t = first + i * threads + static_cast<int>(threadIdx.x);
      const unsigned bits = __ballot_sync(all_lanes, takes(share, x[i], equal, scan));
      if (threadIdx.x % 32 == 0 && bits != 0) atomicOr(marks + (t >> 5), bits);
    }
  }
}

// One block serves a KV head.
__global__ void __launch_bounds__(threads) list_top_p_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned taken[];
  __shared__ SelectShared select;
  const int head = blockIdx.x, row = blockIdx.y, n = min(a.kv.tokens(row, head), a.most);
  const bool pins = a.pins.first > 0 || a.pins.last > 0;
  const PinLimits limits = pin_limits(a.kv, row, head, n, a.pins, select);
  const unsigned* marks = a.marks_of(row, head);
  constexpr int each = 4;
  for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x) < n; first += each * threads) {
    bool pinned[each] = {};
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (pins) pinned[i] = limits.pinned(a.kv.position(row, head, min(first + i * threads, n - 1)));
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int t = first + i * threads;
      const unsigned bits = __ballot_sync(all_lanes, pinned[i] && t < n);
      if (threadIdx.x % 32 == 0 && t < n) taken[t >> 5] = bits | marks[t >> 5];
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
  const std::int64_t words = (most + 31) / 32, marks = words * kv.kv_heads * kv.rows;
  const std::int64_t room = shared_bytes() - static_cast<std::int64_t>(sizeof(SelectShared)) - 1024;
  if (words * 4 > room)
    throw Error(Errc::unsupported,
                "got rows of up to " + std::to_string(most) + " weights, wanted at most " + std::to_string(room * 8),
                "op top_p_tokens");
  auto* there = static_cast<unsigned*>(fixed_scratch(s.handle(), "top p marks", static_cast<std::size_t>(marks) * 4));
  const Args a{DeviceKv(kv),
               weights,
               list,
               pins,
               double{p},
               static_cast<int>(weights.extent[1]) / kv.kv_heads,
               static_cast<int>(most),
               static_cast<int>(words),
               p < 1 ? static_cast<int>(std::min(most, room / 2 / 4)) : 0,  // two blocks a multiprocessor
               there};
  const auto held = static_cast<int>(room);
  check(cudaFuncSetAttribute(mark_top_p_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, held), "top_p_tokens");
  check(cudaFuncSetAttribute(list_top_p_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, held), "top_p_tokens");
  const auto rows = static_cast<unsigned>(kv.rows);
  const dim3 heads(static_cast<unsigned>(kv.kv_heads), rows);
  clear_marks_kernel<<<heads, threads, 0, stream_of(s)>>>(a);
  check_launch("top_p_tokens");
  mark_top_p_kernel<<<dim3(static_cast<unsigned>(weights.extent[1]), rows), threads,
                      static_cast<std::size_t>(a.held) * 4, stream_of(s)>>>(a);
  check_launch("top_p_tokens");
  list_top_p_kernel<<<heads, threads, static_cast<unsigned>(words * 4), stream_of(s)>>>(a);
  check_launch("top_p_tokens");
}

}  // namespace

KVLAB_ON_CUDA(top_p_tokens, top_p_tokens_cuda);

}  // namespace kvlab::ops
