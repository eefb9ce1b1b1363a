// Column sums of a prompt's attention: how much of all the chunk's tokens' attention each token gets.
//
// A block has 256 tokens' keys of a head, 128 for each of two groups of four warps. Queries stream through shared
// memory by bulk copies (TMA), 64 a tile. While the tensor cores multiply a tile, the warps turn the scores of the tile
// before into probabilities. Sums stay in registers: a lane has two queries and 32 tokens of a tile. All queries come
// in order, so a sum does not depend on the schedule of blocks.
#include <algorithm>
#include <cmath>
#include <new>
#include <type_traits>

#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "base/tensor_map.hpp"
#include "ops/attend/attend_prompt.cuh"
#include "ops/attend/attend_unit.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int groups = 2, threads = 128 * groups, tokens_each = 128, block_tokens = groups * tokens_each;
constexpr int tile = 64, stages = 4;  // queries of a tile; tiles in shared memory

struct Args {
  const std::int32_t* length;  // [slot, kv_head] tokens that the first query sees; null: `seen`
  std::int64_t length_slot, length_head;
  const std::int32_t* slots;
  PromptLse lse;
  float* sums;
  std::int64_t sum_head;
  int tokens, heads, group, room;
  int seen, window;  // near sums only: a query counts for its `window` newest tokens
  float scale;
};

template <int Dim>
struct Place {
  static constexpr int row_bytes = Dim * 2, panels = Dim / 64;
  static constexpr unsigned panel_bytes = 128;  // of a row
  static constexpr unsigned keys_bytes = block_tokens * row_bytes, tile_bytes = tile * row_bytes;
  static constexpr std::size_t bytes = 1024 + keys_bytes + stages * tile_bytes + (1 + 2 * stages) * 8;
};

// Near: tokens count for the queries near them alone, and the sums are added to what is there.
template <class T, int Dim, bool Near>
__global__ void __launch_bounds__(threads, 1)
    sums_kernel(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap query_map,
                const __grid_constant__ CUtensorMap key_map) {
  using P = Place<Dim>;
  extern __shared__ unsigned char memory[];
  const int mine = static_cast<int>(threadIdx.x), wide = mine / 128, warp = mine / 32 % 4, lane = mine % 32,
            g = lane / 4, q = lane % 4;
  const int head = blockIdx.y, kv_head = head / a.group, place = static_cast<int>(blockIdx.x) * block_tokens;
  const int seen = Near ? a.seen : a.length[a.slots[0] * a.length_slot + kv_head * a.length_head],
            total = seen + a.tokens - 1;
  if (place >= total) return;
  const unsigned keys = (shared_address(memory) + 1023) / 1024 * 1024, tiles_at = keys + P::keys_bytes;
  // An even number of tiles, and one more, whose products nobody reads: ptxas lets products and other work overlap
  // only where no branch lies between them.
  const int first = max(0, place + 1 - seen) / tile * tile,
            end = Near ? min(a.tokens, place + block_tokens - seen + a.window) : a.tokens,
            tiles = (end - first + 2 * tile - 1) / (2 * tile) * 2;
  if (Near && end <= first) return;

  // Barriers: the keys have come; for each stage, its tile has come, and both groups' products of it are done.
  const unsigned keys_here = tiles_at + stages * P::tile_bytes, tile_here = keys_here + 8,
                 tile_done = tile_here + 8 * stages;
  // Queries after the last one read as zeros. Their log-sum-exp makes them count nothing.
  const auto bring = [&](int n) {
    const unsigned to = tiles_at + n % stages * P::tile_bytes, barrier = tile_here + 8 * (n % stages);
    barrier_expect(barrier, P::tile_bytes);
    for (int p = 0; p < P::panels; ++p)
      bulk_copy_2d(to + p * (tile * P::panel_bytes), &query_map, head * Dim + 64 * p, first + n * tile, barrier);
  };
  if (mine == 0) {
    barrier_init(keys_here, 1);
    for (int i = 0; i < stages; ++i) barrier_init(tile_here + 8 * i, 1), barrier_init(tile_done + 8 * i, groups * 4);
    barrier_init_fence();
    barrier_expect(keys_here, P::keys_bytes);
    for (int i = 0; i < groups; ++i)
      for (int p = 0; p < P::panels; ++p)
        bulk_copy_2d(keys + i * (P::keys_bytes / groups) + p * (tokens_each * P::panel_bytes), &key_map, 64 * p,
                     kv_head * a.room + place + i * tokens_each, keys_here);
    for (int n = 0; n < stages && n <= tiles; ++n) bring(n);
  }
  __syncthreads();
  const auto multiply = [&](int n, float(&c)[64]) {
    barrier_wait(tile_here + 8 * (n % stages), n / stages & 1);
    start_products();
#pragma unroll
    for (int k = 0; k < Dim / 16; ++k) {
      const unsigned at = static_cast<unsigned>(k % 4) * 32, panel = static_cast<unsigned>(k / 4) * P::panel_bytes;
      mma_rows<T>(c, operand_of(tiles_at + n % stages * P::tile_bytes + panel * tile + at),
                  operand_of(keys + wide * (P::keys_bytes / groups) + panel * tokens_each + at), k > 0);
    }
    commit_products();
  };
  const auto lse_of = [&](int n, int r) {
    const int token = first + n * tile + 16 * warp + g + 8 * r;
    return token < a.tokens ? a.lse.data[token * a.lse.row + head * a.lse.head] * log2e : INFINITY;
  };

  float even[64], odd[64], sum[32] = {}, next[2] = {lse_of(0, 0), lse_of(0, 1)};
  barrier_wait(keys_here, 0);
  multiply(0, even);
  const int mine_from = place + wide * tokens_each;
  // Masked: not all of the group's tokens count for all queries of the tile.
  const auto add = [&](auto masked, int n, float(&c)[64], float(&after)[64]) {
    wait_products(c);
    __syncwarp();
    if (lane == 0) barrier_arrive(tile_done + 8 * (n % stages));
    const float lse[2] = {next[0], next[1]};
    next[0] = lse_of(n + 1, 0), next[1] = lse_of(n + 1, 1);
    // The tile before this is long done, so its stage is free without a wait.
    if (mine == 0 && n > 0 && n - 1 + stages <= tiles) {
      barrier_wait(tile_done + 8 * ((n - 1) % stages), (n - 1) / stages & 1);
      bring(n - 1 + stages);
    }
    __syncwarp();
    multiply(n + 1, after);
    const int newest = seen + first + n * tile + 16 * warp + g - mine_from - 2 * q;  // of the row's first query
#pragma unroll
    for (int i = 0; i < 16; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = exp2_fast(c[4 * i + h] * a.scale - lse[0]), y = exp2_fast(c[4 * i + 2 + h] * a.scale - lse[1]);
        if constexpr (masked && Near)
          sum[2 * i + h] += (8 * i + h < newest && 8 * i + h >= newest - a.window ? x : 0.f) +
                            (8 * i + h < newest + 8 && 8 * i + h >= newest + 8 - a.window ? y : 0.f);
        else if constexpr (masked)
          sum[2 * i + h] += (8 * i + h < newest ? x : 0.f) + (8 * i + h < newest + 8 ? y : 0.f);
        else
          sum[2 * i + h] += x + y;
      }
  };
  const int whole = mine_from + tokens_each - seen - first,
            masked = min(max(0, (whole + 2 * tile - 1) / (2 * tile) * 2), tiles);
  int n = 0;
  for (; n < masked; n += 2) add(std::true_type{}, n, even, odd), add(std::true_type{}, n + 1, odd, even);
  // Near: all queries of these tiles count for all of the group's tokens.
  const int clear = Near ? min(tiles, max(0, mine_from + 1 + a.window - seen - first) / (2 * tile) * 2) : tiles;
  for (; n < clear; n += 2) add(std::false_type{}, n, even, odd), add(std::false_type{}, n + 1, odd, even);
  if constexpr (Near)
    for (; n < tiles; n += 2) add(std::true_type{}, n, even, odd), add(std::true_type{}, n + 1, odd, even);
  wait_products(even);

#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = sum_of_lanes<4, 16>(sum[i]);
  __syncthreads();  // all products are done
  float* of_warps = reinterpret_cast<float*>(memory);
  if (g == 0)
    for (int i = 0; i < 16; ++i)
      for (int h = 0; h < 2; ++h) of_warps[mine / 32 * tokens_each + 8 * i + 2 * q + h] = sum[2 * i + h];
  __syncthreads();
  if (place + mine >= total) return;
  float all = 0;
  for (int w = 0; w < 4; ++w) all += of_warps[(wide * 4 + w) * tokens_each + mine % 128];
  float& to = a.sums[head * a.sum_head + place + mine];
  to = Near ? to + all : all;
}

template <class T, int Dim, bool Near>
void launch_dim(const Args& a, const PromptRows& rows, int kv_heads, int most, cudaStream_t stream) {
  constexpr bool half = std::is_same_v<T, __half>;
  const CUtensorMap queries = matrix_map(rows.queries, half, a.tokens, std::int64_t{a.heads} * Dim,
                                         std::int64_t{a.heads} * Dim, tile),
                    keys = matrix_map(rows.keys, half, std::int64_t{kv_heads} * a.room, Dim, Dim, tokens_each);
  const auto kernel = sums_kernel<T, Dim, Near>;
  static const cudaError_t once =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Place<Dim>::bytes));
  check(once, "attend_prompt_sums");
  kernel<<<dim3(static_cast<unsigned>((most + block_tokens - 1) / block_tokens), static_cast<unsigned>(a.heads)),
           threads, Place<Dim>::bytes, stream>>>(a, queries, keys);
  check_launch("attend_prompt_sums");
}

// `most`: places of a row.
template <bool Near>
void launch_sums(const Args& a, const PromptRows& rows, const PagedKv& kv, int most, Stream s) {
  const auto go = [&]<class T>() {
    kv.head_dim == 64 ? launch_dim<T, 64, Near>(a, rows, kv.kv_heads, most, stream_of(s))
                      : launch_dim<T, 128, Near>(a, rows, kv.kv_heads, most, stream_of(s));
  };
  kv.layouts[0].dtype == DType::f16 ? go.template operator()<__half>() : go.template operator()<__nv_bfloat16>();
}

constexpr int near_queries = 8192;  // of a launch: their rounded copies are scratch

}  // namespace

bool attend_prompt_sums(const PromptArgs& in, PromptRows rows, const PromptLse& lse, float scale, Stream s) try {
  const PagedKv& kv = in.kv;
  const int dim = kv.head_dim;
  if (dim != 64 && dim != 128) return false;
  const int most = static_cast<int>(in.sums.extent[1]);
  if (!rows.keys) {
    if (in.queries.stride[1] != dim) return false;
    rows.room = most;
    void* keys = fixed_scratch(s.handle(), "prompt keys",
                               static_cast<std::size_t>(std::int64_t{kv.kv_heads} * rows.room * dim * 2));
    rows.queries = rounded_queries(in, kv.rows, s);
    gather_prompt(kv, rows.room, keys, nullptr, nullptr, s);
    rows.keys = keys;
  }
  Args a = {};
  a.length = kv.length.data;
  a.length_slot = kv.length.stride[0], a.length_head = kv.length.stride[1];
  a.slots = kv.slots;
  a.lse = lse;
  a.sums = in.sums.data, a.sum_head = in.sums.stride[0];
  a.tokens = kv.rows;
  a.heads = static_cast<int>(in.queries.extent[1]);
  a.group = a.heads / kv.kv_heads;
  a.room = rows.room;
  a.scale = scale;
  launch_sums<false>(a, rows, kv, most, s);
  return true;
} catch (const std::bad_alloc&) {  // another kernel reads the pages
  return false;
}

bool attend_prompt_near(const NearSums& in, Stream s) try {
  const PagedKv& kv = in.kv;
  const PageLayout& l = kv.layouts[0];
  const int dim = kv.head_dim, count = static_cast<int>(in.queries.extent[0]),
            heads = static_cast<int>(in.queries.extent[1]);
  if ((dim != 64 && dim != 128) || l.codec.k.bits || (l.dtype != DType::bf16 && l.dtype != DType::f16) ||
      kv.lower_pages || kv.rope == RopeRegime::cache_relative || in.queries.stride[1] != dim ||
      in.queries.stride[0] % 4 != 0)
    return false;
  const int most = std::min(count, near_queries), room = most + std::min(in.window, in.seen + count) + kv.page_size;
  void* keys =
      fixed_scratch(s.handle(), "near keys", static_cast<std::size_t>(std::int64_t{kv.kv_heads} * room * dim * 2));
  Args a = {};
  a.heads = heads, a.group = heads / kv.kv_heads;
  a.sum_head = in.sums.stride[0];
  a.window = in.window;
  a.scale = log2e / std::sqrt(static_cast<float>(dim));
  for (int at = 0; at < count; at += most) {
    const int here = std::min(most, count - at), seen = in.seen + at,
              from = std::max(0, seen - in.window) / kv.page_size * kv.page_size;
    PromptArgs some;
    some.kv = kv;
    some.kv.rows = here;
    some.queries = in.queries;
    some.queries.data += at * in.queries.stride[0];
    some.queries.extent[0] = here;
    a.tokens = here;
    a.seen = seen - from;
    a.lse = in.lse;
    a.lse.data += at * in.lse.row;
    a.sums = in.sums.data + from;
    PromptRows rows;
    rows.queries = rounded_queries(some, most, s);
    rows.keys = keys;
    rows.room = a.room = std::min(room, a.seen + here - 1);
    gather_prompt(kv, rows.room, keys, nullptr, nullptr, s, from);
    launch_sums<true>(a, rows, kv, rows.room, s);
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

}  // namespace kvlab::ops
