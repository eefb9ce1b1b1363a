// Overlaps of lists with the best tokens by each row of scores. A block takes a row of scores; the medians follow.
#include "ops/select/drifted.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>

#include "base/scratch.cuh"
#include "ops/page/paged.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 512, median_threads = 128;

struct Args {
  DeviceKv kv;
  View<const float, 3> scores;
  IndexList lists;
  const std::int32_t* leaders;
  Heads heads;
  HeadFlags drifted;
  float* overlaps;  // [row, kv_head, window]
  float threshold;
  int window, most;
  bool staged;
};

__device__ __forceinline__ bool leads(const Args& a, int row, int head) {
  return a.leaders[head] == head && a.heads.on(a.kv.kv.slots[row], head) && a.lists.count(a.lists.at(row), head) > 0;
}

__global__ void __launch_bounds__(threads) overlap_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  __shared__ SelectShared select;
  const int i = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  if (!leads(a, row, head)) return;
  const std::int64_t at = a.lists.at(row);
  const int n = min(a.kv.tokens(row, head), a.most), count = a.lists.count(at, head);
  const float* scores = &a.scores(row, head * a.window + i, 0);
  auto* chosen = reinterpret_cast<unsigned*>(dynamic);
  float* stage = a.staged ? reinterpret_cast<float*>(chosen + ((a.most + 31) / 32 + 3) / 4 * 4) : nullptr;
  fill_bits(chosen, n, count >= n);
  if (count < n) select_best(load_row(scores, n, stage, false), n, count, chosen, select);
  unsigned own = 0, both;
  for (int x = threadIdx.x; x < count; x += threads) {
    const int token = a.lists.index(at, head, x);
    own += token < n && has_bit(chosen, token);
  }
  block_scan(own, select.scan, both);
  if (threadIdx.x == 0)
    a.overlaps[(std::int64_t(row) * a.kv.kv_heads + head) * a.window + i] =
        static_cast<float>(both) / static_cast<float>(count);
}

__global__ void __launch_bounds__(median_threads) median_kernel(const __grid_constant__ Args a) {
  const int row = blockIdx.x;
  for (int head = threadIdx.x; head < a.kv.kv_heads; head += median_threads) {
    const int leader = a.leaders[head];
    bool moved = leader >= 0 && leads(a, row, leader);
    if (moved) {
      float x[most_overlaps];
      const float* from = a.overlaps + (std::int64_t(row) * a.kv.kv_heads + leader) * a.window;
      for (int i = 0; i < a.window; ++i) x[i] = from[i];
      moved = median_of(x, a.window) < a.threshold;
    }
    a.drifted(a.kv.kv.slots[row], head) = moved;
  }
}

}  // namespace

static void drifted_heads_cuda(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists, float threshold,
                               const std::int32_t* leaders, HeadFlags drifted, Stream s, const Heads& heads) {
  const char* op = "drifted_heads";
  if (kv.rows == 0) return;
  Args a = {};
  a.kv = DeviceKv(kv);
  a.scores = scores;
  a.lists = lists;
  a.leaders = leaders;
  a.heads = heads;
  a.drifted = drifted;
  a.threshold = threshold;
  a.window = static_cast<int>(scores.extent[1]) / kv.kv_heads;
  a.most = static_cast<int>(std::min(kv.table.extent[2] * kv.page_size, scores.extent[2]));
  const std::int64_t bits = std::int64_t{(a.most + 31) / 32 + 3} / 4 * 16, row = std::int64_t{a.most} * 4;
  const std::int64_t room = shared_bytes() - static_cast<std::int64_t>(sizeof(SelectShared)) - 1024;
  if (bits > room)
    throw Error(Errc::unsupported,
                "got rows of up to " + std::to_string(a.most) + " scores, wanted at most " + std::to_string(room * 8),
                std::string("op ") + op);
  a.staged = bits + row <= 100 * 1024;
  a.overlaps =
      static_cast<float*>(fixed_scratch(s.handle(), op, std::size_t(kv.rows) * kv.kv_heads * a.window * sizeof(float)));
  check(cudaFuncSetAttribute(overlap_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)), op);
  overlap_kernel<<<dim3(a.window, kv.kv_heads, kv.rows), threads, bits + (a.staged ? row : 0), stream_of(s)>>>(a);
  check_launch(op);
  median_kernel<<<kv.rows, median_threads, 0, stream_of(s)>>>(a);
  check_launch(op);
}
KVLAB_ON_CUDA(drifted_heads, drifted_heads_cuda);

}  // namespace kvlab::ops
