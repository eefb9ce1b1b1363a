#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "store/cuda_head.cuh"
#include "store/cuda_unused.hpp"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int threads = 256;

// A thread takes a head. Tables and lengths of all layers lie one behind the other.
__global__ void __launch_bounds__(threads)
    empty_places_kernel(const __grid_constant__ CudaStoreLayer first, int heads, unsigned long long* places) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), p = first.layout.page_size;
  unsigned empty[pools] = {};
  if (index < heads) {
    const Head h = head_of(first, index / first.kv_heads, index % first.kv_heads);
    const int n = *h.length;
    for (int tier = 0; n % p && tier < (first.base[1] ? 2 : 1); ++tier)
      if (const PageEntry e = h.table[tier][n / p]; e.frame >= 0)
        empty[pool_of(tier, e.codec)] = static_cast<unsigned>(p - n % p);
  }
  for (int pool = 0; pool < pools; ++pool) {
    const unsigned sum = sum_of_lanes(empty[pool]);
    if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(places + pool, static_cast<unsigned long long>(sum));
  }
}

}  // namespace

namespace cuda_store {

void count_empty_places(const CudaStoreLayer& first, std::int64_t heads, unsigned long long* places, Stream stream) {
  empty_places_kernel<<<static_cast<unsigned>((heads + threads - 1) / threads), threads, 0, stream_of(stream)>>>(
      first, static_cast<int>(heads), places);
  check_launch("count_empty_places");
}
KVLAB_ON_CUDA(count_empty_places, count_empty_places);

}  // namespace cuda_store
}  // namespace kvlab
