#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "base/backend.hpp"
#include "base/cuda.cuh"
#include "model/random_weights.hpp"

namespace kvlab {
using namespace cuda;
namespace {

__global__ void causal_kernel(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length,
                              std::int32_t* row) {
  const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= std::int64_t{tokens} * kv_heads) return;
  const int t = static_cast<int>(i / kv_heads), head = static_cast<int>(i % kv_heads);
  length[i] = now[head] - tokens + t + 1;
  if (head == 0) row[t] = t;
}

__global__ void add_rows_kernel(View<const float, 3> mass, View<float, 2> sums) {
  const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int head = blockIdx.y;
  if (i >= sums.extent[1]) return;
  float sum = sums(head, i);
  for (std::int64_t row = 0; row < mass.extent[0]; ++row) sum += mass(row, head, i);
  sums(head, i) = sum;
}

__global__ void turn_kernel(float* rows, std::int64_t stride, int heads, int kv_heads, int dim, const float* cosine,
                            const float* sine, int angles, View<const std::int32_t, 2> length,
                            const std::int32_t* slots) {
  const int head = blockIdx.x, row = blockIdx.y, half = dim / 2;
  const int kv_head = head < heads ? head / (heads / kv_heads) : head - heads;
  const std::int64_t at = min(max(length(slots[row], kv_head) - 1, 0), angles - 1);
  float* x = rows + row * stride + std::int64_t{head} * dim;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const float c = cosine[at * half + i], s = sine[at * half + i], low = x[i], high = x[i + half];
    x[i] = low * c - high * s;
    x[i + half] = high * c + low * s;
  }
}

template <class T>
__global__ void random_kernel(T* out, std::int64_t first, std::int64_t count, std::uint64_t seed, float scale) {
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * blockDim.x)
    out[i] = T(random_weight(seed, static_cast<std::uint64_t>(first + i)) * scale);
}

constexpr int threads = 256;
unsigned blocks_of(std::int64_t work) { return static_cast<unsigned>((work + threads - 1) / threads); }

void causal(const std::int32_t* now, int kv_heads, int tokens, std::int32_t* length, std::int32_t* row, void* stream) {
  const unsigned blocks = blocks_of(std::int64_t{tokens} * kv_heads);
  causal_kernel<<<blocks, threads, 0, stream_of(stream)>>>(now, kv_heads, tokens, length, row);
  check_launch("causal");
}

void add_rows(const View<const float, 3>& mass, const View<float, 2>& sums, void* stream) {
  const dim3 grid(blocks_of(sums.extent[1]), static_cast<unsigned>(sums.extent[0]));
  add_rows_kernel<<<grid, threads, 0, stream_of(stream)>>>(mass, sums);
  check_launch("add_rows");
}

void turn(float* heads_of_rows, std::int64_t stride, int rows, int heads, int kv_heads, int dim, const float* cosine,
          const float* sine, int angles, const View<const std::int32_t, 2>& length, const std::int32_t* slots,
          void* stream) {
  constexpr int most_rows = 65535;  // of a grid
  for (int begin = 0; begin < rows; begin += most_rows) {
    const dim3 grid(static_cast<unsigned>(heads + kv_heads), static_cast<unsigned>(min(most_rows, rows - begin)));
    turn_kernel<<<grid, 64, 0, stream_of(stream)>>>(heads_of_rows + begin * stride, stride, heads, kv_heads, dim,
                                                    cosine, sine, angles, length, slots + begin);
    check_launch("turn");
  }
}

void random(void* out, DType dtype, std::int64_t first, std::int64_t count, std::uint64_t seed, float scale,
            void* stream) {
  if (count <= 0) return;
  const unsigned blocks = blocks_of(count < (1 << 24) ? count : 1 << 24);
  const auto start = [&](auto kernel, auto* to) {
    kernel<<<blocks, threads, 0, stream_of(stream)>>>(to, first, count, seed, scale);
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

}  // namespace

void fill_cuda_model_ops(CudaModelOps& t);
void fill_cuda_model_ops(CudaModelOps& t) {
  t.causal = causal;
  t.add_rows = add_rows;
  t.turn = turn;
  t.random = random;
}

}  // namespace kvlab
