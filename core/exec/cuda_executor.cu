#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "base/backend.hpp"
#include "base/cuda.cuh"
#include "exec/cuda_kernels.hpp"
#include "model/random_weights.hpp"
#include "ops/page/ranks.cuh"

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

template <class T>
__global__ void random_kernel(T* out, std::int64_t first, std::int64_t count, std::uint64_t seed, float scale) {
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * blockDim.x)
    out[i] = T(random_weight(seed, static_cast<std::uint64_t>(first + i)) * scale);
}

// One warp per token of a head.
struct PromptPagesArgs {
  CudaPromptPages in;
  ops::DeviceKv kv;
  const std::int32_t* rank;  // [kv_head, room]; null: keys are turned already
  std::int64_t room;
};

template <class T>
__global__ void __launch_bounds__(128) prompt_pages_kernel(const __grid_constant__ PromptPagesArgs a) {
  const CudaPromptPages& in = a.in;
  const int lane = threadIdx.x % 32, head = blockIdx.y, t = blockIdx.x * 4 + threadIdx.x / 32;
  const int n = a.kv.tokens(0, head), p = in.layout.page_size, page = t / p, half = in.layout.head_dim / 2;
  if (t >= n || page >= in.pages) return;
  const std::int64_t frame = std::int64_t{head} * in.pages + page;
  std::byte* to = in.frames + frame * in.layout.bytes;
  const auto old = a.kv.token(0, head, t);
  if (lane == 0) {
    reinterpret_cast<std::int32_t*>(to + in.layout.positions)[t % p] = old.position();
    if (t % p == 0) {
      PageEntry e;
      e.frame = static_cast<std::int32_t>(frame * (in.layout.bytes / granule_bytes));
      e.tokens = static_cast<std::uint16_t>(min(p, n - t));
      in.table[frame] = e;
    }
  }
  T* keys = reinterpret_cast<T*>(to + in.layout.k) + t % p * 2 * half;
  T* values = reinterpret_cast<T*>(to + in.layout.v) + t % p * 2 * half;
  const int fresh = t - (n - in.tokens);
  for (int i = lane; i < half; i += 32) {
    float low, high, value_low, value_high;
    if (fresh >= 0) {
      const float* k = in.keys + fresh * in.key_stride + std::int64_t{head} * 2 * half;
      const float* v = in.values + fresh * in.value_stride + std::int64_t{head} * 2 * half;
      low = k[i], high = k[i + half], value_low = v[i], value_high = v[i + half];
    } else {
      low = old.key(i), high = old.key(i + half), value_low = old.value(i), value_high = old.value(i + half);
      if (a.rank) {
        const std::int64_t at = std::int64_t{min(a.rank[head * a.room + t], in.angles - 1)} * half + i;
        const float x = low, c = in.cosine[at], s = in.sine[at];
        low = x * c - high * s, high = high * c + x * s;
      }
    }
    keys[i] = T(low), keys[i + half] = T(high);
    values[i] = T(value_low), values[i + half] = T(value_high);
  }
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

void prompt_pages(const CudaPromptPages& in, void* stream) {
  PromptPagesArgs a;
  a.in = in;
  a.kv = ops::DeviceKv(in.kv);
  a.room = in.kv.table.extent[2] * in.kv.page_size;
  a.rank = in.kv.rope == RopeRegime::cache_relative ? ops::token_ranks(a.kv, stream) : nullptr;
  const dim3 grid(static_cast<unsigned>(in.pages * in.layout.page_size / 4 + 1), static_cast<unsigned>(in.kv.kv_heads));
  const auto start = [&](auto kernel) { kernel<<<grid, 128, 0, stream_of(stream)>>>(a); };
  if (in.layout.dtype == DType::f16)
    start(prompt_pages_kernel<__half>);
  else
    start(prompt_pages_kernel<__nv_bfloat16>);
  check_launch("prompt_pages");
}

}  // namespace

void fill_cuda_model_ops(CudaModelOps& t);
void fill_cuda_model_ops(CudaModelOps& t) {
  t.causal = causal;
  t.add_rows = add_rows;
  t.prompt_pages = prompt_pages;
  t.random = random;
}

}  // namespace kvlab
