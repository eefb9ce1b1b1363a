// Keys from factors in kernels: the op rebuild_rows and the store's place edits make the same bits.
#pragma once
#include "ops/page/summary.cuh"
#include "ops/score/key_factors.hpp"

namespace kvlab::ops {

constexpr int rebuild_threads = 256, rebuild_step = 32;

struct RebuildShared {
  float numbers[rebuilt_at_once][rebuild_step], keys[rebuilt_at_once][most_head_dim];
};

__device__ inline float factor_at(const std::byte* row, DType dtype, std::int64_t i) {
  if (dtype == DType::f32) return reinterpret_cast<const float*>(row)[i];
  if (dtype == DType::f16) return __half2float(reinterpret_cast<const __half*>(row)[i]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
}

// A block makes the keys of `count` <= rebuilt_at_once places of a head from `first` on. position(t) is the text
// position of the t-th of them, and put(t, d, x) takes its elements. All threads of the block call it.
template <class Position, class Put>
__device__ void rebuild_keys(const KeyFactors& f, const RopeTable& rope, int slot, int head, int first, int count,
                             RebuildShared& s, const Position& position, const Put& put) {
  const int dim = rope.head_dim, half = dim / 2, me = static_cast<int>(threadIdx.x), groups = rebuild_threads / dim,
            group = me / dim, d = me % dim;
  const std::int64_t size = f.dtype == DType::f32 ? 4 : 2, width = std::int64_t{f.kv_heads} * dim;
  const std::byte *tokens = f.tokens + slot * f.slot_bytes + first * f.row * size,
                  *basis = f.basis + slot * f.slot_bytes;
  float sum[rebuilt_at_once] = {};
  for (int from = 0; from < f.rank; from += rebuild_step) {
    const int here = min(rebuild_step, f.rank - from);
    __syncthreads();
    for (int i = me; i < count * rebuild_step; i += rebuild_threads) {
      const int t = i / rebuild_step, q = i % rebuild_step;
      if (q < here) s.numbers[t][q] = factor_at(tokens + t * f.row * size, f.dtype, from + q);
    }
    __syncthreads();
    for (int q = 0; group < groups && q < here; ++q) {
      const float of = factor_at(basis, f.dtype, (from + q) * width + head * dim + d);
#pragma unroll
      for (int j = 0; j < rebuilt_at_once; ++j)
        if (const int t = group + j * groups; t < count) sum[j] = fmaf(s.numbers[t][q], of, sum[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < rebuilt_at_once; ++j)
    if (const int t = group + j * groups; group < groups && t < count) s.keys[t][d] = sum[j];
  __syncthreads();
  for (int i = me; i < count * half; i += rebuild_threads) {
    const int t = i / half, e = i % half;
    double sine, cosine;
    sincos(static_cast<double>(position(t)) * rope.inv_freq[e], &sine, &cosine);
    const float c = __fmul_rn(static_cast<float>(cosine), rope.attention_scale),
                n = __fmul_rn(static_cast<float>(sine), rope.attention_scale), a = s.keys[t][e],
                b = s.keys[t][half + e];
    put(t, e, __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, n)));
    put(t, half + e, __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, n)));
  }
  __syncthreads();
}

}  // namespace kvlab::ops
