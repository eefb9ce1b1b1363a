// Tokens of a device with two codecs: pages that change theirs, tokens by levels, and extents of frames. Pages of the
// second codec come first in a head's table. No kernel here takes frames of a pool and also gives some back.
#include <algorithm>

#include "base/cuda.cuh"
#include "ops/page/paged.hpp"
#include "store/cuda_tokens.cuh"

namespace kvlab {
using namespace cuda;
using namespace device_store;
namespace {

constexpr int threads = 256, warps = threads / 32;

// Gives back frames of one pool of the device. The whole block calls it.
__device__ void give_all_back(const CudaStoreLayer& s, int pool, const PageEntry* entries, int count) {
  __shared__ int at;
  const int mine = static_cast<int>(threadIdx.x);
  for (int i = mine; s.poison && i < count; i += threads) poison_frame(s, 0, entries[i]);
  if (mine == 0) {
    at = atomicAdd(s.pool[pool].free_count, count);
    atomicMax(&s.counters->peak_frames[pool], s.counters->frames[pool] - at);
  }
  __syncthreads();
  for (int i = mine; i < count; i += threads) s.pool[pool].free[at + i] = entries[i].frame;
}

// ---- pages in another codec ----------------------------------------------------------------------------------------

// Whether each side of a page stays as it is or becomes shorter codes. Then its rows are one run of bytes.
__device__ bool only_lowers(const PageLayout& from, const PageLayout& to) {
  for (const bool key : {true, false}) {
    const CodecSide of = ops::side_of(from, key), as = ops::side_of(to, key);
    const std::int64_t elements = std::int64_t{from.page_size} * from.head_dim;
    if (of.grouped() || (of != as && ops::code_ratio(of, as) == 0) || elements * (of.bits ? of.bits : 16) % 128 != 0)
      return false;
  }
  return true;
}

// Calls f(i, word i of 16 bytes) for a run of bytes. A warp has several on their way.
template <class F>
__device__ void for_words(const std::byte* from, int words, int lane, const F& f) {
  constexpr int batch = 8;
  const auto* in = reinterpret_cast<const uint4*>(from);
  for (int first = lane; first < words; first += 32 * batch) {
    uint4 x[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) x[i] = in[min(first + 32 * i, words - 1)];
#pragma unroll
    for (int i = 0; i < batch; ++i)
      if (first + 32 * i < words) f(first + 32 * i, x[i]);
  }
}
template <int From, int To>
__device__ void lower_words(const std::byte* from, std::byte* to, int words, int lane) {
  for_words(from, words, lane, [&](int i, uint4 codes) {
    const ops::Lowered<From, To> x(codes);
    if constexpr (x.bytes == 8)
      reinterpret_cast<uint2*>(to)[i] = make_uint2(x.word[0], x.word[1]);
    else
      reinterpret_cast<unsigned*>(to)[i] = x.word[0];
  });
}

// A warp stores a page whose layouts are only_lowers.
__device__ void lower_page(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt, int lane) {
  const int p = lf.page_size;
  for (const bool key : {true, false}) {
    const CodecSide of = ops::side_of(lf, key), as = ops::side_of(lt, key);
    const std::byte* rows = from + ops::row_offset(lf, key, 0);
    std::byte* out = to + ops::row_offset(lt, key, 0);
    const int words = static_cast<int>(p * ops::row_bytes(lf, key) / 16);
    if (of == as)
      for_words(rows, words, lane, [&](int i, uint4 x) { reinterpret_cast<uint4*>(out)[i] = x; });
    else if (of.bits == 4)
      lower_words<4, 2>(rows, out, words, lane);
    else if (as.bits == 4)
      lower_words<8, 4>(rows, out, words, lane);
    else
      lower_words<8, 2>(rows, out, words, lane);
    const int ratio = of == as ? 1 : ops::code_ratio(of, as);
    for (int t = lane; of.bits && t < p; t += 32) {
      const unsigned meta = *reinterpret_cast<const unsigned*>(from + ops::meta_offset(lf, key, t));
      *reinterpret_cast<unsigned*>(to + ops::meta_offset(lt, key, t)) = ratio > 1 ? lowered_meta(meta, ratio) : meta;
    }
  }
  for (int t = lane; t < p; t += 32)
    for (int i = 0; i <= lf.state_columns; ++i) *field(to, lt, t, i) = *field(const_cast<std::byte*>(from), lf, t, i);
}

// Scale and zero of the codes of numbers between lo and hi, stored in f16 if `writes`.
__device__ ops::CodeScale put_scale(CodecSide side, float lo, float hi, std::byte* at, bool writes) {
  const ops::CodeScale exact = ops::code_scale(side, lo, hi);
  const __half scale = __float2half_rn(exact.scale), zero = __float2half_rn(exact.zero);
  if (writes) {
    __half* meta = reinterpret_cast<__half*>(at);
    meta[0] = scale, meta[1] = zero;
  }
  return {__half2float(scale), __half2float(zero)};
}

// A block stores a grouped side of a full page, as ops::copy_page does. A warp takes 32 elements, one a lane: of a
// group's tokens, or of `batch` tokens, whose loads do not wait for each other. number(t, d) is an element.
template <class Number>
__device__ void encode_groups_of(const Number& number, std::byte* to, const PageLayout& l, bool key) {
  constexpr int batch = 8;
  const CodecSide side = ops::side_of(l, key);
  const bool channel = side.axis == CodeAxis::channel;
  const int p = l.page_size, dim = l.head_dim, group = ops::group_of(side, p, dim), tiles = (dim + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int each = 8 / side.bits, own = lane % each;  // neighbouring lanes share a byte
  const auto put = [&](float x, const ops::CodeScale& of, int t, int d) {
    unsigned byte = d < dim ? ops::code_of(side, x, of) << own * side.bits : 0;
    for (int m = 1; m < each; m *= 2) byte |= __shfl_xor_sync(~0u, byte, m);
    if (d < dim && own == 0) to[ops::row_offset(l, key, t) + d / each] = static_cast<std::byte>(byte);
  };
  // Calls f(t, x) for tokens first to end - 1, a batch after the other.
  const auto for_tokens = [&](int first, int end, int d, const auto& f) {
    for (int t = first; t < end; t += batch) {
      float x[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) x[i] = number(min(t + i, end - 1), d);
#pragma unroll
      for (int i = 0; i < batch; ++i)
        if (t + i < end) f(t + i, x[i]);
    }
  };
  const int tokens = channel ? group : batch, shares = (p + tokens - 1) / tokens * tiles;
  const bool in_lanes = group < 32 ? (group & (group - 1)) == 0 && dim % 32 == 0 : group == 32;
  for (int share = static_cast<int>(threadIdx.x) / 32; share < shares; share += warps) {
    const int first = share / tiles * tokens, end = min(p, first + tokens), d = share % tiles * 32 + lane,
              within = min(d, dim - 1);
    if (channel) {
      float lo = INFINITY, hi = -INFINITY;
      for_tokens(first, end, within, [&](int, float x) { lo = fminf(lo, x), hi = fmaxf(hi, x); });
      const ops::CodeScale of = put_scale(side, lo, hi, to + ops::meta_offset(l, key, first, within), d < dim);
      for_tokens(first, end, within, [&](int t, float x) { put(x, of, t, d); });
    } else {
      for_tokens(first, end, within, [&](int t, float x) {
        float lo = x, hi = x;
        if (in_lanes) {
          lo = x == x ? x : INFINITY, hi = x == x ? x : -INFINITY;
          for (int m = 1; m < group; m *= 2)
            lo = fminf(lo, __shfl_xor_sync(~0u, lo, m)), hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, m));
        } else {
          lo = INFINITY, hi = -INFINITY;
          for (int i = 0, begin = within / group * group; i < group; ++i) {
            const float y = number(t, begin + i);
            lo = fminf(lo, y), hi = fmaxf(hi, y);
          }
        }
        put(x, put_scale(side, lo, hi, to + ops::meta_offset(l, key, t, within), d < dim && d % group == 0), t, d);
      });
    }
  }
}

// The same for rows of bf16 up to 128 elements: a lane holds four neighbours of a warp's few tokens.
constexpr int most_held_tokens = 8;
__device__ bool groups_are_held(const PageLayout& lf, const PageLayout& lt, bool key) {
  const CodecSide side = ops::side_of(lt, key);
  const int p = lf.page_size, own = p / warps, dim = lf.head_dim, group = ops::group_of(side, p, dim);
  if (ops::side_of(lf, key).bits || lf.dtype != DType::bf16 || dim > 128 || p % warps || own > most_held_tokens)
    return false;
  return side.axis == CodeAxis::channel ? group % own == 0 : group % 4 == 0 && (group & (group - 1)) == 0;
}
__device__ void encode_held_groups(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt,
                                   bool key) {
  constexpr int each = 4;
  __shared__ float2 ranges[warps][128];
  const CodecSide side = ops::side_of(lt, key);
  const bool channel = side.axis == CodeAxis::channel;
  const int p = lf.page_size, dim = lf.head_dim, group = ops::group_of(side, p, dim);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, own = p / warps,
            first = warp * own, d = lane * each;
  const bool there = d < dim;
  uint2 held[most_held_tokens];
#pragma unroll
  for (int t = 0; t < most_held_tokens; ++t)
    if (t < own && there) held[t] = *reinterpret_cast<const uint2*>(from + ops::row_offset(lf, key, first + t) + d * 2);
  const auto number = [&](int t, int e) {
    const unsigned word = e < 2 ? held[t].x : held[t].y;
    return __uint_as_float(e % 2 ? word & 0xffff0000u : word << 16);
  };
  // A lane's codes of a token are 4 * bits bits.
  const auto put = [&](int t, const auto& of) {
    unsigned codes = 0;
#pragma unroll
    for (int e = 0; e < each; ++e) codes |= of(e).code(side, number(t, e)) << e * side.bits;
    std::byte* at = to + ops::row_offset(lt, key, first + t) + d * side.bits / 8;
    if (side.bits == 8)
      *reinterpret_cast<unsigned*>(at) = codes;
    else if (side.bits == 4)
      *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(codes);
    else
      *at = static_cast<std::byte>(codes);
  };
  if (channel) {
    float2 range[each];
#pragma unroll
    for (int e = 0; e < each; ++e) range[e] = make_float2(INFINITY, -INFINITY);
#pragma unroll
    for (int t = 0; t < most_held_tokens; ++t)
      if (t < own && there)
#pragma unroll
        for (int e = 0; e < each; ++e) {
          const float x = number(t, e);
          range[e].x = fminf(range[e].x, x), range[e].y = fmaxf(range[e].y, x);
        }
    __syncthreads();  // the other side's are read
    if (there)
#pragma unroll
      for (int e = 0; e < each; ++e) ranges[warp][d + e] = range[e];
    __syncthreads();
    if (!there) return;
    const int sharers = group / own, begin = warp / sharers * sharers;  // warps of this group
    const auto scale_of = [&](int e) {
      float2 all = ranges[begin][d + e];
      for (int w = begin + 1; w < begin + sharers; ++w) {
        const float2 other = ranges[w][d + e];
        all.x = fminf(all.x, other.x), all.y = fmaxf(all.y, other.y);
      }
      return ops::SharedScale(
          put_scale(side, all.x, all.y, to + ops::meta_offset(lt, key, first, d + e), warp == begin));
    };
    static_assert(each == 4);
    const ops::SharedScale of[each] = {scale_of(0), scale_of(1), scale_of(2), scale_of(3)};
#pragma unroll
    for (int t = 0; t < most_held_tokens; ++t)
      if (t < own) put(t, [&](int e) { return of[e]; });
    return;
  }
#pragma unroll
  for (int t = 0; t < most_held_tokens; ++t) {
    if (t >= own) break;
    float lo = INFINITY, hi = -INFINITY;
#pragma unroll
    for (int e = 0; e < each; ++e)
      if (there) lo = fminf(lo, number(t, e)), hi = fmaxf(hi, number(t, e));
#pragma unroll
    for (int m = 1; m < 32; m *= 2)
      if (m * each < group) lo = fminf(lo, __shfl_xor_sync(~0u, lo, m)), hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, m));
    if (!there) continue;
    const ops::SharedScale of(put_scale(side, lo, hi, to + ops::meta_offset(lt, key, first + t, d), d % group == 0));
    put(t, [&](int) { return of; });
  }
}

__device__ void encode_groups(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt,
                              bool key) {
  if (groups_are_held(lf, lt, key)) return encode_held_groups(from, lf, to, lt, key);
  const int dim = lf.head_dim;
  const std::byte* rows = from + ops::row_offset(lf, key, 0);
  if (ops::side_of(lf, key).bits == 0 && lf.dtype == DType::bf16)
    return encode_groups_of(
        [&](int t, int d) {
          return static_cast<float>(reinterpret_cast<const __nv_bfloat16*>(rows)[std::int64_t{t} * dim + d]);
        },
        to, lt, key);
  encode_groups_of([&](int t, int d) { return element(from, lf, key, t, d); }, to, lt, key);
}

// Stores a page of the first codec in the second, or the other way. The whole block calls it.
__device__ void encode_page(const CudaStoreLayer& s, int codec, std::int32_t before, std::int32_t fresh) {
  const PageLayout &from = codec > 0 ? s.layout : s.lower_layout, &to = codec > 0 ? s.lower_layout : s.layout;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (only_lowers(from, to)) {
    if (warp == 0) lower_page(frame_at(s, 0, before), from, frame_at(s, 0, fresh), to, lane);
    return;
  }
  constexpr int each = 2;  // tokens of a warp whose loads are under way together
  for (int t = warp; t < s.layout.page_size; t += each * warps) {
    Carried x[each];
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (t + i * warps < s.layout.page_size) x[i].read(frame_at(s, 0, before), from, t + i * warps, to, lane);
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (t + i * warps < s.layout.page_size) x[i].write(frame_at(s, 0, fresh), to, t + i * warps, lane);
  }
  for (const bool key : {true, false})
    if (ops::side_of(to, key).grouped()) encode_groups(frame_at(s, 0, before), from, frame_at(s, 0, fresh), to, key);
}

// A list that goes on where the pages of the second codec end, as a prompt's does: a block takes all its frames at
// once, and no page changes its place. encode_run_kernel then stores the pages side by side.
__global__ void __launch_bounds__(threads)
    encode_plan_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreEncode a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x);
  const Head h = head_of(s, a.slots[row], head);
  const int n = *h.length, count = a.count(row, head), first = *h.lower_pages;
  bool runs = count > 0 && count <= a.index.extent[2] && (first + count) * p <= n;
  for (int i = mine; runs && i < count; i += threads) {
    const PageEntry& e = h.table[0][first + i];
    runs = a.index(row, head, i) == first + i && e.frame >= 0 && e.codec != a.codec;
  }
  if (__syncthreads_or(!runs)) {
    if (mine == 0) a.runs[blockIdx.x] = 0;
    return;
  }
  __shared__ int left;
  const ops::FramePool& pool = s.pool[pool_of(0, a.codec)];
  if (mine == 0) left = atomicSub(pool.free_count, count);
  __syncthreads();
  if (left < count) {
    if (mine == 0) fail(s, store_no_frame), a.runs[blockIdx.x] = 0;
    return;
  }
  PageEntry* before = a.before + std::int64_t{blockIdx.x} * a.index.extent[2];
  for (int i = mine; i < count; i += threads) {
    PageEntry& e = h.table[0][first + i];
    before[i] = e;
    e.frame = pool.free[left - 1 - i];
    e.codec = static_cast<std::uint8_t>(a.codec);
  }
  if (mine == 0) {
    a.runs[blockIdx.x] = count;
    *h.lower_pages = first + count;
    count_fired(s, a.edit);
  }
}

// Blocks [share of a run, head].
__global__ void __launch_bounds__(threads)
    encode_run_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreEncode a) {
  const int of = static_cast<int>(blockIdx.y), row = of / s.kv_heads, head = of % s.kv_heads;
  const Head h = head_of(s, a.slots[row], head);
  const PageEntry* before = a.before + std::int64_t{of} * a.index.extent[2];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const PageLayout &from = a.codec > 0 ? s.layout : s.lower_layout, &to = a.codec > 0 ? s.lower_layout : s.layout;
  if (only_lowers(from, to)) {  // each warp takes pages
    for (int i = static_cast<int>(blockIdx.x) * warps + warp; i < a.runs[of];
         i += static_cast<int>(gridDim.x) * warps) {
      const int page = a.index(row, head, i);
      lower_page(frame_at(s, 0, before[i].frame), from, frame_at(s, 0, h.table[0][page].frame), to, lane);
      __syncwarp();
      summarize(s, h, page, s.layout.page_size, lane);
    }
    return;
  }
  for (int i = static_cast<int>(blockIdx.x); i < a.runs[of]; i += static_cast<int>(gridDim.x)) {
    const int page = a.index(row, head, i);
    encode_page(s, a.codec, before[i].frame, h.table[0][page].frame);
    __syncthreads();
    if (warp == 0) summarize(s, h, page, s.layout.page_size, lane);
  }
}

// A block stores a head's listed pages in another codec, one after the other. Of a run it gives the old frames back.
__global__ void __launch_bounds__(threads)
    encode_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreEncode a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x), warp = mine / 32, lane = mine % 32;
  const Head h = head_of(s, a.slots[row], head);
  if (a.runs && a.runs[blockIdx.x] > 0) {
    PageEntry* before = a.before + std::int64_t{blockIdx.x} * a.index.extent[2];
    give_all_back(s, pool_of(0, before[0].codec), before, a.runs[blockIdx.x]);
    return;
  }
  const int n = *h.length, pages = (n + p - 1) / p, count = a.count(row, head);
  if (wrong_list(s, a, row, head, pages)) return;
  __shared__ PageEntry before, fresh;
  __shared__ bool changes;
  for (int i = 0; i < count; ++i) {
    // Pages that change places are never on the list behind the one that does.
    const int page = a.index(row, head, a.codec > 0 ? i : count - 1 - i);
    if (mine == 0) {
      before = h.table[0][page];
      changes = before.frame >= 0 && before.codec != a.codec && (page + 1) * p <= n &&
                (a.codec > 0 || *h.lower_pages * p <= n) && take(s, 0, fresh, before.tokens, store_no_frame, a.codec);
      if (before.frame < 0) fail(s, ops::page_absent);
    }
    __syncthreads();
    const bool goes = changes;
    if (goes) encode_page(s, a.codec, before.frame, fresh.frame);
    __syncthreads();
    if (!goes) continue;
    const int other = a.codec > 0 ? *h.lower_pages : *h.lower_pages - 1;
    __syncthreads();
    if (mine == 0) {
      h.table[0][page] = h.table[0][other];
      h.table[0][other] = fresh;
      *h.lower_pages = a.codec > 0 ? other + 1 : other;
      give_back(s, 0, before);
      count_fired(s, a.edit);
    }
    __syncthreads();
    if (warp < 2) summarize(s, h, warp ? other : page, min(p, n - (warp ? other : page) * p), lane);
    __syncthreads();
  }
}

// ---- levels --------------------------------------------------------------------------------------------------------

// Sums of a block's numbers in front of each thread, and of all.
struct BlockSums {
  int before, all;
};
__device__ BlockSums sum_block(int own) {
  __shared__ int of_warps[warps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int sum = own;
  for (int d = 1; d < 32; d *= 2)
    if (const int x = __shfl_up_sync(~0u, sum, d); lane >= d) sum += x;
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  BlockSums out = {sum - own, 0};
  for (int w = 0; w < warps; ++w) {
    if (w < warp) out.before += of_warps[w];
    out.all += of_warps[w];
  }
  return out;
}

// Takes frames for pages [first, end) of a head. The whole block calls it.
__device__ bool take_pages(const CudaStoreLayer& s, PageEntry* fresh, int first, int end, int kept, int codec) {
  __shared__ int left;
  const ops::FramePool& pool = s.pool[pool_of(0, codec)];
  const int count = end - first, p = s.layout.page_size;
  __syncthreads();
  if (threadIdx.x == 0) left = atomicSub(pool.free_count, count);
  __syncthreads();
  if (left < count) {
    if (threadIdx.x == 0) fail(s, store_no_frame);
    return false;
  }
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
    PageEntry e;
    e.frame = pool.free[left - 1 - i];
    e.tokens = static_cast<std::uint16_t>(min(p, kept - (first + i) * p));
    e.codec = static_cast<std::uint8_t>(codec);
    fresh[first + i] = e;
  }
  return true;
}

// Writes the order of a head's tokens by their places to come, and takes frames for them.
__global__ void __launch_bounds__(threads)
    levels_plan_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x), pages = (a.most + p - 1) / p;
  const Head h = head_of(s, a.slots[row], head);
  const int n = *h.length, codecs = h.lower_pages ? 2 : 1;
  CudaStoreLevels::Plan plan;
  std::int32_t* order = a.order + std::int64_t{blockIdx.x} * a.most;
  const auto level = [&](int t) { return t < n ? a.levels(row, head, t) : level_gone; };
  bool bad = n > a.levels.extent[2] || n > a.most;
  int lower = 0;
  for (int t = mine; !bad && t < n; t += threads) {
    bad = level(t) != level_gone && level(t) >= codecs;
    lower += level(t) == 1;
  }
  if (__syncthreads_or(bad)) {
    if (mine == 0) fail(s, store_bad_list), a.plans[blockIdx.x] = plan;
    return;
  }
  plan.low = sum_block(lower).all / p * p;
  int lows = 0, others = 0;
  bool same = true;
  for (int begin = 0; begin < n; begin += threads) {
    const int t = begin + mine, own = level(t);
    const BlockSums low = sum_block(own == 1);
    const bool is_low = own == 1 && lows + low.before < plan.low, stays = !is_low && own != level_gone;
    const BlockSums other = sum_block(stays);
    const int to = is_low ? lows + low.before : plan.low + others + other.before;
    if (is_low || stays) order[to] = t;
    same = same && (t >= n || ((is_low || stays) && to == t));
    lows += low.all, others += other.all;
  }
  plan.kept = plan.low + others;
  same = same && plan.low == (h.lower_pages ? *h.lower_pages * p : 0);
  PageEntry* fresh = a.fresh + std::int64_t{blockIdx.x} * pages;
  if (!__syncthreads_or(!same) || !take_pages(s, fresh, 0, plan.low / p, plan.kept, 1) ||
      !take_pages(s, fresh, plan.low / p, (plan.kept + p - 1) / p, plan.kept, 0))
    plan.kept = -1;
  if (mine == 0) a.plans[blockIdx.x] = plan;
}

// Grid [part, head of a row]. A warp copies a token.
__global__ void __launch_bounds__(threads)
    levels_copy_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  const int row = blockIdx.y / s.kv_heads, head = blockIdx.y % s.kv_heads, p = s.layout.page_size;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const CudaStoreLevels::Plan plan = a.plans[blockIdx.y];
  const Head h = head_of(s, a.slots[row], head);
  const std::int32_t* order = a.order + std::int64_t{blockIdx.y} * a.most;
  const PageEntry* fresh = a.fresh + std::int64_t{blockIdx.y} * ((a.most + p - 1) / p);
  for (int i = static_cast<int>(blockIdx.x) * warps + warp; i < plan.kept; i += static_cast<int>(gridDim.x) * warps) {
    const int from = order[i];
    const PageLayout& to = i < plan.low ? s.lower_layout : s.layout;
    Carried x;
    x.read(page_at(s, h, from / p), s.mixed ? layout_at(s, h, from / p) : s.layout, from % p, to, lane);
    x.write(frame_at(s, 0, fresh[i / p].frame), to, i % p, lane);
  }
}

// Gives the old frames of a head back and enters the new ones.
__global__ void __launch_bounds__(threads)
    levels_finish_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ CudaStoreLevels a) {
  const int row = blockIdx.x / s.kv_heads, head = blockIdx.x % s.kv_heads, p = s.layout.page_size;
  const int mine = static_cast<int>(threadIdx.x);
  const CudaStoreLevels::Plan plan = a.plans[blockIdx.x];
  if (plan.kept < 0) return;
  const Head h = head_of(s, a.slots[row], head);
  const int before = (*h.length + p - 1) / p, after = (plan.kept + p - 1) / p;
  const PageEntry* fresh = a.fresh + std::int64_t{blockIdx.x} * ((a.most + p - 1) / p);
  for (int page = mine; page < before; page += threads) {
    for (int tier = 0; tier < 2; ++tier) give_back(s, tier, h.table[tier][page]);
    if (page < after) h.table[0][page] = fresh[page];
  }
  __syncthreads();
  if (mine == 0) {
    *h.length = plan.kept;
    if (h.lower_pages) *h.lower_pages = plan.low / p;
    fewer_pages(s, before - after);
    count_fired(s, a.edit);
  }
  for (int page = mine / 32; page < after; page += warps)
    summarize(s, h, page, min(p, plan.kept - page * p), mine % 32);
}

// ---- extents -------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(threads)
    grant_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool, const __grid_constant__ CudaExtents e) {
  const int fresh = e.count * e.each, at = *s.pool[pool].free_count;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < fresh; i += threads) {
    // A pool gives its last frames first: those of the first extents.
    const int from = fresh - 1 - i, extent = e.extents[from / e.each];
    s.pool[pool].free[at + i] = static_cast<std::int32_t>(extent * (e.bytes / granule_bytes)) + from % e.each * e.step;
  }
  __syncthreads();
  if (threadIdx.x == 0) *s.pool[pool].free_count = at + fresh, s.counters->frames[pool] += fresh;
}

// Calls f(i) for the places of a list, over the whole grid.
template <class F>
__device__ void for_places(int count, const F& f) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x * blockDim.x))
    f(i);
}

__global__ void count_free_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                  const __grid_constant__ CudaExtents e) {
  const ops::FramePool& p = s.pool[pool];
  for_places(*p.free_count, [&](int i) { atomicAdd(&e.free[e.extent_of(p.free[i])], 1); });
}

// Copies the frames that stay to a list of their own.
__global__ void take_out_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                const __grid_constant__ CudaExtents e) {
  const ops::FramePool& p = s.pool[pool];
  for_places(*p.free_count, [&](int i) {
    if (e.free[e.extent_of(p.free[i])] < e.each) e.list[atomicAdd(e.list_count, 1)] = p.free[i];
  });
}

__global__ void put_back_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                                const __grid_constant__ CudaExtents e) {
  for_places(*e.list_count, [&](int i) { s.pool[pool].free[i] = e.list[i]; });
}

__global__ void shrink_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                              const __grid_constant__ CudaExtents e) {
  s.counters->frames[pool] -= *s.pool[pool].free_count - *e.list_count;
  *s.pool[pool].free_count = *e.list_count;
}

// Writes where the frames of each extent begin in the arranged list: those of the last extents come first.
__global__ void __launch_bounds__(threads) arrange_plan_kernel(const __grid_constant__ CudaExtents e) {
  int before = 0;
  for (int from = 0; from < e.count; from += threads) {
    const int extent = e.count - 1 - from - static_cast<int>(threadIdx.x);
    const BlockSums sums = sum_block(extent >= 0 ? e.free[extent] : 0);
    if (extent >= 0) e.begin[extent] = before + sums.before;
    before += sums.all;
  }
  if (threadIdx.x == 0) *e.list_count = before;
}

__global__ void arrange_kernel(const __grid_constant__ CudaStoreLayer s, CudaPool pool,
                               const __grid_constant__ CudaExtents e) {
  const ops::FramePool& p = s.pool[pool];
  for_places(*p.free_count, [&](int i) { e.list[atomicAdd(&e.begin[e.extent_of(p.free[i])], 1)] = p.free[i]; });
}

constexpr int blocks = 256;  // of kernels over a pool's list

}  // namespace

namespace cuda_store {

void plan_encode(const CudaStoreLayer& s, const CudaStoreEncode& e, Stream stream) {
  encode_plan_kernel<<<static_cast<unsigned>(e.rows * s.kv_heads), threads, 0, stream_of(stream)>>>(s, e);
  check_launch("plan_encode");
}
KVLAB_ON_CUDA(plan_encode, plan_encode);

void encode(const CudaStoreLayer& s, const CudaStoreEncode& e, Stream to) {
  const cudaStream_t stream = stream_of(to);
  const auto heads = static_cast<unsigned>(e.rows * s.kv_heads);
  if (e.runs) {
    const auto parts = static_cast<unsigned>(std::clamp<std::int64_t>(e.index.extent[2], 1, 1024));
    encode_run_kernel<<<dim3(parts, heads), threads, 0, stream>>>(s, e);
  }
  encode_kernel<<<heads, threads, 0, stream>>>(s, e);
  check_launch("encode");
}
KVLAB_ON_CUDA(encode, encode);

void plan_levels(const CudaStoreLayer& s, const CudaStoreLevels& a, Stream stream) {
  levels_plan_kernel<<<static_cast<unsigned>(a.rows * s.kv_heads), threads, 0, stream_of(stream)>>>(s, a);
  check_launch("plan_levels");
}
KVLAB_ON_CUDA(plan_levels, plan_levels);

void store_levels(const CudaStoreLayer& s, const CudaStoreLevels& a, Stream to) {
  const cudaStream_t stream = stream_of(to);
  const auto heads = static_cast<unsigned>(a.rows * s.kv_heads);
  const auto parts = static_cast<unsigned>(std::clamp(a.most / (4 * warps), 1, 1024));
  levels_copy_kernel<<<dim3(parts, heads), threads, 0, stream>>>(s, a);
  levels_finish_kernel<<<heads, threads, 0, stream>>>(s, a);
  check_launch("store_levels");
}
KVLAB_ON_CUDA(store_levels, store_levels);

void grant(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream stream) {
  grant_kernel<<<1, threads, 0, stream_of(stream)>>>(s, pool, e);
  check_launch("grant");
}
KVLAB_ON_CUDA(grant, grant);

void count_free(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream stream) {
  count_free_kernel<<<blocks, threads, 0, stream_of(stream)>>>(s, pool, e);
  check_launch("count_free");
}
KVLAB_ON_CUDA(count_free, count_free);

void take_out(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream to) {
  const cudaStream_t stream = stream_of(to);
  take_out_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  put_back_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  shrink_kernel<<<1, 1, 0, stream>>>(s, pool, e);
  check_launch("take_out");
}
KVLAB_ON_CUDA(take_out, take_out);

void arrange(const CudaStoreLayer& s, CudaPool pool, const CudaExtents& e, Stream to) {
  const cudaStream_t stream = stream_of(to);
  count_free_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  arrange_plan_kernel<<<1, threads, 0, stream>>>(e);
  arrange_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  put_back_kernel<<<blocks, threads, 0, stream>>>(s, pool, e);
  check_launch("arrange");
}
KVLAB_ON_CUDA(arrange, arrange);

}  // namespace cuda_store
}  // namespace kvlab
