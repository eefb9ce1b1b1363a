// A head of the cache in kernels: its pages, the taking and giving back of frames, elements of its tokens.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/copy_units.cuh"
#include "base/lanes.cuh"
#include "ops/page/codes.cuh"
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

// Stores one element of a row in the cache's dtype. Returns whether its bits changed.
__device__ inline bool put_element(std::byte* row, DType dtype, int d, float x) {
  if (dtype == DType::f32) {
    unsigned* to = reinterpret_cast<unsigned*>(row) + d;
    const unsigned bits = __float_as_uint(x), before = *to;
    *to = bits;
    return bits != before;
  }
  auto* to = reinterpret_cast<unsigned short*>(row) + d;
  const unsigned short bits = ops::nearest_bits(x, dtype == DType::f16), before = *to;
  *to = bits;
  return bits != before;
}

// Makes place for frames of a pool that come back, and returns the first one's. takes: the kernel takes frames of the
// pool, too. It notes how many are in use before.
__device__ inline int place_back(const CudaStoreLayer& s, int pool, int count, bool takes = false) {
  const ops::FramePool& of = s.pool[pool];
  const int taken = takes ? *static_cast<volatile std::int32_t*>(of.taken) : atomicSub(of.taken, count),
            given = takes ? atomicAdd(of.given, count) : *of.given;
  atomicMax(&s.counters->peak_frames[pool], s.counters->frames[pool] - (given - taken));
  return takes ? given : taken - count;
}

// The peak is noted here: the pool has fewest frames just before a kernel gives back its first one.
__device__ inline void give_back(const CudaStoreLayer& s, int tier, PageEntry& e, bool takes = false) {
  if (e.frame < 0) return;
  poison_frame(s, tier, e);
  const int pool = pool_of(tier, e.codec);
  s.pool[pool].at(place_back(s, pool, 1, takes)) = e.frame;
  e = PageEntry{};
}

// Gives back frames of one pool of the device. The whole block calls it, with a number in shared memory.
__device__ inline void give_all_back(const CudaStoreLayer& s, int pool, const PageEntry* entries, int count, int& at) {
  const int mine = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (count == 0) return;
  for (int i = mine; s.poison && i < count; i += threads) poison_frame(s, 0, entries[i]);
  __syncthreads();  // of the call before
  if (mine == 0) at = place_back(s, pool, count);
  __syncthreads();
  for (int i = mine; i < count; i += threads) s.pool[pool].at(at + i) = entries[i].frame;
}

__device__ inline PageEntry entry_of(std::int32_t frame, int tokens, int codec = 0) {
  PageEntry e;
  e.frame = frame;
  e.tokens = static_cast<std::uint16_t>(tokens);
  e.codec = static_cast<std::uint8_t>(codec);
  return e;
}

__device__ inline bool take(const CudaStoreLayer& s, int tier, PageEntry& e, int tokens, int otherwise = store_no_frame,
                            int codec = 0) {
  const ops::FramePool& pool = s.pool[pool_of(tier, codec)];
  const int next = atomicAdd(pool.taken, 1);
  if (next >= *static_cast<volatile std::int32_t*>(pool.given)) {
    atomicSub(pool.taken, 1);
    if (otherwise) fail(s, otherwise);
    return false;
  }
  e = entry_of(pool.at(next), tokens, codec);
  return true;
}

// Takes `count` frames of a pool, those from the returned number on. -1: there are too few, which is noted. Then those
// that there are stay taken, since other blocks may have found the list empty meanwhile.
__device__ inline int take_frames(const CudaStoreLayer& s, int pool, int count, int otherwise = store_no_frame) {
  const ops::FramePool& of = s.pool[pool];
  const int first = atomicAdd(of.taken, count), left = *static_cast<volatile std::int32_t*>(of.given) - first;
  if (left >= count) return first;
  atomicSub(of.taken, count - max(left, 0));
  fail(s, otherwise);
  return -1;
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

// last: the latest edit that counted, of those that run one after the other.
__device__ inline void count_fired(const CudaStoreLayer& s, unsigned long long edit, unsigned long long* last) {
  if (*static_cast<volatile unsigned long long*>(last) == edit) return;  // atomics wait for each other
  if (atomicExch(last, edit) != edit) atomicAdd(&s.counters->fired, 1ull);
}
__device__ inline void count_fired(const CudaStoreLayer& s, unsigned long long edit) {
  count_fired(s, edit, &s.counters->last_edit);
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

// For copies that run beside kernels that take frames.
__device__ inline void give_frame_back(const CudaStoreLayer& s, std::int32_t frame) {
  PageEntry e;
  e.frame = frame;
  poison_frame(s, 0, e);
  s.returned[atomicAdd(s.returned_count, 1)] = frame;
}

// The last word of a job (CudaStorePlace) for a page whose entry on the host is `lower`.
__device__ inline std::int32_t last_of_job(const CudaStoreLayer& s, const PageEntry& lower, int tokens) {
  return s.packs ? static_cast<std::int32_t>(&lower - s.host_entries) : tokens;
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

// The same as a call, for code that seldom needs it.
__device__ __noinline__ inline float any_element(const std::byte* frame, const PageLayout& l, bool key, int token,
                                                 int d) {
  return element(frame, l, key, token, d);
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

// The same in codes. It is a call, so that kernels stay small.
__device__ __noinline__ inline void summarize_in_codes(const CudaStoreLayer& s, const PageLayout& l, const Head& h,
                                                       int page, int tokens, int lane) {
  const std::byte* frame = page_at(s, h, page);
  std::byte* out = h.summaries + page * s.summary_bytes;
  const bool mean = s.summary == Summary::mean;
  constexpr int each = 8;  // elements of a lane, for up to 256
  float low[each] = {}, high[each] = {}, least = ops::summary_limit, most = -ops::summary_limit;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int d = lane + 32 * i;
    if (d >= l.head_dim) break;
    ops::KeyElement keys;
    for (int t = 0; t < tokens; ++t) keys.add(element(frame, l, true, t, d), t == 0);
    low[i] = keys.least, high[i] = keys.most;
    if (s.summary == Summary::centre_radius) {
      for (int t = 0; t < tokens; ++t) keys.add_distance(element(frame, l, true, t, d), t == 0);
      low[i] = keys.low(tokens), high[i] = keys.high(tokens);
    } else if (mean) {
      low[i] = high[i] = keys.mean(tokens);
    }
    // These leave NaN out.
    least = fminf(least, fminf(ops::SummaryCodes::within(low[i]), ops::SummaryCodes::within(high[i])));
    most = fmaxf(most, fmaxf(ops::SummaryCodes::within(low[i]), ops::SummaryCodes::within(high[i])));
  }
  const ops::SummaryCodes codes(cuda::least_of_lanes(least), cuda::most_of_lanes(most));
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int d = lane + 32 * i;
    if (d >= l.head_dim) break;
    if (mean)
      out[d] = codes.nearest(low[i]);
    else
      out[d] = codes.below(low[i]), out[l.head_dim + d] = codes.above(high[i]);
  }
  if (lane == 0) codes.put(out, mean ? l.head_dim : 2 * l.head_dim);
}

__device__ inline void summarize(const CudaStoreLayer& s, const Head& h, int page, int tokens, int lane) {
  if (s.summary == Summary::none) return;
  const PageLayout& l = s.mixed ? layout_at(s, h, page) : s.layout;
  if (s.summary_bits == 8)
    summarize_in_codes(s, l, h, page, tokens, lane);
  else
    summarize_as(s, l, h, page, tokens, lane);
}

// The same for a head of n tokens, as a call: kernels that seldom need it have fewer registers then.
__device__ __noinline__ inline void summarize_page(const CudaStoreLayer& s, int slot, int head, int page, int n,
                                                   int lane) {
  const int p = s.layout.page_size;
  summarize(s, head_of(s, slot, head), page, min(p, n - page * p), lane);
}

// A lane's part of a row: 8 neighbouring elements, so that its loads and stores are wide.
constexpr int lane_elements = 8;

// How a warp holds both sides of a token. Rows of up to 128 elements take half a warp each; keys come first. Longer
// rows take the whole warp, one after the other.
struct RowLanes {
  int turns, lanes, first;  // first: of the lane's elements
  bool there;               // the row has them
  int side;                 // of the lane in the first turn; 0 = keys

  __device__ RowLanes(int head_dim, int lane)
      : turns(head_dim > 128 ? 2 : 1),
        lanes(32 * turns / 2),
        first(lane % lanes * lane_elements),
        there(first < head_dim),
        side(lane / lanes) {}
  __device__ bool key(int turn) const { return side + turn == 0; }
};

// Memory of a lane's elements as they are stored: `bytes` of it, 2 to 32, aligned to as many or to 16.
struct LaneWords {
  unsigned word[lane_elements];

  __device__ void load(const std::byte* from, int bytes) {
    switch (bytes) {
      case 32: put(4, reinterpret_cast<const uint4*>(from)[1]); [[fallthrough]];
      case 16: put(0, *reinterpret_cast<const uint4*>(from)); break;
      case 8: {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        word[0] = x.x, word[1] = x.y;
        break;
      }
      case 4: word[0] = *reinterpret_cast<const unsigned*>(from); break;
      default: word[0] = *reinterpret_cast<const unsigned short*>(from);
    }
  }
  __device__ void store(std::byte* to, int bytes) const {
    switch (bytes) {
      case 32: reinterpret_cast<uint4*>(to)[1] = make_uint4(word[4], word[5], word[6], word[7]); [[fallthrough]];
      case 16: *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]); break;
      case 8: *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]); break;
      case 4: *reinterpret_cast<unsigned*>(to) = word[0]; break;
      default: *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(word[0]);
    }
  }
  // Code i of rows of codes of so many bits.
  __device__ unsigned code(int bits, int i) const {
    return bits == 8 ? word[i / 4] >> 8 * (i % 4) & 0xffu : word[0] >> bits * i & ((1u << bits) - 1);
  }
  template <class Code>
  __device__ void put_codes(int bits, const Code& code) {
    unsigned low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < lane_elements; ++i) {
      const unsigned c = code(i);
      if (bits == 8)
        (i < 4 ? low : high) |= c << 8 * (i % 4);
      else
        low |= c << bits * i;
    }
    word[0] = low, word[1] = high;
  }

 private:
  __device__ void put(int at, uint4 x) { word[at] = x.x, word[at + 1] = x.y, word[at + 2] = x.z, word[at + 3] = x.w; }
};

__device__ inline int lane_bytes(CodecSide side, DType dtype) {
  return side.bits ? side.bits : lane_elements * (dtype == DType::f32 ? 4 : 2);
}

// The lane's stored elements of a side that is not grouped, as numbers.
__device__ inline void numbers_of(const LaneWords& words, CodecSide side, DType dtype, unsigned meta,
                                  float (&x)[lane_elements]) {
  const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(meta))),
              zero = __half2float(__ushort_as_half(static_cast<unsigned short>(meta >> 16)));
#pragma unroll
  for (int i = 0; i < lane_elements; ++i) {
    const unsigned two = words.word[i / 2], half = i % 2 ? two >> 16 : two & 0xffffu;
    if (side.bits)  // the host uses no fused multiply-add here either
      x[i] = __fadd_rn(__fmul_rn(ops::value_of(side, words.code(side.bits, i)), scale), zero);
    else if (dtype == DType::f32)
      x[i] = __uint_as_float(words.word[i]);
    else if (dtype == DType::f16)
      x[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
    else
      x[i] = __uint_as_float(half << 16);
  }
}

// A lane's elements of a row: Parts times lane_elements neighbours from `first` on, `step` apart.
template <int Parts>
struct RowParts {
  float x[Parts][lane_elements];
  int first, step;
  bool there;  // the row has the first ones

  __device__ bool has(int part, int head_dim) const { return there && (part == 0 || first + part * step < head_dim); }
};

// The least and the most of a row. The whole warp calls it; `lanes` neighbours have a row.
template <int Parts>
__device__ float2 range_of(const RowParts<Parts>& row, int head_dim, int lanes) {
  float2 r = make_float2(INFINITY, -INFINITY);
#pragma unroll
  for (int part = 0; part < Parts; ++part) {
    float lo = row.x[part][0], hi = lo;
#pragma unroll
    for (int i = 1; i < lane_elements; ++i) lo = fminf(lo, row.x[part][i]), hi = fmaxf(hi, row.x[part][i]);
    if (row.has(part, head_dim)) r.x = fminf(r.x, lo), r.y = fmaxf(r.y, hi);
  }
#pragma unroll
  for (int d = 16; d; d /= 2)
    if (d < lanes) r.x = fminf(r.x, __shfl_xor_sync(~0u, r.x, d)), r.y = fmaxf(r.y, __shfl_xor_sync(~0u, r.y, d));
  return r;
}

// Lanes store a row's elements as ops::write_token does. The whole warp calls it; `lanes` neighbours have a row.
template <int Parts>
__device__ void encode(std::byte* frame, const PageLayout& l, bool key, int offset, const RowParts<Parts>& row,
                       int lanes) {
  const CodecSide side = ops::side_of(l, key);
  const int bytes = lane_bytes(side, l.dtype);
  std::byte* to = frame + ops::row_offset(l, key, offset);
  const auto put = [&](int part, const LaneWords& words) {
    words.store(to + (row.first + part * row.step) / lane_elements * bytes, bytes);
  };
  float2 range = make_float2(0, 0);
  if (__any_sync(~0u, side.bits != 0)) range = range_of(row, l.head_dim, lanes);
  if (!row.there) return;
  const auto put_codes = [&](auto bits) {
    const bool whole = side.kind == CodeKind::whole_zero;
    const ops::SharedScale of(
        ops::put_scale(whole ? ops::code_scale(side, range.x, range.y) : ops::scale_of(bits, range.x, range.y),
                       frame + ops::meta_offset(l, key, offset), row.first == 0));
#pragma unroll
    for (int part = 0; part < Parts; ++part)
      if (row.has(part, l.head_dim)) {
        const ops::EightCodes codes = ops::codes_of<bits>(row.x[part], of);
        LaneWords words;
        words.word[0] = codes.low, words.word[1] = codes.high;
        put(part, words);
      }
  };
  if (side.kind == CodeKind::e4m3) return put_codes(std::integral_constant<int, 0>{});
  if (side.bits == 8) return put_codes(std::integral_constant<int, 8>{});
  if (side.bits == 4) return put_codes(std::integral_constant<int, 4>{});
  if (side.bits == 2) return put_codes(std::integral_constant<int, 2>{});
#pragma unroll
  for (int part = 0; part < Parts; ++part) {
    if (!row.has(part, l.head_dim)) continue;
    const float(&x)[lane_elements] = row.x[part];
    LaneWords words;
    if (l.dtype == DType::f32) {
#pragma unroll
      for (int i = 0; i < lane_elements; ++i) words.word[i] = __float_as_uint(x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < lane_elements / 2; ++i)
        words.word[i] = l.dtype == DType::f16 ? cuda::Pair<__half>::pack(x[2 * i], x[2 * i + 1])
                                              : cuda::Pair<__nv_bfloat16>::pack(x[2 * i], x[2 * i + 1]);
    }
    put(part, words);
  }
}

}  // namespace kvlab::device_store
