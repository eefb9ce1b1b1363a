// Column sums of a prompt's attention: how much of all the chunk's tokens' attention each token gets.
//
// A block has 256 tokens' keys of a head, 128 for each of two groups of four warps. Queries stream through shared
// memory, 64 a tile. While the tensor cores multiply a tile, the warps turn the scores of the tile before into
// probabilities. Sums stay in registers: a lane has two queries and 32 tokens of a tile. All queries come in order, so
// a sum does not depend on the schedule of blocks.
#include <algorithm>
#include <new>

#include "base/launch.cuh"
#include "base/scratch.cuh"
#include "ops/attend/attend_prompt.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int groups = 2, threads = 128 * groups, tokens_each = 128, block_tokens = groups * tokens_each;
constexpr int tile = 64, stages = 4;  // queries of a tile; tiles in shared memory

struct Args {
  const std::byte *queries, *keys;
  const std::int32_t* length;  // [slot, kv_head] tokens that the first query sees
  std::int64_t length_slot, length_head;
  const std::int32_t* slots;
  PromptLse lse;
  float* sums;
  std::int64_t sum_head;
  int tokens, heads, group, room;
  float scale;
};

template <int Dim>
struct Place {
  static constexpr int row_bytes = Dim * 2, pieces = Dim / 8;
  static constexpr unsigned keys_bytes = block_tokens * row_bytes, tile_bytes = tile * row_bytes;
  static constexpr std::size_t bytes = 1024 + keys_bytes + stages * tile_bytes;
  // Of 16 bytes of a row among `rows`, from a multiple of 1024 on (operand_of, base/ptx.cuh).
  static __device__ unsigned of(int rows, int row, int piece) {
    return static_cast<unsigned>((piece / 8 * rows + row) * 128 + (piece % 8 ^ row % 8) * 16);
  }
};

template <class T, int Dim>
__global__ void __launch_bounds__(threads, 1) sums_kernel(const __grid_constant__ Args a) {
  using P = Place<Dim>;
  extern __shared__ unsigned char memory[];
  const int mine = static_cast<int>(threadIdx.x), wide = mine / 128, warp = mine / 32 % 4, lane = mine % 32,
            g = lane / 4, q = lane % 4;
  const int head = blockIdx.y, kv_head = head / a.group, place = static_cast<int>(blockIdx.x) * block_tokens;
  const int seen = a.length[a.slots[0] * a.length_slot + kv_head * a.length_head], total = seen + a.tokens - 1;
  if (place >= total) return;
  const unsigned keys = (shared_address(memory) + 1023) / 1024 * 1024, tiles_at = keys + P::keys_bytes;
  const int first = max(0, place + 1 - seen) / tile * tile, tiles = (a.tokens - first + tile - 1) / tile;

  for (int i = mine; i < block_tokens * P::pieces; i += threads) {
    const int row = i / P::pieces, piece = i % P::pieces, t = min(place + row, a.room - 1);
    copy_async16(keys + row / tokens_each * (P::keys_bytes / groups) + P::of(tokens_each, row % tokens_each, piece),
                 a.keys + (std::int64_t{kv_head} * a.room + t) * P::row_bytes + piece * 16);
  }
  // Rows after the last query repeat it. Their log-sum-exp makes them count nothing.
  const auto bring = [&](int n) {
    if (n < tiles)
      for (int i = mine; i < tile * P::pieces; i += threads) {
        const int row = i / P::pieces, piece = i % P::pieces, token = min(first + n * tile + row, a.tokens - 1);
        copy_async16(tiles_at + n % stages * P::tile_bytes + P::of(tile, row, piece),
                     a.queries + (std::int64_t{token} * a.heads + head) * P::row_bytes + piece * 16);
      }
    commit_copies();
  };
  const auto multiply = [&](int n, float(&c)[64]) {
    start_products();
#pragma unroll
    for (int k = 0; k < Dim / 16; ++k) {
      const unsigned at = static_cast<unsigned>(k % 4) * 32, panel = static_cast<unsigned>(k / 4) * 128;
      mma_rows<T>(c, operand_of(tiles_at + n % stages * P::tile_bytes + panel * tile + at),
                  operand_of(keys + wide * (P::keys_bytes / groups) + panel * tokens_each + at), k > 0);
    }
    commit_products();
  };
  const auto lse_of = [&](int n, int r) {
    const int token = first + n * tile + 16 * warp + g + 8 * r;
    return token < a.tokens ? a.lse.data[token * a.lse.row + head * a.lse.head] * a.lse.unit : INFINITY;
  };

  for (int n = 0; n < stages - 1; ++n) bring(n);
  float even[64], odd[64], sum[32] = {}, next[2] = {lse_of(0, 0), lse_of(0, 1)};
  wait_copies_but<stages - 2>();
  show_to_products();
  __syncthreads();
  multiply(0, even);
  const int mine_from = place + wide * tokens_each;
  const auto add = [&](int n, float(&c)[64], float(&after)[64]) {
    wait_products(c);
    const float lse[2] = {next[0], next[1]};
    if (n + 1 < tiles) {
      wait_copies_but<stages - 3>();
      show_to_products();
      __syncthreads();  // the tile has come, and all warps are done with the one before this
      multiply(n + 1, after);
      bring(n + stages - 1);
      next[0] = lse_of(n + 1, 0), next[1] = lse_of(n + 1, 1);
    }
    const int row = first + n * tile;
    if (mine_from + tokens_each <= seen + row) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          sum[2 * i + h] += exp2_fast(c[4 * i + h] * a.scale - lse[0]) + exp2_fast(c[4 * i + 2 + h] * a.scale - lse[1]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (mine_from + 8 * i + 2 * q + h < seen + row + 16 * warp + g + 8 * r)
            sum[2 * i + h] += exp2_fast(c[4 * i + 2 * r + h] * a.scale - lse[r]);
  };
  for (int n = 0; n < tiles; n += 2) {
    add(n, even, odd);
    if (n + 1 < tiles) add(n + 1, odd, even);
  }

#pragma unroll
  for (int i = 0; i < 32; ++i)
    for (int d = 4; d < 32; d *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
  __syncthreads();  // all products are done
  float* of_warps = reinterpret_cast<float*>(memory);
  if (g == 0)
    for (int i = 0; i < 16; ++i)
      for (int h = 0; h < 2; ++h) of_warps[mine / 32 * tokens_each + 8 * i + 2 * q + h] = sum[2 * i + h];
  __syncthreads();
  if (place + mine >= total) return;
  float all = 0;
  for (int w = 0; w < 4; ++w) all += of_warps[(wide * 4 + w) * tokens_each + mine % 128];
  a.sums[head * a.sum_head + place + mine] = all;
}

template <class T, int Dim>
void launch_sums(const Args& a, int most, cudaStream_t stream) {
  const auto kernel = sums_kernel<T, Dim>;
  static const cudaError_t once =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Place<Dim>::bytes));
  check(once, "attend_prompt_sums");
  kernel<<<dim3(static_cast<unsigned>((most + block_tokens - 1) / block_tokens), static_cast<unsigned>(a.heads)),
           threads, Place<Dim>::bytes, stream>>>(a);
  check_launch("attend_prompt_sums");
}

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
  a.queries = static_cast<const std::byte*>(rows.queries), a.keys = static_cast<const std::byte*>(rows.keys);
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
  const auto go = [&]<class T>() {
    dim == 64 ? launch_sums<T, 64>(a, most, stream_of(s)) : launch_sums<T, 128>(a, most, stream_of(s));
  };
  kv.layouts[0].dtype == DType::f16 ? go.template operator()<__half>() : go.template operator()<__nv_bfloat16>();
  return true;
} catch (const std::bad_alloc&) {  // another kernel reads the pages
  return false;
}

}  // namespace kvlab::ops
