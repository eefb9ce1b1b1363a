// Overlaps of lists with the best tokens by a row of scores. A block takes a head: it makes the scores of logits, finds
// the worst key among the best by its digits, counts the tokens of the list that reach it, and decides.
#include "ops/select/drifted.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <span>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/joined_calls.hpp"
#include "base/launch.cuh"
#include "ops/page/paged.cuh"
#include "ops/score/logits.cuh"
#include "ops/score/logits.hpp"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 1024, digit_bits = 11, digit_bins = 1 << digit_bits;
constexpr int most_layers = 32;  // of a launch
constexpr int most_half = 32;    // of a kernel, where the launch reads logits

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
  int rows, kv_heads, most;
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
  // The logits that attention left, or null.
  __device__ const float* logits(int head) const {
    if (!layer.logits || layer.of_logits[head] < 0) return nullptr;
    Heads heads = a.logits.heads;
    heads.flags.data = const_cast<std::uint8_t*>(layer.flags), heads.classes = layer.classes;
    if (!heads.on(slot, head) || tokens(head) > a.logits.out.extent[2]) return nullptr;
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
};

constexpr int tokens_each(int group) { return group > 4 ? 2 : 4; }  // of a thread, in a tile

struct Shared {
  unsigned bins[digit_bins], scan[32], found[3];
  float2 parts[threads / 32 * 8], stats[8];
};

// Calls f(token, score) for a row of scores that this block or an earlier launch has written.
template <class F>
__device__ __forceinline__ void for_each_score(const float* scores, int n, const F& f) {
  constexpr int batch = 4;
  const int mine = static_cast<int>(threadIdx.x),
            past = static_cast<int>(reinterpret_cast<std::uintptr_t>(scores) / 4 % 4);
  const int first = min(n, (4 - past) % 4), vectors = (n - first) / 4, rest = first + vectors * 4;
  if (mine < first) f(mine, __ldcg(scores + mine));
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
      const int t = first + (v + i * threads) * 4;
      f(t, x[i].x), f(t + 1, x[i].y), f(t + 2, x[i].z), f(t + 3, x[i].w);
    }
  }
  if (rest + mine < n) f(rest + mine, __ldcg(scores + rest + mine));
}

// Of a row of scores: the key of the worst entry among the best, and of the entries with this key the last one.
struct Worst {
  unsigned key = 0;     // the bits that are known
  unsigned wanted = 0;  // entries still to choose among those with these bits
  int last = 0;
  bool done = false;  // entries with the known bits are all chosen
};

// Finds the digit in the bins, which count entries from the greatest digit on.
template <int Shift, int Bits>
__device__ __forceinline__ void take_digit(Worst& w, Shared& s) {
  constexpr unsigned mask = (1u << Bits) - 1, each = digit_bins / threads;
  unsigned own[each], sum = 0, total;
#pragma unroll
  for (unsigned i = 0; i < each; ++i) own[i] = s.bins[threadIdx.x * each + i], sum += own[i];
  unsigned above = block_scan(sum, s.scan, total);
  if (above < w.wanted && w.wanted <= above + sum)
    for (unsigned i = 0; i < each; ++i) {
      if (w.wanted <= above + own[i]) {
        s.found[0] = threadIdx.x * each + i, s.found[1] = above, s.found[2] = own[i];
        break;
      }
      above += own[i];
    }
  __syncthreads();
  w.key |= (mask - s.found[0]) << Shift, w.wanted -= s.found[1], w.done = w.wanted == s.found[2];
}

__device__ __forceinline__ void clear_bins(Shared& s) {
  __syncthreads();
  for (int i = threadIdx.x; i < digit_bins; i += threads) s.bins[i] = 0;
  __syncthreads();
}

// The bins of a digit, of entries with the known bits above it.
template <int Shift, int Bits>
__device__ __forceinline__ void next_digit(Worst& w, const float* scores, int n, Shared& s) {
  constexpr unsigned mask = (1u << Bits) - 1;
  if (w.done) return;
  clear_bins(s);
  for_each_score(scores, n, [&](int, float x) {
    const unsigned key = score_key(x);
    if (key >> (Shift + Bits) == w.key >> (Shift + Bits)) atomicAdd(&s.bins[mask - (key >> Shift & mask)], 1u);
  });
  __syncthreads();
  take_digit<Shift, Bits>(w, s);
}

// The first entries with the worst key, as many as are wanted.
__device__ __noinline__ int last_of_tie(const Worst& w, const float* scores, int n, Shared& s) {
  unsigned before = 0;
  for (int base = 0; base < n && before < w.wanted; base += threads) {
    const int t = base + static_cast<int>(threadIdx.x);
    const bool same = t < n && score_key(__ldcg(scores + t)) == w.key;
    unsigned of_block;
    const unsigned place = before + block_scan(same, s.scan, of_block);
    if (same && place + 1 == w.wanted) s.found[0] = static_cast<unsigned>(t);
    before += of_block;
  }
  __syncthreads();
  return static_cast<int>(s.found[0]);
}

// The block's number of tokens of the list that are among the best.
__device__ __forceinline__ unsigned overlap(const Of& of, int head, int n, const Worst& w, bool all, Shared& s) {
  constexpr int batch = 8;
  const int count = of.count(head);
  const float* scores = of.scores(head);
  unsigned both = 0, total;
  for (int first = threadIdx.x; first < count; first += batch * threads) {
    int token[batch];
    float x[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) token[i] = first + i * threads < count ? of.token(head, first + i * threads) : n;
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

// Pools a head's logits, if there are some, and counts the first digit of its scores. Group 0: it reads scores.
template <int Group, bool Fives>
__device__ __forceinline__ void score_head(const Of& of, int head, bool counts, float* memory, Shared& s) {
  constexpr int shift = 32 - digit_bits;
  constexpr unsigned mask = (1u << digit_bits) - 1;
  const int n = of.tokens(head);
  float* const scores = of.scores(head);
  const auto count = [&](float x) { atomicAdd(&s.bins[mask - (score_key(x) >> shift)], 1u); };
  if (counts) clear_bins(s);
  if constexpr (Group > 0) {
    if (const float* logits = of.logits(head); logits && n > 0) {
      softmax_stats<Group, threads>(logits, n, s.parts, s.stats);
      if constexpr (Fives) {
        const bool vectors = reinterpret_cast<std::uintptr_t>(scores) % sizeof(float4) == 0;
        pool_fives<Group, threads, tokens_each(Group)>(
            logits, n, s.stats, of.a.pooling.rule, memory, [&](int t, float4 x, int some) {
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
        const int half = of.a.pooling.kind == Pooling::none ? 0 : of.a.pooling.kernel / 2;
        pool_tiles<Group, -1, threads, tokens_each(Group)>(logits, n, s.stats, of.a.pooling, half, 0, 1, memory,
                                                           [&](int t, float x) {
                                                             scores[t] = x;
                                                             if (counts) count(x);
                                                           });
      }
      __syncthreads();
      return;
    }
  }
  if (counts) for_each_score(scores, n, [&](int, float x) { count(x); });
  __syncthreads();
}

template <int Group, bool Fives>
__device__ __forceinline__ void watch_head(const Of& of, int head, float* memory, Shared& s) {
  const bool leads = of.leads(head), scored = of.scored(head);
  const int n = of.tokens(head), count = leads ? of.count(head) : 0;
  const bool counts = scored && count < n;
  score_head<Group, Fives>(of, head, counts, memory, s);
  int now = -1;
  if (scored) {
    Worst w;
    if (counts) {
      w.wanted = static_cast<unsigned>(count);
      take_digit<21, 11>(w, s);
      next_digit<10, 11>(w, of.scores(head), n, s);
      next_digit<0, 10>(w, of.scores(head), n, s);
      w.last = w.done ? of.a.most : last_of_tie(w, of.scores(head), n, s);
    }
    now = count - static_cast<int>(overlap(of, head, n, w, !counts, s));
  }
  __syncthreads();  // all threads know whether the head rests
  Watched watched = {};
  if (leads && threadIdx.x == 0) {
    watched = watch_step(of.rule(), of.missed(head), count, now, of.left(), of.checks(head));
    of.rests(head) = watched.rests;
  }
  if (threadIdx.x != 0) return;
  const std::int32_t* leaders = of.layer.leaders;
  if (leaders[head] < 0 || leaders[leaders[head]] != leaders[head]) of.drifted(head) = 0;
  if (leaders[head] != head) return;
  for (int h = 0; h < of.a.kv_heads; ++h)
    if (leaders[h] == head) of.drifted(h) = watched.drifted;
}

// Blocks [kv_head, layer and row].
template <int Group, bool Fives>
__global__ void __launch_bounds__(threads) watch_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared s;
  let_successor_start();
  wait_for_predecessor();
  watch_head<Group, Fives>(Of(a, static_cast<int>(blockIdx.y)), blockIdx.x, reinterpret_cast<float*>(memory), s);
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

static void launch_watch(const Args& a, int group, int layers, Stream s) {
  const dim3 grid(a.kv_heads, layers * a.rows);
  const auto launch_with = [&](auto kernel, int floats) {
    const int bytes = floats * static_cast<int>(sizeof(float));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "drifted_heads");
    launch("drifted_heads", kernel, grid, threads, bytes, stream_of(s), true, a);
  };
  const auto of_group = [&](auto size) {
    constexpr int n = decltype(size)::value, floats = pool_floats<n, threads, tokens_each(n)>;
    launch_with(
        a.pooling.kind == Pooling::average && a.pooling.kernel == 5 ? watch_kernel<n, true> : watch_kernel<n, false>,
        floats);
  };
  switch (group) {
    case 0: return launch_with(watch_kernel<0, false>, 0);
    case 1: return of_group(std::integral_constant<int, 1>{});
    case 2: return of_group(std::integral_constant<int, 2>{});
    case 4: return of_group(std::integral_constant<int, 4>{});
    default: return of_group(std::integral_constant<int, 8>{});
  }
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
  a.most = static_cast<int>(std::min(kv.table.extent[2] * kv.page_size, first.scores.extent[2]));
  launch_watch(a, by_logits ? static_cast<int>(first.logits.out.extent[3]) : 0, static_cast<int>(calls.size()), s);
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
