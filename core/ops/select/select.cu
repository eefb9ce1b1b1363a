// Exact selection of pages and tokens. One block per (row, KV head) reads its scores once, into registers or, for
// longer rows, into shared memory if they fit.
#include "ops/select/select_held.cuh"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <span>
#include <tuple>

#include "base/joined_calls.hpp"
#include "ops/select/chosen_tokens.hpp"
#include "ops/select/pins.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

struct Args {
  DeviceKv kv;
  View<const float, 3> scores;
  View<const std::int32_t, 2> amount;
  const Pins* pins;  // [row]; top_tokens only
  View<std::int32_t, 3> list;
  View<std::int32_t, 2> count;
  const std::int32_t* slots;  // of the list; null = entry `row` is the row's
  Heads heads;
  int most;  // most entries of a row
  bool newest, staged;
};

constexpr int most_layers = 32;  // of a launch of top_tokens

// Where a layer's memory begins. The rest is that of Args.
struct TokensOfLayer {
  const std::int32_t *length, *amount, *by, *among;
  const float* scores;
  std::int32_t *list, *count;
  const std::uint8_t *flags, *classes;
};
struct TokensArgs : Args {
  TokensOfLayer layers[most_layers];
  int layer_count;
};
static_assert(sizeof(TokensArgs) < 4000, "a kernel's arguments");

// Shared memory holds the bits of a row, then the row itself where `staged`.
__device__ __forceinline__ float* stage_of(const Args& a, unsigned* chosen) {
  return a.staged ? reinterpret_cast<float*>(chosen + ((a.most + 31) / 32 + 3) / 4 * 4) : nullptr;
}

// A thread holds `Vectors` vectors of four scores; 0 = the row is too long for registers.
template <int Threads, int Blocks, int Vectors>
__global__ void __launch_bounds__(Threads, Blocks) top_pages_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 dynamic[];
  __shared__ SelectShared select;
  const int head = blockIdx.x, row = blockIdx.y, n = min(a.kv.pages(row, head), a.most);
  const float* scores = a.scores.data + row * a.scores.stride[0] + head * a.scores.stride[1];
  std::int32_t* list = a.list.data + row * a.list.stride[0] + head * a.list.stride[1];
  const int room = static_cast<int>(a.list.extent[2]), budget = a.amount(row, head);
  auto* chosen = reinterpret_cast<unsigned*>(dynamic);
  int count;
  if constexpr (Vectors > 0)
    count =
        choose_pages_held<Threads, Vectors>(scores, n, budget, a.newest, list, a.list.stride[2], room, chosen, select);
  else
    count = choose_pages(scores, n, budget, a.newest, false, list, a.list.stride[2], room, stage_of(a, chosen), chosen,
                         select);
  if (threadIdx.x == 0) a.count(row, head) = count;
}

// An item is [layer, row, kv_head]. A block takes several, where few heads are likely to choose.
template <int Threads, int Blocks, int Vectors>
__global__ void __launch_bounds__(Threads, Blocks) top_tokens_kernel(const __grid_constant__ TokensArgs a) {
  extern __shared__ uint4 dynamic[];
  __shared__ SelectShared select;
  const int rows = a.kv.kv.rows, kv_heads = a.kv.kv_heads, items = a.layer_count * rows * kv_heads;
  const auto chooses = [&](int item) {
    const TokensOfLayer& l = a.layers[item / kv_heads / rows];
    Heads heads = a.heads;
    heads.flags.data = const_cast<std::uint8_t*>(l.flags), heads.classes = l.classes;
    return heads.on(a.kv.kv.slots[item / kv_heads % rows], item % kv_heads);
  };
  unsigned few = 0;  // of 32 items of the block, those that choose
#pragma unroll 1
  for (int item = blockIdx.x, turn = 0; item < items; item += gridDim.x, ++turn) {
    if (turn % 32 == 0) {  // each warp looks at all 32 at once
      const int of_lane = item + static_cast<int>(threadIdx.x % 32 * gridDim.x);
      few = __ballot_sync(all_lanes, of_lane < items && chooses(of_lane));
    }
    if (!(few >> turn % 32 & 1)) continue;
    const int own = item % kv_heads, row = item / kv_heads % rows, slot = a.kv.kv.slots[row];
    const TokensOfLayer& l = a.layers[item / kv_heads / rows];
    const int head = l.by ? l.by[own] : own;
    const int n = min(l.length[slot * a.kv.kv.length.stride[0] + head * a.kv.kv.length.stride[1]], a.most);
    const std::int64_t at = a.slots ? a.slots[row] : row;
    const float* scores = l.scores + row * a.scores.stride[0] + head * a.scores.stride[1];
    std::int32_t* list = l.list + at * a.list.stride[0] + own * a.list.stride[1];
    const auto count_of = [&](int h) -> std::int32_t& {
      return l.count[at * a.count.stride[0] + h * a.count.stride[1]];
    };
    const bool same = !l.amount;  // as many as the list holds
    const int held = same ? count_of(own) : 0, room = same ? held : static_cast<int>(a.list.extent[2]);
    const int keep = min(
        same ? l.among ? count_of(l.among[own]) : held : l.amount[row * a.amount.stride[0] + own * a.amount.stride[1]],
        n);
    auto* chosen = reinterpret_cast<unsigned*>(dynamic);
    const Pins pins = a.pins ? a.pins[row] : Pins{};
    const bool pin = pins.first > 0 || pins.last > 0;
    const PinLimits limits = pin ? pin_limits(a.kv, row, head, n, pins, select) : PinLimits{};
    int count;
    unsigned of_thread = 0, pinned = 0;
    if constexpr (Vectors > 0) {
      Held<Threads, Vectors> held;
      held.load(scores, n);
      if (pin) {
        held.pin(n, [&](int t) { return limits.pinned(a.kv.position(row, head, t)); });
        block_scan(__popc(held.chosen), select.scan, pinned);
      }
      count = choose_held(held, scores, n, static_cast<int>(pinned), keep - static_cast<int>(pinned), list,
                          a.list.stride[2], room, chosen, select);
    } else {
      const int lane = threadIdx.x % 32;
      if (pin) {
        for (int base = threadIdx.x - lane; base < n; base += Threads) {
          const int t = base + lane;
          const unsigned bits = __ballot_sync(all_lanes, t < n && limits.pinned(a.kv.position(row, head, t)));
          if (lane == 0) chosen[base >> 5] = bits, of_thread += __popc(bits);
        }
        block_scan(of_thread, select.scan, pinned);
      } else {
        fill_bits(chosen, n, false);
      }
      const int wanted = keep - static_cast<int>(pinned);
      if (keep >= n)
        fill_bits(chosen, n, true);
      else if (wanted > 0)
        select_best(load_row(scores, n, stage_of(a, chosen), false), n, wanted, chosen, select);
      count = write_list(chosen, n, list, a.list.stride[2], room, select);
    }
    // Another block may read a number that stays.
    if (threadIdx.x == 0 && (!same || count != held)) count_of(own) = count;
    __syncthreads();
  }
}

constexpr int shared_rows = 8192;  // blocks of rows up to here share a multiprocessor

// Launches as many threads as a row has work for.
template <template <int, int, int> class Kernel, class A>
void launch(A a, const char* op, cudaStream_t stream, dim3 grid) {
  const std::int64_t bits = std::int64_t{(a.most + 31) / 32 + 3} / 4 * 16, row = std::int64_t{a.most} * 4;
  const std::int64_t room = shared_bytes() - static_cast<std::int64_t>(sizeof(SelectShared)) - 1024;
  if (bits > room)
    throw Error(Errc::unsupported,
                "got rows of up to " + std::to_string(a.most) + " scores, wanted at most " + std::to_string(room * 8),
                std::string("op ") + op);
  const bool held = a.most <= 16384;
  a.staged = !held && bits + row <= 100 * 1024;
  const int bytes = static_cast<int>(bits + (a.staged ? row : 0));
  const auto start = [&](auto kernel, int threads) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)), op);
    kernel<<<grid, threads, bytes, stream>>>(a);
    check_launch(op);
  };
  if (a.most <= 2048)
    start(Kernel<256, 6, 2>::run, 256);
  else if (a.most <= shared_rows)
    start(Kernel<512, 3, 4>::run, 512);
  else if (held)
    start(Kernel<1024, 1, 4>::run, 1024);
  else
    start(Kernel<1024, 1, 0>::run, 1024);
}
template <int Threads, int Blocks, int Vectors>
struct TopPages {
  static constexpr auto run = top_pages_kernel<Threads, Blocks, Vectors>;
};
template <int Threads, int Blocks, int Vectors>
struct TopTokens {
  static constexpr auto run = top_tokens_kernel<Threads, Blocks, Vectors>;
};

constexpr int pin_threads = 256;

// One block sets the scores of all query heads of a KV head.
__global__ void __launch_bounds__(pin_threads)
    set_pinned_kernel(const __grid_constant__ DeviceKv kv, Pins pins, float value, int group, View<float, 3> scores) {
  __shared__ SelectShared select;
  const int head = blockIdx.x, row = blockIdx.y, n = kv.tokens(row, head);
  const PinLimits limits = pin_limits(kv, row, head, n, pins, select);
  constexpr int each = 4;
  for (int first = threadIdx.x; first < n; first += each * pin_threads) {
    bool pinned[each];
#pragma unroll
    for (int i = 0; i < each; ++i)
      pinned[i] = limits.pinned(kv.position(row, head, min(first + i * pin_threads, n - 1)));
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (const int t = first + i * pin_threads; pinned[i] && t < n && t < scores.extent[2])
        for (int q = head * group; q < (head + 1) * group; ++q) scores(row, q, t) = value;
  }
}

Args arguments(const PagedKv& kv, const View<const float, 3>& scores, const View<const std::int32_t, 2>& amount,
               const IndexList& list, std::int64_t most) {
  Args a = {};
  a.kv = DeviceKv(kv);
  a.scores = scores;
  a.amount = amount;
  a.list = list.index, a.count = list.count;
  a.most = static_cast<int>(std::min(most, scores.extent[2]));
  return a;
}

}  // namespace

void top_pages_cuda(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> page_budgets, Pins pins,
                    PageList out, Stream s) {
  if (kv.rows == 0) return;
  Args a = arguments(kv, scores, page_budgets, out, kv.table.extent[2]);
  a.newest = pins.newest_page;
  launch<TopPages>(a, "top_pages", stream_of(s), dim3(kv.kv_heads, kv.rows));
}
KVLAB_ON_CUDA(top_pages, top_pages_cuda);

// What calls that share launches have in common.
static auto common_of(const ChosenTokens& c) {
  const TokenChoice& o = c.choice;
  const Heads& h = o.heads;
  return std::tuple(std::tuple(c.kv.rows, c.kv.kv_heads, c.kv.page_size, c.kv.slots, c.kv.table.extent[2],
                               c.kv.length.stride, c.scores.extent[2], c.scores.stride, c.list.index.extent[2],
                               c.list.index.stride, c.list.count.stride, c.list.slots),
                    std::tuple(o.keep.data != nullptr, o.keep.stride, h.flags.data != nullptr, h.flags.stride,
                               h.unflagged, h.steps, h.period, h.lead, h.classes != nullptr, h.join, c.stream.handle()),
                    // Pins need the layer's table.
                    o.pins ? c.kv.table.data : nullptr, o.pins);
}

static void run(std::span<const ChosenTokens> calls) {
  const ChosenTokens& first = calls[0];
  const PagedKv& kv = first.kv;
  if (kv.rows == 0) return;
  TokensArgs a = {};
  static_cast<Args&>(a) = arguments(kv, first.scores, first.choice.keep, first.list, kv.table.extent[2] * kv.page_size);
  a.pins = first.choice.pins, a.slots = first.list.slots, a.heads = first.choice.heads;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const ChosenTokens& c = calls[i];
    const TokenChoice& o = c.choice;
    a.layers[i] = {c.kv.length.data,  o.keep.data,        o.by,           o.among, c.scores.data, c.list.index.data,
                   c.list.count.data, o.heads.flags.data, o.heads.classes};
  }
  a.layer_count = static_cast<int>(calls.size());
  // A block of long rows needs a multiprocessor to itself, for which it waits beside a step. Few layers' heads choose.
  // A prime number of blocks spreads a head that chooses in many layers.
  constexpr int most_blocks_of_layers = 31;
  const int items = a.layer_count * kv.rows * kv.kv_heads;
  const bool few = a.layer_count > 1 && a.heads.flags.data && a.most > shared_rows;
  launch<TopTokens>(a, "top_tokens", stream_of(first.stream), few ? std::min(items, most_blocks_of_layers) : items);
}

static void chosen_tokens_in_layers_cuda(const std::vector<ChosenTokens>& calls) {
  for_each_alike(std::span(calls), most_layers, common_of, run);
}
KVLAB_ON_CUDA(chosen_tokens_in_layers, chosen_tokens_in_layers_cuda);

static void chosen_tokens_cuda(const PagedKv& kv, View<const float, 3> scores, const TokenChoice& c, TokenList list,
                               Stream s) {
  const ChosenTokens call{kv, scores, c, list, s};
  run({&call, 1});
}
KVLAB_ON_CUDA(chosen_tokens, chosen_tokens_cuda);

static void set_pinned_cuda(const PagedKv& kv, Pins pins, float value, Scores scores, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  set_pinned_kernel<<<grid, pin_threads, 0, stream_of(s)>>>(DeviceKv(kv), pins, value,
                                                            static_cast<int>(scores.extent[1]) / kv.kv_heads, scores);
  check_launch("set_pinned");
}
KVLAB_ON_CUDA(set_pinned, set_pinned_cuda);

}  // namespace kvlab::ops
