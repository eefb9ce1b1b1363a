// What a decode step changes in the heads of a cache of two codecs, in one launch for all layers, heads and rows: a
// token becomes low, a token leaves, a page of low tokens that is full takes the second codec. Heads take frames of the
// second codec beside others that give some back.
#include "base/cuda.cuh"
#include "ops/page/paged.hpp"
#include "store/cuda_lower.cuh"
#include "store/cuda_moves.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int warps = 4;  // of a block; each has a head

// Stores the head's listed page in the second codec. Returns whether it changed.
__device__ bool lower_page(const CudaStoreLayer& s, const CudaStoreList& a, int row, int head, bool runs, int lane) {
  const int count = a.count(row, head), p = s.layout.page_size;
  if (count == 0) return false;
  const Head h = head_of(s, a.slots[row], head);
  const int n = *h.length, page = a.index(row, head, 0);
  if (count != 1 || page < 0 || page * p >= n) {
    if (lane == 0) fail(s, store_bad_list);
    return false;
  }
  PageEntry before = h.table[0][page], fresh;
  const int other = *h.lower_pages;
  if (before.frame < 0 || before.codec > 0 || (page + 1) * p > n || other * p > n) {
    if (lane == 0 && before.frame < 0) fail(s, ops::page_absent);
    return false;
  }
  if (lane == 0 && !take(s, 0, fresh, before.tokens, store_no_frame, 1)) fresh.frame = null_frame;
  fresh.frame = __shfl_sync(~0u, fresh.frame, 0);
  if (fresh.frame < 0) return false;
  const std::byte* from = frame_at(s, 0, before.frame);
  std::byte* to = frame_at(s, 0, fresh.frame);
  if (runs) {
    for (const bool key : {true, false}) lower_side(from, s.layout, to, s.lower_layout, key, lane);
  } else {
    for (int t = 0; t < p; ++t) {
      Carried x;
      x.read(from, s.layout, t, s.lower_layout, lane);
      x.write(to, s.lower_layout, t, lane);
    }
  }
  __syncwarp();
  if (lane == 0) {
    h.table[0][page] = h.table[0][other];
    h.table[0][other] = fresh;
    *h.lower_pages = other + 1;
    give_back(s, 0, before);
  }
  __syncwarp();
  for (const int changed : {page, other}) summarize(s, h, changed, min(p, n - changed * p), lane);
  return true;
}

__global__ void __launch_bounds__(warps * 32)
    step_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreStep a, bool runs) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int of_all = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32;
  const int row = of_all / s.kv_heads, head = of_all % s.kv_heads;
  if (row >= a.move.rows) return;
  const bool moved = swap_pairs<unsigned, true>(s, a.move, row, head, lane);
  __syncwarp();
  const bool left = evict_one<unsigned, true, true>(s, a.evict, row, head, nullptr, lane);
  __syncwarp();
  const bool lowered = lower_page(s, a.lower, row, head, runs, lane);
  if (lane != 0) return;
  const bool changed[] = {moved, left, lowered};
  const unsigned long long edits[] = {a.move.edit, a.evict.edit, a.lower.edit};
  for (int i = 0; i < 3; ++i)
    if (changed[i]) count_fired(s, edits[i], &s.counters->last_step[i]);
}

}  // namespace

namespace cuda_store {

void step_down(const CudaStoreLayer& s, const CudaStoreStep& a, Stream stream) {
  const int heads = a.move.rows * s.kv_heads;
  step_kernel<<<static_cast<unsigned>((heads + warps - 1) / warps), warps * 32, 0, stream_of(stream)>>>(
      s, a, only_lowers(s.layout, s.lower_layout));
  check_launch("step_down");
}
KVLAB_ON_CUDA(step_down, step_down);

}  // namespace cuda_store
}  // namespace kvlab
