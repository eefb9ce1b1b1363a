// One warp per head of a row: a query head is normed and rotated; a KV head too, and its key and value go into a page.
#include "base/launch.cuh"
#include "ops/paged.cuh"
#include "ops/rope_append_cuda.hpp"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int warps = 4;       // of a block
constexpr int most_pairs = 4;  // (i, i + head_dim / 2) of a lane: head_dim <= 256

struct Args {
  RopeAppendArgs in;
  PageLayout layouts[DeviceKv::most_codecs];
};

// A head: pair j of a lane is elements lane + 32 j and half of head_dim further.
struct Head {
  float low[most_pairs], high[most_pairs];

  __device__ void load(const float* x, int half, int lane) {
#pragma unroll
    for (int j = 0; j < most_pairs; ++j) {
      const int i = lane + 32 * j;
      low[j] = i < half ? x[i] : 0.f;
      high[j] = i < half ? x[i + half] : 0.f;
    }
  }
  __device__ void store(float* x, int half, int lane) const {
#pragma unroll
    for (int j = 0; j < most_pairs; ++j)
      if (const int i = lane + 32 * j; i < half) x[i] = low[j], x[i + half] = high[j];
  }
  __device__ void norm(const float* weight, float eps, int half, int lane) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < most_pairs; ++j) sum += low[j] * low[j] + high[j] * high[j];
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const float factor = 1 / sqrtf(sum / static_cast<float>(2 * half) + eps);
#pragma unroll
    for (int j = 0; j < most_pairs; ++j)
      if (const int i = lane + 32 * j; i < half)
        low[j] = low[j] * factor * weight[i], high[j] = high[j] * factor * weight[i + half];
  }
  __device__ void rotate(const float* cosine, const float* sine, int half, int lane) {
#pragma unroll
    for (int j = 0; j < most_pairs; ++j)
      if (const int i = lane + 32 * j; i < half) {
        const float a = low[j], b = high[j], c = cosine[i], s = sine[i];
        low[j] = a * c - b * s;
        high[j] = b * c + a * s;
      }
  }
  // As write_token stores one side of a token.
  __device__ void encode(std::byte* frame, const PageLayout& l, bool key, int offset, int lane) const {
    const int half = l.head_dim / 2, bits = key ? l.codec.k.bits : l.codec.v.bits;
    std::byte* side = frame + (key ? l.k : l.v);
    const std::int64_t row = std::int64_t{offset} * l.head_dim;
    const auto put = [&](auto* to, auto of) {
#pragma unroll
      for (int j = 0; j < most_pairs; ++j)
        if (const int i = lane + 32 * j; i < half) to[row + i] = of(low[j]), to[row + half + i] = of(high[j]);
    };
    if (bits) {
      float lo = INFINITY, hi = -INFINITY;
#pragma unroll
      for (int j = 0; j < most_pairs; ++j)
        if (lane + 32 * j < half) lo = fminf(lo, fminf(low[j], high[j])), hi = fmaxf(hi, fmaxf(low[j], high[j]));
      for (int d = 16; d; d /= 2)
        lo = fminf(lo, __shfl_xor_sync(~0u, lo, d)), hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, d));
      constexpr float most = 65504.f;  // keeps scale and zero finite in f16
      const __half half_scale = __float2half_rn(fminf((hi - lo) / 255.f, most)),
                   half_zero = __float2half_rn(fminf(fmaxf(lo, -most), most));
      if (lane == 0) {
        __half* meta = reinterpret_cast<__half*>(frame + (key ? l.k_meta : l.v_meta)) + 2 * offset;
        meta[0] = half_scale, meta[1] = half_zero;
      }
      const float scale = __half2float(half_scale), zero = __half2float(half_zero);
      put(reinterpret_cast<std::uint8_t*>(side), [&](float x) {
        return static_cast<std::uint8_t>(scale > 0 ? rintf(fminf(fmaxf((x - zero) / scale, 0.f), 255.f)) : 0.f);
      });
    } else if (l.dtype == DType::f32) {
      put(reinterpret_cast<float*>(side), [](float x) { return x; });
    } else if (l.dtype == DType::f16) {
      put(reinterpret_cast<__half*>(side), [](float x) { return __float2half_rn(x); });
    } else {
      put(reinterpret_cast<__nv_bfloat16*>(side), [](float x) { return __float2bfloat16_rn(x); });
    }
  }
};

struct Place {
  int frame = null_frame, offset = 0, codec = 0;  // null_frame: there is none, and *error says why
};

// Where the head's next token goes; table and length say so from now on.
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

__global__ void __launch_bounds__(warps * 32) rope_append_kernel(const __grid_constant__ Args all) {
  RopeAppendArgs a = all.in;
  a.layouts = all.layouts;
  let_successor_start();
  wait_for_predecessor();
  const int lane = threadIdx.x % 32, each = a.heads + a.kv_heads, index = blockIdx.x * warps + threadIdx.x / 32;
  if (index >= a.rows * each) return;
  const int row = index / each, head = index % each, dim = a.head_dim, half = dim / 2, at = a.position[row];
  if (at < 0 || at >= a.angles) {
    if (lane == 0) atomicOr(a.error, append_no_angle);
    return;
  }
  const bool query = head < a.heads;
  float* x = a.qkv + row * a.qkv_stride + std::int64_t{head} * dim;
  Head h;
  h.load(x, half, lane);
  if (const float* norm = query ? a.query_norm : a.key_norm) h.norm(norm, a.eps, half, lane);
  if (a.turn) h.rotate(a.cosine + std::int64_t{at} * half, a.sine + std::int64_t{at} * half, half, lane);
  h.store(x, half, lane);
  if (query) return;

  Place p;
  if (lane == 0) p = take_place(a, a.slots[row], head - a.heads);
  p.frame = __shfl_sync(~0u, p.frame, 0);
  p.offset = __shfl_sync(~0u, p.offset, 0);
  p.codec = __shfl_sync(~0u, p.codec, 0);
  if (p.frame < 0) return;
  const PageLayout& l = a.layouts[p.codec];
  std::byte* frame = a.base + std::int64_t{p.frame} * granule_bytes;
  h.encode(frame, l, true, p.offset, lane);
  h.load(x + std::int64_t{a.kv_heads} * dim, half, lane);
  h.encode(frame, l, false, p.offset, lane);
  if (lane == 0) reinterpret_cast<std::int32_t*>(frame + l.positions)[p.offset] = at;
  for (int c = lane; c < l.state_columns; c += 32)
    reinterpret_cast<float*>(frame + l.state)[std::int64_t{c} * l.page_size + p.offset] = 0;
}

}  // namespace

void rope_append_cuda(const RopeAppendArgs& in, void* stream) {
  if (in.head_dim < 8 || in.head_dim % 8 || in.head_dim > 64 * most_pairs || in.codecs < 1 ||
      in.codecs > DeviceKv::most_codecs)
    throw Error(Errc::unsupported,
                "got head_dim " + std::to_string(in.head_dim) + " and " + std::to_string(in.codecs) +
                    " codecs, wanted a multiple of 8 up to 256 and at most " + std::to_string(DeviceKv::most_codecs),
                "op rope_append (CUDA)");
  if (in.rows == 0) return;
  Args a;
  a.in = in;
  for (int c = 0; c < in.codecs; ++c) a.layouts[c] = in.layouts[c];
  const int heads = in.rows * (in.heads + in.kv_heads);
  launch("rope_append", rope_append_kernel, (heads + warps - 1) / warps, warps * 32, 0, stream_of(stream), true, a);
}

}  // namespace kvlab::ops
