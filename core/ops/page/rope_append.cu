// `width` neighbouring lanes take one head of a row. They norm and rotate a query or key head, and write a KV head's
// key and value to its page. rope_kernel appends nothing; there the same lanes take several heads.
#include <bit>
#include <type_traits>

#include "base/finite.hpp"
#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "ops/page/codes.cuh"
#include "ops/page/paged.cuh"
#include "ops/page/rope_append.hpp"
#include "ops/page/summary.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 128;   // threads of a block
constexpr int each = 4;        // neighbouring elements of a lane in each half of the head
constexpr int most_heads = 4;  // heads of a row that the same lanes rotate in rope_kernel
constexpr int most_dim = 2 * 32 * each;

struct Args {
  RopeAppendArgs in;
  PageLayout layouts[DeviceKv::most_codecs];
  int width = 0;         // lanes of a head, a power of two
  int query_blocks = 0;  // where blocks of their own have a KV head each
  float limit = 0;       // finite_limit of the cache's dtype
};

__device__ __forceinline__ void load4(const float* from, float* to) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
// Stores four neighbouring elements: 16 bytes of float, 8 bytes of a 16-bit type.
__device__ __forceinline__ void store4(float* to, const float* x) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
template <class T>
__device__ __forceinline__ void store4(T* to, const float* x) {
  *reinterpret_cast<uint2*>(to) = make_uint2(Pair<T>::pack(x[0], x[1]), Pair<T>::pack(x[2], x[3]));
}

// What read_row makes of a code. The host uses no fused multiply-add here either.
__device__ __forceinline__ float decode(float code, float scale, float zero) {
  return __fadd_rn(__fmul_rn(code, scale), zero);
}

// A lane's elements of a head: [4 lane, 4 lane + 4) and the same range head_dim / 2 further. They are zero in lanes
// past the head.
struct Head {
  float low[each] = {}, high[each] = {};

  __device__ void load(const float* x, int half, int lane) {
    load4(x + each * lane, low);
    load4(x + half + each * lane, high);
  }
  template <class T>
  __device__ void store(T* x, int half, int lane) const {
    store4(x + each * lane, low);
    store4(x + half + each * lane, high);
  }
  __device__ void round(void* out, DType dtype, std::int64_t at, int half, int lane) const {
    if (dtype == DType::f16)
      store(static_cast<__half*>(out) + at, half, lane);
    else
      store(static_cast<__nv_bfloat16*>(out) + at, half, lane);
  }
  // All lanes of the warp must call it. A null weight leaves the head unchanged.
  __device__ void norm(const float* weight, float eps, int half, int lane, int width, bool mine) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < each; ++j) sum += low[j] * low[j] + high[j] * high[j];
    for (int d = width / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (!weight || !mine) return;
    const float factor = 1 / sqrtf(sum / static_cast<float>(2 * half) + eps);
    Head w;
    w.load(weight, half, lane);
#pragma unroll
    for (int j = 0; j < each; ++j) low[j] = low[j] * factor * w.low[j], high[j] = high[j] * factor * w.high[j];
  }
  __device__ void rotate(const float* cosine, const float* sine) {
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const float a = low[j], b = high[j], c = cosine[j], s = sine[j];
      low[j] = a * c - b * s;
      high[j] = b * c + a * s;
    }
  }
  __device__ bool finite(float limit) const {
    bool all = true;
#pragma unroll
    for (int j = 0; j < each; ++j) all = all && fabsf(low[j]) < limit && fabsf(high[j]) < limit;
    return all;
  }
  // Minimum and maximum of the head; all lanes of the warp must call it.
  __device__ float2 range(int width, bool mine) const {
    float lo = INFINITY, hi = -INFINITY;
#pragma unroll
    for (int j = 0; j < each; ++j)
      if (mine) lo = fminf(lo, fminf(low[j], high[j])), hi = fmaxf(hi, fmaxf(low[j], high[j]));
    for (int d = width / 2; d; d /= 2)
      lo = fminf(lo, __shfl_xor_sync(~0u, lo, d)), hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, d));
    return make_float2(lo, hi);
  }
  // Stores one side of a token as write_token does. Returns what read_row reads there. Without `Coded` no layout has
  // codes, and the kernel is short.
  template <bool Coded>
  __device__ Head encode(std::byte* frame, const PageLayout& l, bool key, int offset, int lane, float2 range) const {
    const int half = l.head_dim / 2;
    const CodecSide side = side_of(l, key);
    std::byte* row = frame + row_offset(l, key, offset);
    Head out = *this;
    if (Coded && side.bits) {
      const CodeScale of =
          put_scale(code_scale(side, range.x, range.y), frame + meta_offset(l, key, offset), lane == 0);
      const SharedScale shared(of);
      const auto put = [&](int at, float* x) {
        unsigned word = 0;
#pragma unroll
        for (int j = 0; j < each; ++j) {
          const unsigned code = shared.code(side, x[j]);
          word |= code << side.bits * j;
          x[j] = decode(value_of(side, code), of.scale, of.zero);
        }
        std::byte* to = row + at * side.bits / 8;
        if (side.bits == 8)
          *reinterpret_cast<unsigned*>(to) = word;
        else if (side.bits == 4)
          *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(word);
        else
          *to = static_cast<std::byte>(word);
      };
      put(each * lane, out.low);
      put(half + each * lane, out.high);
    } else if (l.dtype == DType::f32) {
      store(reinterpret_cast<float*>(row), half, lane);
    } else {
      round(row, l.dtype, 0, half, lane);
      const bool f16 = l.dtype == DType::f16;
      const auto rounded = [=](float x) {
        return f16 ? __half2float(__float2half_rn(x)) : __bfloat162float(__float2bfloat16_rn(x));
      };
#pragma unroll
      for (int j = 0; j < each; ++j) out.low[j] = rounded(low[j]), out.high[j] = rounded(high[j]);
    }
    return out;
  }
};

enum class Element { f32, f16, bf16, code8, code4, code2, e4m3 };  // of a stored row
__device__ __forceinline__ Element element_of(DType dtype) {
  return dtype == DType::f32 ? Element::f32 : dtype == DType::f16 ? Element::f16 : Element::bf16;
}
__device__ __forceinline__ constexpr bool coded(Element e) { return e >= Element::code8; }
__device__ __forceinline__ constexpr int bits_of(Element e) {
  return e == Element::f32 ? 32 : !coded(e) ? 16 : e == Element::code4 ? 4 : e == Element::code2 ? 2 : 8;
}

// stored_bounds: the kernel widens the stored bounds by the new key. For bounds, mean and centre it reads all keys of
// the page, and so for all of these in codes.
enum class Summed { nothing, stored_bounds, bounds, mean, centre, coded_bounds, coded_mean, coded_centre };
__device__ __forceinline__ constexpr bool reads_page(Summed how) { return how >= Summed::bounds; }
__device__ __forceinline__ constexpr bool in_codes(Summed how) { return how >= Summed::coded_bounds; }
__device__ __forceinline__ constexpr bool is_mean(Summed how) {
  return how == Summed::mean || how == Summed::coded_mean;
}
__device__ __forceinline__ constexpr bool is_centre(Summed how) {
  return how == Summed::centre || how == Summed::coded_centre;
}
// Floats of shared memory: a key, which ends of a box replace, then other ends, and least and most number of each warp.
constexpr int page_room(Summed how) { return in_codes(how) ? 2 * most_dim + 2 * threads / 32 : most_dim; }

// A lane's elements of a page's stored bounds. They are unpacked later, so that other loads are in flight.
class StoredBound {
 public:
  __device__ void load(const std::byte* row, Element e, int half, int lane) {
    low_ = four(row, e, each * lane);
    high_ = four(row, e, half + each * lane);
  }
  __device__ Head unpacked(Element e) const {
    Head out;
    unpack_four(low_, e, out.low);
    unpack_four(high_, e, out.high);
    return out;
  }

 private:
  static __device__ uint4 four(const std::byte* row, Element e, int at) {
    const std::byte* from = row + at * bits_of(e) / 8;
    if (e == Element::f32) return *reinterpret_cast<const uint4*>(from);
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    return make_uint4(x.x, x.y, 0, 0);
  }
  static __device__ void unpack_four(const uint4& x, Element e, float* to) {
    if (e == Element::f32) {
      to[0] = __uint_as_float(x.x), to[1] = __uint_as_float(x.y);
      to[2] = __uint_as_float(x.z), to[3] = __uint_as_float(x.w);
    } else if (e == Element::f16) {
      Pair<__half>::unpack(x.x, to[0], to[1]);
      Pair<__half>::unpack(x.y, to[2], to[3]);
    } else {
      Pair<__nv_bfloat16>::unpack(x.x, to[0], to[1]);
      Pair<__nv_bfloat16>::unpack(x.y, to[2], to[3]);
    }
  }

  uint4 low_ = {}, high_ = {};
};

// Lanes write the bounds of a page: those that were stored, widened by the new key. first: it is the page's only one.
__device__ void write_bounds(std::byte* summary, const PageLayout& l, const StoredBound& least, const StoredBound& most,
                             const Head& key, bool first, int lane) {
  const Element e = element_of(l.dtype);
  const int half = l.head_dim / 2;
  const bool f16 = e == Element::f16;
  const auto put = [&](std::byte* row, const Head& stored, bool upper) {
    const auto four = [&](int at, const float* old, const float* now) {
      float x[each];
#pragma unroll
      for (int j = 0; j < each; ++j) x[j] = first || (upper ? old[j] < now[j] : now[j] < old[j]) ? now[j] : old[j];
      const auto two = [&](int j) {
        return bound_bits(x[j], upper, f16) | static_cast<unsigned>(bound_bits(x[j + 1], upper, f16)) << 16;
      };
      if (e == Element::f32)
        store4(reinterpret_cast<float*>(row) + at, x);
      else
        *reinterpret_cast<uint2*>(row + 2 * at) = make_uint2(two(0), two(2));
    };
    four(each * lane, stored.low, key.low);
    four(half + each * lane, stored.high, key.high);
  };
  put(summary, least.unpacked(e), false);
  put(summary + l.head_dim * bits_of(e) / 8, most.unpacked(e), true);
}

// One element of neighbouring keys of a page, as it is stored. It is decoded later, so that all loads are in flight
// together, and beside what the block does until then.
template <bool Coded>
class Column {
 public:
  static constexpr int batch = 32;

  // bits: of a stored element.
  __device__ __forceinline__ void load(int bits, const std::byte* frame, const PageLayout& l, int begin, int tokens,
                                       int d) {
    const int step = l.head_dim * bits / 8;
    const std::byte* row = frame + row_offset(l, true, begin) + d * bits / 8;
    const auto each_key = [&](const auto& take) {
#pragma unroll
      for (int j = 0; j < batch; ++j, row += step) {
        if (begin + j >= tokens) break;
        take(j);
      }
    };
    if (Coded && bits <= 8)
      each_key([&](int j) {
        raw_[j] = static_cast<unsigned>(*row);
        meta_[Coded ? j : 0] = reinterpret_cast<const unsigned*>(frame + l.k_meta)[begin + j];
      });
    else if (bits == 32)
      each_key([&](int j) { raw_[j] = *reinterpret_cast<const unsigned*>(row); });
    else
      each_key([&](int j) { raw_[j] = *reinterpret_cast<const unsigned short*>(row); });
  }
  template <Element E>
  __device__ __forceinline__ float number(int j, int d) const {
    if constexpr (E == Element::f32) {
      return __uint_as_float(raw_[j]);
    } else if constexpr (E == Element::f16) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(raw_[j])));
    } else if constexpr (E == Element::bf16) {
      return __uint_as_float(raw_[j] << 16);
    } else {
      constexpr int bits = bits_of(E);
      float scale, zero;
      Pair<__half>::unpack(meta_[Coded ? j : 0], scale, zero);
      const unsigned code = raw_[j] >> d * bits % 8 & static_cast<unsigned>(most_code(bits));
      return decode(E == Element::e4m3 ? from_e4m3(code) : static_cast<float>(code), scale, zero);
    }
  }

 private:
  unsigned raw_[batch], meta_[Coded ? batch : 1];
};

// The block writes a summary in codes: of ends [2, most_dim], or of means, ends [0]. least, most: of the thread's
// numbers.
template <bool Mean>
__device__ void put_codes(float* ends, int dim, float least, float most, std::byte* summary) {
  least = least_of_lanes(least), most = most_of_lanes(most);
  float* of_warps = ends + 2 * most_dim;
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 16] = least, of_warps[threadIdx.x / 16 + 1] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < threads / 32; ++w) least = fminf(least, of_warps[2 * w]), most = fmaxf(most, of_warps[2 * w + 1]);
  const SummaryCodes codes(least, most);
  for (int d = static_cast<int>(threadIdx.x); d < dim; d += threads) {
    if (Mean)
      summary[d] = codes.nearest(ends[d]);
    else
      summary[d] = codes.below(ends[d]), summary[dim + d] = codes.above(ends[most_dim + d]);
  }
  if (threadIdx.x == 0) codes.put(summary, Mean ? dim : 2 * dim);
}

// The block writes the summary of a page of `tokens` keys before the new one, which is in key [head_dim]. column: the
// thread's first element of the page's first keys. key: page_room(How) floats.
template <Summed How, Element E, bool Coded>
__device__ __forceinline__ void sum_columns(Column<Coded>& column, const std::byte* frame, const PageLayout& l,
                                            int tokens, float* key, std::byte* summary) {
  const int mine = static_cast<int>(threadIdx.x), dim = l.head_dim;
  const Element e = element_of(l.dtype);
  const bool f16 = e == Element::f16;
  float least = summary_limit, most = -summary_limit;
#pragma unroll 1
  for (int d = mine; d < dim; d += threads) {
    KeyElement x;
    const auto for_keys = [&](bool again, const auto& add) {
#pragma unroll 1
      for (int begin = 0; begin < tokens; begin += column.batch) {
        if (again || begin > 0) column.load(bits_of(E), frame, l, begin, tokens, d);
#pragma unroll
        for (int j = 0; j < column.batch; ++j)
          if (begin + j < tokens) add(column.template number<E>(j, d), begin + j == 0);
      }
      add(key[d], tokens == 0);
    };
    for_keys(d != mine, [&](float k, bool first) { x.add(k, first); });
    if (is_centre(How)) for_keys(tokens > column.batch, [&](float k, bool first) { x.add_distance(k, first); });
    const auto put = [&](int at, float y, unsigned short bits) {
      if (e == Element::f32)
        reinterpret_cast<float*>(summary)[at] = y;
      else
        reinterpret_cast<unsigned short*>(summary)[at] = bits;
    };
    const float low = is_mean(How)     ? x.mean(tokens + 1)
                      : is_centre(How) ? x.low(tokens + 1)
                                       : x.least,
                high = is_mean(How)     ? low
                       : is_centre(How) ? x.high(tokens + 1)
                                        : x.most;
    if constexpr (in_codes(How)) {
      // These leave NaN out.
      least = fminf(least, fminf(SummaryCodes::within(low), SummaryCodes::within(high)));
      most = fmaxf(most, fmaxf(SummaryCodes::within(low), SummaryCodes::within(high)));
      key[d] = low, key[most_dim + d] = high;
    } else if constexpr (is_mean(How)) {
      put(d, low, nearest_bits(low, f16));
    } else {
      put(d, low, bound_bits(low, false, f16));
      put(dim + d, high, bound_bits(high, true, f16));
    }
  }
  if constexpr (in_codes(How)) put_codes<is_mean(How)>(key, dim, least, most, summary);
}
template <Summed How, bool Coded>
__device__ __forceinline__ void sum_page(Column<Coded>& column, const std::byte* frame, const PageLayout& l, int tokens,
                                         float* key, std::byte* summary) {
  const auto sum = [&](auto element) {
    sum_columns<How, decltype(element)::value>(column, frame, l, tokens, key, summary);
  };
  if constexpr (Coded) {
    if (l.codec.k.kind == CodeKind::e4m3) return sum(std::integral_constant<Element, Element::e4m3>{});
    if (l.codec.k.bits == 2) return sum(std::integral_constant<Element, Element::code2>{});
    if (l.codec.k.bits == 4) return sum(std::integral_constant<Element, Element::code4>{});
    if (l.codec.k.bits) return sum(std::integral_constant<Element, Element::code8>{});
  }
  if (l.dtype == DType::f32) return sum(std::integral_constant<Element, Element::f32>{});
  if (l.dtype == DType::f16) return sum(std::integral_constant<Element, Element::f16>{});
  sum(std::integral_constant<Element, Element::bf16>{});
}

// A lane's cosines and sines of a position; ones and zeros without `turn`.
struct Angles {
  float cosine[each] = {1, 1, 1, 1}, sine[each] = {};

  __device__ void load(const RopeAppendArgs& a, int position, int lane) {
    if (!a.turn) return;
    const std::int64_t at = std::int64_t{position} * (a.head_dim / 2) + each * lane;
    load4(a.cosine + at, cosine);
    load4(a.sine + at, sine);
  }
};

struct Place {
  int frame = null_frame, codec = 0;  // null_frame: no place; *error has the reason
};

__device__ __forceinline__ std::int32_t* length_of(const RopeAppendArgs& a, int slot, int head) {
  return a.length.data + slot * a.length.stride[0] + head * a.length.stride[1];
}

__device__ __forceinline__ std::byte* summary_of(const RopeAppendArgs& a, int slot, int head, int page) {
  const auto& stride = a.summaries.stride;
  return a.summaries.data + slot * stride[0] + head * stride[1] + page * stride[2];
}

__device__ __forceinline__ PageEntry* entry_of(const RopeAppendArgs& a, int slot, int head, int page) {
  const auto& stride = a.table.stride;
  return a.table.data + slot * stride[0] + head * stride[1] + page * stride[2];
}

// Returns the place of the head's next token and enters it in table and length. last: the entry of its page.
__device__ Place take_place(const RopeAppendArgs& a, int slot, int head, int page, int offset, const PageEntry& last) {
  Place p;
  const auto fail = [&](int why) {
    atomicOr(a.error, why);
    p.frame = null_frame;
    return p;
  };
  if (page >= a.table.extent[2]) return fail(append_no_page);
  PageEntry* e = entry_of(a, slot, head, page);
  if (offset == 0) {
    const int next = atomicAdd(a.pool.taken, 1);
    if (next >= *a.pool.given) {
      atomicSub(a.pool.taken, 1);
      return fail(append_no_frame);
    }
    p.frame = a.pool.at(next);
    p.codec = a.codec;
    PageEntry fresh;
    fresh.frame = p.frame;
    fresh.tokens = 1;
    fresh.codec = static_cast<std::uint8_t>(p.codec);
    *e = fresh;
  } else {
    if (last.frame < 0) return fail(append_page_absent);
    p.frame = last.frame;
    p.codec = last.codec;
    e->tokens = static_cast<std::uint16_t>(offset + 1);
  }
  *length_of(a, slot, head) = page * a.layouts->page_size + offset + 1;
  return p;
}

template <Summed How, bool Coded>
__global__ void __launch_bounds__(threads) rope_append_kernel(const __grid_constant__ Args all) {
  RopeAppendArgs a = all.in;
  a.layouts = all.layouts;
  // Where the kernel reads a page's keys, blocks of their own have a KV head each. Lanes of the first warp append.
  const bool whole_block = reads_page(How) && blockIdx.x >= static_cast<unsigned>(all.query_blocks);
  const int width = all.width, lane = threadIdx.x % width, dim = a.head_dim, half = dim / 2,
            index = whole_block ? static_cast<int>(blockIdx.x) - all.query_blocks
                                : static_cast<int>(blockIdx.x * threads + threadIdx.x) / width,
            heads = whole_block       ? a.kv_heads
                    : reads_page(How) ? a.heads
                                      : a.heads + a.kv_heads;
  const bool of_row = index < a.rows * heads, there = of_row && (!whole_block || threadIdx.x < width),
             mine = there && lane < half / each;
  const int row = of_row ? index / heads : 0, head = (of_row ? index % heads : 0) + (whole_block ? a.heads : 0);
  const bool query = head < a.heads;
  float* x = a.qkv + row * a.qkv_stride + std::int64_t{head} * dim;
  let_successor_start();
  const int at = a.position[row], slot = a.slots[row];
  const bool known = at >= 0 && at < a.angles, works = mine && known;
  Angles angles;
  if (works) angles.load(a, at, lane);
  const int page_size = a.layouts->page_size, likely = known ? at / page_size : 0;
  wait_for_predecessor();
  Head h, value;
  if (mine) h.load(x, half, lane);
  if (mine && !query) value.load(x + std::int64_t{a.kv_heads} * dim, half, lane);
  // A head that has lost no token appends to the page of the text position. What the page's entry says, and its
  // stored bounds, then come together with the length. Else they are loaded once more.
  const int kv_head = head - a.heads;
  const bool appends = of_row && !query;
  PageEntry last;
  StoredBound least, most;
  const auto load_page = [&](int page) {
    if (!appends || page >= a.table.extent[2]) return;
    last = *entry_of(a, slot, kv_head, page);
    if constexpr (How == Summed::stored_bounds) {
      if (!mine) return;
      const std::byte* summary = summary_of(a, slot, kv_head, page);
      const Element e = element_of(a.layouts->dtype);
      least.load(summary, e, half, lane);
      most.load(summary + dim * bits_of(e) / 8, e, half, lane);
    }
  };
  load_page(likely);
  const int n = appends ? *length_of(a, slot, kv_head) : 0;
  int page = likely, offset = n - likely * page_size;
  if (offset < 0 || offset >= page_size) page = n / page_size, offset = n % page_size, load_page(page);
  const std::byte* keys = a.base + std::int64_t{last.frame} * granule_bytes;
  const PageLayout& of_keys = a.layouts[offset > 0 ? last.codec : a.codec];
  const int before = offset > 0 && last.frame >= 0 && page < a.table.extent[2] ? offset : 0;
  Column<Coded> column;
  if constexpr (reads_page(How))
    if (whole_block && static_cast<int>(threadIdx.x) < dim) {
      const int codes = Coded ? of_keys.codec.k.bits : 0;
      column.load(codes ? codes : 8 * static_cast<int>(size_of(of_keys.dtype)), keys, of_keys, 0, before,
                  static_cast<int>(threadIdx.x));
    }
  // take_place changes the length and the entry that all lanes of the head read.
  if (whole_block)
    __syncthreads();
  else
    __syncwarp();
  Place p;
  if (there && lane == 0) {
    if (!known)
      atomicOr(a.error, append_no_angle);
    else if (!query)
      p = take_place(a, slot, kv_head, page, offset, last);
  }
  if (a.query_norm || a.key_norm) h.norm(query ? a.query_norm : a.key_norm, a.eps, half, lane, width, mine);
  if (a.turn) h.rotate(angles.cosine, angles.sine);
  if (works) h.store(x, half, lane);
  if (works && a.nonfinite && !(query ? h.finite(INFINITY) : h.finite(all.limit) && value.finite(all.limit)))
    a.nonfinite[row * a.nonfinite_step] = 1;
  if (works && query && a.rounded)
    h.round(a.rounded, a.rounded_dtype, (std::int64_t{row} * a.heads + head) * dim, half, lane);

  const int first = threadIdx.x % 32 / width * width;
  p.frame = __shfl_sync(~0u, p.frame, first);
  p.codec = __shfl_sync(~0u, p.codec, first);
  float2 key_range = make_float2(0, 0), value_range = key_range;
  if constexpr (Coded) key_range = h.range(width, mine), value_range = value.range(width, mine);
  const PageLayout& l = a.layouts[p.codec];
  std::byte* frame = a.base + std::int64_t{p.frame} * granule_bytes;
  const bool placed = there && p.frame >= 0;
  Head key;
  if (placed && mine) {
    key = h.encode<Coded>(frame, l, true, offset, lane, key_range);
    value.encode<Coded>(frame, l, false, offset, lane, value_range);
  }
  if (placed && lane == 0) reinterpret_cast<std::int32_t*>(frame + l.positions)[offset] = at;
  for (int c = lane; placed && c < l.state_columns; c += width)
    reinterpret_cast<float*>(frame + l.state)[std::int64_t{c} * l.page_size + offset] = 0;
  if (How != Summed::nothing && placed && lane == 0 && offset == 0) atomicAdd(a.pages, 1);
  if constexpr (reads_page(How)) {
    if (!whole_block) return;  // a query
    __shared__ float4 aligned[page_room(How) / 4];
    __shared__ bool has_place;
    float* appended = reinterpret_cast<float*>(aligned);
    if (mine) key.store(appended, half, lane);
    if (threadIdx.x == 0) has_place = placed;
    __syncthreads();
    if (has_place) sum_page<How>(column, keys, of_keys, before, appended, summary_of(a, slot, kv_head, page));
  } else if (How == Summed::stored_bounds && placed && mine) {
    write_bounds(summary_of(a, slot, kv_head, page), l, least, most, key, offset == 0, lane);
  }
}

// Norms and rotates without appending.
__global__ void __launch_bounds__(threads) rope_kernel(const __grid_constant__ RopeAppendArgs a, int width) {
  const int lane = threadIdx.x % width, index = (blockIdx.x * threads + threadIdx.x) / width,
            heads = a.heads + a.kv_heads, units = (heads + most_heads - 1) / most_heads, dim = a.head_dim,
            half = dim / 2;
  const bool there = index < a.rows * units;
  const int row = there ? index / units : 0, first = index % units * most_heads;
  let_successor_start();
  wait_for_predecessor();
  const int at = a.position[row];
  float* x = a.qkv + row * a.qkv_stride + std::int64_t{first} * dim;
  Head h[most_heads];
  bool mine[most_heads];
#pragma unroll
  for (int j = 0; j < most_heads; ++j) {
    mine[j] = there && lane < half / each && first + j < heads;
    if (mine[j]) h[j].load(x + j * dim, half, lane);
  }
  const bool known = at >= 0 && at < a.angles;
  if (there && !known && lane == 0 && a.error) atomicOr(a.error, append_no_angle);
  Angles angles;
  if (mine[0] && known) angles.load(a, at, lane);
#pragma unroll
  for (int j = 0; j < most_heads; ++j) {
    const bool query = first + j < a.heads;
    if (a.query_norm || a.key_norm) h[j].norm(query ? a.query_norm : a.key_norm, a.eps, half, lane, width, mine[j]);
    if (a.turn) h[j].rotate(angles.cosine, angles.sine);
    if (!mine[j] || !known) continue;
    h[j].store(x + j * dim, half, lane);
    if (a.nonfinite && !h[j].finite(INFINITY)) a.nonfinite[row * a.nonfinite_step] = 1;
    if (query && a.rounded)
      h[j].round(a.rounded, a.rounded_dtype, (std::int64_t{row} * a.heads + first + j) * dim, half, lane);
  }
}

[[noreturn]] void refuse(const std::string& got) { throw Error(Errc::unsupported, got, "op rope_append (CUDA)"); }

void check(const RopeAppendArgs& a) {
  if (a.head_dim < 8 || a.head_dim % 8 || a.head_dim > most_dim)
    refuse("got head_dim " + std::to_string(a.head_dim) + ", wanted a multiple of 8 up to " + std::to_string(most_dim));
  if (a.append && (a.codecs < 1 || a.codecs > DeviceKv::most_codecs))
    refuse("got " + std::to_string(a.codecs) + " codecs, wanted 1 to " + std::to_string(DeviceKv::most_codecs));
  if (a.qkv_stride % 4) refuse("got rows " + std::to_string(a.qkv_stride) + " apart, wanted a multiple of 4");
  if (a.rounded && a.rounded_dtype != DType::bf16 && a.rounded_dtype != DType::f16)
    refuse(std::string("got rounded queries of ") + name_of(a.rounded_dtype) + ", wanted bf16 or f16");
}

template <bool Coded>
auto kernel_of(const RopeAppendArgs& in) {
  if (in.summary_bits == 8 && in.summary != Summary::none)
    return in.summary == Summary::mean            ? rope_append_kernel<Summed::coded_mean, Coded>
           : in.summary == Summary::centre_radius ? rope_append_kernel<Summed::coded_centre, Coded>
                                                  : rope_append_kernel<Summed::coded_bounds, Coded>;
  return in.summary == Summary::none            ? rope_append_kernel<Summed::nothing, Coded>
         : in.summary == Summary::mean          ? rope_append_kernel<Summed::mean, Coded>
         : in.summary == Summary::centre_radius ? rope_append_kernel<Summed::centre, Coded>
         : in.bounds_hold                       ? rope_append_kernel<Summed::stored_bounds, Coded>
                                                : rope_append_kernel<Summed::bounds, Coded>;
}

}  // namespace

static void rope_append_cuda(const RopeAppendArgs& in, Stream s) {
  check(in);
  const int heads = in.heads + in.kv_heads, width = static_cast<int>(std::bit_ceil(in.head_dim / (2u * each)));
  if (in.rows == 0 || heads == 0) return;
  const auto blocks = [&](int units) {
    return static_cast<unsigned>((std::int64_t{in.rows} * units * width + threads - 1) / threads);
  };
  if (!in.append) {
    launch("rope", rope_kernel, blocks((heads + most_heads - 1) / most_heads), threads, 0, stream_of(s), true, in,
           width);
    return;
  }
  Args a;
  a.in = in;
  a.width = width;
  a.limit = finite_limit(in.layouts->dtype);
  bool coded = false;
  for (int c = 0; c < in.codecs; ++c) {
    a.layouts[c] = in.layouts[c];
    coded = coded || in.layouts[c].codec.k.bits || in.layouts[c].codec.v.bits;
  }
  const auto kernel = coded ? kernel_of<true>(in) : kernel_of<false>(in);
  unsigned all = blocks(heads);
  if (in.summary != Summary::none && !(in.summary == Summary::min_max && in.summary_bits == 16 && in.bounds_hold)) {
    a.query_blocks = static_cast<int>(blocks(in.heads));
    all = static_cast<unsigned>(a.query_blocks + in.rows * in.kv_heads);
  }
  launch("rope_append", kernel, all, threads, 0, stream_of(s), true, a);
}
KVLAB_ON_CUDA(rope_append, rope_append_cuda);

}  // namespace kvlab::ops
