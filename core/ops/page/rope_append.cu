// `width` neighbouring lanes take one head of a row. They norm and rotate a query or key head, and write a KV head's
// key and value to its page. rope_kernel appends nothing; there the same lanes take several heads.
#include <bit>

#include "base/finite.hpp"
#include "base/launch.cuh"
#include "ops/page/paged.cuh"
#include "ops/page/rope_append.hpp"

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
  int width = 0;       // lanes of a head, a power of two
  bool coded = false;  // some layout has a codec
  float limit = 0;     // finite_limit of the cache's dtype
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
  // Stores one side of a token as write_token does.
  __device__ void encode(std::byte* frame, const PageLayout& l, bool key, int offset, int lane, float2 range) const {
    const int half = l.head_dim / 2, bits = key ? l.codec.k.bits : l.codec.v.bits;
    std::byte* side = frame + (key ? l.k : l.v);
    const std::int64_t row = std::int64_t{offset} * l.head_dim;
    if (bits) {
      constexpr float most = 65504.f;  // keeps scale and zero finite in f16
      const __half half_scale = __float2half_rn(fminf((range.y - range.x) / 255.f, most)),
                   half_zero = __float2half_rn(fminf(fmaxf(range.x, -most), most));
      if (lane == 0) {
        __half* meta = reinterpret_cast<__half*>(frame + (key ? l.k_meta : l.v_meta)) + 2 * offset;
        meta[0] = half_scale, meta[1] = half_zero;
      }
      const float scale = __half2float(half_scale), zero = __half2float(half_zero);
      const auto put = [&](std::int64_t at, const float* x) {
        unsigned word = 0;
#pragma unroll
        for (int j = 0; j < each; ++j) {
          const float code = scale > 0 ? rintf(fminf(fmaxf((x[j] - zero) / scale, 0.f), 255.f)) : 0.f;
          word |= static_cast<unsigned>(code) << 8 * j;
        }
        *reinterpret_cast<unsigned*>(side + at) = word;
      };
      put(row + each * lane, low);
      put(row + half + each * lane, high);
    } else if (l.dtype == DType::f32) {
      store(reinterpret_cast<float*>(side) + row, half, lane);
    } else {
      round(side, l.dtype, row, half, lane);
    }
  }
};

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
  int frame = null_frame, offset = 0, codec = 0;  // null_frame: no place; *error has the reason
};

// Returns the place of the head's next token and enters it in table and length.
__device__ Place take_place(const RopeAppendArgs& a, int slot, int head) {
  std::int32_t* length = a.length.data + slot * a.length.stride[0] + head * a.length.stride[1];
  const int page_size = a.layouts->page_size, n = *length, page = n / page_size;
  Place p;
  p.offset = n % page_size;
  const auto fail = [&](int why) {
    atomicOr(a.error, why);
    p.frame = null_frame;
    return p;
  };
  if (page >= a.table.extent[2]) return fail(append_no_page);
  PageEntry& e = a.table.data[slot * a.table.stride[0] + head * a.table.stride[1] + page * a.table.stride[2]];
  if (p.offset == 0) {
    const int left = atomicSub(a.pool.free_count, 1);
    if (left <= 0) {
      atomicAdd(a.pool.free_count, 1);
      return fail(append_no_frame);
    }
    p.frame = a.pool.free[left - 1];
    p.codec = a.codec;
    PageEntry fresh;
    fresh.frame = p.frame;
    fresh.tokens = 1;
    fresh.codec = static_cast<std::uint8_t>(p.codec);
    e = fresh;
  } else {
    if (e.frame < 0) return fail(append_page_absent);
    p.frame = e.frame;
    p.codec = e.codec;
    e.tokens = static_cast<std::uint16_t>(p.offset + 1);
  }
  *length = n + 1;
  return p;
}

__global__ void __launch_bounds__(threads) rope_append_kernel(const __grid_constant__ Args all) {
  RopeAppendArgs a = all.in;
  a.layouts = all.layouts;
  const int width = all.width, lane = threadIdx.x % width, index = (blockIdx.x * threads + threadIdx.x) / width,
            heads = a.heads + a.kv_heads, dim = a.head_dim, half = dim / 2;
  const bool there = index < a.rows * heads, mine = there && lane < half / each;
  const int row = there ? index / heads : 0, head = there ? index % heads : 0;
  const bool query = head < a.heads;
  float* x = a.qkv + row * a.qkv_stride + std::int64_t{head} * dim;
  let_successor_start();
  const int at = a.position[row], slot = a.slots[row];
  const bool known = at >= 0 && at < a.angles, works = mine && known;
  Angles angles;
  if (works) angles.load(a, at, lane);
  wait_for_predecessor();
  Head h, value;
  if (mine) h.load(x, half, lane);
  if (mine && !query) value.load(x + std::int64_t{a.kv_heads} * dim, half, lane);
  Place p;
  if (there && lane == 0) {
    if (!known)
      atomicOr(a.error, append_no_angle);
    else if (!query)
      p = take_place(a, slot, head - a.heads);
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
  p.offset = __shfl_sync(~0u, p.offset, first);
  p.codec = __shfl_sync(~0u, p.codec, first);
  float2 key_range = make_float2(0, 0), value_range = key_range;
  if (all.coded) key_range = h.range(width, mine), value_range = value.range(width, mine);
  if (p.frame < 0) return;
  const PageLayout& l = a.layouts[p.codec];
  std::byte* frame = a.base + std::int64_t{p.frame} * granule_bytes;
  if (mine) {
    h.encode(frame, l, true, p.offset, lane, key_range);
    value.encode(frame, l, false, p.offset, lane, value_range);
  }
  if (lane == 0) reinterpret_cast<std::int32_t*>(frame + l.positions)[p.offset] = at;
  for (int c = lane; c < l.state_columns; c += width)
    reinterpret_cast<float*>(frame + l.state)[std::int64_t{c} * l.page_size + p.offset] = 0;
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
  for (int c = 0; c < in.codecs; ++c) {
    a.layouts[c] = in.layouts[c];
    a.coded = a.coded || in.layouts[c].codec.k.bits || in.layouts[c].codec.v.bits;
  }
  launch("rope_append", rope_append_kernel, blocks(heads), threads, 0, stream_of(s), true, a);
}
KVLAB_ON_CUDA(rope_append, rope_append_cuda);

}  // namespace kvlab::ops
