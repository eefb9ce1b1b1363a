// Overlaps of lists with the best tokens by a row of scores. Several blocks share a row, and each launch of them fixes
// some bits of the worst key among the best: the last block of a row to arrive finds them. Then tokens of the list that
// reach the key are counted, and the last block of all heads decides.
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

constexpr int threads = 256, digit_bits = 11, digit_bins = 1 << digit_bits;
constexpr int tokens_of_block = 4096, most_blocks = 32;

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
  DriftRule rule;
  DriftWatch watch;
  HeadFlags drifted;
  Worst* worst;       // [row, kv_head]
  unsigned* bins;     // [row, kv_head, digit_bins]
  unsigned* arrived;  // [row] blocks of overlap_kernel
  int most;
};

__device__ __forceinline__ bool leads(const Args& a, int row, int head) {
  return a.leaders[head] == head && a.lists.count(a.lists.at(row), head) > 0;
}
// Whether a leader's scores of this step count.
__device__ __forceinline__ bool scored(const Args& a, int row, int head) {
  const int slot = a.kv.kv.slots[row];
  return leads(a, row, head) && !a.watch.rests(slot, head) &&
         step_counts(a.rule, steps_to_check(a.rule, a.rule.steps[slot]));
}

// Blocks [share of a row, kv_head, row]. Shift: lowest bit of this launch's digit.
template <int Shift, int Bits>
__global__ void __launch_bounds__(threads) digit_kernel(const __grid_constant__ Args a) {
  __shared__ unsigned bins[digit_bins], scan[32], found[3];
  __shared__ bool latest;
  constexpr bool first_digit = Shift + Bits == 32;
  constexpr int batch = 8;
  constexpr unsigned mask = (1u << Bits) - 1, each = digit_bins / threads;
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.y, row = blockIdx.z;
  if (!scored(a, row, head)) return;
  const std::int64_t at = std::int64_t(row) * gridDim.y + head;
  const int n = min(a.kv.tokens(row, head), a.most), count = a.lists.count(a.lists.at(row), head);
  Worst& worst = a.worst[at];
  if (first_digit ? count >= n : worst.done != 0) {
    if (first_digit && blockIdx.x == 0 && threadIdx.x == 0) worst.done = 2;
    return;
  }
  const unsigned known = first_digit ? 0 : worst.key;
  for (int i = threadIdx.x; i < digit_bins; i += threads) bins[i] = 0;
  __syncthreads();
  const float* scores = &a.scores(row, head, 0);
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

// This block's share of the tokens of the list that are among the best.
__device__ __forceinline__ void count_overlap(const Args& a, int row, int head) {
  const std::int64_t at = a.lists.at(row);
  const int n = min(a.kv.tokens(row, head), a.most), count = a.lists.count(at, head);
  Worst& of = a.worst[std::int64_t(row) * gridDim.y + head];
  const unsigned key = of.key;
  const int last = of.last;
  const bool all = of.done == 2;
  const float* scores = &a.scores(row, head, 0);
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

// Blocks as before. They share the list.
__global__ void __launch_bounds__(threads) overlap_kernel(const __grid_constant__ Args a) {
  __shared__ bool latest;
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.z, heads = gridDim.y;
  if (scored(a, row, blockIdx.y)) count_overlap(a, row, blockIdx.y);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) latest = atomicAdd(a.arrived + row, 1u) + 1 == gridDim.x * gridDim.y;
  __syncthreads();
  if (!latest) return;
  __threadfence();
  const int slot = a.kv.kv.slots[row], left = steps_to_check(a.rule, a.rule.steps[slot]);
  Worst* const worst = a.worst + std::int64_t(row) * heads;
  for (int head = threadIdx.x; head < heads; head += threads) {
    Worst& of = worst[head];
    const int count = a.lists.count(a.lists.at(row), head);
    Watched w = {};
    if (leads(a, row, head)) {
      const int now = scored(a, row, head) ? count - static_cast<int>(__ldcg(&of.both)) : -1;
      w = watch_step(a.rule, &a.watch.missed(slot, head, 0), count, now, left);
      a.watch.rests(slot, head) = w.rests;
    }
    of.both = w.drifted, of.done = 0;
  }
  __syncthreads();
  for (int head = threadIdx.x; head < heads; head += threads) {
    const int leader = a.leaders[head];
    a.drifted(slot, head) = leader >= 0 && worst[leader].both;
  }
  __syncthreads();
  for (int head = threadIdx.x; head < heads; head += threads) worst[head].both = 0;
  if (threadIdx.x == 0) a.arrived[row] = 0;
}

__global__ void forget_kernel(const std::int32_t* slots, const __grid_constant__ DriftWatch watch) {
  const int slot = slots[blockIdx.y], head = blockIdx.x;
  for (int i = threadIdx.x; i < watch.missed.extent[2]; i += blockDim.x) watch.missed(slot, head, i) = 0;
  if (threadIdx.x == 0) watch.rests(slot, head) = 0;
}

}  // namespace

static void drifted_heads_cuda(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists,
                               const DriftRule& rule, const std::int32_t* leaders, const DriftWatch& watch,
                               HeadFlags drifted, Stream s) {
  const char* op = "drifted_heads";
  if (kv.rows == 0) return;
  Args a = {};
  a.kv = DeviceKv(kv);
  a.scores = scores;
  a.lists = lists;
  a.leaders = leaders;
  a.rule = rule, a.watch = watch;
  a.drifted = drifted;
  a.most = static_cast<int>(std::min(kv.table.extent[2] * kv.page_size, scores.extent[2]));
  const std::size_t units = std::size_t(kv.rows) * static_cast<std::size_t>(kv.kv_heads);
  a.worst = static_cast<Worst*>(zeroed_scratch(s.handle(), op, units * sizeof(Worst)));
  a.bins = static_cast<unsigned*>(zeroed_scratch(s.handle(), "drifted_heads bins", units * digit_bins * sizeof(int)));
  a.arrived = static_cast<unsigned*>(
      zeroed_scratch(s.handle(), "drifted_heads arrived", std::size_t(kv.rows) * sizeof(unsigned)));
  const dim3 grid(std::clamp((a.most + tokens_of_block - 1) / tokens_of_block, 1, most_blocks), kv.kv_heads, kv.rows);
  for (const auto kernel : {digit_kernel<21, 11>, digit_kernel<10, 11>, digit_kernel<0, 10>, overlap_kernel})
    launch(op, kernel, grid, threads, 0, stream_of(s), true, a);
}
KVLAB_ON_CUDA(drifted_heads, drifted_heads_cuda);

static void forget_overlaps_cuda(const PagedKv& kv, const DriftWatch& watch, Stream s) {
  if (kv.rows == 0) return;
  forget_kernel<<<dim3(kv.kv_heads, kv.rows), 32, 0, stream_of(s)>>>(kv.slots, watch);
  check_launch("forget_overlaps");
}
KVLAB_ON_CUDA(forget_overlaps, forget_overlaps_cuda);

}  // namespace kvlab::ops
