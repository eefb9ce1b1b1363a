// A head of the cache in kernels: its pages, the taking and giving back of frames, elements of its tokens.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/copy_units.cuh"
#include "ops/page/codes.hpp"
#include "ops/page/summary.cuh"
#include "store/cuda_kernels.hpp"

namespace kvlab::device_store {

struct Head {
  PageEntry* table[2];
  std::int32_t *length, *lower_pages;
  std::byte* summaries;
};

__device__ inline Head head_of(const CudaStoreLayer& s, int slot, int head) {
  const std::int64_t at = std::int64_t{slot} * s.kv_heads + head;
  return {{s.table[0] + at * s.pages, s.table[1] + at * s.pages},
          s.length + at,
          s.lower_pages ? s.lower_pages + at : nullptr,
          s.summaries ? s.summaries + at * s.pages * s.summary_bytes : nullptr};
}

__device__ inline std::byte* frame_at(const CudaStoreLayer& s, int tier, std::int32_t frame) {
  return s.base[tier] + std::int64_t{frame} * granule_bytes;
}

// The layout of a tier's pages, where the device has one codec.
__device__ inline const PageLayout& layout_of(const CudaStoreLayer& s, int tier) {
  return tier ? s.host_layout : s.layout;
}

// Returns the layout of a page where kernels read and write its tokens: on the device if it has them.
__device__ inline const PageLayout& layout_at(const CudaStoreLayer& s, const Head& h, int page) {
  const PageEntry& upper = h.table[0][page];
  return upper.frame < 0 ? s.host_layout : upper.codec ? s.lower_layout : s.layout;
}
__device__ inline int pool_of(int tier, int codec) { return tier == 0 && codec > 0 ? lower_pool : tier; }
__device__ inline std::byte* page_at(const CudaStoreLayer& s, const Head& h, int page) {
  const std::int32_t upper = h.table[0][page].frame;
  return upper >= 0 ? frame_at(s, 0, upper) : frame_at(s, 1, h.table[1][page].frame);
}

__device__ inline void fail(const CudaStoreLayer& s, int why) { atomicOr(&s.counters->error, why); }

__device__ inline void poison_frame(const CudaStoreLayer& s, int tier, const PageEntry& e) {
  if (!s.poison) return;
  auto* words = reinterpret_cast<uint4*>(frame_at(s, tier, e.frame));
  const PageLayout& l = tier ? s.host_layout : e.codec ? s.lower_layout : s.layout;
  for (std::int64_t i = 0; i < l.bytes / std::int64_t{sizeof(uint4)}; ++i) words[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

// The peak is noted here: the pool's count is least just before a kernel gives back its first frame.
__device__ inline void give_back(const CudaStoreLayer& s, int tier, PageEntry& e) {
  if (e.frame < 0) return;
  poison_frame(s, tier, e);
  const int pool = pool_of(tier, e.codec), at = atomicAdd(s.pool[pool].free_count, 1);
  s.pool[pool].free[at] = e.frame;
  atomicMax(&s.counters->peak_frames[pool], s.counters->frames[pool] - at);
  e = PageEntry{};
}

__device__ inline bool take(const CudaStoreLayer& s, int tier, PageEntry& e, int tokens, int otherwise = store_no_frame,
                            int codec = 0) {
  const ops::FramePool& pool = s.pool[pool_of(tier, codec)];
  const int left = atomicSub(pool.free_count, 1);
  if (left <= 0) {
    atomicAdd(pool.free_count, 1);
    if (otherwise) fail(s, otherwise);
    return false;
  }
  PageEntry fresh;
  fresh.frame = pool.free[left - 1];
  fresh.tokens = static_cast<std::uint16_t>(tokens);
  fresh.codec = static_cast<std::uint8_t>(codec);
  e = fresh;
  return true;
}

__device__ inline void fewer_pages(const CudaStoreLayer& s, int pages) {
  if (s.summary != Summary::none && pages > 0) atomicMax(&s.counters->peak_pages, atomicSub(&s.counters->pages, pages));
}

// Whether a head's list names what is not below `limit`, or does not ascend; that is noted. The whole block calls it.
__device__ inline bool wrong_list(const CudaStoreLayer& s, const CudaStoreList& a, int row, int head, int limit) {
  const int count = a.count(row, head);
  bool wrong = count < 0 || count > a.index.extent[2];
  for (int i = static_cast<int>(threadIdx.x); !wrong && i < count; i += static_cast<int>(blockDim.x)) {
    const int at = a.index(row, head, i);
    wrong = at < 0 || at >= limit || (i > 0 && at <= a.index(row, head, i - 1));
  }
  if (!__syncthreads_or(wrong)) return false;
  if (threadIdx.x == 0) fail(s, store_bad_list);
  return true;
}

__device__ inline void count_fired(const CudaStoreLayer& s, unsigned long long edit) {
  if (*static_cast<volatile unsigned long long*>(&s.counters->last_edit) == edit)
    return;  // atomics wait for each other
  if (atomicExch(&s.counters->last_edit, edit) != edit) atomicAdd(&s.counters->fired, 1ull);
}

// Policies write token state in device pages, so the state of a copy on the host is stale.
__device__ inline void copy_state_down(const CudaStoreLayer& s, std::int32_t upper, std::int32_t lower) {
  const std::byte* above = frame_at(s, 0, upper) + s.layout.state;
  std::byte* below = frame_at(s, 1, lower) + s.host_layout.state;
  for (int at = 0; at < s.layout.state_columns * s.layout.page_size * 4; at += 4)
    *reinterpret_cast<unsigned*>(below + at) = *reinterpret_cast<const unsigned*>(above + at);
  atomicAdd(&s.counters->states, 1ull);
}

// Copies a frame with `threads` threads, in units of 16 bytes.
__device__ inline void copy_frame(const CudaStoreLayer& s, const std::byte* from, std::byte* to, int thread,
                                  int threads) {
  const uint4* units = reinterpret_cast<const uint4*>(from);
  cuda::copy_units([&](int i) { return units + i; }, reinterpret_cast<uint4*>(to),
                   static_cast<int>(s.layout.bytes / 16), thread, threads);
}

// One thread of each block of copies calls it at the block's end. counts: {jobs, blocks that are done}. The last block
// leaves both zero.
__device__ inline void end_copies(std::int32_t* counts) {
  __threadfence();
  if (atomicAdd(counts + 1, 1) == static_cast<int>(gridDim.x) - 1) counts[0] = counts[1] = 0;
}

// ---- elements ------------------------------------------------------------------------------------------------------

__device__ inline float element(const std::byte* frame, const PageLayout& l, bool key, int token, int d) {
  const CodecSide side = ops::side_of(l, key);
  const std::byte* row = frame + ops::row_offset(l, key, token);
  if (side.bits) {
    const __half* meta = reinterpret_cast<const __half*>(
        frame + (side.grouped() ? ops::meta_offset(l, key, token, d) : ops::meta_offset(l, key, token)));
    // The host uses no fused multiply-add here either.
    return __fadd_rn(__fmul_rn(ops::value_of(side, ops::code_at(side, row, d)), __half2float(meta[0])),
                     __half2float(meta[1]));
  }
  if (l.dtype == DType::f32) return reinterpret_cast<const float*>(row)[d];
  if (l.dtype == DType::f16) return __half2float(reinterpret_cast<const __half*>(row)[d]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[d]);
}

// A warp writes the page's summary.
__device__ inline void summarize_as(const CudaStoreLayer& s, const PageLayout& l, const Head& h, int page, int tokens,
                                    int lane) {
  const std::byte* frame = page_at(s, h, page);
  std::byte* out = h.summaries + page * s.summary_bytes;
  for (int d = lane; d < l.head_dim; d += 32) {
    ops::KeyElement keys;
    for (int t = 0; t < tokens; ++t) keys.add(element(frame, l, true, t, d), t == 0);
    float low = keys.least, high = keys.most;
    if (s.summary == Summary::centre_radius) {
      for (int t = 0; t < tokens; ++t) keys.add_distance(element(frame, l, true, t, d), t == 0);
      low = keys.low(tokens), high = keys.high(tokens);
    }
    if (l.dtype == DType::f32) {
      float* to = reinterpret_cast<float*>(out);
      if (s.summary == Summary::mean)
        to[d] = keys.mean(tokens);
      else
        to[d] = low, to[l.head_dim + d] = high;
    } else {
      const bool half = l.dtype == DType::f16;
      auto* to = reinterpret_cast<unsigned short*>(out);
      if (s.summary == Summary::mean)
        to[d] = ops::nearest_bits(keys.mean(tokens), half);
      else
        to[d] = ops::bound_bits(low, false, half), to[l.head_dim + d] = ops::bound_bits(high, true, half);
    }
  }
}

__device__ inline void summarize(const CudaStoreLayer& s, const Head& h, int page, int tokens, int lane) {
  if (s.summary == Summary::none) return;
  summarize_as(s, s.mixed ? layout_at(s, h, page) : s.layout, h, page, tokens, lane);
}

constexpr int most_elements = 8;  // elements of a lane: head_dim <= 256

// A warp writes a row of codes. code(j) is that of element lane + 32 j.
template <class Code>
__device__ inline void put_codes(CodecSide side, std::byte* row, int head_dim, int lane, const Code& code) {
  const int each = 8 / side.bits, own = lane % each;  // neighbouring lanes share a byte
#pragma unroll
  for (int j = 0; j < most_elements; ++j) {
    unsigned byte = code(j) << own * side.bits;
    for (int m = 1; m < each; m *= 2) byte |= __shfl_xor_sync(~0u, byte, m);
    if (const int d = lane + 32 * j; d < head_dim && own == 0) row[d / each] = static_cast<std::byte>(byte);
  }
}

// A warp stores one side of a token as ops::write_token does. x[j] is element lane + 32 j.
__device__ inline void encode(std::byte* frame, const PageLayout& l, bool key, int offset,
                              const float (&x)[most_elements], int lane) {
  constexpr int most = most_elements;
  const CodecSide side = ops::side_of(l, key);
  std::byte* row = frame + ops::row_offset(l, key, offset);
  const auto put = [&](auto* to, auto of) {
#pragma unroll
    for (int j = 0; j < most; ++j)
      if (const int d = lane + 32 * j; d < l.head_dim) to[d] = of(x[j]);
  };
  if (side.bits) {
    float lo = INFINITY, hi = -INFINITY;
#pragma unroll
    for (int j = 0; j < most; ++j)
      if (lane + 32 * j < l.head_dim) lo = fminf(lo, x[j]), hi = fmaxf(hi, x[j]);
    for (int d = 16; d; d /= 2)
      lo = fminf(lo, __shfl_xor_sync(~0u, lo, d)), hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, d));
    const ops::CodeScale exact = ops::code_scale(side, lo, hi);
    const __half scale = __float2half_rn(exact.scale), zero = __float2half_rn(exact.zero);
    if (lane == 0) {
      __half* meta = reinterpret_cast<__half*>(frame + ops::meta_offset(l, key, offset));
      meta[0] = scale, meta[1] = zero;
    }
    const ops::CodeScale of = {__half2float(scale), __half2float(zero)};
    put_codes(side, row, l.head_dim, lane, [&](int j) { return ops::code_of(side, x[j], of); });
  } else if (l.dtype == DType::f32) {
    put(reinterpret_cast<float*>(row), [](float y) { return y; });
  } else if (l.dtype == DType::f16) {
    put(reinterpret_cast<__half*>(row), [](float y) { return __float2half_rn(y); });
  } else {
    put(reinterpret_cast<__nv_bfloat16*>(row), [](float y) { return __float2bfloat16_rn(y); });
  }
}

template <class In>
__device__ inline void encode_row(std::byte* frame, const PageLayout& l, bool key, int offset, const In* from,
                                  int lane) {
  float x[most_elements];
#pragma unroll
  for (int j = 0; j < most_elements; ++j) {
    const int d = lane + 32 * j;
    x[j] = d < l.head_dim ? static_cast<float>(from[d]) : 0.f;
  }
  encode(frame, l, key, offset, x, lane);
}

}  // namespace kvlab::device_store
