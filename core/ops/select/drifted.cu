// Overlaps of lists with the best tokens by a row of scores. Several blocks share a row, and each launch of them fixes
// some bits of the worst key among the best: the last block of a row to arrive finds them. Then tokens of the list that
// reach the key are counted, and the last block of all heads decides.
#include "ops/select/drifted.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <span>
#include <tuple>

#include "base/joined_calls.hpp"
#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "ops/page/paged.cuh"
#include "ops/score/logits.hpp"
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

constexpr int most_layers = 32;  // of a launch

// Where a layer's memory begins. The rest is that of Args.
struct Layer {
  const std::int32_t* length;
  const float* scores;
  std::int32_t *index, *count;  // of the lists
  const std::int32_t* leaders;
  float* missed;
  std::uint8_t *rests, *drifted;
  int lead;
};
struct Args {
  Layer layers[most_layers];
  View<const std::int32_t, 2> length;
  View<const float, 3> scores;
  IndexList lists;
  DriftWatch watch;
  HeadFlags drifted;
  DriftRule rule;
  const std::int32_t* slots;
  Worst* worst;       // [layer and row, kv_head]
  unsigned* bins;     // [layer and row, kv_head, digit_bins]
  unsigned* arrived;  // [layer and row] blocks of overlap_kernel
  int rows, most;
};
static_assert(sizeof(Args) < 4000, "a kernel's arguments");

// A row of a layer, to which blocks belong by their z.
struct Of {
  const Args& a;
  const Layer& layer;
  std::int64_t list;
  int row, slot;

  __device__ explicit Of(const Args& args)
      : a(args), layer(args.layers[blockIdx.z / args.rows]), row(static_cast<int>(blockIdx.z) % args.rows) {
    slot = a.slots[row], list = a.lists.at(row);
  }
  __device__ int tokens(int head) const {
    return min(layer.length[slot * a.length.stride[0] + head * a.length.stride[1]], a.most);
  }
  __device__ int count(int head) const {
    return layer.count[list * a.lists.count.stride[0] + head * a.lists.count.stride[1]];
  }
  __device__ int token(int head, int i) const {
    const std::int64_t* stride = a.lists.index.stride.data();
    return layer.index[list * stride[0] + head * stride[1] + i * stride[2]];
  }
  __device__ const float* scores(int head) const {
    return layer.scores + row * a.scores.stride[0] + head * a.scores.stride[1];
  }
  __device__ float* missed(int head) const {
    return layer.missed + slot * a.watch.missed.stride[0] + head * a.watch.missed.stride[1];
  }
  __device__ std::uint8_t& rests(int head) const {
    return layer.rests[slot * a.watch.rests.stride[0] + head * a.watch.rests.stride[1]];
  }
  __device__ std::uint8_t& drifted(int head) const {
    return layer.drifted[slot * a.drifted.stride[0] + head * a.drifted.stride[1]];
  }
  __device__ DriftRule rule() const {
    DriftRule r = a.rule;
    r.lead = layer.lead;
    return r;
  }
  __device__ bool leads(int head) const { return layer.leaders[head] == head && count(head) > 0; }
  __device__ int left() const { return steps_to_check(rule(), a.rule.steps[slot]); }
  // Whether a leader's scores of this step count.
  __device__ bool scored(int head) const { return leads(head) && !rests(head) && step_counts(a.rule, left()); }
};

// Blocks [share of a row, kv_head, layer and row]. Shift: lowest bit of this launch's digit.
template <int Shift, int Bits>
__global__ void __launch_bounds__(threads) digit_kernel(const __grid_constant__ Args a) {
  __shared__ unsigned bins[digit_bins], scan[32], found[3];
  __shared__ bool latest;
  constexpr bool first_digit = Shift + Bits == 32;
  constexpr int batch = 8;
  constexpr unsigned mask = (1u << Bits) - 1, each = digit_bins / threads;
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.y;
  const Of of(a);
  if (!of.scored(head)) return;
  const std::int64_t at = std::int64_t{blockIdx.z} * gridDim.y + head;
  const int n = of.tokens(head), count = of.count(head);
  Worst& worst = a.worst[at];
  if (first_digit ? count >= n : worst.done != 0) {
    if (first_digit && blockIdx.x == 0 && threadIdx.x == 0) worst.done = 2;
    return;
  }
  const unsigned known = first_digit ? 0 : worst.key;
  for (int i = threadIdx.x; i < digit_bins; i += threads) bins[i] = 0;
  __syncthreads();
  const float* scores = of.scores(head);
  const int share = (n + gridDim.x - 1) / static_cast<int>(gridDim.x), begin = blockIdx.x * share,
            end = min(n, begin + share);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = begin + static_cast<int>(threadIdx.x); first - lane < end; first += batch * threads) {
    float x[batch] = {};
#pragma unroll
    for (int i = 0; i < batch; ++i)  // all loads first: none waits for another
      if (first + i * threads < end) x[i] = __ldcg(scores + first + i * threads);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const bool there = first + i * threads < end;
      const unsigned key = score_key(x[i]);
      if constexpr (first_digit) {  // many shares of a softmax have the same one
        const unsigned digit = there ? mask - (key >> Shift) : digit_bins, peers = __match_any_sync(all_lanes, digit);
        if (there && lane == __ffs(peers) - 1) atomicAdd(&bins[digit], static_cast<unsigned>(__popc(peers)));
      } else if (there && key >> (Shift + Bits) == known >> (Shift + Bits)) {
        atomicAdd(&bins[mask - (key >> Shift & mask)], 1u);
      }
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
__device__ __forceinline__ void count_overlap(const Of& of, int head, Worst& worst) {
  const int n = of.tokens(head), count = of.count(head);
  const unsigned key = worst.key;
  const int last = worst.last;
  const bool all = worst.done == 2;
  const float* scores = of.scores(head);
  unsigned both = 0;
#pragma unroll 4
  for (int x = blockIdx.x * threads + threadIdx.x; x < count; x += gridDim.x * threads) {
    const int token = of.token(head, x);
    if (token >= n) continue;
    const unsigned own = all ? 0 : score_key(__ldcg(scores + token));
    both += all || own > key || (own == key && token <= last);
  }
  both = __reduce_add_sync(all_lanes, both);
  if (threadIdx.x % 32 == 0 && both > 0) atomicAdd(&worst.both, both);
}

// Blocks as before. They share the list.
__global__ void __launch_bounds__(threads) overlap_kernel(const __grid_constant__ Args a) {
  __shared__ bool latest;
  let_successor_start();
  wait_for_predecessor();
  const int heads = gridDim.y;
  const Of of(a);
  Worst* const worst = a.worst + std::int64_t{blockIdx.z} * heads;
  if (of.scored(blockIdx.y)) count_overlap(of, blockIdx.y, worst[blockIdx.y]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) latest = atomicAdd(a.arrived + blockIdx.z, 1u) + 1 == gridDim.x * gridDim.y;
  __syncthreads();
  if (!latest) return;
  __threadfence();
  for (int head = threadIdx.x; head < heads; head += threads) {
    const int count = of.count(head);
    Watched w = {};
    if (of.leads(head)) {
      const int now = of.scored(head) ? count - static_cast<int>(__ldcg(&worst[head].both)) : -1;
      w = watch_step(of.rule(), of.missed(head), count, now, of.left());
      of.rests(head) = w.rests;
    }
    worst[head].both = w.drifted, worst[head].done = 0;
  }
  __syncthreads();
  for (int head = threadIdx.x; head < heads; head += threads) {
    const int leader = of.layer.leaders[head];
    of.drifted(head) = leader >= 0 && worst[leader].both;
  }
  __syncthreads();
  for (int head = threadIdx.x; head < heads; head += threads) worst[head].both = 0;
  if (threadIdx.x == 0) a.arrived[blockIdx.z] = 0;
}

__global__ void forget_kernel(const std::int32_t* slots, const __grid_constant__ DriftWatch watch) {
  const int slot = slots[blockIdx.y], head = blockIdx.x;
  for (int i = threadIdx.x; i < watch.missed.extent[2]; i += blockDim.x) watch.missed(slot, head, i) = 0;
  if (threadIdx.x == 0) watch.rests(slot, head) = 0;
}

}  // namespace

// What calls that share launches have in common.
static auto common_of(const DriftedHeads& c) {
  return std::tuple(
      std::tuple(c.kv.rows, c.kv.kv_heads, c.kv.page_size, c.kv.slots, c.kv.table.extent[2], c.kv.length.stride,
                 c.scores.extent[2], c.scores.stride, c.lists.index.stride, c.lists.count.stride, c.lists.slots),
      std::tuple(c.watch.missed.stride, c.watch.rests.stride, c.drifted.stride, c.rule.threshold, c.rule.window,
                 c.rule.period, c.rule.steps, c.stream.handle()));
}

static void run(std::span<const DriftedHeads> calls) {
  const char* op = "drifted_heads";
  const DriftedHeads& first = calls[0];
  const PagedKv& kv = first.kv;
  const Stream s = first.stream;
  if (kv.rows == 0) return;
  Args a = {};
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const DriftedHeads& c = calls[i];
    a.layers[i] = {c.kv.length.data,    c.scores.data,      c.lists.index.data, c.lists.count.data, c.leaders,
                   c.watch.missed.data, c.watch.rests.data, c.drifted.data,     c.rule.lead};
  }
  a.length = kv.length, a.scores = first.scores, a.lists = first.lists;
  a.watch = first.watch, a.drifted = first.drifted, a.rule = first.rule;
  a.slots = kv.slots, a.rows = kv.rows;
  a.most = static_cast<int>(std::min(kv.table.extent[2] * kv.page_size, first.scores.extent[2]));
  const auto layers_and_rows = static_cast<unsigned>(calls.size()) * kv.rows;
  const std::size_t units = std::size_t{layers_and_rows} * static_cast<std::size_t>(kv.kv_heads);
  a.worst = static_cast<Worst*>(zeroed_scratch(s.handle(), op, units * sizeof(Worst)));
  a.bins = static_cast<unsigned*>(zeroed_scratch(s.handle(), "drifted_heads bins", units * digit_bins * sizeof(int)));
  a.arrived = static_cast<unsigned*>(
      zeroed_scratch(s.handle(), "drifted_heads arrived", std::size_t{layers_and_rows} * sizeof(unsigned)));
  const int share = tokens_of_block * blocks_fewer(layers_and_rows);
  const dim3 grid(std::clamp((a.most + share - 1) / share, 1, most_blocks), kv.kv_heads, layers_and_rows);
  for (const auto kernel : {digit_kernel<21, 11>, digit_kernel<10, 11>, digit_kernel<0, 10>, overlap_kernel})
    launch(op, kernel, grid, threads, 0, stream_of(s), true, a);
}

static void drifted_in_layers_cuda(const std::vector<DriftedHeads>& calls) {
  for_each_alike(std::span(calls), most_layers, common_of, run);
}
KVLAB_ON_CUDA(drifted_in_layers, drifted_in_layers_cuda);

static void drifted_heads_cuda(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists,
                               const DriftRule& rule, const std::int32_t* leaders, const DriftWatch& watch,
                               HeadFlags drifted, Stream s) {
  const DriftedHeads call{kv, scores, lists, rule, leaders, watch, drifted, s};
  run({&call, 1});
}
KVLAB_ON_CUDA(drifted_heads, drifted_heads_cuda);

static void forget_overlaps_cuda(const PagedKv& kv, const DriftWatch& watch, Stream s) {
  if (kv.rows == 0) return;
  forget_kernel<<<dim3(kv.kv_heads, kv.rows), 32, 0, stream_of(s)>>>(kv.slots, watch);
  check_launch("forget_overlaps");
}
KVLAB_ON_CUDA(forget_overlaps, forget_overlaps_cuda);

}  // namespace kvlab::ops
