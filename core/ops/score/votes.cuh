// The logits of many queries by tensor cores, for kernels that make votes and shares of them. Such kernels read the
// keys twice: for the maximum and sum of every query's softmax, then for the probabilities. Tensor cores multiply tiles
// of 16 tokens with all queries of a query head. A query takes two columns: its rounded value and the rest. bf16 holds
// what a code means. A key is code * scale + zero, so its product with q is scale * (q . codes) + zero * sum(q).
#pragma once
#include <kvlab/kv.hpp>

#include <algorithm>
#include <cmath>

#include "base/cuda.cuh"
#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "base/ptx.cuh"
#include "base/scratch.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops::votes {

using namespace cuda;

constexpr int threads = 256, warps = threads / 32, tile_tokens = 16, chunk_bytes = 64;
constexpr int most_queries = 128;  // longest window that the tensor cores take
constexpr float log2e = 1.4426950408889634f;

struct Args {
  DeviceKv kv;
  View<const float, 4> queries;
  const std::int32_t* seen;
  View<float, 3> votes;
  float2* partial;           // [row, query head, chunk, query] maximum and sum of logits times log2(e)
  float* logits;             // [row, query head, room], or [row, kv_head, 2, room]; votes_any_kernel only
  const std::int32_t* rank;  // [row, kv_head, room], cache_relative only
  std::int64_t room;
  int group, window, chunks;
  float scale;
  // Queries with w = 1: the query heads of a KV head are its window, and each has a row of votes.
  bool each;
  bool of_group;  // a vote of each KV head: the sum of the greatest shares of its query heads
  Scores stored;  // logits of the queries, for pooled_kernel; or empty
  Heads heads;
  bool placed;    // the kernel wants the tokens' text positions, also without `seen`
  bool skips;     // tiles that none of a pass's queries see
  bool of_slots;  // queries are [slot, ...] in place of [row, ...]
  int near;       // `newest` of window_votes
};

// Element d of a query.
__device__ __forceinline__ const float* query_at(const Args& a, int row, int head, int i, int d) {
  return &a.queries(a.of_slots ? a.kv.kv.slots[row] : row, head, i, d);
}

__device__ __forceinline__ bool left_out(const Args& a, int row, int kv_head) {
  return !a.heads.on(a.kv.kv.slots[row], kv_head);
}
// The newest text position that query i sees.
__device__ __forceinline__ int newest_of(const Args& a, int row, int i) {
  if (!a.seen) return 0x7ffffffe;
  return a.each ? a.seen[row] - 1 : a.seen[row] - a.window + i;
}

// Whether query i votes for a token that it sees.
__device__ __forceinline__ bool votes_for(const Args& a, int row, int i, int position) {
  return a.near <= 0 || position > newest_of(a, row, i) - a.near;
}

__device__ __forceinline__ int tokens_of(const Args& a, int row, int kv_head) {
  return min(a.kv.tokens(row, kv_head), static_cast<int>(a.votes.extent[2]));
}

// Joins (maximum, sum of 2^(x - maximum)) of two sets.
__device__ __forceinline__ void join(float& high, float& sum, float other_high, float other_sum) {
  const float fresh = fmaxf(high, other_high);
  if (fresh == -INFINITY) return;
  sum = sum * exp2f(high - fresh) + other_sum * exp2f(other_high - fresh);
  high = fresh;
}

enum class Stored { plain, code8, code4, code2, e4m3 };
constexpr int bits_of(Stored s) { return s == Stored::code4 ? 4 : s == Stored::code2 ? 2 : 8; }

// Turns the low two codes into elements.
template <class T, Stored S>
__device__ __forceinline__ unsigned pair_of(unsigned codes) {
  constexpr int bits = bits_of(S);
  const auto number = [](unsigned code) {
    code &= static_cast<unsigned>(most_code(bits));
    return S == Stored::e4m3 ? from_e4m3(code) : static_cast<float>(code);
  };
  return Pair<T>::pack(number(codes), number(codes >> bits));
}
// Turns eight codes from `row` on into elements.
template <class T, Stored S>
__device__ __forceinline__ uint4 eight_of(const std::byte* row) {
  if constexpr (bits_of(S) == 8) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(row));
    return make_uint4(pair_of<T, S>(x.x), pair_of<T, S>(x.x >> 16), pair_of<T, S>(x.y), pair_of<T, S>(x.y >> 16));
  } else {
    unsigned x;
    if constexpr (bits_of(S) == 4)
      x = __ldg(reinterpret_cast<const unsigned*>(row));
    else
      x = __ldg(reinterpret_cast<const unsigned short*>(row));
    constexpr int two = 2 * bits_of(S);
    return make_uint4(pair_of<T, S>(x), pair_of<T, S>(x >> two), pair_of<T, S>(x >> 2 * two),
                      pair_of<T, S>(x >> 3 * two));
  }
}

// Queries of a window that a pass scores: `count` from `first` on of `members` query heads from `head` on.
struct Pass {
  int head, members, first, count;
};

// Calls f(column tile, member, query, t, s, position) with the scores s[2] of this thread's two tokens t for one query.
// Tokens that the query does not see score -inf. After a tile it calls end_of_tile(t, tokens). Fragments lie as in
// score_pages.cu, a member's behind one another's.
template <class T, int Chunks, Stored S, class F, class EndOfTile>
__device__ __forceinline__ void for_scores(const Args& a, int row, const Pass& pass, uint4* fragments, const F& f,
                                           const EndOfTile& end_of_tile) {
  constexpr bool coded = S != Stored::plain;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = lane % 4, kv_head = pass.head / a.group;
  const int tokens = tokens_of(a, row, kv_head), column_tiles = (2 * pass.count + 7) / 8;
  for (int i = threadIdx.x; i < pass.members * column_tiles * Chunks * 32; i += threads) {
    const int of = i % 32, chunk = i / 32 % Chunks, tile = i / 32 / Chunks, member = tile / column_tiles,
              column = tile % column_tiles * 8 + of / 4, element = chunk * 32 + of % 4 * 8;
    unsigned out[4] = {};
    if (column / 2 < pass.count) {
      const float* q = query_at(a, row, pass.head + member, pass.first + column / 2, element);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[k] = Pair<T>::pack(q[2 * k], q[2 * k + 1]);
        if (column % 2) {
          float x, y;
          Pair<T>::unpack(out[k], x, y);
          out[k] = Pair<T>::pack(q[2 * k] - x, q[2 * k + 1] - y);
        }
      }
    }
    fragments[i] = make_uint4(out[0], out[1], out[2], out[3]);
  }
  __shared__ float query_sum[coded ? most_queries : 1];
  for (int i = warp; coded && i < pass.members * pass.count; i += warps) {
    float sum = 0;
    for (int d = lane; d < a.kv.head_dim; d += 32)
      sum += *query_at(a, row, pass.head + i / pass.count, pass.first + i % pass.count, d);
    sum = sum_of_lanes(sum);
    if (lane == 0) query_sum[i] = sum;
  }
  __syncthreads();
  const unsigned fragment = shared_address(fragments + lane);
  const PageLayout& layout = a.kv.layouts[0];
  const int tiles = (tokens + tile_tokens - 1) / tile_tokens;
  for (int tile = blockIdx.x * warps + warp; tile < tiles; tile += gridDim.x * warps) {
    int t[2], position[2];
    DeviceKv::Token of[2];
    uint4 key[2][Chunks];
    float2 code[2] = {};  // scale and zero
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      t[half] = tile * tile_tokens + lane / 4 + 8 * half;
      of[half] = a.kv.token(row, kv_head, min(t[half], tokens - 1));
      position[half] = t[half] >= tokens ? 0x7fffffff : a.seen || a.placed ? of[half].position() : 0;
    }
    if (a.skips && least_of_lanes(min(position[0], position[1])) > newest_of(a, row, pass.first + pass.count - 1)) {
      end_of_tile(t, tokens);
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DeviceKv::Token& token = of[half];
      if constexpr (coded) {
        const __half* meta = reinterpret_cast<const __half*>(token.frame + layout.k_meta) + 2 * token.offset;
        code[half] = make_float2(__half2float(meta[0]), __half2float(meta[1]));
        constexpr int eight = bits_of(S);  // bytes of eight codes
        const std::byte* from = token.frame + layout.k + token.offset * (Chunks * 4 * eight) + quarter * eight;
#pragma unroll
        for (int c = 0; c < Chunks; ++c) key[half][c] = eight_of<T, S>(from + 4 * c * eight);
      } else {
        const auto* from = reinterpret_cast<const uint4*>(token.frame + layout.k +
                                                          token.offset * (Chunks * chunk_bytes) + quarter * 16);
#pragma unroll
        for (int c = 0; c < Chunks; ++c) key[half][c] = __ldg(from + c * (chunk_bytes / 16));
      }
    }
    for (int column = 0; column < column_tiles; ++column)
      for (int member = 0; member < pass.members; ++member) {
        float sum[4] = {};
#pragma unroll
        for (int c = 0; c < Chunks; ++c) {
          const uint4 b = load_shared16(fragment + ((member * column_tiles + column) * Chunks + c) * 512);
          mma16816<T>(sum, key[0][c].x, key[1][c].x, key[0][c].y, key[1][c].y, b.x, b.y);
          mma16816<T>(sum, key[0][c].z, key[1][c].z, key[0][c].w, key[1][c].w, b.z, b.w);
        }
        const int query = column * 4 + quarter;
        const bool there = query < pass.count;
        const int newest = there ? newest_of(a, row, pass.first + query) : -1;
        float s[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x = sum[2 * half] + sum[2 * half + 1];
          if constexpr (coded)
            x = x * code[half].x + (there ? query_sum[member * pass.count + query] : 0) * code[half].y;
          s[half] = position[half] <= newest ? x * a.scale : -INFINITY;
        }
        f(column, member, query, t, s, position);
      }
    end_of_tile(t, tokens);
  }
}

// The maximum of a query's logits, and 1 / sum.
__device__ __forceinline__ float2 softmax_of(const Args& a, int row, int head, int query, int queries) {
  float2 all = make_float2(-INFINITY, 0.f);
  for (int c = 0; c < a.chunks; ++c) {
    const float2 x = a.partial[((row * a.queries.extent[1] + head) * a.chunks + c) * queries + query];
    join(all.x, all.y, x.x, x.y);
  }
  return make_float2(all.x, all.y > 0 ? 1.f / all.y : 0.f);
}

// Queries of each head that a pass of a group takes, so that a pass has at most most_queries. 0: too many
// heads.
constexpr int queries_of_pass(int group, int window) {
  const int most = most_queries / group / 4 * 4;
  return window < most ? window : most;
}

// Calls f.template operator()<T, Chunks, S>() for the pages' elements, head_dim and format.
template <class T, Stored S, class F>
void for_dim(int head_dim, const F& f) {
  switch (head_dim) {
    case 64: return f.template operator()<T, 2, S>();
    case 96: return f.template operator()<T, 3, S>();
    case 128: return f.template operator()<T, 4, S>();
    default: return f.template operator()<T, 8, S>();
  }
}
template <class F>
void for_format(const PagedKv& kv, const F& f) {
  const CodecSide keys = kv.layouts[0].codec.k;
  if (keys.kind == CodeKind::e4m3) return for_dim<__nv_bfloat16, Stored::e4m3>(kv.head_dim, f);
  if (keys.bits == 2) return for_dim<__nv_bfloat16, Stored::code2>(kv.head_dim, f);
  if (keys.bits == 4) return for_dim<__nv_bfloat16, Stored::code4>(kv.head_dim, f);
  if (keys.bits) return for_dim<__nv_bfloat16, Stored::code8>(kv.head_dim, f);
  return kv.layouts[0].dtype == DType::f16 ? for_dim<__half, Stored::plain>(kv.head_dim, f)
                                           : for_dim<__nv_bfloat16, Stored::plain>(kv.head_dim, f);
}

// Dynamic shared memory for the fragments and sums of so many queries.
inline std::int64_t tile_bytes(int head_dim, std::int64_t queries) {
  return (2 * queries + 7) / 8 * (std::int64_t{head_dim} / 32 * 512 + threads * 8);
}
// Whether the kernels of tensor cores serve the cache.
inline bool fits_tiles(const PagedKv& kv) {
  const PageLayout& l = kv.layouts[0];
  const int dim = kv.head_dim;
  return !kv.lower_pages && (l.codec.k.bits > 0 || l.dtype == DType::bf16 || l.dtype == DType::f16) &&
         (dim == 64 || dim == 96 || dim == 128 || dim == 256) && kv.rope != RopeRegime::cache_relative;
}

inline Args arguments(const PagedKv& kv, const View<const float, 4>& queries, const Scores& votes, const Heads& heads) {
  Args a = {};
  a.heads = heads;
  a.kv = DeviceKv(kv);
  a.queries = queries, a.votes = votes;
  a.group = static_cast<int>(queries.extent[1]) / kv.kv_heads, a.window = static_cast<int>(queries.extent[2]);
  a.scale = log2e / std::sqrt(static_cast<float>(kv.head_dim));
  a.room = kv.table.extent[2] * kv.page_size;
  return a;
}

}  // namespace kvlab::ops::votes
