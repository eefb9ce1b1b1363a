#include "ops/page/prompt_pages.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/cuda.cuh"
#include "ops/page/ranks.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

// One warp copies one token of one head.
struct Args {
  PromptPagesArgs in;
  DeviceKv kv;
  const std::int32_t* rank;  // [kv_head, room]; null: stored keys are already rotated
  std::int64_t room;
};

template <class T>
__global__ void __launch_bounds__(128) prompt_pages_kernel(const __grid_constant__ Args a) {
  const PromptPagesArgs& in = a.in;
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

}  // namespace

static void prompt_pages_cuda(const PromptPagesArgs& in, Stream s) {
  Args a;
  a.in = in;
  a.kv = DeviceKv(in.kv);
  a.room = in.kv.table.extent[2] * in.kv.page_size;
  a.rank = in.kv.rope == RopeRegime::cache_relative ? token_ranks(a.kv, s.handle()) : nullptr;
  const dim3 grid(static_cast<unsigned>(in.pages * in.layout.page_size / 4 + 1), static_cast<unsigned>(in.kv.kv_heads));
  const auto start = [&](auto kernel) { kernel<<<grid, 128, 0, stream_of(s)>>>(a); };
  if (in.layout.dtype == DType::f16)
    start(prompt_pages_kernel<__half>);
  else
    start(prompt_pages_kernel<__nv_bfloat16>);
  check_launch("prompt_pages");
}
KVLAB_ON_CUDA(prompt_pages, prompt_pages_cuda);

}  // namespace kvlab::ops
