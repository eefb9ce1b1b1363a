// Causal attention of a prompt's chunk, and the column sums of its probabilities.
//
// A warp takes 32 tokens' queries (16 at head_dim 256) of one query head as the columns of attend_unit.cuh. A block has
// eight such warps, for neighbouring heads of one KV head. They share the units of 16 tokens that bulk copies bring,
// four a stage. The blocks of the chunk's last tokens start first, because they see the most tokens. Where
// attend_prompt_sums.cu refuses, a second pass computes the column sums: a warp holds the keys of 32 tokens and takes
// all queries that see them, in order. So a sum does not depend on the schedule of blocks.
#include <cmath>

#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "ops/attend/attend_prompt.cuh"
#include "ops/attend/attend_unit.cuh"
#include "ops/attend/prompt_mask.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int warps = 8, stage_units = 4;

struct Args {
  const PageEntry* table;  // of the chunk's slot
  std::int64_t table_head;
  // [slot, kv_head]: tokens that the first row sees, itself included; each next row sees one more
  const std::int32_t* length;
  std::int64_t length_head;
  const std::int32_t* slots;
  std::int64_t length_slot, table_slot;
  const float* queries;
  std::int64_t query_row, query_head;
  float *out, *lse, *sums;  // lse [token, query head], or null
  PromptLse sums_lse;       // log-sum-exp that sums_kernel uses
  void* rounded;            // null, or dense and written instead of out
  std::int64_t out_row, out_head, sum_head;
  const std::byte* base;
  std::int64_t keys;        // offset of the keys in a frame
  const PromptMask* masks;  // [kv_head], or null
  std::int64_t positions;   // offset of the text positions in a frame
  int first_position;       // of the chunk's first token; for masks
  int tokens, heads, group, page_size, value_rows, stages;
  bool joint;   // a page is one unit: its keys and values are contiguous
  float scale;  // factor of the scores, times log2(e)
};

template <int Dim>
struct Tile {
  static constexpr int columns = Dim <= 128 ? 4 : 2;
  static constexpr int tokens = 8 * columns;  // of a warp
};

__device__ __forceinline__ int seen_by_first(const Args& a, int kv_head) {
  return a.length[a.slots[0] * a.length_slot + kv_head * a.length_head];
}

__device__ __forceinline__ int stored_position(const Args& a, const PageEntry* entries, int place) {
  const std::byte* frame = a.base + std::int64_t{entries[place / a.page_size].frame} * granule_bytes;
  return reinterpret_cast<const std::int32_t*>(frame + a.positions)[place % a.page_size];
}

template <class T, int Dim>
__global__ void __launch_bounds__(32 * warps, 1)
    prompt_kernel(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap map) {
  using S = UnitShape<Dim>;
  constexpr int columns = Tile<Dim>::columns, tile_tokens = Tile<Dim>::tokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int kv_head = blockIdx.y;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned stages = shared_address(memory), barriers = stages + a.stages * stage_units * S::unit_bytes;
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.stages; ++s) barrier_init(barriers + 8 * s, 1);
    barrier_init_fence();
  }
  __syncthreads();
  let_successor_start();
  wait_for_predecessor();

  // Item tile * group + h is head h of the group for the tile's tokens.
  const int items = (a.tokens + tile_tokens - 1) / tile_tokens * a.group, block = gridDim.x - 1 - blockIdx.x;
  const int item = block * warps + warp, last_item = min((block + 1) * warps, items) - 1;
  const bool works = item < items;
  const int tile = item / a.group, head = kv_head * a.group + item % a.group, first = tile * tile_tokens;
  const int seen = seen_by_first(a, kv_head), total = seen + a.tokens - 1;
  const int end = works ? min(seen + first + tile_tokens - 1, total) : 0;
  const int block_end = min(seen + (last_item / a.group + 1) * tile_tokens - 1, total);
  const int units = (block_end + unit_tokens - 1) / unit_tokens;
  // With a mask the block reads `lead` units, those of the tokens before the chunk and of sinks, and then the units
  // from its first token's window on. `gap` units lie between.
  const PromptMask mask = a.masks ? a.masks[kv_head] : PromptMask{};
  const int past = seen - 1;
  int lead = units, gap = 0;
  if (mask.window > 0) {
    const int window_from = past + block * warps / a.group * tile_tokens - mask.window + 1;
    lead = min(units, (past + min(max(0, mask.sinks - a.first_position), a.tokens) + unit_tokens - 1) / unit_tokens);
    gap = max(0, window_from / unit_tokens - lead);
  }
  const int read = units - gap, steps = (read + stage_units - 1) / stage_units;
  const auto unit_of = [&](int i) { return i < lead ? i : i + gap; };

  const PageEntry* entries = a.table + a.slots[0] * a.table_slot + kv_head * a.table_head;
  const std::uint64_t policy = read_once_policy();
  const auto issue = [&](int step) {  // only the first warp calls it
    const int u = unit_of(step * stage_units + lane), here = min(stage_units, read - step * stage_units);
    const unsigned barrier = barriers + 8 * (step % a.stages),
                   to = stages + (step % a.stages * stage_units + lane) * S::unit_bytes;
    const bool two = a.page_size < unit_tokens;                       // a unit spans two pages
    const bool half = two && (2 * units - 1) * a.page_size >= total;  // the last unit has no second page
    if (lane == 0) barrier_expect(barrier, here * S::unit_bytes - (half && step == steps - 1 ? S::unit_bytes / 2 : 0));
    __syncwarp();
    if (lane >= here) return;
    if (two) {
      for (int i = 0; i < (half && u == units - 1 ? 1 : 2); ++i) {
        const int y = entries[2 * u + i].frame;
        bulk_copy_2d(to + i * S::side_bytes / 2, &map, 0, y, barrier, policy);
        bulk_copy_2d(to + S::side_bytes + i * S::side_bytes / 2, &map, 0, y + a.value_rows, barrier, policy);
      }
      return;
    }
    const int per_page = a.page_size / unit_tokens,
              y = entries[u / per_page].frame + u % per_page * (S::side_bytes / 128);
    bulk_copy_2d(to, &map, 0, y, barrier, policy);
    if (!a.joint) bulk_copy_2d(to + S::side_bytes, &map, 0, y + a.value_rows, barrier, policy);
  };
  if (warp == 0)
    for (int s = 0; s < a.stages && s < steps; ++s) issue(s);

  unsigned qf[columns][S::steps][2];
#pragma unroll
  for (int c = 0; c < columns; ++c) {
    const int token = first + c * 8 + g;
    const bool there = works && token < a.tokens;
    const float* from = a.queries + (there ? token * a.query_row + head * a.query_head : 0);
#pragma unroll
    for (int j = 0; j < S::steps / 2; ++j)
      pack_query<T>(query_piece(from, q, j), there ? 1.f : 0.f, qf[c][2 * j], qf[c][2 * j + 1]);
  }
  float o[columns][S::tiles][4], high[columns][2], sum[columns][2];
#pragma unroll
  for (int c = 0; c < columns; ++c) {
#pragma unroll
    for (int t = 0; t < S::tiles; ++t) o[c][t][0] = o[c][t][1] = o[c][t][2] = o[c][t][3] = 0;
    high[c][0] = high[c][1] = -INFINITY;
    sum[c][0] = sum[c][1] = 0;
  }
  const int row0 = token_of<Dim>(g), row1 = row0 + 8;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(barriers + 8 * (step % a.stages), step / a.stages & 1);
    for (int i = 0; i < stage_units; ++i) {
      const int place = unit_of(step * stage_units + i) * unit_tokens;
      if (place >= end) break;
      if (mask.window > 0 && place >= past &&
          hides(mask, a.first_position + place - past, a.first_position + first - (unit_tokens - 1)))
        continue;  // the warp's first token does not see the unit's last one
      const unsigned keys = stages + (step % a.stages * stage_units + i) * S::unit_bytes;
      float s[columns][4];
      score_unit<T, Dim>(keys, row0, row1, q, qf, s);
      const bool diagonal = place + unit_tokens > seen + first;  // the tile's first token does not see the whole unit
      int position[2] = {};
      if (mask.window > 0)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int t = place + (r ? row1 : row0);
          position[r] = t >= past ? a.first_position + t - past : stored_position(a, entries, t);
        }
      unsigned p[columns][2];
#pragma unroll
      for (int c = 0; c < columns; ++c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int sees = seen + first + c * 8 + 2 * q + h;
          s[c][h] = !diagonal || place + row0 < sees ? s[c][h] * a.scale : -INFINITY;
          s[c][2 + h] = !diagonal || place + row1 < sees ? s[c][2 + h] * a.scale : -INFINITY;
          if (mask.window > 0) {
            const int own = a.first_position + first + c * 8 + 2 * q + h;
            if (hides(mask, position[0], own)) s[c][h] = -INFINITY;
            if (hides(mask, position[1], own)) s[c][2 + h] = -INFINITY;
          }
        }
        soften_unit<T>(s[c], high[c], sum[c], o[c], p[c]);
      }
      add_unit<T, Dim>(keys + S::side_bytes, min(unit_tokens, total - place), g, q, p, o);
    }
    __syncthreads();  // all warps have read the stage
    if (warp == 0 && step + a.stages < steps) issue(step + a.stages);
  }
#pragma unroll
  for (int c = 0; c < columns; ++c)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[c][h] = sum_of_lanes<4, 16>(sum[c][h]);
      const int token = first + c * 8 + 2 * q + h;
      if (!works || token >= a.tokens) continue;
      const float share = 1 / sum[c][h];  // sum > 0: a token sees itself
      if (a.rounded) {
        T* to = static_cast<T*>(a.rounded) + (std::int64_t{token} * a.heads + head) * Dim;
#pragma unroll
        for (int t = 0; t < S::tiles; ++t)
          *reinterpret_cast<unsigned*>(to + element_of<Dim>(g, 2 * t)) =
              Pair<T>::pack(o[c][t][h] * share, o[c][t][2 + h] * share);
      } else {
        float* to = a.out + token * a.out_row + head * a.out_head;
#pragma unroll
        for (int t = 0; t < S::tiles; ++t)
          *reinterpret_cast<float2*>(to + element_of<Dim>(g, 2 * t)) =
              make_float2(o[c][t][h] * share, o[c][t][2 + h] * share);
      }
      if (a.lse && g == 0)
        a.lse[std::int64_t(token) * a.heads + head] = (high[c][h] + log2f(sum[c][h])) * (1.f / log2e);
    }
}

template <int Dim>
struct SumTile {
  static constexpr int units = Dim <= 128 ? 2 : 1;                  // of a warp
  static constexpr int tokens = units * unit_tokens, queries = 32;  // tokens of a warp; queries of a step
  static constexpr int query_stride = Dim * 2 + 64;  // bytes; the padding puts the rows of a load in different banks
};

// sums[head, place] = sum over the chunk's tokens of their probability for the place.
template <class T, int Dim>
__global__ void __launch_bounds__(32 * warps, 1) sums_kernel(const __grid_constant__ Args a) {
  using S = UnitShape<Dim>;
  using U = SumTile<Dim>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int head = blockIdx.y, kv_head = head / a.group;
  extern __shared__ __align__(16) unsigned char tile[];
  const unsigned queries = shared_address(tile);
  float* lse = reinterpret_cast<float*>(tile + U::queries * U::query_stride);
  const int seen = seen_by_first(a, kv_head), total = seen + a.tokens - 1;
  const int block_place = blockIdx.x * warps * U::tokens, place = block_place + warp * U::tokens;
  if (block_place >= total) return;
  const PageEntry* entries = a.table + a.slots[0] * a.table_slot + kv_head * a.table_head;

  uint4 keys[U::units][2][S::steps / 2];
#pragma unroll
  for (int u = 0; u < U::units; ++u)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = place + u * unit_tokens + g + 8 * r;
      const std::byte* row = t < total ? a.base + entries[t / a.page_size].frame * granule_bytes + a.keys +
                                             std::int64_t(t % a.page_size) * S::row_bytes
                                       : nullptr;
#pragma unroll
      for (int j = 0; j < S::steps / 2; ++j)
        keys[u][r][j] = row ? *reinterpret_cast<const uint4*>(row + (4 * j + q) * 16) : make_uint4(0, 0, 0, 0);
    }
  float sum[U::units][2] = {};
  for (int first = max(0, block_place + 1 - seen) / U::queries * U::queries; first < a.tokens; first += U::queries) {
    __syncthreads();
    for (int i = threadIdx.x; i < U::queries * Dim / 2; i += blockDim.x) {
      const int token = i / (Dim / 2), e = i % (Dim / 2) * 2;
      float2 x = make_float2(0, 0);
      if (first + token < a.tokens)
        x = *reinterpret_cast<const float2*>(a.queries + (first + token) * a.query_row + head * a.query_head + e);
      *reinterpret_cast<unsigned*>(tile + token * U::query_stride + e * 2) = Pair<T>::pack(x.x, x.y);
    }
    for (int i = threadIdx.x; i < U::queries; i += blockDim.x)
      lse[i] = first + i < a.tokens ? a.sums_lse.data[(first + i) * a.sums_lse.row + head * a.sums_lse.head] * log2e
                                    : INFINITY;
    __syncthreads();
    if (place >= min(seen + first + U::queries - 1, total)) continue;
#pragma unroll
    for (int c = 0; c < U::queries / 8; ++c) {
      float s[U::units][4] = {};
#pragma unroll
      for (int j = 0; j < S::steps / 2; ++j) {
        const uint4 b = load_shared16(queries + (c * 8 + g) * U::query_stride + (4 * j + q) * 16);
#pragma unroll
        for (int u = 0; u < U::units; ++u) {
          const uint4 &k0 = keys[u][0][j], &k1 = keys[u][1][j];
          mma16816<T>(s[u], k0.x, k1.x, k0.y, k1.y, b.x, b.y);
          mma16816<T>(s[u], k0.z, k1.z, k0.w, k1.w, b.z, b.w);
        }
      }
#pragma unroll
      for (int u = 0; u < U::units; ++u)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = c * 8 + 2 * q + i % 2, t = place + u * unit_tokens + g + 8 * (i / 2);
          if (t < seen + first + column) sum[u][i / 2] += exp2_fast(s[u][i] * a.scale - lse[column]);
        }
    }
  }
#pragma unroll
  for (int u = 0; u < U::units; ++u)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[u][r] = sum_of_lanes<1, 2>(sum[u][r]);
      const int t = place + u * unit_tokens + g + 8 * r;
      if (q == 0 && t < total) a.sums[head * a.sum_head + t] = sum[u][r];
    }
}

template <class T, int Dim>
void launch_attention(Args a, const CUtensorMap& map, int kv_heads, cudaStream_t stream) {
  const std::int64_t stage = stage_units * UnitShape<Dim>::unit_bytes + 8;
  a.stages = static_cast<int>(std::min<std::int64_t>(6, (shared_bytes() - 1024) / stage));
  const auto kernel = prompt_kernel<T, Dim>;
  static const cudaError_t once = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(shared_bytes() - 1024));
  check(once, "attend_prompt");
  const int items = (a.tokens + Tile<Dim>::tokens - 1) / Tile<Dim>::tokens * a.group;
  cuda::launch("attend_prompt", kernel, dim3((items + warps - 1) / warps, kv_heads), 32 * warps,
               static_cast<std::size_t>(a.stages * stage), stream, true, a, map);
}

template <class T, int Dim>
void launch_sums(const Args& a, int most, cudaStream_t stream) {
  using U = SumTile<Dim>;
  const dim3 grid((most + warps * U::tokens - 1) / (warps * U::tokens), a.heads);
  const auto sums = sums_kernel<T, Dim>;
  sums<<<grid, 32 * warps, U::queries*(U::query_stride + 4), stream>>>(a);
  check_launch("attend_prompt sums");
}

// f.template operator()<T, Dim>()
template <class T, class F>
void with_dim(int dim, F f) {
  switch (dim) {
    case 64: return f.template operator()<T, 64>();
    case 96: return f.template operator()<T, 96>();
    case 128: return f.template operator()<T, 128>();
    default: return f.template operator()<T, 256>();
  }
}
template <class F>
void with_type(bool half, int dim, F f) {
  half ? with_dim<__half>(dim, f) : with_dim<__nv_bfloat16>(dim, f);
}

}  // namespace

static bool attend_prompt_cuda(const PromptArgs& in, Workspace&, Stream s) {
  const PagedKv& kv = in.kv;
  const PageLayout& l = kv.layouts[0];
  const int dim = kv.head_dim, p = kv.page_size;
  const bool half = l.dtype == DType::f16;
  if (in.window > 0 || (in.masks && (in.sums || in.kernel == PromptKernel::cudnn)) || kv.lower_pages ||
      l.codec.k.bits || l.codec.v.bits || (!half && l.dtype != DType::bf16) || kv.rope == RopeRegime::cache_relative ||
      (dim != 64 && dim != 96 && dim != 128 && dim != 256) || (p != 16 && p != 32 && p != 64 && (p != 8 || dim == 96)))
    return false;
  Args a = {};
  a.table = kv.table.data;
  a.table_slot = kv.table.stride[0], a.table_head = kv.table.stride[1];
  a.length = kv.length.data;
  a.length_slot = kv.length.stride[0], a.length_head = kv.length.stride[1];
  a.slots = kv.slots;
  a.queries = in.queries.data;
  a.query_row = in.queries.stride[0], a.query_head = in.queries.stride[1];
  a.out = in.out.data;
  a.out_row = in.out.stride[0], a.out_head = in.out.stride[1];
  a.rounded = in.rounded;
  a.base = kv.base;
  a.keys = l.k;
  a.masks = in.masks, a.positions = l.positions, a.first_position = in.first;
  a.tokens = kv.rows;
  a.heads = static_cast<int>(in.queries.extent[1]);
  a.group = a.heads / kv.kv_heads;
  a.page_size = p;
  const std::int64_t side = std::int64_t{unit_tokens} * dim * 2;
  a.value_rows = static_cast<int>((l.v - l.k) / granule_bytes);
  a.joint = p == unit_tokens && l.v - l.k == side && 2 * side / granule_bytes <= 256;
  const float scale = in.softmax_scale != 0 ? in.softmax_scale : 1.f / std::sqrt(static_cast<float>(dim));
  a.scale = scale * log2e;
  const cudaStream_t stream = stream_of(s);
  PromptRows dense;
  if (in.kernel == PromptKernel::own || in.masks ||
      !attend_prompt_cudnn(in, scale, in.sums || in.lse ? &a.sums_lse : nullptr, dense, s)) {
    if (in.kernel == PromptKernel::cudnn) return false;
    if (in.sums || in.lse) {
      a.lse = static_cast<float*>(fixed_scratch(s.handle(), "attend_prompt lse",
                                                std::size_t(a.tokens) * static_cast<std::size_t>(a.heads) * 4));
      a.sums_lse = {a.lse, a.heads, 1};
    }
    const int rows = static_cast<int>(std::min(p, unit_tokens) * dim * 2 / granule_bytes) * (a.joint ? 2 : 1);
    const CUtensorMap& map = unit_map(kv.base, rows, half);
    with_type(half, dim, [&]<class T, int Dim>() { launch_attention<T, Dim>(a, map, kv.kv_heads, stream); });
  }
  if (in.lse) *in.lse = {a.sums_lse.data, {a.heads, a.tokens}, {a.sums_lse.head, a.sums_lse.row}};
  if (in.sums) {
    if (attend_prompt_sums(in, dense, a.sums_lse, a.scale, s)) return true;
    a.sums = in.sums.data, a.sum_head = in.sums.stride[0];
    const int most = static_cast<int>(in.sums.extent[1]);
    with_type(half, dim, [&]<class T, int Dim>() { launch_sums<T, Dim>(a, most, stream); });
  }
  return true;
}
KVLAB_ON_CUDA(attend_prompt, attend_prompt_cuda);

}  // namespace kvlab::ops
