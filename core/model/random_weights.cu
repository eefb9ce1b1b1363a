#include "model/random_weights.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "base/cuda.cuh"

namespace kvlab {
using namespace cuda;
namespace {

template <class T>
__global__ void random_kernel(T* out, std::int64_t first, std::int64_t count, std::uint64_t seed, float scale) {
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * blockDim.x)
    out[i] = T(random_weight(seed, static_cast<std::uint64_t>(first + i)) * scale);
}

}  // namespace

static void random_weights_cuda(void* out, DType dtype, std::int64_t first, std::int64_t count, std::uint64_t seed,
                                float scale, Stream s) {
  if (count <= 0) return;
  constexpr unsigned threads = 256;
  const auto blocks = static_cast<unsigned>(((count < (1 << 24) ? count : 1 << 24) + threads - 1) / threads);
  const auto start = [&](auto kernel, auto* to) {
    kernel<<<blocks, threads, 0, stream_of(s)>>>(to, first, count, seed, scale);
  };
  if (dtype == DType::bf16)
    start(random_kernel<__nv_bfloat16>, static_cast<__nv_bfloat16*>(out));
  else if (dtype == DType::f16)
    start(random_kernel<__half>, static_cast<__half*>(out));
  else
    throw Error(Errc::unsupported, std::string("got random weights of ") + name_of(dtype) + ", wanted bf16 or f16",
                "CUDA random");
  check_launch("random");
}
KVLAB_ON_CUDA(random_weights, random_weights_cuda);

}  // namespace kvlab
