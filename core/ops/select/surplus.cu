// surplus_tokens: one block per (row, KV head). In a decode step one token of a head leaves, which takes a pass over
// the scores; more of them take the radix threshold of the tokens that stay.
#include <kvlab/ops.hpp>

#include <algorithm>

#include "ops/select/surplus.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 512;

struct Args {
  DeviceKv kv;
  View<const float, 3> scores;  // empty: the newest token is the best
  View<const std::int32_t, 2> keep;
  const Pins* pins;  // [row] or null
  View<std::int32_t, 3> list;
  View<std::int32_t, 2> count;
  int most;     // most tokens of a head
  bool staged;  // shared memory has room for their positions
};

__global__ void __launch_bounds__(threads) surplus_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  __shared__ SelectShared select;
  const int head = blockIdx.x, row = blockIdx.y;
  const int n = min(a.kv.tokens(row, head), a.most), wanted = a.keep(row, head), keep = max(0, wanted);
  std::int32_t* list = a.list.data + row * a.list.stride[0] + head * a.list.stride[1];
  // (ptxas 13.0 takes `max(0, min(wanted, n)) == n` for true on sm_90a.)
  if (wanted >= n) {
    if (threadIdx.x == 0) a.count(row, head) = 0;
    return;
  }
  auto* chosen = reinterpret_cast<unsigned*>(dynamic);  // a bit for each token
  auto* stage = reinterpret_cast<int*>(chosen + ((a.most + 31) / 32 + 3) / 4 * 4);
  const Pins pins = a.pins ? a.pins[row] : Pins{};
  const bool pin = pins.first > 0 || pins.last > 0, by_age = !a.scores.data;
  if (a.staged && (pin || by_age)) {
#pragma unroll 4
    for (int t = threadIdx.x; t < n; t += threads) stage[t] = a.kv.position(row, head, t);
    __syncthreads();
  }
  const auto at = [&](int t) { return a.staged ? stage[t] : a.kv.position(row, head, t); };
  const float* scores = by_age ? nullptr : a.scores.data + row * a.scores.stride[0] + head * a.scores.stride[1];
  const Leaving lost = find_surplus(
      at, [&](int t) { return scores[t]; }, by_age, n, keep, pins, chosen, select);
  if (lost.count < 2) {
    if (threadIdx.x == 0) {
      a.count(row, head) = min(lost.count, static_cast<int>(a.list.extent[2]));
      if (lost.count == 1 && a.list.extent[2] > 0) list[0] = lost.place;
    }
    return;
  }
  const int count = write_list(chosen, n, list, a.list.stride[2], static_cast<int>(a.list.extent[2]), select);
  if (threadIdx.x == 0) a.count(row, head) = count;
}

}  // namespace

static void surplus_tokens_cuda(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> keep,
                                const Pins* pins, TokenList list, Stream s) {
  if (kv.rows == 0) return;
  Args a = {};
  a.kv = DeviceKv(kv);
  a.scores = scores, a.keep = keep, a.pins = pins;
  a.list = list.index, a.count = list.count;
  const std::int64_t tokens = kv.table.extent[2] * kv.page_size;
  a.most = static_cast<int>(scores ? std::min(tokens, scores.extent[2]) : tokens);
  const std::int64_t bits = std::int64_t{(a.most + 31) / 32 + 3} / 4 * 16, positions = std::int64_t{a.most} * 4;
  const std::int64_t room = shared_bytes() - static_cast<std::int64_t>(sizeof(SelectShared)) - 1024;
  if (bits > room)
    throw Error(Errc::unsupported,
                "got heads of up to " + std::to_string(a.most) + " tokens, wanted at most " + std::to_string(room * 8),
                "op surplus_tokens");
  a.staged = bits + positions <= 64 * 1024;
  const auto bytes = static_cast<int>(bits + (a.staged ? positions : 0));
  check(cudaFuncSetAttribute(surplus_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)),
        "surplus_tokens");
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  surplus_kernel<<<grid, threads, bytes, stream_of(s)>>>(a);
  check_launch("surplus_tokens");
}
KVLAB_ON_CUDA(surplus_tokens, surplus_tokens_cuda);

}  // namespace kvlab::ops
