// One block per (row, KV head). Lists are bits in shared memory. A block draws the pages of the greatest hashes.
#include "ops/select/inject.hpp"

#include "ops/page/paged.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 256;

struct Args {
  DeviceKv kv;
  PageList list;
  Pins pins;
  Heads heads;
  View<std::uint32_t, 3> state;
  const std::uint32_t *sequence, *question;
  const std::int32_t* steps;
  int layer, most;  // pages of a head
  std::uint64_t seed;
  std::int32_t overlap;
  RecordedPages recorded;
};

// Counts the bits of word(w) over w in [0, words).
template <class Word>
__device__ __forceinline__ int count_bits(int words, const Word& word, SelectShared& s) {
  unsigned own = 0, total;
  for (int w = threadIdx.x; w < words; w += threads) own += __popc(word(w));
  block_scan(own, s.scan, total);
  return static_cast<int>(total);
}

// Adds the `wanted` pages of greatest key to `now`, out of the `all` pages of `from`.
__device__ inline void draw(const unsigned* from, int all, int wanted, int pages, unsigned long long stream,
                            unsigned* now, SelectShared& s) {
  const int lane = threadIdx.x % 32;
  if (wanted <= 0) return;
  const auto key = [&](int, int t, unsigned i, unsigned long long& k) {
    k = inject_key(stream, i);
    return has_bit(from, t);
  };
  const int first[] = {0, pages};
  const unsigned long long threshold =
      wanted < all ? radix_threshold(key, first, 1, static_cast<unsigned>(wanted), 0, s) : 0;
  for (int base = threadIdx.x - lane; base < pages; base += threads) {
    const int page = base + lane;
    const bool take = page < pages && has_bit(from, page) && inject_key(stream, page) >= threshold;
    const unsigned bits = __ballot_sync(all_lanes, take);
    if (lane == 0) now[base >> 5] |= bits;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(threads) inject_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned bits[];
  __shared__ SelectShared s;
  const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, p = a.kv.page_size;
  const int tokens = a.kv.tokens(row, head), pages = min(a.kv.pages(row, head), a.most), words = (pages + 31) / 32;
  const int slot = a.kv.kv.slots[row];
  std::uint32_t* state = a.state.data + slot * a.state.stride[0] + head * a.state.stride[1];
  const bool recorded = a.recorded.first, on = a.heads.on(slot, head);
  const std::uint32_t question = recorded ? a.question[slot] : 0, kept = state[1] == question ? state[0] : 0;
  const InjectTurn turn = inject_turn(kept, a.steps, slot);
  __syncthreads();
  if (threadIdx.x == 0 && (on || a.steps)) state[0] = turn.keep, state[1] = question;
  if (!on) return;
  const std::int64_t at = a.list.at(row);
  const int room_words = (a.most + 31) / 32;
  unsigned *now = bits, *was = now + room_words, *free = was + room_words;
  const std::int64_t list = recorded ? a.recorded.list(question, turn.list, head) : -1;
  const bool drawn = recorded ? list >= 0 : turn.list > 0;
  fill_bits(now, pages, false);
  for (int w = threadIdx.x; w < words; w += threads) was[w] = recorded ? 0 : state[inject_header + w];
  __syncthreads();
  const auto set = [&](unsigned* to, int page) {
    if (page >= 0 && page < pages) atomicOr(&to[page >> 5], 1u << (page & 31));
  };
  for (int i = threadIdx.x; i < a.list.count(at, head); i += threads) set(now, a.list.index(at, head, i));
  if (list >= 0) {
    const std::int64_t end = a.recorded.begin[list + 1];
    for (std::int64_t i = a.recorded.begin[list] + threadIdx.x; i < end; i += threads) set(was, a.recorded.page[i]);
  }
  for (int base = threadIdx.x - lane; base < pages; base += threads) {
    const int page = base + lane;
    const long long end = (page + 1LL) * p;
    const bool pinned = end - p < a.pins.first ||
                        (a.pins.last > 0 && end > tokens - static_cast<long long>(a.pins.last)) ||
                        (a.pins.newest_page && page == pages - 1);
    const unsigned may = __ballot_sync(all_lanes, page < pages && !pinned);
    if (lane == 0) free[base >> 5] = may;
  }
  __syncthreads();
  if (drawn) {
    const int n = count_bits(
        words, [&](int w) { return now[w]; }, s);
    const int fixed = count_bits(
        words, [&](int w) { return now[w] & ~free[w]; }, s);
    const int fixed_old = count_bits(
        words, [&](int w) { return now[w] & ~free[w] & was[w]; }, s);
    const int old = count_bits(
        words, [&](int w) { return free[w] & was[w]; }, s);
    const int others = count_bits(
        words, [&](int w) { return free[w] & ~was[w]; }, s);
    for (int w = threadIdx.x; w < words; w += threads) {
      const unsigned may = free[w], before = was[w];
      now[w] &= ~may;
      was[w] = before & may;
      free[w] = may & ~before;
    }
    __syncthreads();
    const int stay = max(0, (recorded ? n : inject_kept(a.overlap, n)) - fixed_old), wanted = n - fixed;
    const int rest = min(wanted - min(min(stay, wanted), old), others);
    const auto stream = inject_stream(a.seed, a.layer, a.sequence[slot], head, recorded ? 0 : turn.list);
    draw(was, old, wanted - rest, pages, stream, now, s);
    draw(free, others, rest, pages, stream, now, s);
  }
  const View<std::int32_t, 3>& to = a.list.index;
  const int count = write_list(now, pages, to.data + at * to.stride[0] + head * to.stride[1], to.stride[2],
                               static_cast<int>(to.extent[2]), s);
  for (int w = threadIdx.x; w + inject_header < a.state.extent[2]; w += threads)
    state[inject_header + w] = w < words ? now[w] : 0;
  if (threadIdx.x == 0) a.list.count(at, head) = count;
}

}  // namespace

static void inject_pages_cuda(const InjectArgs& in, Stream s) {
  if (in.pages.rows <= 0) return;
  Args a = {};
  a.kv = DeviceKv(in.pages);
  a.list = in.list;
  a.pins = in.pins, a.heads = in.heads;
  a.state = in.state;
  a.sequence = in.sequence, a.question = in.question, a.steps = in.steps;
  a.layer = in.layer, a.seed = in.seed, a.overlap = in.overlap, a.recorded = in.recorded;
  a.most = static_cast<int>(in.pages.table.extent[2]);
  const std::int64_t bytes = std::int64_t{(a.most + 31) / 32} * 4 * 3, room = 32 * 1024;
  if (bytes > room)
    throw Error(Errc::unsupported,
                "got " + std::to_string(a.most) + " pages of a head, wanted at most " + std::to_string(room * 8 / 3),
                "op inject_pages");
  inject_kernel<<<dim3(in.pages.kv_heads, in.pages.rows), threads, bytes, stream_of(s)>>>(a);
  check_launch("inject_pages");
}
KVLAB_ON_CUDA(inject_pages, inject_pages_cuda);

}  // namespace kvlab::ops
