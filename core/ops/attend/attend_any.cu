// Attention of decode steps for everything that the pipelined kernel refuses: any codec, regime, page size and
// head_dim, with or without a list. The tokens of a (row, KV head) are cut into parts of fixed size, whatever the
// device. A block of four warps serves up to 8 query heads of a part's group; a warp takes batches of 32 tokens
// (attend_any.cuh). A second kernel merges the parts in their order.
#include "ops/attend/attend_any.cuh"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/scratch.cuh"
#include "ops/attend/attend.cuh"
#include "ops/page/ranks.cuh"

namespace kvlab::ops {
namespace {

using namespace decode_any;
constexpr int merge_warps = 8, most_parts = 128, most_blocks = 8192;

template <int Heads>
__global__ void __launch_bounds__(threads, Heads > 4 ? 2 : 3) part_kernel(const __grid_constant__ Args a) {
  const int row = blockIdx.z, kv_head = blockIdx.y / a.head_sets, set = blockIdx.y % a.head_sets;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = a.kv.head_dim;
  const int first_head = kv_head * a.group + set * Heads, heads = min(Heads, a.group - set * Heads);
  const int end = places(a, row, kv_head), in_front = parts_in_front(a, row, kv_head);
  if (static_cast<int>(blockIdx.x) * a.part_tokens >= end) return;

  using Shared = Queries<Heads>;
  __shared__ Shared q;
  __shared__ float4 share_room[warps][batch * Heads / 4];
  __shared__ float4 out_room[2][warps][most_dim / 4];
  __shared__ float highs[Heads][warps], sums[Heads][warps], zeros[Heads][warps];
  for (int h = warp; h < Heads; h += warps) {
    float sum = 0;
    for (int d = lane; d < dim; d += 32) {
      const float x = h < heads ? a.queries(row, first_head + h, d) * a.scale : 0.f;
      reinterpret_cast<float*>(q.x[h])[d] = x;
      sum += x;
    }
    sum = sum_of_lanes<1, 16>(sum);
    if (lane == 0) q.sum[h] = sum;
  }
  if (a.rank)
    for (int i = threadIdx.x; i < dim / 2; i += threads) q.turns[i] = turns_of(a.kv.kv.rope_table.inv_freq[i]);
  __syncthreads();

  const int own_x = 8 * (lane % 4) + lane / 4;  // the lane's token in a batch
  float* shares = reinterpret_cast<float*>(share_room[warp]);
  float* logits = a.logits.of(row, a.kv.kv.slots[row], kv_head, a.kv.tokens(row, kv_head));
  if (logits) logits += set * Heads;
  int lanes = 1;  // lanes that share one token's value
  while (lanes * chunk_elements < dim) lanes *= 2;
  for (int part = blockIdx.x; part * a.part_tokens < end; part += gridDim.x) {
    Running<Heads> r;
    r.clear();
    const int part_end = min(end, (part + 1) * a.part_tokens);
    const int first = part * a.part_tokens + warp * batch;
    Place place = find_place(a, row, kv_head, first + own_x, part_end);
    for (int x = first; x < part_end; x += warps * batch) {
      const Token own = look_up(a, row, kv_head, place);
      place = find_place(a, row, kv_head, x + warps * batch + own_x, part_end);
      if (!__any_sync(~0u, own.key >= 0)) continue;
      float s[Heads][sets] = {}, score_of_own[Heads];
      with_type(a.keys, [&](auto type) {
        a.rank ? score_turned<decltype(type)>(a, own, q, s) : score<decltype(type)>(a, own, q, s);
      });
#pragma unroll
      for (int h = 0; h < Heads; ++h) {  // lane u of four gets the sum of s[h][u]
        const bool odd = lane & 1, upper = lane & 2;
        const float low = (odd ? s[h][1] : s[h][0]) + __shfl_xor_sync(~0u, odd ? s[h][0] : s[h][1], 1);
        const float high = (odd ? s[h][3] : s[h][2]) + __shfl_xor_sync(~0u, odd ? s[h][2] : s[h][3], 1);
        const float dot = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
        const float full = a.rank ? dot : fmaf(dot, own.key_code.x, own.key_code.y * q.sum[h]);
        const bool biased = a.bias.data && own.key >= 0 && h < heads && own.place < a.bias.extent[2];
        score_of_own[h] = own.key < 0 ? -INFINITY
                          : biased    ? fmaf(a.bias(row, first_head + h, own.place), log2e, full)
                                      : full;
        if (a.mass.data && own.key >= 0 && h < heads) a.mass(row, first_head + h, own.place) = full;
        if (logits && own.place >= 0 && h < heads) logits[std::int64_t{own.place} * a.group + h] = score_of_own[h];
      }
      r.soften(score_of_own, own.value_code);
      __syncwarp();
#pragma unroll
      for (int h = 0; h < Heads; ++h) shares[own_x * Heads + h] = score_of_own[h];
      __syncwarp();
      with_type(a.values,
                [&](auto type) { add_values<decltype(type)>(a, own, min(batch, part_end - x), lanes, shares, r.o); });
    }
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      r.sum[h] = sum_of_lanes<1, 16>(r.sum[h]), r.zero[h] = sum_of_lanes<1, 16>(r.zero[h]);
#pragma unroll
      for (int e = 0; e < 8; ++e) r.o[h][e] = sum_of_lanes_from(lanes, r.o[h][e]);
      if (lane == 0) highs[h][warp] = r.high[h], sums[h][warp] = r.sum[h], zeros[h][warp] = r.zero[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      if (h >= heads) break;
      float top = -INFINITY, sum = 0, zero = 0;
      for (int w = 0; w < warps; ++w) top = fmaxf(top, highs[h][w]);
      for (int w = 0; w < warps; ++w) {
        const float weight = highs[h][w] == -INFINITY ? 0.f : exp2_fast(highs[h][w] - top);
        sum += sums[h][w] * weight, zero += zeros[h][w] * weight;
      }
      const float weight = r.high[h] == -INFINITY ? 0.f : exp2_fast(r.high[h] - top);
      if (lane < lanes)
#pragma unroll
        for (int e = 0; e < 8; e += 4)
          out_room[h % 2][warp][2 * lane + e / 4] =
              make_float4(r.o[h][e] * weight, r.o[h][e + 1] * weight, r.o[h][e + 2] * weight, r.o[h][e + 3] * weight);
      __syncthreads();
      const std::int64_t at = (std::int64_t(row) * a.queries.extent[1] + first_head + h) * a.parts + in_front + part;
      if (threadIdx.x == 0) a.softmax[at] = make_float2(top, sum);
      for (int d = threadIdx.x; d < dim; d += threads) {
        float value = zero;
        for (int w = 0; w < warps; ++w) value += reinterpret_cast<const float*>(out_room[h % 2][w])[d];
        a.part_out[at * dim + d] = value;
      }
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(merge_warps * 32) merge_kernel(const __grid_constant__ Args a) {
  const int head = blockIdx.x, row = blockIdx.y, kv_head = head / a.group, dim = a.kv.head_dim;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int parts = parts_in_front(a, row, kv_head) + (places(a, row, kv_head) + a.part_tokens - 1) / a.part_tokens;
  const std::int64_t pair = std::int64_t(row) * a.queries.extent[1] + head;
  const float2* softmax = a.softmax + pair * a.parts;
  const float4* from = reinterpret_cast<const float4*>(a.part_out + pair * a.parts * dim);
  float top = -INFINITY, sum = 0;
  for (int i = lane; i < parts; i += 32) top = fmaxf(top, softmax[i].x);
  top = most_of_lanes(top);
  float4 o[2] = {};
#pragma unroll 4
  for (int i = warp; i < parts; i += merge_warps) {
    const float2 part = softmax[i];
    const float weight = part.x == -INFINITY ? 0.f : exp2_fast(part.x - top);
    sum = fmaf(part.y, weight, sum);
#pragma unroll
    for (int v = 0; v < 2; ++v)
      if (4 * (lane + 32 * v) < dim) {
        const float4 x = from[std::int64_t(i) * (dim / 4) + lane + 32 * v];
        o[v].x = fmaf(x.x, weight, o[v].x), o[v].y = fmaf(x.y, weight, o[v].y);
        o[v].z = fmaf(x.z, weight, o[v].z), o[v].w = fmaf(x.w, weight, o[v].w);
      }
  }
  __shared__ float4 out_room[merge_warps][most_dim / 4];
  __shared__ float sums[merge_warps];
#pragma unroll
  for (int v = 0; v < 2; ++v) out_room[warp][lane + 32 * v] = o[v];
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < merge_warps; ++w) total += sums[w];
  for (int d = threadIdx.x; d < dim; d += merge_warps * 32) {
    float value = 0;
    for (int w = 0; w < merge_warps; ++w) value += reinterpret_cast<const float*>(out_room[w])[d];
    a.out(row, head, d) = total != 0 ? value / total : 0.f;  // a NaN total gives NaN
  }
  if (threadIdx.x != 0) return;
  const float lse = total != 0 ? top + log2f(total) : -INFINITY;
  a.shift[pair] = lse;
  if (a.lse.data) a.lse(row, head) = lse * ln2;
}

__global__ void clear_kernel(View<float, 3> x) {
  for (std::int64_t t = blockIdx.x * blockDim.x + threadIdx.x; t < x.extent[2]; t += gridDim.x * blockDim.x)
    x(blockIdx.z, blockIdx.y, t) = -INFINITY;
}
// Turns scores x, in units of log2, into probabilities; -inf marks places that were not attended.
__global__ void mass_kernel(View<float, 3> x, const float* shift) {
  const float own = shift[std::int64_t(blockIdx.z) * gridDim.y + blockIdx.y];
  for (std::int64_t t = blockIdx.x * blockDim.x + threadIdx.x; t < x.extent[2]; t += gridDim.x * blockDim.x) {
    float& e = x(blockIdx.z, blockIdx.y, t);
    e = e == -INFINITY ? 0.f : exp2_fast(e - own);
  }
}

template <int Heads>
void launch(Args& a, int rows, cudaStream_t stream) {
  a.head_sets = (a.group + Heads - 1) / Heads;
  const int pairs = a.kv.kv_heads * a.head_sets;
  const int blocks = std::clamp(most_blocks / (pairs * rows), 1, a.parts);
  const auto kernel = part_kernel<Heads>;
  kernel<<<dim3(blocks, pairs, rows), threads, 0, stream>>>(a);
  check_launch("attend, parts");
}

Elements elements_of(const CodecSide& side, DType dtype) {
  if (side.kind == CodeKind::e4m3) return Elements::e4m3;
  if (side.bits) return side.bits == 8 ? Elements::code8 : side.bits == 4 ? Elements::code4 : Elements::code2;
  return dtype == DType::f32 ? Elements::single : dtype == DType::f16 ? Elements::half : Elements::bfloat;
}

}  // namespace

void attend_any_cuda(const AttendArgs& in, Stream s) {
  const cudaStream_t stream = stream_of(s);
  const int heads = static_cast<int>(in.queries.extent[1]), rows = in.kv.rows, dim = in.kv.head_dim;
  if (rows == 0) return;
  Args a = {};
  a.kv = DeviceKv(in.kv);
  a.queries = in.queries;
  a.entry_tokens = in.tokens ? 1 : in.kv.page_size;
  if (in.pages) a.list = in.pages->index, a.list_count = in.pages->count;
  if (in.tokens) a.list = in.tokens->index, a.list_count = in.tokens->count;
  a.out = in.out, a.mass = in.mass, a.lse = in.lse, a.last = in.last, a.window = in.window;
  a.masks = in.masks;
  a.logits = in.logits;
  a.bias = in.bias;
  a.group = heads / in.kv.kv_heads;
  a.scale = (in.softmax_scale != 0 ? in.softmax_scale : 1.f / std::sqrt(static_cast<float>(dim))) * log2e;
  a.room = static_cast<int>(in.kv.table.extent[2]) * in.kv.page_size;
  if (in.kv.rope == RopeRegime::cache_relative) {
    a.rank = token_ranks(a.kv, s.handle());
    a.scale *= in.kv.rope_table.attention_scale;
  } else if (in.most_distance > 0) {
    a.rank = tokens_beyond(a.kv, in.last, in.most_distance, s.handle());
  }
  const int most = in.tokens ? static_cast<int>(std::min<std::int64_t>(a.room, a.list.extent[2])) : a.room;
  a.part_tokens = std::max(256, static_cast<int>(std::bit_ceil(static_cast<unsigned>(most / most_parts))));
  a.parts = std::max(1, (most + a.part_tokens - 1) / a.part_tokens);
  if (in.kv.lower_pages) a.parts = a.list_count ? 2 * a.parts : a.parts + 1;
  const std::size_t pairs = std::size_t(rows) * std::size_t(heads), parts = pairs * std::size_t(a.parts);
  a.softmax = static_cast<float2*>(fixed_scratch(s.handle(), "attend any softmax", parts * sizeof(float2)));
  a.part_out =
      static_cast<float*>(fixed_scratch(s.handle(), "attend any out", parts * std::size_t(dim) * sizeof(float)));
  a.shift = static_cast<float*>(fixed_scratch(s.handle(), "attend any lse", pairs * sizeof(float)));

  const auto tokens = in.mass ? static_cast<unsigned>(in.mass.extent[2]) : 0u;
  const dim3 mass_grid(std::clamp(tokens / 1024, 1u, 64u), static_cast<unsigned>(heads), static_cast<unsigned>(rows));
  if (in.mass) clear_kernel<<<mass_grid, 256, 0, stream>>>(in.mass);
  const auto read = [&](Args::Run run, int codec) {
    const PageLayout& layout = a.kv.layouts[codec];
    a.run = run, a.codec = codec;
    a.grouped_keys = layout.codec.k.grouped(), a.grouped_values = layout.codec.v.grouped();
    a.keys = elements_of(layout.codec.k, layout.dtype), a.values = elements_of(layout.codec.v, layout.dtype);
    if (a.group == 1)
      launch<1>(a, rows, stream);
    else
      a.group <= 4 ? launch<4>(a, rows, stream) : launch<8>(a, rows, stream);
  };
  if (in.kv.lower_pages) read(Args::lower, 1);
  read(in.kv.lower_pages ? Args::rest : Args::all, 0);
  merge_kernel<<<dim3(static_cast<unsigned>(heads), static_cast<unsigned>(rows)), merge_warps * 32, 0, stream>>>(a);
  if (in.mass) mass_kernel<<<mass_grid, 256, 0, stream>>>(in.mass, a.shift);
  check_launch("attend");
}

}  // namespace kvlab::ops
