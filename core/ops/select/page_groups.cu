// Groups of pages on a GPU. One block takes a KV head of a row.
#include "ops/select/page_groups.hpp"

#include <algorithm>
#include <string>

#include "base/device_op.hpp"
#include "ops/page/paged.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 256;

struct Args {
  DeviceKv kv;
  View<const float, 3> scores;
  GroupChoice choice;
  PageList list;
  int most_groups;  // for which there is shared memory
};

// Shared memory holds the scores of the groups, then their bits.
__global__ void __launch_bounds__(threads) group_kernel(const __grid_constant__ Args a) {
  extern __shared__ float group_scores[];
  __shared__ SelectShared select;
  auto* chosen = reinterpret_cast<unsigned*>(group_scores + a.most_groups);
  const int head = blockIdx.x, row = blockIdx.y, parts = a.choice.parts, me = threadIdx.x;
  if (!a.choice.heads.on(a.kv.kv.slots[row], head)) return;
  const int tokens = a.kv.tokens(row, head), most = a.choice.most[head];
  int pages = a.kv.pages(row, head);
  int groups = (pages + parts - 1) / parts;
  const bool all = tokens <= a.choice.whole || most >= groups;
  if (!all) {
    pages = min(pages, static_cast<int>(a.scores.extent[2]));
    groups = min((pages + parts - 1) / parts, a.most_groups);
    const float* scores = a.scores.data + row * a.scores.stride[0] + head * a.scores.stride[1];
    Row of_groups{group_scores, INFINITY, -INFINITY, false};
    for (int g = me; g < groups; g += threads) {
      float best = NAN;
      for (int p = g * parts; p < min(pages, (g + 1) * parts); ++p) {
        const float x = __ldcg(scores + p);
        if (x == x && !(best >= x)) best = x;
      }
      group_scores[g] = best;
      widen(best, of_groups.low, of_groups.high);
    }
    fill_bits(chosen, groups, false);
    const int newest = a.choice.newest_group && groups > 0;
    if (newest && me == 0) chosen[(groups - 1) >> 5] |= 1u << ((groups - 1) & 31);
    __syncthreads();
    if (most > newest && most < groups) select_best(of_groups, groups, most - newest, chosen, select);
  }
  const std::int64_t at = a.list.at(row);
  std::int32_t* list = a.list.index.data + at * a.list.index.stride[0] + head * a.list.index.stride[1];
  const auto room = static_cast<unsigned>(a.list.index.extent[2]);
  unsigned kept = 0;
  for (int first = 0; first < pages; first += threads) {
    const int p = first + me;
    const bool taken = p < pages && (all || has_bit(chosen, p / parts));
    unsigned total = 0;
    const unsigned place = kept + block_scan(taken, select.scan, total);
    if (taken && place < room) list[place * a.list.index.stride[2]] = p;
    kept += total;
  }
  if (me == 0) a.list.count(at, head) = static_cast<std::int32_t>(min(kept, room));
}

__global__ void periods_kernel(const __grid_constant__ DeviceKv kv, int period, HeadNumbers last, HeadFlags begins) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / kv.kv_heads, head = i % kv.kv_heads;
  if (row >= kv.kv.rows) return;
  const int slot = kv.kv.slots[row], begun = (kv.tokens(row, head) + period - 1) / period;
  std::int32_t& before = last(0, slot, head);
  begins(slot, head) = begun != before;
  before = begun;
}

}  // namespace

static void group_pages_cuda(const PagedKv& kv, View<const float, 3> page_scores, const GroupChoice& choice,
                             PageList list, Stream s) {
  if (kv.rows == 0 || kv.kv_heads == 0) return;
  const std::int64_t most = (std::min(kv.table.extent[2], page_scores.extent[2]) + choice.parts - 1) / choice.parts;
  const std::int64_t room = shared_bytes() - static_cast<std::int64_t>(sizeof(SelectShared)) - 1024;
  const std::int64_t bytes = most * 4 + (most + 31) / 32 * 4;
  if (bytes > room)
    throw Error(
        Errc::unsupported,
        "got up to " + std::to_string(most) + " groups of pages, wanted at most " + std::to_string(room * 8 / 33 - 8),
        "op group_pages");
  check(cudaFuncSetAttribute(group_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room)),
        "group_pages");
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  group_kernel<<<grid, threads, static_cast<unsigned>(bytes), stream_of(s)>>>(
      Args{DeviceKv(kv), page_scores, choice, list, static_cast<int>(most)});
  check_launch("group_pages");
}
KVLAB_ON_CUDA(group_pages, group_pages_cuda);

static void begun_periods_cuda(const PagedKv& kv, int period, HeadNumbers last, HeadFlags begins, Stream s) {
  const int heads = kv.rows * kv.kv_heads;
  if (heads <= 0) return;
  periods_kernel<<<static_cast<unsigned>((heads + threads - 1) / threads), threads, 0, stream_of(s)>>>(
      DeviceKv(kv), period, last, begins);
  check_launch("begun_periods");
}
KVLAB_ON_CUDA(begun_periods, begun_periods_cuda);

}  // namespace kvlab::ops
