// What a decode step changes in the heads of a cache of two codecs, in one launch for all layers, heads and rows: a
// token becomes low, a token leaves, a page of low tokens that is full takes the second codec. Heads take frames of the
// second codec beside others that give some back.
#include "base/cuda.cuh"
#include "base/ptx.cuh"
#include "ops/page/paged.hpp"
#include "store/cuda_lower.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int warps = 4;  // of a block; each has a head

// Where a token lies. A device of two codecs has no host tier.
struct Spot {
  PageEntry page;
  int offset;

  __device__ Spot(const CudaStoreLayer& s, const Head& h, int place)
      : page(h.table[0][place / s.layout.page_size]), offset(place % s.layout.page_size) {}
  __device__ std::byte* frame(const CudaStoreLayer& s) const { return frame_at(s, 0, page.frame); }
  __device__ const PageLayout& layout(const CudaStoreLayer& s) const {
    return page.codec > 0 ? s.lower_layout : s.layout;
  }
};

// A token's way between places of a head; or none.
struct Way {
  int from = -1, to = -1;
  __device__ bool there() const { return from >= 0; }
};

// Two tokens go their ways, once both are read. No load waits for one that it does not need.
template <int Turns>
__device__ void carry(const CudaStoreLayer& s, const Head& h, Way a, Way b, int lane) {
  const Spot a_from(s, h, max(0, a.from)), a_to(s, h, max(0, a.to)), b_from(s, h, max(0, b.from)),
      b_to(s, h, max(0, b.to));
  CarriedToken<Turns, false> x, y;
  if (a.there()) x.load(a_from.frame(s), a_from.layout(s), a_from.offset, a_to.layout(s), lane);
  if (b.there()) y.load(b_from.frame(s), b_from.layout(s), b_from.offset, b_to.layout(s), lane);
  if (a.there()) x.convert(a_from.layout(s), a_to.layout(s), lane);
  if (b.there()) y.convert(b_from.layout(s), b_to.layout(s), lane);
  __syncwarp();
  if (a.there()) x.write(a_to.frame(s), a_to.layout(s), a_to.offset, lane);
  if (b.there()) y.write(b_to.frame(s), b_to.layout(s), b_to.offset, lane);
  __syncwarp();
}

// Of layouts that are not only_lowers. A call spares registers.
__device__ __noinline__ void lower_tokens(const CudaStoreLayer& s, const std::byte* from, std::byte* to, int lane) {
  for (int t = 0; t < s.layout.page_size; ++t) {
    CarriedToken<2, false> x;
    x.read(from, s.layout, t, s.lower_layout, lane);
    x.write(to, s.lower_layout, t, lane);
  }
}

// Stores a page of a head of n tokens in the second codec, which has `other` pages. Returns whether it changed.
__device__ bool lower_page(const CudaStoreLayer& s, const Head& h, int page, int n, int other, bool runs, int lane) {
  const int p = s.layout.page_size;
  if (page < 0 || page * p >= n) {
    if (lane == 0) fail(s, store_bad_list);
    return false;
  }
  PageEntry before = h.table[0][page], fresh;
  if (before.frame < 0 || before.codec > 0 || (page + 1) * p > n || other * p > n) {
    if (lane == 0 && before.frame < 0) fail(s, ops::page_absent);
    return false;
  }
  const std::byte* from = frame_at(s, 0, before.frame);
  for (std::int64_t at = lane * 128; at < s.layout.bytes; at += 32 * 128) fetch_line(from + at);
  if (lane == 0 && !take(s, 0, fresh, before.tokens, store_no_frame, 1)) fresh.frame = null_frame;
  fresh.frame = __shfl_sync(~0u, fresh.frame, 0);
  if (fresh.frame < 0) return false;
  std::byte* to = frame_at(s, 0, fresh.frame);
  if (runs)
    for (const bool key : {true, false}) lower_side<4>(from, s.layout, to, s.lower_layout, key, lane);
  else
    lower_tokens(s, from, to, lane);
  __syncwarp();
  if (lane == 0) {
    h.table[0][page] = h.table[0][other];
    h.table[0][other] = fresh;
    *h.lower_pages = other + 1;
    give_back(s, 0, before);
  }
  return true;
}

template <int Turns>
__global__ void __launch_bounds__(warps * 32, Turns == 1 ? 7 : 4)
    step_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreStep a, bool runs) {
  const int lane = static_cast<int>(threadIdx.x) % 32, p = s.layout.page_size;
  const int of_all = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32;
  const int row = of_all / s.kv_heads, head = of_all % s.kv_heads;
  if (row >= a.move.rows) return;
  // Lists that are empty are read, too: so all numbers are on their way at once.
  const int slot = a.move.slots[row], pairs = a.move.count(row, head), lost = a.evict.count(row, head),
            fulls = a.lower.count(row, head);
  const int x = a.move.index(row, head, 0), y = a.move.index(row, head, 1), out = a.evict.index(row, head, 0),
            full = a.lower.index(row, head, 0);
  const unsigned long long edits[] = {a.move.edit, a.evict.edit, a.lower.edit};
  const volatile unsigned long long* last_step = s.counters->last_step;
  const bool counts[] = {last_step[0] != edits[0], last_step[1] != edits[1], last_step[2] != edits[2]};
  keep_load(x), keep_load(y), keep_load(out), keep_load(full);
  if (pairs == 0 && lost == 0 && fulls == 0) return;
  const Head h = head_of(s, slot, head);
  const int before = *h.length, last = before - 1, lower = *h.lower_pages;
  const auto has = [&](int place) { return place >= 0 && place < before; };
  const bool pair = pairs == 2 && has(x) && has(y), leaves = lost == 1 && has(out), swaps = pair && x != y;
  if (lane == 0 && ((pairs != 0 && !pair) || (lost != 0 && !leaves))) fail(s, store_bad_list);

  // The last token closes the hole. Where one that came to x leaves at once, it does not come at all.
  const bool with_pair = leaves && (!swaps || (out == x && last != y));
  const Way closing = leaves && out != last ? Way{last, out} : Way{};
  Way ways[] = {swaps ? Way{x, y} : Way{}, with_pair ? closing : swaps ? Way{y, x} : Way{}};
  for (bool later = closing.there() && !with_pair;; later = false) {
    if (ways[0].there() || ways[1].there()) carry<Turns>(s, h, ways[0], ways[1], lane);
    if (!later) break;
    ways[0] = closing, ways[1] = {};
  }
  __syncwarp();  // all lanes know the length
  const bool emptied = leaves && last % p == 0;
  const int n = leaves ? last : before, lower_pages = emptied ? min(lower, last / p) : lower;
  if (leaves && lane == 0) {
    PageEntry& entry = h.table[0][last / p];
    *h.length = last;
    if (emptied) {
      give_back(s, 0, entry, entry.codec > 0);
      *h.lower_pages = lower_pages;
      fewer_pages(s, 1);
    } else {
      entry.tokens = static_cast<std::uint16_t>(last % p);
    }
  }
  __syncwarp();
  if (lane == 0 && fulls != 0 && fulls != 1) fail(s, store_bad_list);
  const bool lowered = fulls == 1 && lower_page(s, h, full, n, lower_pages, runs, lane);
  if (s.summary != Summary::none) {
    __syncwarp();
    const int changed[] = {swaps ? x / p : -1,     swaps ? y / p : -1,  leaves ? out / p : -1,
                           leaves ? last / p : -1, lowered ? full : -1, lowered ? lower_pages : -1};
    for (const int page : changed)
      if (page >= 0 && page * p < n) summarize_page(s, slot, head, page, n, lane);
  }
  if (lane != 0) return;
  const bool changed[] = {swaps, leaves, lowered};
  for (int i = 0; i < 3; ++i)
    if (changed[i] && counts[i]) count_fired(s, edits[i], &s.counters->last_step[i]);
}

}  // namespace

namespace cuda_store {

void step_down(const CudaStoreLayer& s, const CudaStoreStep& a, Stream stream) {
  const int heads = a.move.rows * s.kv_heads;
  const auto kernel = s.layout.head_dim > 128 ? step_kernel<2> : step_kernel<1>;
  kernel<<<static_cast<unsigned>((heads + warps - 1) / warps), warps * 32, 0, stream_of(stream)>>>(
      s, a, only_lowers(s.layout, s.lower_layout));
  check_launch("step_down");
}
KVLAB_ON_CUDA(step_down, step_down);

}  // namespace cuda_store
}  // namespace kvlab
