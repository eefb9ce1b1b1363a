// `width` neighbouring lanes take a query, key or value of a row. They norm and rotate queries and keys, and write keys
// and values to pages. A head's key and value are encoded side by side, by the same instructions, before their place
// is known. rope_kernel appends nothing; there the same lanes take several heads.
#include <bit>
#include <type_traits>

#include "base/finite.hpp"
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
  int shift = 0;       // 2^shift lanes have a head
  int page_shift = 0;  // 2^page_shift is the page size; -1: it is no power of two
  float limit = 0;     // finite_limit of the cache's dtype
};

// The first unit of keys and values: a pair of lanes' units begins at an even one.
__host__ __device__ constexpr int first_pair(int heads) { return (heads + 1) / 2 * 2; }

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

enum class Element { f32, f16, bf16, code8, code4, code2, e4m3 };  // of a stored row
__device__ __forceinline__ Element element_of(DType dtype) {
  return dtype == DType::f32 ? Element::f32 : dtype == DType::f16 ? Element::f16 : Element::bf16;
}
__device__ __forceinline__ constexpr bool coded(Element e) { return e >= Element::code8; }
__device__ __forceinline__ constexpr int bits_of(Element e) {
  return e == Element::f32 ? 32 : !coded(e) ? 16 : e == Element::code4 ? 4 : e == Element::code2 ? 2 : 8;
}

// Bytes of a token's key or value, row_bytes without a table of types.
template <bool Coded>
__device__ __forceinline__ int row_size(const PageLayout& l, CodecSide side) {
  return l.head_dim * (Coded && side.bits ? side.bits : bits_of(element_of(l.dtype))) / 8;
}

// What read_row makes of a code. The host uses no fused multiply-add here either.
__device__ __forceinline__ float decode(float code, float scale, float zero) {
  return __fadd_rn(__fmul_rn(code, scale), zero);
}

// A lane's codes of a key or value, and the word of scale and zero.
struct Codes {
  unsigned words[2] = {}, scale = 0;

  // Of elements [4 lane, 4 lane + 4), and the same range `half` further.
  __device__ void store(std::byte* row, int bits, int half, int lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::byte* to = row + (h * half + each * lane) * bits / 8;
      if (bits == 8)
        *reinterpret_cast<unsigned*>(to) = words[h];
      else if (bits == 4)
        *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(words[h]);
      else
        *to = static_cast<std::byte>(words[h]);
    }
  }
};

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
  // Returns what is stored.
  template <class T>
  __device__ Head store_rounded(T* x, int half, int lane) const {
    Head out;
    const auto four = [&](int at, const float* from, float* to) {
      const uint2 words = make_uint2(Pair<T>::pack(from[0], from[1]), Pair<T>::pack(from[2], from[3]));
      *reinterpret_cast<uint2*>(x + at) = words;
      Pair<T>::unpack(words.x, to[0], to[1]), Pair<T>::unpack(words.y, to[2], to[3]);
    };
    four(each * lane, low, out.low);
    four(half + each * lane, high, out.high);
    return out;
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
    for (int j = 0; j < each; ++j) all = all & (fabsf(low[j]) < limit) & (fabsf(high[j]) < limit);
    return all;
  }
  // Least and greatest of the lane's elements.
  __device__ float2 range() const {
    float least = INFINITY, most = -INFINITY;
#pragma unroll
    for (int j = 0; j < each; ++j)
      least = fminf(least, fminf(low[j], high[j])), most = fmaxf(most, fmaxf(low[j], high[j]));
    return make_float2(least, most);
  }
  // Makes codes as write_token does. range: of the whole head. read: becomes what read_row reads of the codes.
  __device__ Codes encode(CodecSide side, float2 range, Head& read) const {
    Codes out;
    const CodeScale of = put_scale(side.kind == CodeKind::whole_zero
                                       ? code_scale(side, range.x, range.y)
                                       : scale_of(side.kind == CodeKind::e4m3 ? 0 : side.bits, range.x, range.y),
                                   reinterpret_cast<std::byte*>(&out.scale), true);
    const SharedScale shared(of);
    const auto code_all = [&](const auto& code_of, const auto& number_of) {
#pragma unroll
      for (int j = 2 * each - 1; j >= 0; --j) {
        const unsigned code = code_of(j < each ? low[j % each] : high[j % each]);
        out.words[j / each] = (out.words[j / each] << side.bits) + code;
        (j < each ? read.low : read.high)[j % each] = decode(number_of(code), of.scale, of.zero);
      }
    };
    // One branch for all elements, so that they are computed side by side.
    if (side.kind == CodeKind::e4m3)
      code_all([&](float x) { return e4m3_of_floats(shared.e4m3(x), 0) & 0xffu; },
               [](unsigned code) { return from_e4m3(code); });
    else
      code_all([&](float x) { return shared.integer(x, side.bits); },
               [](unsigned code) { return static_cast<float>(code); });
    return out;
  }
  // Stores the head as it is, in the layout's dtype. Returns what read_row reads there.
  __device__ Head store_plain(std::byte* row, DType dtype, int half, int lane) const {
    if (dtype == DType::f16) return store_rounded(reinterpret_cast<__half*>(row), half, lane);
    if (dtype == DType::bf16) return store_rounded(reinterpret_cast<__nv_bfloat16*>(row), half, lane);
    store(reinterpret_cast<float*>(row), half, lane);
    return *this;
  }
};

// Joins ranges of 2^shift lanes, side by side; all lanes of the warp must call it.
template <int Count>
__device__ __forceinline__ void join_ranges(float2 (&of)[Count], int shift) {
#pragma unroll
  for (int at = 4; at >= 0; --at) {
    if (at >= shift) continue;
    float2 other[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i)
      other[i] = make_float2(__shfl_xor_sync(~0u, of[i].x, 1 << at), __shfl_xor_sync(~0u, of[i].y, 1 << at));
#pragma unroll
    for (int i = 0; i < Count; ++i) of[i] = make_float2(fminf(of[i].x, other[i].x), fmaxf(of[i].y, other[i].y));
  }
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
    const std::byte* row = frame + l.k + begin * step + d * bits / 8;
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
  float2 range[1] = {make_float2(least, most)};
  join_ranges(range, 5);
  least = range[0].x, most = range[0].y;
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

__device__ __forceinline__ std::byte* summary_of(const RopeAppendArgs& a, int slot, int head, int page) {
  const auto& stride = a.summaries.stride;
  return a.summaries.data + slot * stride[0] + head * stride[1] + page * stride[2];
}

// Returns the frame of the head's next token, and enters the token in length and the entry of its page. null_frame: it
// has no place, and *error has the reason. last: that entry.
__device__ std::int32_t take_place(const RopeAppendArgs& a, std::int32_t* length, PageEntry* entry, int page,
                                   int offset, const PageEntry& last) {
  const auto fail = [&](int why) {
    atomicOr(a.error, why);
    return null_frame;
  };
  if (page >= a.table.extent[2]) return fail(append_no_page);
  std::int32_t frame = last.frame;
  if (offset == 0) {
    const int next = atomicAdd(a.pool.taken, 1);
    if (next >= *a.pool.given) {
      atomicSub(a.pool.taken, 1);
      return fail(append_no_frame);
    }
    PageEntry fresh;
    fresh.frame = frame = a.pool.at(next);
    fresh.tokens = 1;
    fresh.codec = static_cast<std::uint8_t>(a.codec);
    *entry = fresh;
  } else {
    if (last.frame < 0) return fail(append_page_absent);
    entry->tokens = static_cast<std::uint16_t>(offset + 1);
  }
  *length = page * a.layouts->page_size + offset + 1;
  return frame;
}

// A block works for row blockIdx.y.
template <Summed How, bool Coded>
__global__ void __launch_bounds__(threads) rope_append_kernel(const __grid_constant__ Args all) {
  RopeAppendArgs a = all.in;
  a.layouts = all.layouts;
  // Where the kernel reads a page's keys, blocks of their own have a KV head each. Its key, its value and its place are
  // then the work of a warp each. Elsewhere a KV head's key and value have neighbouring lanes.
  constexpr int warp_of_key = 0, warp_of_value = 1, warp_of_place = 2;
  const int first_of_heads = reads_page(How) ? a.kv_heads : 0, block = static_cast<int>(blockIdx.x),
            thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const bool whole_block = reads_page(How) && block < first_of_heads;
  const int width = 1 << all.shift, lane = thread & (width - 1), dim = a.head_dim, half = dim / 2,
            row = static_cast<int>(blockIdx.y);
  // Units: queries, then key and value of each KV head.
  const int unit = ((block - first_of_heads) * threads + thread) >> all.shift, of_pairs = unit - first_pair(a.heads);
  const bool query = !whole_block && unit < a.heads;
  const bool appends = whole_block || (!reads_page(How) && of_pairs >= 0 && of_pairs < 2 * a.kv_heads);
  const bool in_width = !whole_block || thread % 32 < width;
  const bool key = appends && in_width && (whole_block ? warp == warp_of_key : of_pairs % 2 == 0),
             value = appends && in_width && (whole_block ? warp == warp_of_value : of_pairs % 2 == 1),
             of_place = whole_block ? in_width && warp == warp_of_place : key, places = of_place && lane == 0;
  const bool mine = (query || key || value) && lane < half / each, turns = mine && !value;
  const int kv_head = whole_block ? block
                      : appends   ? of_pairs / 2
                                  : 0,
            head = query ? unit : a.heads + kv_head + (value ? a.kv_heads : 0);
  float* x = a.qkv + row * a.qkv_stride + std::int64_t{head} * dim;
  let_successor_start();
  const int at = a.position[row], slot = a.slots[row];
  // No slot is negative. The condition has both loads start together.
  const bool known = at >= 0 && at < a.angles && slot >= 0;
  Angles angles;
  if (turns && known) angles.load(a, at, lane);
  const int page_size = a.layouts->page_size;
  const auto page_of = [&](int token) { return all.page_shift < 0 ? token / page_size : token >> all.page_shift; };
  // A head that has lost no token appends to the page of the text position. What the page's entry says, and its
  // stored bounds, then come together with the length. Else they are loaded once more.
  const int likely = known ? page_of(at) : 0;
  PageEntry* entries = a.table.data + slot * a.table.stride[0] + kv_head * a.table.stride[1];
  std::int32_t* length = a.length.data + slot * a.length.stride[0] + kv_head * a.length.stride[1];
  wait_for_predecessor();
  Head h;
  if (mine) h.load(x, half, lane);
  PageEntry last;
  StoredBound least, most;
  const auto load_page = [&](int page) {
    if (!appends || page >= a.table.extent[2]) return;
    last = entries[page * a.table.stride[2]];
    if constexpr (How == Summed::stored_bounds) {
      if (!key || !mine) return;
      const std::byte* summary = summary_of(a, slot, kv_head, page);
      const Element e = element_of(a.layouts->dtype);
      least.load(summary, e, half, lane);
      most.load(summary + dim * bits_of(e) / 8, e, half, lane);
    }
  };
  load_page(likely);
  const int n = appends ? *length : 0;
  int page = likely, offset = n - likely * page_size;
  if (offset < 0 || offset >= page_size) page = page_of(n), offset = n - page * page_size, load_page(page);
  const std::byte* keys = a.base + std::int64_t{last.frame} * granule_bytes;
  int codec = a.codec;
  if (a.codecs > 1 && offset > 0) codec = last.codec;
  const PageLayout& l = a.layouts[codec];
  const CodecSide side = side_of(l, !value);
  const int before = offset > 0 && last.frame >= 0 && page < a.table.extent[2] ? offset : 0;
  Column<Coded> column;
  if constexpr (reads_page(How))
    if (whole_block && thread < dim) {
      const int codes = Coded ? l.codec.k.bits : 0;
      column.load(codes ? codes : bits_of(element_of(l.dtype)), keys, l, 0, before, thread);
    }
  Codes codes;
  Head read;  // the key as it is stored
  const auto turn = [&] {
    if (a.query_norm || a.key_norm) h.norm(query ? a.query_norm : a.key_norm, a.eps, half, lane, width, turns);
    if (a.turn && !value) h.rotate(angles.cosine, angles.sine);
    if (turns && known) h.store(x, half, lane);
    if (mine && !h.finite(query ? INFINITY : all.limit) && known && a.nonfinite)
      a.nonfinite[row * a.nonfinite_step] = 1;
    if (turns && known && query && a.rounded)
      h.round(a.rounded, a.rounded_dtype, (std::int64_t{row} * a.heads + head) * dim, half, lane);
    if constexpr (Coded) {
      if (!__any_sync(~0u, mine && !query)) return;
      float2 range[1] = {make_float2(INFINITY, -INFINITY)};
      if (mine) range[0] = h.range();
      join_ranges(range, all.shift);
      if (side.bits) codes = h.encode(side, range[0], read);
    }
  };
  if constexpr (!reads_page(How)) turn();  // while the page's entry comes
  // take_place changes the length and the entry that all lanes of the head read.
  const bool fresh = __syncthreads_or(appends && offset == 0);
  std::int32_t frame = offset > 0 && known && page < a.table.extent[2] ? last.frame : null_frame, taken = null_frame;
  if (places) {
    if (!known)
      atomicOr(a.error, append_no_angle);
    else
      taken = take_place(a, length, entries + page * a.table.stride[2], page, offset, last);
  }
  if constexpr (reads_page(How)) turn();
  if (fresh) {
    __shared__ std::int32_t of_heads[threads / 2];
    const int pair = whole_block ? 0 : thread >> (all.shift + 1);
    if (places) of_heads[pair] = taken;
    __syncthreads();
    if (offset == 0) frame = of_heads[pair];
  }
  const bool placed = appends && frame >= 0;
  std::byte* to = a.base + std::int64_t{frame} * granule_bytes;
  if (placed && mine) {
    std::byte* of_token = to + (value ? l.v : l.k) + offset * row_size<Coded>(l, side);
    if (Coded && side.bits) {
      codes.store(of_token, side.bits, half, lane);
      if (lane == 0) *reinterpret_cast<unsigned*>(to + meta_offset(l, !value, offset)) = codes.scale;
    } else {
      read = h.store_plain(of_token, l.dtype, half, lane);
    }
  }
  if (placed && places) {
    reinterpret_cast<std::int32_t*>(to + l.positions)[offset] = at;
    if (How != Summed::nothing && offset == 0) atomicAdd(a.pages, 1);
  }
  for (int c = lane; placed && of_place && c < l.state_columns; c += width)
    reinterpret_cast<float*>(to + l.state)[std::int64_t{c} * l.page_size + offset] = 0;
  if constexpr (reads_page(How)) {
    if (!whole_block || !placed) return;  // a query, or no place
    __shared__ float4 aligned[page_room(How) / 4];
    float* appended = reinterpret_cast<float*>(aligned);
    if (key && mine) read.store(appended, half, lane);
    __syncthreads();
    sum_page<How>(column, keys, l, before, appended, summary_of(a, slot, kv_head, page));
  } else if (How == Summed::stored_bounds && placed && key && mine) {
    write_bounds(summary_of(a, slot, kv_head, page), l, least, most, read, offset == 0, lane);
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
  a.shift = std::countr_zero(static_cast<unsigned>(width));
  const auto page_size = static_cast<unsigned>(in.layouts->page_size);
  a.page_shift = std::has_single_bit(page_size) ? std::countr_zero(page_size) : -1;
  a.limit = finite_limit(in.layouts->dtype);
  bool coded = false;
  for (int c = 0; c < in.codecs; ++c) {
    a.layouts[c] = in.layouts[c];
    coded = coded || in.layouts[c].codec.k.bits || in.layouts[c].codec.v.bits;
  }
  const auto kernel = coded ? kernel_of<true>(in) : kernel_of<false>(in);
  const bool reads =
      in.summary != Summary::none && !(in.summary == Summary::min_max && in.summary_bits == 16 && in.bounds_hold);
  const auto blocks_of = [&](int units) { return static_cast<unsigned>((units * width + threads - 1) / threads); };
  const dim3 grid(reads ? static_cast<unsigned>(in.kv_heads) + blocks_of(in.heads)
                        : blocks_of(first_pair(in.heads) + 2 * in.kv_heads),
                  static_cast<unsigned>(in.rows));
  launch("rope_append", kernel, grid, threads, 0, stream_of(s), true, a);
}
KVLAB_ON_CUDA(rope_append, rope_append_cuda);

}  // namespace kvlab::ops
