// Overlaps of lists with the best tokens by each row of scores. Several blocks share a row, and each launch of them
// fixes some bits of the worst key among the best: the last block of a row to arrive finds them. Then tokens of the
// list that reach the key are counted, and the medians follow.
#include "ops/select/drifted.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>

#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "ops/page/paged.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 256, median_threads = 128, digit_bits = 11, digit_bins = 1 << digit_bits;
constexpr int tokens_of_block = 4096, most_blocks = 16;

// The launches know this of a row of scores. All is zero between calls but `key` and `last`.
struct Worst {
  unsigned key;     // the bits that are known
  unsigned wanted;  // entries still to choose among those with these bits
  int last;         // entries with this key are chosen up to this one
  unsigned done;    // 1 = entries with the known bits are all chosen, 2 = there are none to leave out
  unsigned both;    // entries of the list that are chosen
  unsigned arrived;
};

struct Args {
  DeviceKv kv;
  View<const float, 3> scores;
  IndexList lists;
  const std::int32_t* leaders;
  Heads heads;
  HeadFlags drifted;
  Worst* worst;    // [row, kv_head, window]
  unsigned* bins;  // [row, kv_head, window, digit_bins]
  float threshold;
  int window, most;
};

__device__ __forceinline__ bool leads(const Args& a, int row, int head) {
  return a.leaders[head] == head && a.heads.on(a.kv.kv.slots[row], head) && a.lists.count(a.lists.at(row), head) > 0;
}

// Blocks [share of a row, kv_head x window, row]. Shift: lowest bit of this launch's digit.
template <int Shift, int Bits>
__global__ void __launch_bounds__(threads) digit_kernel(const __grid_constant__ Args a) {
  __shared__ unsigned bins[digit_bins], scan[32], found[3];
  __shared__ bool latest;
  constexpr bool first_digit = Shift + Bits == 32;
  constexpr int batch = 8;
  constexpr unsigned mask = (1u << Bits) - 1, each = digit_bins / threads;
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.y / a.window, row = blockIdx.z;
  if (!leads(a, row, head)) return;
  const std::int64_t at = std::int64_t(row) * gridDim.y + blockIdx.y;
  const int n = min(a.kv.tokens(row, head), a.most), count = a.lists.count(a.lists.at(row), head);
  Worst& worst = a.worst[at];
  if (first_digit ? count >= n : worst.done != 0) {
    if (first_digit && blockIdx.x == 0 && threadIdx.x == 0) worst.done = 2;
    return;
  }
  const unsigned known = first_digit ? 0 : worst.key;
  for (int i = threadIdx.x; i < digit_bins; i += threads) bins[i] = 0;
  __syncthreads();
  const float* scores = &a.scores(row, blockIdx.y, 0);
  const int share = (n + gridDim.x - 1) / static_cast<int>(gridDim.x), begin = blockIdx.x * share,
            end = min(n, begin + share);
  for (int first = begin + static_cast<int>(threadIdx.x); first < end; first += batch * threads) {
    float x[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i)  // all loads first: none waits for another
      if (first + i * threads < end) x[i] = __ldcg(scores + first + i * threads);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (first + i * threads >= end) break;
      const unsigned key = score_key(x[i]);
      if constexpr (first_digit)
        atomicAdd(&bins[mask - (key >> Shift)], 1u);
      else if (key >> (Shift + Bits) == known >> (Shift + Bits))
        atomicAdd(&bins[mask - (key >> Shift & mask)], 1u);
    }
  }
  __syncthreads();
  unsigned* all = a.bins + at * digit_bins;
  for (int i = threadIdx.x; i < digit_bins; i += threads)
    if (bins[i] > 0) atomicAdd(all + i, bins[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) latest = atomicAdd(&worst.arrived, 1u) + 1 == gridDim.x;
  __syncthreads();
  if (!latest) return;
  __threadfence();
  const unsigned wanted = first_digit ? static_cast<unsigned>(count) : worst.wanted;
  unsigned own[each], sum = 0, total;
#pragma unroll
  for (unsigned i = 0; i < each; ++i) {
    own[i] = __ldcg(all + threadIdx.x * each + i), sum += own[i];
    all[threadIdx.x * each + i] = 0;
  }
  unsigned above = block_scan(sum, scan, total);
  if (above < wanted && wanted <= above + sum)
    for (unsigned i = 0; i < each; ++i) {
      if (wanted <= above + own[i]) {
        found[0] = threadIdx.x * each + i, found[1] = above, found[2] = own[i];
        break;
      }
      above += own[i];
    }
  __syncthreads();
  const unsigned key = known | (mask - found[0]) << Shift, left = wanted - found[1];
  const bool done = left == found[2];
  int last = a.most;
  if (Shift == 0 && !done) {  // a tie: the first entries with this key
    unsigned before = 0;
    for (int base = 0; base < n && before < left; base += threads) {
      const int t = base + static_cast<int>(threadIdx.x);
      const bool same = t < n && score_key(__ldcg(scores + t)) == key;
      unsigned of_block;
      const unsigned place = before + block_scan(same, scan, of_block);
      if (same && place + 1 == left) found[0] = static_cast<unsigned>(t);
      before += of_block;
    }
    __syncthreads();
    last = static_cast<int>(found[0]);
  }
  if (threadIdx.x == 0) worst.key = key, worst.wanted = left, worst.last = last, worst.done = done, worst.arrived = 0;
}

// Blocks as before. They share the list.
__global__ void __launch_bounds__(threads) overlap_kernel(const __grid_constant__ Args a) {
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.y / a.window, row = blockIdx.z;
  if (!leads(a, row, head)) return;
  const std::int64_t at = a.lists.at(row);
  const int n = min(a.kv.tokens(row, head), a.most), count = a.lists.count(at, head);
  Worst& of = a.worst[std::int64_t(row) * gridDim.y + blockIdx.y];
  const unsigned key = of.key;
  const int last = of.last;
  const bool all = of.done == 2;
  const float* scores = &a.scores(row, blockIdx.y, 0);
  unsigned both = 0;
#pragma unroll 4
  for (int x = blockIdx.x * threads + threadIdx.x; x < count; x += gridDim.x * threads) {
    const int token = a.lists.index(at, head, x);
    if (token >= n) continue;
    const unsigned own = all ? 0 : score_key(__ldcg(scores + token));
    both += all || own > key || (own == key && token <= last);
  }
  both = __reduce_add_sync(all_lanes, both);
  if (threadIdx.x % 32 == 0 && both > 0) atomicAdd(&of.both, both);
}

__global__ void __launch_bounds__(median_threads) median_kernel(const __grid_constant__ Args a) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.x;
  for (int head = threadIdx.x; head < a.kv.kv_heads; head += median_threads) {
    const int leader = a.leaders[head];
    bool moved = leader >= 0 && leads(a, row, leader);
    if (moved) {
      float x[most_overlaps];
      const Worst* of = a.worst + (std::int64_t(row) * a.kv.kv_heads + leader) * a.window;
      const auto count = static_cast<float>(a.lists.count(a.lists.at(row), leader));
      for (int i = 0; i < a.window; ++i) x[i] = static_cast<float>(of[i].both) / count;
      moved = median_of(x, a.window) < a.threshold;
    }
    a.drifted(a.kv.kv.slots[row], head) = moved;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < a.kv.kv_heads * a.window; i += median_threads) {
    Worst& of = a.worst[std::int64_t(row) * a.kv.kv_heads * a.window + i];
    of.both = 0, of.done = 0;
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
  const std::size_t units = std::size_t(kv.rows) * static_cast<std::size_t>(kv.kv_heads * a.window);
  a.worst = static_cast<Worst*>(zeroed_scratch(s.handle(), op, units * sizeof(Worst)));
  a.bins = static_cast<unsigned*>(zeroed_scratch(s.handle(), "drifted_heads bins", units * digit_bins * sizeof(int)));
  const dim3 grid(std::clamp((a.most + tokens_of_block - 1) / tokens_of_block, 1, most_blocks), kv.kv_heads * a.window,
                  kv.rows);
  for (const auto kernel : {digit_kernel<21, 11>, digit_kernel<10, 11>, digit_kernel<0, 10>, overlap_kernel})
    launch(op, kernel, grid, threads, 0, stream_of(s), true, a);
  launch(op, median_kernel, dim3(kv.rows), median_threads, 0, stream_of(s), true, a);
}
KVLAB_ON_CUDA(drifted_heads, drifted_heads_cuda);

}  // namespace kvlab::ops
