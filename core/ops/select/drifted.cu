// Overlaps of lists with the best tokens by a row of scores. Few heads have work in a step, so one block lists them,
// and a row's parts go to many blocks. Launches in a row sum up the softmax of logits, make scores of them, find the
// worst key among the best digit by digit, and count the tokens of the list that reach it. No block waits for another
// one. Of a head's blocks the last one finds the digit, and decides.
#include "ops/select/drifted.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <cstring>
#include <span>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/joined_calls.hpp"
#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "ops/page/paged.cuh"
#include "ops/score/logits.cuh"
#include "ops/score/logits.hpp"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 256, digit_bits = 8, digit_bins = 1 << digit_bits, first_shift = 32 - digit_bits;
static_assert(digit_bins == threads, "a thread has a bin");
constexpr int plan_threads = 1024;
constexpr int sum_threads = 1024, sum_parts = sum_threads / threads, sum_warps = sum_threads / 32;  // of a softmax

constexpr int tokens_of_part = 12288;  // of an item, at most
constexpr int most_layers = 32;        // of a launch
constexpr int most_half = 32;          // of a kernel, where the launch reads logits

// A head with work.
struct alignas(16) Item {
  int at;  // layer and row
  std::int16_t head;
  bool pools, scored;  // it has logits; its overlap counts
  int tokens, count;   // count: of the list

  // Whether the tokens of the list are fewer than all.
  __device__ bool counts() const { return scored && count < tokens; }
};

// Of a row of scores: the key of the worst entry among the best, and of the entries with this key the last one.
struct alignas(16) Worst {
  unsigned key;     // the bits that are known
  unsigned wanted;  // entries still to choose among those with these bits
  int last;
  bool done;  // entries with the known bits are all chosen
};

// Where a layer's memory begins. The rest is that of Args.
struct Layer {
  const std::int32_t* length;
  float* scores;
  std::int32_t *index, *count;  // of the lists
  const std::int32_t* leaders;
  float* missed;
  std::uint8_t *rests, *drifted;
  const float* logits;
  std::int64_t logits_row;
  const std::int32_t* of_logits;
  const std::uint8_t *flags, *classes;  // of heads with logits
  int lead, number;                     // number: of the layer in the model, where drift is injected
};
struct Args {
  Layer layers[most_layers];
  View<const std::int32_t, 2> length;
  View<float, 3> scores;
  IndexList lists;
  DriftWatch watch;
  HeadFlags drifted;
  DriftRule rule;
  HeadLogits logits;
  VotePooling pooling;
  InjectedDrift injected;
  const std::int32_t* slots;
  int layers_and_rows, rows, kv_heads, most;
  int parts;  // of an item
  Item* items;
  int* item_count;
  float2* sums;           // [item, warp of sum_threads, query head of the group]
  Worst* worst;           // [item]
  unsigned *bins, *both;  // [item, bin]; [item] tokens of the list that are among the best
  int* arrived;           // [item] blocks that are done; like bins and both, zero between launches
};
static_assert(sizeof(Args) < 8000, "a kernel's arguments, of which CUDA takes 32764 bytes");

// A row of a layer.
struct Of {
  const Args& a;
  const Layer& layer;
  std::int64_t list;
  int row, slot;

  __device__ Of(const Args& args, int at) : a(args), layer(args.layers[at / args.rows]), row(at % args.rows) {
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
  __device__ float* scores(int head) const {
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
  // Whether attention left logits.
  __device__ bool has_logits(int head) const {
    if (!layer.logits || layer.of_logits[head] < 0) return false;
    Heads heads = a.logits.heads;
    heads.flags.data = const_cast<std::uint8_t*>(layer.flags), heads.classes = layer.classes;
    return heads.on(slot, head) && tokens(head) <= a.logits.out.extent[2];
  }
  __device__ const float* logits(int head) const {
    return layer.logits + row * layer.logits_row + layer.of_logits[head] * a.logits.out.stride[1];
  }
  __device__ DriftRule rule() const {
    DriftRule r = a.rule;
    r.lead = layer.lead;
    return r;
  }
  __device__ InjectedChecks checks(int head) const {
    InjectedDrift injected = a.injected;
    injected.layer = layer.number;
    return injected_checks(injected, slot, head, a.rule.steps[slot]);
  }
  __device__ bool leads(int head) const { return layer.leaders[head] == head && count(head) > 0; }
  __device__ int left() const { return steps_to_check(rule(), a.rule.steps[slot]); }
  // Whether a leader's scores of this step count.
  __device__ bool scored(int head) const { return leads(head) && !rests(head) && step_counts(a.rule, left()); }

  // By one thread. now: as in watch_step.
  __device__ void decide(int head, int now) const {
    Watched watched = {};
    if (leads(head)) {
      watched = watch_step(rule(), missed(head), count(head), now, left(), checks(head));
      rests(head) = watched.rests;
    }
    const std::int32_t* leaders = layer.leaders;
    if (leaders[head] < 0 || leaders[leaders[head]] != leaders[head]) drifted(head) = 0;
    if (leaders[head] != head) return;
    for (int h = 0; h < a.kv_heads; ++h)
      if (leaders[h] == head) drifted(h) = watched.drifted;
  }
};

constexpr int tokens_each(int group) { return group > 4 ? 2 : 4; }  // of a thread, in a tile

struct Shared {
  unsigned bins[digit_bins], scan[32];
  Worst worst;
  bool comes_last;
  float2 sums[sum_warps * 8], stats[8];
};

// Loads 16 bytes that other blocks have written.
template <class T>
__device__ __forceinline__ T load_new(const T* from) {
  static_assert(sizeof(T) == sizeof(int4));
  const int4 words = __ldcg(reinterpret_cast<const int4*>(from));
  T x;
  std::memcpy(&x, &words, sizeof x);
  return x;
}

// Calls f(number of an item, the item, part) for the block's share of all parts. back: the last item comes first.
// Launches take turns, so that each begins with what the L2 cache still has.
template <class F>
__device__ __forceinline__ void for_each_part(const Args& a, int parts, bool back, const F& f) {
  let_successor_start();
  wait_for_predecessor();
  const int items = __ldcg(a.item_count);
#pragma unroll 1
  for (int x = blockIdx.x; x < items * parts; x += gridDim.x) {
    const int i = back ? items - 1 - x / parts : x / parts;
    f(i, load_new(a.items + i), x % parts);
  }
}

// Calls f(score) for n scores that earlier launches have written.
template <class F>
__device__ __forceinline__ void for_each_score(const float* scores, int n, const F& f) {
  constexpr int batch = 8;
  const int mine = static_cast<int>(threadIdx.x),
            past = static_cast<int>(reinterpret_cast<std::uintptr_t>(scores) / 4 % 4);
  const int first = min(n, (4 - past) % 4), vectors = (n - first) / 4, rest = first + vectors * 4;
  if (mine < first) f(__ldcg(scores + mine));
  const auto* all = reinterpret_cast<const float4*>(scores + first);
#pragma unroll 1
  for (int v = mine; v < vectors; v += batch * threads) {
    float4 x[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i)  // all loads first: none waits for another
      x[i] = __ldcg(all + min(v + i * threads, vectors - 1));
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (v + i * threads >= vectors) break;
      f(x[i].x), f(x[i].y), f(x[i].z), f(x[i].w);
    }
  }
  if (rest + mine < n) f(__ldcg(scores + rest + mine));
}
template <class F>
__device__ __forceinline__ void for_each_score_of_part(const Args& a, const float* scores, int n, int part,
                                                       const F& f) {
  const int each = ((n + a.parts - 1) / a.parts + 3) / 4 * 4, begin = min(part * each, n);
  for_each_score(scores + begin, min(each, n - begin), f);
}

__device__ __forceinline__ void clear_bins(Shared& s) {
  __syncthreads();
  s.bins[threadIdx.x] = 0;
  __syncthreads();
}
// Bins count from the greatest digit on.
__device__ __forceinline__ void count_digit(unsigned key, int shift, Shared& s) {
  atomicAdd(&s.bins[digit_bins - 1 - (key >> shift & (digit_bins - 1))], 1u);
}

// Of the entries with the key, the last of the first `wanted`. Each round finds the warp that has it among its own.
__device__ __noinline__ int last_of_tie(unsigned key, unsigned wanted, const float* scores, int n, Shared& s) {
  constexpr int warps = threads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int begin = 0, end = n;
  while (end - begin > 1) {
    const int each = (end - begin + warps - 1) / warps, from = begin + warp * each, to = min(from + each, end);
    unsigned own = 0;
#pragma unroll 8
    for (int t = from + lane; t < to; t += 32) own += score_key(__ldcg(scores + t)) == key;
    own = __reduce_add_sync(all_lanes, own);
    if (lane == 0) s.scan[warp] = own;
    __syncthreads();
    int of = 0;
    for (; s.scan[of] < wanted; ++of) wanted -= s.scan[of];
    __syncthreads();
    begin += of * each, end = min(begin + each, end);
  }
  return begin;
}

// Adds the block's bins of a digit to those of the item. The last of its blocks finds the digit of w.
__device__ __forceinline__ void take_digit(const Args& a, int i, const Item& item, Worst w, int shift, Shared& s) {
  unsigned* const bin = a.bins + std::int64_t{i} * digit_bins + threadIdx.x;
  __syncthreads();
  if (s.bins[threadIdx.x] > 0) atomicAdd(bin, s.bins[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) s.comes_last = add_released(a.arrived + i, 1) == a.parts - 1;
  __syncthreads();
  if (!s.comes_last) return;
  const unsigned inside = __ldcg(bin);
  *bin = 0;
  unsigned total;
  const unsigned above = block_scan(inside, s.scan, total);
  if (above < w.wanted && w.wanted <= above + inside) {
    w.key |= (digit_bins - 1 - threadIdx.x) << shift, w.wanted -= above;
    w.done = w.wanted == inside, w.last = a.most;
    s.worst = w;
  }
  __syncthreads();
  w = s.worst;
  if (shift == 0 && !w.done) w.last = last_of_tie(w.key, w.wanted, Of(a, item.at).scores(item.head), item.tokens, s);
  if (threadIdx.x == 0) a.worst[i] = w, a.arrived[i] = 0;
}

// One block lists the heads that have work. For the others it decides.
__global__ void __launch_bounds__(plan_threads) plan_kernel(const __grid_constant__ Args a) {
  __shared__ int count;
  let_successor_start();
  wait_for_predecessor();
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < a.layers_and_rows * a.kv_heads; i += plan_threads) {
    const int at = i / a.kv_heads, head = i % a.kv_heads;
    const Of of(a, at);
    const int n = of.tokens(head);
    const bool pools = n > 0 && of.has_logits(head), scored = of.scored(head);
    if (pools || scored)
      a.items[atomicAdd(&count, 1)] = {at, static_cast<std::int16_t>(head), pools, scored, n, of.count(head)};
    if (!scored) of.decide(head, -1);
  }
  __syncthreads();
  if (threadIdx.x == 0) *a.item_count = count;
}

template <int Group>
__global__ void __launch_bounds__(threads, 4) sum_kernel(const __grid_constant__ Args a) {
  for_each_part(a, sum_parts, false, [&](int i, const Item& item, int part) {
    if (item.pools)
      softmax_sums<Group, sum_threads, threads>(Of(a, item.at).logits(item.head), item.tokens, part,
                                                a.sums + std::int64_t{i} * sum_warps * Group);
  });
}

// Pools a part of a head's logits, if there are some, and counts the first digit of its scores. Group 0: it reads
// scores.
template <int Group, bool Fives>
__device__ __forceinline__ void score_part(const Args& a, int i, const Item& item, int part, float* memory, Shared& s) {
  float* const scores = Of(a, item.at).scores(item.head);
  const int n = item.tokens;
  const bool counts = item.counts();
  const auto count = [&](float x) { count_digit(score_key(x), first_shift, s); };
  clear_bins(s);
  if constexpr (Group > 0) {
    if (item.pools) {
      const float* const logits = Of(a, item.at).logits(item.head);
      softmax_stats<Group, sum_warps>(a.sums + std::int64_t{i} * sum_warps * Group, s.sums, s.stats);
      if constexpr (Fives) {
        const bool vectors = reinterpret_cast<std::uintptr_t>(scores) % sizeof(float4) == 0;
        pool_fives<Group, threads, tokens_each(Group)>(
            logits, n, s.stats, a.pooling.rule, part, a.parts, memory, [&](int t, float4 x, int some) {
              if (vectors && some == 4)
                *reinterpret_cast<float4*>(scores + t) = x;
              else
                for (int i = 0; i < some; ++i) scores[t + i] = i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
              if (!counts) return;
              count(x.x);
              if (some > 1) count(x.y);
              if (some > 2) count(x.z);
              if (some > 3) count(x.w);
            });
      } else {
        const int half = a.pooling.kind == Pooling::none ? 0 : a.pooling.kernel / 2;
        pool_tiles<Group, -1, threads, tokens_each(Group)>(logits, n, s.stats, a.pooling, half, part, a.parts, memory,
                                                           [&](int t, float x) {
                                                             scores[t] = x;
                                                             if (counts) count(x);
                                                           });
      }
    }
  }
  if (!counts) return;
  if (Group == 0 || !item.pools) for_each_score_of_part(a, scores, n, part, count);
  take_digit(a, i, item, {.key = 0, .wanted = static_cast<unsigned>(item.count)}, first_shift, s);
}

template <int Group, bool Fives>
__global__ void __launch_bounds__(threads, 4) score_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared s;
  for_each_part(a, a.parts, true, [&](int i, const Item& item, int part) {
    score_part<Group, Fives>(a, i, item, part, reinterpret_cast<float*>(memory), s);
  });
}

__global__ void __launch_bounds__(threads, 4) digit_kernel(const __grid_constant__ Args a, int shift) {
  __shared__ Shared s;
  for_each_part(a, a.parts, shift / digit_bits % 2 == 1, [&](int i, const Item& item, int part) {
    if (!item.counts()) return;
    const Worst w = load_new(a.worst + i);
    if (w.done) return;
    clear_bins(s);
    for_each_score_of_part(a, Of(a, item.at).scores(item.head), item.tokens, part, [&](float x) {
      const unsigned key = score_key(x);
      if ((key ^ w.key) >> (shift + digit_bits) == 0) count_digit(key, shift, s);
    });
    take_digit(a, i, item, w, shift, s);
  });
}

// The tokens of a part of the list that are among the best, of the block.
__device__ __forceinline__ unsigned overlap(const Of& of, const Item& item, int part, const Worst& w, Shared& s) {
  constexpr int batch = 8;
  const int n = item.tokens, parts = of.a.parts, each = (item.count + parts - 1) / parts;
  const int end = min((part + 1) * each, item.count);
  const bool all = !item.counts();
  const float* scores = of.scores(item.head);
  unsigned both = 0, total;
  for (int first = part * each + static_cast<int>(threadIdx.x); first < end; first += batch * threads) {
    int token[batch];
    float x[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) token[i] = first + i * threads < end ? of.token(item.head, first + i * threads) : n;
#pragma unroll
    for (int i = 0; i < batch; ++i) x[i] = all || token[i] >= n ? 0.f : __ldcg(scores + token[i]);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const unsigned key = score_key(x[i]);
      both += token[i] < n && (all || key > w.key || (key == w.key && token[i] <= w.last));
    }
  }
  block_scan(both, s.scan, total);
  return total;
}

__global__ void __launch_bounds__(threads, 4) overlap_kernel(const __grid_constant__ Args a) {
  __shared__ Shared s;
  for_each_part(a, a.parts, true, [&](int i, const Item& item, int part) {
    if (!item.scored) return;
    const Of of(a, item.at);
    const unsigned both = overlap(of, item, part, item.counts() ? load_new(a.worst + i) : Worst{}, s);
    if (threadIdx.x != 0) return;
    atomicAdd(a.both + i, both);
    if (add_released(a.arrived + i, 1) != a.parts - 1) return;
    of.decide(item.head, item.count - static_cast<int>(atomicExch(a.both + i, 0u)));
    a.arrived[i] = 0;
  });
}

__global__ void forget_kernel(const std::int32_t* slots, const __grid_constant__ DriftWatch watch) {
  const int slot = slots[blockIdx.y], head = blockIdx.x;
  for (int i = threadIdx.x; i < watch.missed.extent[2]; i += blockDim.x) watch.missed(slot, head, i) = 0;
  if (threadIdx.x == 0) watch.rests(slot, head) = 0;
}

}  // namespace

// What calls that share launches have in common.
static auto common_of(const DriftedHeads& c) {
  const Heads& h = c.logits.heads;
  return std::tuple(
      std::tuple(c.kv.rows, c.kv.kv_heads, c.kv.page_size, c.kv.slots, c.kv.table.extent[2], c.kv.length.stride,
                 c.scores.extent[2], c.scores.stride, c.lists.index.stride, c.lists.count.stride, c.lists.slots),
      std::tuple(c.watch.missed.stride, c.watch.rests.stride, c.drifted.stride, c.rule.threshold, c.rule.window,
                 c.rule.period, c.rule.steps, c.stream.handle()),
      std::tuple(c.logits.out.data != nullptr, c.logits.out.extent[2], c.logits.out.extent[3], c.logits.out.stride[1],
                 c.pooling.kind, c.pooling.kernel, c.pooling.rule),
      std::tuple(h.flags.data != nullptr, h.flags.stride, h.unflagged, h.steps, h.period, h.lead, h.classes != nullptr,
                 h.join, c.injected.share, c.injected.sequence, c.injected.seed));
}

// Sets the memory of the launches.
static void set_scratch(Args& a, int group, Stream s) {
  const auto items = static_cast<std::size_t>(a.layers_and_rows * a.kv_heads);
  const auto of = [&](auto*& to, const char* tag, std::size_t count, auto allocate) {
    to = static_cast<std::remove_reference_t<decltype(to)>>(allocate(s.handle(), tag, count * sizeof *to));
  };
  of(a.items, "drift items", items, fixed_scratch), of(a.item_count, "drift item count", 1, fixed_scratch);
  of(a.sums, "drift sums", items * static_cast<std::size_t>(sum_warps * group), fixed_scratch);
  of(a.worst, "drift worst", items, fixed_scratch);
  of(a.bins, "drift bins", items * digit_bins, zeroed_scratch);
  of(a.both, "drift overlaps", items, zeroed_scratch), of(a.arrived, "drift arrived", items, zeroed_scratch);
}

// group: of logits that the launches pool; 0 = scores are there.
static void launch_watch(const Args& a, int group, Stream s) {
  const int items = a.layers_and_rows * a.kv_heads, most = 8 * multiprocessors();
  const auto start = [&](auto kernel, int parts, int floats, auto... more) {
    launch("drifted_heads", kernel, dim3(static_cast<unsigned>(std::min(items * parts, most))), threads,
           static_cast<std::size_t>(floats) * sizeof(float), stream_of(s), true, a, more...);
  };
  const auto of_group = [&](auto size) {
    constexpr int n = decltype(size)::value;
    start(sum_kernel<n>, sum_parts, 0);
    start(a.pooling.kind == Pooling::average && a.pooling.kernel == 5 ? score_kernel<n, true> : score_kernel<n, false>,
          a.parts, pool_floats<n, threads, tokens_each(n)>);
  };
  launch("drifted_heads", plan_kernel, 1, plan_threads, 0, stream_of(s), true, a);
  switch (group) {
    case 0: start(score_kernel<0, false>, a.parts, 0); break;
    case 1: of_group(std::integral_constant<int, 1>{}); break;
    case 2: of_group(std::integral_constant<int, 2>{}); break;
    case 4: of_group(std::integral_constant<int, 4>{}); break;
    default: of_group(std::integral_constant<int, 8>{});
  }
  for (int shift = first_shift - digit_bits; shift >= 0; shift -= digit_bits) start(digit_kernel, a.parts, 0, shift);
  start(overlap_kernel, a.parts, 0);
}

// Of calls that have all in common: whether the launch pools logits itself.
static bool pools(std::span<const DriftedHeads> calls) {
  const int group = static_cast<int>(calls[0].logits.out.extent[3]);
  const VotePooling& pooling = calls[0].pooling;
  if (group != 1 && group != 2 && group != 4 && group != 8) return false;
  if (pooling.kind != Pooling::none && pooling.kernel / 2 > most_half) return false;
  for (const DriftedHeads& c : calls)
    if (!logit_vectors(c.logits)) return false;
  return true;
}

static void run(std::span<const DriftedHeads> calls) {
  const DriftedHeads& first = calls[0];
  const PagedKv& kv = first.kv;
  const Stream s = first.stream;
  if (kv.rows == 0) return;
  const bool by_logits = first.logits.out.data && pools(calls);
  if (first.logits.out.data && !by_logits) {
    std::vector<PooledLogits> pooled;
    for (const DriftedHeads& c : calls) pooled.push_back({c.kv, c.logits, c.pooling, c.written_scores(), c.stream});
    pooled_in_layers_cuda(pooled);
  }
  Args a = {};
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const DriftedHeads& c = calls[i];
    const HeadLogits logits = by_logits ? c.logits : HeadLogits{};
    a.layers[i] = {
        c.kv.length.data,    c.written_scores().data, c.lists.index.data,   c.lists.count.data, c.leaders,
        c.watch.missed.data, c.watch.rests.data,      c.drifted.data,       logits.out.data,    logits.out.stride[0],
        logits.index,        logits.heads.flags.data, logits.heads.classes, c.rule.lead,        c.injected.layer};
  }
  a.length = kv.length, a.scores = first.written_scores(), a.lists = first.lists;
  a.watch = first.watch, a.drifted = first.drifted, a.rule = first.rule;
  a.logits = first.logits, a.pooling = first.pooling, a.injected = first.injected;
  a.slots = kv.slots, a.rows = kv.rows, a.kv_heads = kv.kv_heads;
  a.layers_and_rows = static_cast<int>(calls.size()) * kv.rows;
  a.most = static_cast<int>(std::min(kv.table.extent[2] * kv.page_size, first.scores.extent[2]));
  a.parts = std::max((a.most + tokens_of_part - 1) / tokens_of_part, 1);
  const int group = by_logits ? static_cast<int>(first.logits.out.extent[3]) : 0;
  set_scratch(a, group, s);
  launch_watch(a, group, s);
}

static void drifted_in_layers_cuda(const std::vector<DriftedHeads>& calls) {
  for_each_alike(std::span(calls), most_layers, common_of, run);
}
KVLAB_ON_CUDA(drifted_in_layers, drifted_in_layers_cuda);

static InjectedDrift drift_of(const PagedKv& kv) {
  return kv.injected && kv.injected->drift ? *kv.injected->drift : InjectedDrift{};
}

static void drifted_heads_cuda(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists,
                               const DriftRule& rule, const std::int32_t* leaders, const DriftWatch& watch,
                               HeadFlags drifted, Stream s) {
  const DriftedHeads call{kv, scores, lists, rule, leaders, watch, drifted, s, {}, {}, drift_of(kv)};
  run({&call, 1});
}
KVLAB_ON_CUDA(drifted_heads, drifted_heads_cuda);

static void drifted_by_logits_cuda(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling,
                                   Scores scores, const TokenList& lists, const DriftRule& rule,
                                   const std::int32_t* leaders, const DriftWatch& watch, HeadFlags drifted, Stream s) {
  const DriftedHeads call{kv, scores, lists, rule, leaders, watch, drifted, s, logits, pooling, drift_of(kv)};
  run({&call, 1});
}
KVLAB_ON_CUDA(drifted_by_logits, drifted_by_logits_cuda);

static void forget_overlaps_cuda(const PagedKv& kv, const DriftWatch& watch, Stream s) {
  if (kv.rows == 0) return;
  forget_kernel<<<dim3(kv.kv_heads, kv.rows), 32, 0, stream_of(s)>>>(kv.slots, watch);
  check_launch("forget_overlaps");
}
KVLAB_ON_CUDA(forget_overlaps, forget_overlaps_cuda);

}  // namespace kvlab::ops
