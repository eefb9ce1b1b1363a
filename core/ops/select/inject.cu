// One block per (layer, row, KV head). Lists are bits in shared memory. A block draws the pages of the greatest hashes.
#include "ops/select/inject.hpp"

#include <span>
#include <tuple>

#include "base/joined_calls.hpp"
#include "base/launch.cuh"
#include "ops/page/paged.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 256, most_layers = 32;

// What differs between layers that share a launch. The rest is that of Args.
struct Layer {
  const std::int32_t* length;
  std::int32_t *index, *count;  // of the lists
  const std::uint8_t *flags, *classes;
  std::uint32_t* state;
  int layer, recorded;
};
struct Args {
  Layer layers[most_layers];
  View<const std::int32_t, 2> length;
  IndexList list;
  Pins pins;
  Heads heads;
  View<std::uint32_t, 3> state;
  const std::int32_t* slots;
  const std::uint32_t *sequence, *question;
  const std::int32_t *steps, *clock;
  int rows, page_size, most;  // most: pages of a head
  std::uint64_t seed;
  std::int32_t overlap, rerank_overlap;
  RecordedPages recorded;
};
static_assert(sizeof(Args) < 4000, "a kernel's arguments");

// Pages that may be drawn are of two sets: those of the last list, and the others.
enum Of : std::uint8_t { old, other };
struct Draw {
  unsigned bins[2][select_bins];  // by the first bits of a page's key, the greatest first
  int wanted[2];                  // pages to draw
  int bin[2], left[2];            // the last bin with drawn pages, and how many of it
};

constexpr int key_bits = 11;
static_assert(select_bins == 1 << key_bits);

__device__ __forceinline__ int bin_of(unsigned long long key) {
  return select_bins - 1 - static_cast<int>(key >> (64 - key_bits));
}

// Adds the pages of greatest key to `now`: d.wanted of each set, out of set[old] and set[other].
__device__ inline void draw(Draw& d, const unsigned* const* set, int pages, unsigned long long stream, unsigned* now,
                            SelectShared& s) {
  const int mine = static_cast<int>(threadIdx.x), lane = mine % 32;
  constexpr int each = select_bins / threads;
  for (int i = mine; i < select_bins; i += threads) d.bins[old][i] = d.bins[other][i] = 0;
  if (mine < 2) d.bin[mine] = -1, d.left[mine] = 0;
  if (mine == 0) s.candidates = 0;
  __syncthreads();
  const auto set_of = [&](int page) { return has_bit(set[old], page) ? old : other; };
  const auto may = [&](int page) { return page < pages && (has_bit(set[old], page) || has_bit(set[other], page)); };
  for (int page = mine; page < pages; page += threads)
    if (may(page)) atomicAdd(&d.bins[set_of(page)][bin_of(inject_key(stream, page))], 1u);
  __syncthreads();
  for (int of = old; of <= other; ++of) {
    unsigned own = 0, total;
    for (int i = 0; i < each; ++i) own += d.bins[of][mine * each + i];
    unsigned before = block_scan(own, s.scan, total);
    const auto wanted = static_cast<unsigned>(max(d.wanted[of], 0));
    if (before < wanted && wanted <= before + own)
      for (int i = 0; i < each; ++i) {
        const unsigned inside = d.bins[of][mine * each + i];
        if (wanted <= before + inside) {
          d.bin[of] = mine * each + i, d.left[of] = static_cast<int>(wanted - before);
          break;
        }
        before += inside;
      }
  }
  __syncthreads();
  // Pages of earlier bins are drawn. Those of the last bin are ranked.
  for (int base = mine - lane; base < pages; base += threads) {
    const int page = base + lane;
    bool take = false;
    if (may(page)) {
      const unsigned long long key = inject_key(stream, page);
      const int of = set_of(page), bin = bin_of(key);
      take = bin < d.bin[of];
      if (bin == d.bin[of]) {
        const unsigned at = atomicAdd(&s.candidates, 1u);
        if (at < most_candidates) s.candidate[at] = key;
      }
    }
    const unsigned bits = __ballot_sync(all_lanes, take);
    if (lane == 0 && bits) now[base >> 5] |= bits;
  }
  __syncthreads();
  const auto candidates = static_cast<int>(s.candidates);
  if (candidates <= most_candidates) {
    const auto page_of = [](unsigned long long key) {
      return static_cast<int>(0xffffffffu - static_cast<unsigned>(key));
    };
    for (int c = mine; c < candidates; c += threads) {
      const unsigned long long key = s.candidate[c];
      const int page = page_of(key), of = set_of(page);
      int better = 0;
      for (int o = 0; o < candidates; ++o) better += s.candidate[o] > key && set_of(page_of(s.candidate[o])) == of;
      if (better < d.left[of]) atomicOr(&now[page >> 5], 1u << (page & 31));
    }
    __syncthreads();
    return;
  }
  for (int of = old; of <= other; ++of) {
    if (d.left[of] == 0) continue;
    const auto key = [&](int, int t, unsigned i, unsigned long long& k) {
      k = inject_key(stream, i);
      return has_bit(set[of], t) && bin_of(k) == d.bin[of];
    };
    const int first[] = {0, pages};
    const unsigned long long threshold = radix_threshold(key, first, 1, static_cast<unsigned>(d.left[of]), 0, s);
    for (int base = mine - lane; base < pages; base += threads) {
      unsigned long long k = 0;
      const bool take =
          base + lane < pages && key(0, base + lane, static_cast<unsigned>(base + lane), k) && k >= threshold;
      const unsigned bits = __ballot_sync(all_lanes, take);
      if (lane == 0 && bits) now[base >> 5] |= bits;
    }
    __syncthreads();
  }
}

// Blocks [kv_head, layer and row].
__global__ void __launch_bounds__(threads) inject_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned bits[];
  __shared__ SelectShared s;
  __shared__ Draw d;
  __shared__ int sums[5];
  let_successor_start();
  wait_for_predecessor();
  const Layer& l = a.layers[blockIdx.y / a.rows];
  const int head = blockIdx.x, row = static_cast<int>(blockIdx.y) % a.rows, mine = threadIdx.x, lane = mine % 32;
  const int slot = a.slots[row], p = a.page_size;
  const int tokens = l.length[slot * a.length.stride[0] + head * a.length.stride[1]],
            pages = min((tokens + p - 1) / p, a.most), words = (pages + 31) / 32;
  std::uint32_t* state = l.state + slot * a.state.stride[0] + head * a.state.stride[1];
  RecordedPages record = a.recorded;
  record.layer = l.recorded;
  Heads heads = a.heads;
  heads.flags.data = l.flags, heads.classes = l.classes;
  const bool recorded = record.first, on = heads.on(slot, head);
  const std::uint32_t question = recorded ? a.question[slot] : 0, kept = state[1] == question ? state[0] : 0;
  const InjectTurn turn = inject_turn(kept, a.steps, slot);
  const std::int64_t at = a.list.at(row);
  std::int32_t* index = l.index + at * a.list.index.stride[0] + head * a.list.index.stride[1];
  std::int32_t* count = l.count + at * a.list.count.stride[0] + head * a.list.count.stride[1];
  const int listed = on ? *count : 0;
  const std::int32_t overlap = inject_reranks(state[2], a.clock, slot) ? a.rerank_overlap : a.overlap;
  __syncthreads();
  if (mine == 0 && (on || a.steps)) state[0] = turn.keep, state[1] = question;
  if (!on) return;
  if (mine == 0) state[2] = inject_now(a.clock, slot);
  const int room_words = (a.most + 31) / 32;
  unsigned *now = bits, *was = now + room_words, *free = was + room_words;
  const std::int64_t list = recorded ? record.list(question, turn.list, head) : -1;
  const bool drawn = recorded ? list >= 0 : turn.list > 0;
  for (int w = mine; w < words; w += threads) now[w] = 0, was[w] = recorded ? 0 : state[inject_header + w];
  if (mine < 5) sums[mine] = 0;
  for (int base = mine - lane; base < pages; base += threads) {
    const int page = base + lane;
    const long long end = (page + 1LL) * p;
    const bool pinned = end - p < a.pins.first ||
                        (a.pins.last > 0 && end > tokens - static_cast<long long>(a.pins.last)) ||
                        (a.pins.newest_page && page == pages - 1);
    const unsigned may = __ballot_sync(all_lanes, page < pages && !pinned);
    if (lane == 0) free[base >> 5] = may;
  }
  __syncthreads();
  const auto set = [&](unsigned* to, int page) {
    if (page >= 0 && page < pages) atomicOr(&to[page >> 5], 1u << (page & 31));
  };
  for (int i = mine; i < listed; i += threads) set(now, index[i * a.list.index.stride[2]]);
  if (list >= 0) {
    const std::int64_t end = record.begin[list + 1];
    for (std::int64_t i = record.begin[list] + mine; i < end; i += threads) set(was, record.page[i]);
  }
  __syncthreads();
  if (drawn) {
    int own[5] = {};  // chosen, chosen and pinned, these in the last list, drawable ones in the last list, and others
    for (int w = mine; w < words; w += threads) {
      const unsigned chosen = now[w], may = free[w], before = was[w];
      own[0] += __popc(chosen), own[1] += __popc(chosen & ~may), own[2] += __popc(chosen & ~may & before);
      own[3] += __popc(may & before), own[4] += __popc(may & ~before);
      now[w] = chosen & ~may, was[w] = before & may, free[w] = may & ~before;
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const int of_warp = __reduce_add_sync(all_lanes, own[i]);
      if (lane == 0 && of_warp > 0) atomicAdd(&sums[i], of_warp);
    }
    __syncthreads();
    const int n = sums[0], fixed = sums[1], fixed_old = sums[2];
    const int stay = max(0, (recorded ? n : inject_kept(overlap, n)) - fixed_old), wanted = n - fixed;
    const int rest = min(wanted - min(min(stay, wanted), sums[3]), sums[4]);
    if (mine == 0) d.wanted[old] = wanted - rest, d.wanted[other] = rest;
    const auto stream = inject_stream(a.seed, l.layer, a.sequence[slot], head, recorded ? 0 : turn.list);
    const unsigned* const sets[] = {was, free};
    draw(d, sets, pages, stream, now, s);
  }
  const int written =
      write_list(now, pages, index, a.list.index.stride[2], static_cast<int>(a.list.index.extent[2]), s);
  for (int w = mine; w + inject_header < a.state.extent[2]; w += threads)
    state[inject_header + w] = w < words ? now[w] : 0;
  if (mine == 0) *count = written;
}

}  // namespace

// What calls that share launches have in common.
static auto common_of(const InjectCall& c) {
  const InjectArgs& a = c.args;
  const Heads& h = a.heads;
  const RecordedPages& r = a.recorded;
  return std::tuple(std::tuple(a.pages.rows, a.pages.kv_heads, a.pages.page_size, a.pages.slots, a.pages.length.stride,
                               a.pages.table.extent[2], a.list.index.stride, a.list.index.extent[2],
                               a.list.count.stride, a.list.slots, a.pins.first, a.pins.last, a.pins.newest_page),
                    std::tuple(h.flags.data != nullptr, h.flags.stride, h.unflagged, h.steps, h.period, h.lead,
                               h.classes != nullptr, h.join, a.state.stride, a.state.extent[2]),
                    std::tuple(a.sequence, a.question, a.steps, a.clock, a.seed, a.overlap, a.rerank_overlap, r.first,
                               r.steps, r.begin, r.page, r.questions, r.layers, r.heads, c.stream.handle()));
}

static void run(std::span<const InjectCall> calls) {
  const InjectArgs& first = calls[0].args;
  const PagedKv& kv = first.pages;
  if (kv.rows <= 0) return;
  Args a = {};
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const InjectArgs& in = calls[i].args;
    a.layers[i] = {in.pages.length.data, in.list.index.data, in.list.count.data, in.heads.flags.data,
                   in.heads.classes,     in.state.data,      in.layer,           in.recorded.layer};
  }
  a.length = kv.length, a.list = first.list, a.pins = first.pins, a.heads = first.heads, a.state = first.state;
  a.slots = kv.slots, a.sequence = first.sequence, a.question = first.question, a.steps = first.steps,
  a.clock = first.clock;
  a.rows = kv.rows, a.page_size = kv.page_size;
  a.seed = first.seed, a.overlap = first.overlap, a.rerank_overlap = first.rerank_overlap, a.recorded = first.recorded;
  a.most = static_cast<int>(kv.table.extent[2]);
  const std::int64_t bytes = std::int64_t{(a.most + 31) / 32} * 4 * 3, room = 32 * 1024;
  if (bytes > room)
    throw Error(Errc::unsupported,
                "got " + std::to_string(a.most) + " pages of a head, wanted at most " + std::to_string(room * 8 / 3),
                "op inject_pages");
  static const cudaError_t once =
      cudaFuncSetAttribute(inject_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room));
  check(once, "inject_pages");
  launch("inject_pages", inject_kernel, dim3(kv.kv_heads, static_cast<unsigned>(calls.size()) * kv.rows), threads,
         static_cast<std::size_t>(bytes), stream_of(calls[0].stream), true, a);
}

static void inject_in_layers_cuda(const std::vector<InjectCall>& calls) {
  for_each_alike(std::span(calls), most_layers, common_of, run);
}
KVLAB_ON_CUDA(inject_in_layers, inject_in_layers_cuda);

static void inject_pages_cuda(const InjectArgs& in, Stream s) {
  const InjectCall call{in, s};
  run({&call, 1});
}
KVLAB_ON_CUDA(inject_pages, inject_pages_cuda);

}  // namespace kvlab::ops
