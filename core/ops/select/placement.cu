// One block per (row, KV head) makes its page lists. Sets of pages are bits in shared memory.
#include "ops/select/placement.hpp"

#include <kvlab/ops.hpp>

#include "ops/page/paged.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 256;

__global__ void lengths_kernel(DeviceKv kv, View<std::int32_t, 2> out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / kv.kv_heads, head = i % kv.kv_heads;
  if (row < kv.kv.rows) out(row, head) = kv.tokens(row, head);
}

__global__ void __launch_bounds__(threads)
    older_kernel(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest,
                 View<std::int32_t, 3> index, View<std::int32_t, 2> count) {
  const int head = blockIdx.x, row = blockIdx.y;
  const int pages = rows && !rows[row] ? 0 : (tokens(row, head) + page_size - 1) / page_size - newest;
  const int n = min(max(pages, 0), static_cast<int>(index.extent[2]));
  for (int page = threadIdx.x; page < n; page += threads) index(row, head, page) = page;
  if (threadIdx.x == 0) count(row, head) = n;
}

struct List {
  View<std::int32_t, 3> index;
  View<std::int32_t, 2> count;
};

struct Args {
  DeviceKv device, host;
  List attended, recall, offload, drop;
  bool all;  // attention reads every page
  Pins pins;
  int resident_tokens, most;  // pages of a head
};

__device__ __forceinline__ void write(const List& list, int row, int head, const unsigned* bits, int pages,
                                      SelectShared& s) {
  const int count = write_list(bits, pages, list.index.data + row * list.index.stride[0] + head * list.index.stride[1],
                               list.index.stride[2], static_cast<int>(list.index.extent[2]), s);
  if (threadIdx.x == 0) list.count(row, head) = count;
}

// Returns the `count` highest bits of `word`.
__device__ __forceinline__ unsigned highest(unsigned word, int count) {
  while (__popc(word) > count) word &= word - 1;
  return word;
}

__global__ void __launch_bounds__(threads) place_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned bits[];
  __shared__ SelectShared s;
  const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, p = a.device.page_size;
  const int n = a.device.tokens(row, head), pages = min(a.device.pages(row, head), a.most), words = (pages + 31) / 32;
  const int room_words = (a.most + 31) / 32;
  unsigned *stays = bits, *here = stays + room_words, *below = here + room_words, *out = below + room_words;
  fill_bits(stays, pages, a.all);
  if (!a.all)
    for (int i = threadIdx.x; i < a.attended.count(row, head); i += threads)
      if (const int page = a.attended.index(row, head, i); page >= 0 && page < pages)
        atomicOr(&stays[page >> 5], 1u << (page & 31));
  __syncthreads();
  for (int base = threadIdx.x - lane; base < pages; base += threads) {
    const int page = base + lane;
    const bool inside = page < pages;
    const long long end = (page + 1LL) * p;
    const unsigned pinned = __ballot_sync(
        all_lanes,
        inside && (end - p < a.pins.first || (a.pins.last > 0 && end > n - static_cast<long long>(a.pins.last))));
    const unsigned upper = __ballot_sync(all_lanes, inside && a.device.entry(row, head, page).frame != null_frame);
    const unsigned lower = __ballot_sync(all_lanes, inside && a.host.entry(row, head, page).frame != null_frame);
    if (lane == 0) {
      const unsigned read = stays[base >> 5] | pinned;
      stays[base >> 5] = read;
      here[base >> 5] = upper, below[base >> 5] = lower;
      out[base >> 5] = read & ~upper;
    }
  }
  __syncthreads();
  write(a.recall, row, head, out, pages, s);
  if (threadIdx.x == 0 && pages > 0) stays[(pages - 1) >> 5] |= 1u << ((pages - 1) & 31);
  __syncthreads();

  unsigned staying = 0;
  for (int w = threadIdx.x; w < words; w += threads) staying += __popc(stays[w]);
  unsigned count;
  block_scan(staying, s.scan, count);
  const int spare = a.resident_tokens / p - static_cast<int>(count);  // room for other pages; the newest ones stay
  unsigned newer = 0;
  for (int base = 0; base < words && static_cast<int>(newer) < spare; base += threads) {
    const int w = words - 1 - base - static_cast<int>(threadIdx.x);
    const unsigned free = w >= 0 ? here[w] & ~stays[w] : 0;
    unsigned total;
    const unsigned before = newer + block_scan(__popc(free), s.scan, total);
    if (free && static_cast<int>(before) < spare) stays[w] |= highest(free, spare - static_cast<int>(before));
    newer += total;
  }
  __syncthreads();
  for (int w = threadIdx.x; w < words; w += threads) {
    const unsigned leaves = here[w] & ~stays[w];
    out[w] = leaves;
    stays[w] = leaves & ~below[w];
  }
  __syncthreads();
  write(a.drop, row, head, out, pages, s);
  write(a.offload, row, head, stays, pages, s);
}

List list_of(const IndexList& l) { return {l.index, l.count}; }

}  // namespace

static void lengths_cuda(const PagedKv& kv, View<std::int32_t, 2> out, Stream s) {
  const int heads = kv.rows * kv.kv_heads;
  if (heads <= 0) return;
  lengths_kernel<<<(heads + threads - 1) / threads, threads, 0, stream_of(s)>>>(DeviceKv(kv), out);
  check_launch("lengths");
}
KVLAB_ON_CUDA(lengths, lengths_cuda);

static void older_pages_cuda(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest,
                             PageList out, Stream s) {
  const dim3 grid(static_cast<unsigned>(tokens.extent[1]), static_cast<unsigned>(tokens.extent[0]));
  if (grid.x == 0 || grid.y == 0) return;
  older_kernel<<<grid, threads, 0, stream_of(s)>>>(tokens, rows, page_size, newest, out.index, out.count);
  check_launch("older_pages");
}
KVLAB_ON_CUDA(older_pages, older_pages_cuda);

static void place_pages_cuda(const PlacementArgs& in, Stream s) {
  if (in.device.rows <= 0) return;
  Args a = {};
  a.device = DeviceKv(in.device), a.host = DeviceKv(in.host);
  if (in.attended) a.attended = list_of(*in.attended);
  a.recall = list_of(in.recall), a.offload = list_of(in.offload), a.drop = list_of(in.drop);
  a.all = !in.attended;
  a.pins = in.pins;
  a.resident_tokens = in.resident_tokens;
  a.most = static_cast<int>(std::min(in.device.table.extent[2], in.host.table.extent[2]));
  const std::int64_t bytes = std::int64_t{(a.most + 31) / 32} * 4 * 4, room = 32 * 1024;
  if (bytes > room)
    throw Error(Errc::unsupported,
                "got " + std::to_string(a.most) + " pages of a head, wanted at most " + std::to_string(room * 2),
                "op place_pages");
  place_kernel<<<dim3(a.device.kv_heads, in.device.rows), threads, bytes, stream_of(s)>>>(a);
  check_launch("place_pages");
}
KVLAB_ON_CUDA(place_pages, place_pages_cuda);

}  // namespace kvlab::ops
