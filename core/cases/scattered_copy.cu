#include "cases/scattered_copy.hpp"

#include "base/copy_units.cuh"
#include "base/relay.cuh"

namespace kvlab {
namespace {

__global__ void __launch_bounds__(256) gather_kernel(const __grid_constant__ ScatteredCopy c) {
  const int warps = static_cast<int>(blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int units = c.piece_bytes / 16;  // of a piece
  for (int page = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32; page < c.pages;
       page += static_cast<int>(gridDim.x) * warps) {
    const std::byte* from = c.from + (c.from_at ? c.from_at[page] : std::int64_t{page} * c.pieces * c.piece_bytes);
    const auto unit = [](const std::byte* p, int i) { return reinterpret_cast<const uint4*>(p) + i; };
    uint4* to = reinterpret_cast<uint4*>(c.to + c.to_at[page]);
    if (c.pieces == 1)
      cuda::copy_units([&](int i) { return unit(from, i); }, to, units, lane, 32);
    else
      cuda::copy_units([&](int i) { return unit(from + i / units * c.stride, i % units); }, to, c.pieces * units, lane,
                       32);
  }
}

__global__ void __launch_bounds__(32) relay_kernel(const __grid_constant__ ScatteredCopy c) {
  cuda::Relay relay(cuda::relay_shared(), cuda::relay_beside);
  const int lane = static_cast<int>(threadIdx.x), blocks = static_cast<int>(gridDim.x);
  if (lane == 0) relay.start();
  for (int first = static_cast<int>(blockIdx.x); first < c.pages; first += 32 * blocks) {
    const int page = first + lane * blocks;
    const bool has = page < c.pages;
    const long long from = has ? c.from_at[page] : 0, to = has ? c.to_at[page] : 0;
    for (unsigned left = __ballot_sync(~0u, has); left; left &= left - 1) {
      const int of = __ffs(static_cast<int>(left)) - 1;
      const std::byte* source = c.from + __shfl_sync(~0u, from, of);
      std::byte* target = c.to + __shfl_sync(~0u, to, of);
      if (lane == 0) relay.copy(source, target, static_cast<unsigned>(c.piece_bytes));
    }
  }
  if (lane == 0) relay.finish();
}

}  // namespace

namespace scattered_copy {

void gather(const ScatteredCopy& c, int blocks, Stream s) {
  gather_kernel<<<blocks, 256, 0, cuda::stream_of(s)>>>(c);
  cuda::check_launch("gather");
}
KVLAB_ON_CUDA(gather, gather);

void relay(const ScatteredCopy& c, int blocks, Stream s) { cuda::launch_relay("relay", relay_kernel, blocks, s, c); }
KVLAB_ON_CUDA(relay, relay);

void relays_beside(bool yes) { cuda::left_free.to_others = yes ? cuda::copying_multiprocessors : 0; }
KVLAB_ON_CUDA(relays_beside, relays_beside);

void page_2d(const std::byte* from, std::byte* to, int pieces, int piece_bytes, std::int64_t stride, Stream s) {
  const auto width = static_cast<std::size_t>(piece_bytes);
  cuda::check(cudaMemcpy2DAsync(to, width, from, static_cast<std::size_t>(stride), width,
                                static_cast<std::size_t>(pieces), cudaMemcpyDefault, cuda::stream_of(s)),
              "cudaMemcpy2DAsync");
}
KVLAB_ON_CUDA(page_2d, page_2d);

#if CUDART_VERSION >= 13000
bool has_batch() { return true; }

void batch(void* const* to, const void* const* from, const std::size_t* bytes, int pages, Stream s) {
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;  // the attributes are those of every copy
  cuda::check(cudaMemcpyBatchAsync(to, from, bytes, static_cast<std::size_t>(pages), &attributes, &first, 1,
                                   cuda::stream_of(s)),
              "cudaMemcpyBatchAsync");
}
#else
bool has_batch() { return false; }

void batch(void* const*, const void* const*, const std::size_t*, int, Stream) {
  throw Error(Errc::unsupported, "got a toolkit before CUDA 13.0, wanted one with cudaMemcpyBatchAsync", "batch");
}
#endif
KVLAB_ON_CUDA(has_batch, has_batch);
KVLAB_ON_CUDA(batch, batch);

}  // namespace scattered_copy
}  // namespace kvlab
