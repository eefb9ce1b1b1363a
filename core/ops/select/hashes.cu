// Hashes of keys and queries on a GPU. Keys: a block hashes a tile of them, a thread takes tables of theirs. Sums run
// in the order of the CPU's, in f64, and products of two f32 are exact there: codes have the same bits.
#include "ops/select/hashes.hpp"

#include <algorithm>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 128, warps = threads / 32, tile = 8, most_dim = 256, at_once = 8;

__global__ void __launch_bounds__(threads)
    mean_kernel(DeviceKv kv, int from, int to, const __grid_constant__ KeyHashes h) {
  const int head = blockIdx.x, row = blockIdx.y, slot = kv.kv.slots[row];
  const int end = max(from, min(to, kv.tokens(row, head)));
  for (int d = threadIdx.x; d < kv.head_dim; d += threads) {
    double sum = 0;
    for (int t = from; t < end; t += at_once) {  // several loads are under way at once
      float x[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) x[i] = t + i < end ? kv.token(row, head, t + i).key(d) : 0.f;
#pragma unroll
      for (int i = 0; i < at_once; ++i) sum += double(x[i]);
    }
    h.mean(slot, head, d) = end > from ? static_cast<float>(sum / (end - from)) : 0.f;
  }
  if (threadIdx.x == 0) h.bound(slot, head, 0) = from, h.bound(slot, head, 1) = end;
}

// put(i, table, code) for `count` vectors of shared memory.
template <class F>
__device__ void hash_tile(const float (&x)[tile][most_dim], int count, const View<const float, 4>& planes, int head,
                          const F& put) {
  const int dim = static_cast<int>(planes.extent[1]), bits = static_cast<int>(planes.extent[2]),
            tables = static_cast<int>(planes.extent[3]);
  for (int table = threadIdx.x; table < tables; table += threads) {
    int code[tile] = {};
    for (int bit = 0; bit < bits; ++bit) {
      double sum[tile] = {};
      for (int d = 0; d < dim; ++d) {
        const double plane = planes(head, d, bit, table);
#pragma unroll
        for (int i = 0; i < tile; ++i) sum[i] += double(x[i][d]) * plane;
      }
#pragma unroll
      for (int i = 0; i < tile; ++i) code[i] |= (sum[i] > 0) << bit;
    }
#pragma unroll
    for (int i = 0; i < tile; ++i)
      if (i < count) put(i, table, static_cast<std::int16_t>(code[i]));
  }
}

__global__ void __launch_bounds__(threads)
    keys_kernel(DeviceKv kv, int from, int to, const __grid_constant__ KeyHashes h) {
  __shared__ float x[tile][most_dim];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row], dim = kv.head_dim;
  const int first = from + static_cast<int>(blockIdx.x) * tile,
            count = min(tile, min(to, kv.tokens(row, head)) - first);
  if (count <= 0) return;
  for (int i = threadIdx.x; i < tile * dim; i += threads)
    x[i / dim][i % dim] =
        i / dim < count ? kv.token(row, head, first + i / dim).key(i % dim) - h.mean(slot, head, i % dim) : 0.f;
  __syncthreads();
  hash_tile(x, count, h.planes, head,
            [&](int i, int table, std::int16_t code) { h.code(slot, head, first + i, table) = code; });
}

// A block takes 32 tables of a KV head's queries: a warp a bit, a lane a table.
constexpr int most_bits = 15, query_tile = 4;
__global__ void __launch_bounds__(32 * most_bits)
    queries_kernel(View<const float, 3> queries, int group, const __grid_constant__ View<const float, 4> planes,
                   View<std::int16_t, 3> codes) {
  __shared__ float x[query_tile][most_dim];
  __shared__ unsigned code[query_tile][32];
  const int head = blockIdx.y, row = blockIdx.z, dim = static_cast<int>(planes.extent[1]);
  const int bit = threadIdx.x / 32, lane = threadIdx.x % 32, first_table = static_cast<int>(blockIdx.x) * 32;
  const int tables = min(32, static_cast<int>(planes.extent[3]) - first_table);
  for (int first = 0; first < group; first += query_tile) {
    const int count = min(query_tile, group - first);
    __syncthreads();
    for (int i = threadIdx.x; i < query_tile * dim; i += blockDim.x)
      x[i / dim][i % dim] = i / dim < count ? queries(row, head * group + first + i / dim, i % dim) : 0.f;
    for (int i = threadIdx.x; i < query_tile * 32; i += blockDim.x) code[i / 32][i % 32] = 0;
    __syncthreads();
    if (lane < tables) {
      double sum[query_tile] = {};
#pragma unroll 16
      for (int d = 0; d < dim; ++d) {
        const double plane = planes(head, d, bit, first_table + lane);
#pragma unroll
        for (int i = 0; i < query_tile; ++i) sum[i] += double(x[i][d]) * plane;
      }
#pragma unroll
      for (int i = 0; i < query_tile; ++i)
        if (sum[i] > 0) atomicOr(&code[i][lane], 1u << bit);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * 32; i += blockDim.x)
      if (i % 32 < tables)
        codes(row, head * group + first + i / 32, first_table + i % 32) =
            static_cast<std::int16_t>(code[i / 32][i % 32]);
  }
}

struct Weighing {
  DeviceKv kv;
  View<const float, 3> queries;
  View<const std::int16_t, 3> codes;  // [row, query head, table]
  KeyHashes hashes;
  Collisions rule;
  Scores out;
};

// Sampled tokens of a warp that wait for their weights. The angle's functions take longest, so that 32 lanes compute
// those of 32 tokens at once.
struct Sampled {
  int token[64], query[64];
  DeviceKv::Token at[32];

  __device__ void weigh(const Weighing& a, int row, int head, int count, int lane) {
    constexpr int together = 4, sharers = 32 / together;  // lanes that share a key
    const int set = lane / sharers;
    __syncwarp();
    at[lane] = a.kv.token(row, head, token[min(lane, max(count - 1, 0))]);
    __syncwarp();
    const float* mean = &a.hashes.mean(a.kv.kv.slots[row], head, 0);
    double cosine = 0;
    for (int i = 0; i < count; i += together) {
      const int of = min(i + set, count - 1);
      const DeviceKv::Token key = at[of];
      const float* asked = &a.queries(row, query[of], 0);
      double dot = 0, of_query = 0, of_key = 0;
#pragma unroll 4
      for (int d = lane % sharers; d < a.kv.head_dim; d += sharers) {
        const double x = asked[d], y = key.key(d) - mean[d];
        dot += x * y, of_query += x * x, of_key += y * y;
      }
      const double own =
          cosine_of_pair(sum_of_lanes<1, 4>(dot), sum_of_lanes<1, 4>(of_query), sum_of_lanes<1, 4>(of_key));
#pragma unroll
      for (int j = 0; j < together; ++j) {
        const double x = __shfl_sync(~0u, own, j * sharers);
        if (i + j == lane) cosine = x;
      }
    }
    if (lane < count) {
      const double chance = collision_probability(cosine, static_cast<int>(a.hashes.planes.extent[2]),
                                                  static_cast<int>(a.hashes.planes.extent[3]), a.rule.least);
      a.out(row, query[lane], token[lane]) = static_cast<float>(1 / (chance + double(a.rule.floor)));
    }
    __syncwarp();
  }
};

// Eight codes. Those of places behind the last table are 0 for keys and this number for queries.
constexpr unsigned no_code = 0x7fff;
__device__ __forceinline__ unsigned two_codes(const std::int16_t* codes, int i, int tables, unsigned none) {
  const auto* from = reinterpret_cast<const std::uint16_t*>(codes) + i;
  return (i < tables ? from[0] : none) | (i + 1 < tables ? unsigned{from[1]} : none) << 16;
}
__device__ __forceinline__ uint4 eight_codes(const std::int16_t* codes, int i, int tables, unsigned none) {
  return make_uint4(two_codes(codes, i, tables, none), two_codes(codes, i + 2, tables, none),
                    two_codes(codes, i + 4, tables, none), two_codes(codes, i + 6, tables, none));
}

// Eight lanes compare the codes of two tokens with those of up to four queries, so a warp takes eight tokens. Whole:
// rows of codes begin at multiples of 16 bytes.
constexpr int members = 4, warp_tokens = 8;
template <bool Whole>
__global__ void __launch_bounds__(threads) weights_kernel(const __grid_constant__ Weighing a) {
  extern __shared__ uint4 wanted[];  // [query of the pass, eight codes]
  __shared__ Sampled sampled[warps];
  const int head = blockIdx.y, row = blockIdx.z, slot = a.kv.kv.slots[row], lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32, set = lane / 8, part = lane % 8;
  const int group = static_cast<int>(a.queries.extent[1]) / a.kv.kv_heads;
  const int tables = static_cast<int>(a.hashes.code.extent[3]), chunks = (tables + 7) / 8;
  const int tokens = static_cast<int>(min(std::int64_t{a.kv.tokens(row, head)}, a.out.extent[2]));
  const int begin = a.hashes.bound(slot, head, 0), end = a.hashes.bound(slot, head, 1);
  for (int pass = 0; pass < group; pass += members) {
    const int queries = min(members, group - pass), first_query = head * group + pass;
    __syncthreads();
    for (int i = threadIdx.x; i < members * chunks; i += threads)
      wanted[i] =
          eight_codes(&a.codes(row, first_query + min(i / chunks, queries - 1), 0), i % chunks * 8, tables, no_code);
    __syncthreads();
    int waiting = 0;
    for (int t = (blockIdx.x * warps + warp) * warp_tokens; t < tokens; t += gridDim.x * warps * warp_tokens) {
      const std::int16_t* codes[2];
      unsigned other[2][members] = {};  // places where the codes differ, in two halves
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = t + 4 * i + set;
        codes[i] = &a.hashes.code(slot, head, own >= begin && own < end ? own : begin, 0);
      }
      if (begin < end && t < end && t + warp_tokens > begin)
#pragma unroll 3
        for (int c = part; c < chunks; c += 8) {
          uint4 own[2];
#pragma unroll
          for (int i = 0; i < 2; ++i)
            own[i] = Whole && (c + 1) * 8 <= tables ? reinterpret_cast<const uint4*>(codes[i])[c]
                                                    : eight_codes(codes[i], c * 8, tables, 0);
#pragma unroll
          for (int q = 0; q < members; ++q) {
            const uint4 x = wanted[q * chunks + c];
            const auto differs = [](unsigned a, unsigned b) { return ((a ^ b) + 0x7fff7fffu) >> 15 & 0x00010001u; };
#pragma unroll
            for (int i = 0; i < 2; ++i)
              other[i][q] +=
                  differs(own[i].x, x.x) + differs(own[i].y, x.y) + differs(own[i].z, x.z) + differs(own[i].w, x.w);
          }
        }
      // The lane's own token and query, and at how many places they differ.
      const int own = t + 4 * (part / members) + set, query = part % members;
      int differ = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int q = 0; q < members; q += 2) {
          const unsigned low = (other[i][q] & 0xffffu) + (other[i][q] >> 16),
                         high = (other[i][q + 1] & 0xffffu) + (other[i][q + 1] >> 16);
          const unsigned both = sum_of_lanes<1, 4>(low | high << 16);
          if (i == part / members && q == query / 2 * 2)
            differ = static_cast<int>(query % 2 ? both >> 16 : both & 0xffffu);
        }
      const bool there = own < tokens && query < queries, hashed = own >= begin && own < end;
      const bool collides = there && hashed && 8 * chunks - differ >= a.rule.least;
      if (there && !collides) a.out(row, first_query + query, own) = hashed ? 0.f : 1.f;
      const unsigned all = __ballot_sync(~0u, collides);
      if (collides) {
        const int at = waiting + __popc(all & ((1u << lane) - 1));
        sampled[warp].token[at] = own, sampled[warp].query[at] = first_query + query;
      }
      waiting += __popc(all);
      if (waiting < 32) continue;
      sampled[warp].weigh(a, row, head, 32, lane);
      waiting -= 32;
      const int token = sampled[warp].token[32 + lane], of = sampled[warp].query[32 + lane];
      __syncwarp();
      if (lane < waiting) sampled[warp].token[lane] = token, sampled[warp].query[lane] = of;
    }
    if (waiting > 0) sampled[warp].weigh(a, row, head, waiting, lane);
  }
}

dim3 grid_of(std::int64_t blocks, const PagedKv& kv) {
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
}

void hash_keys_cuda(const PagedKv& kv, int from, int to, const KeyHashes& hashes, Stream s) {
  if (kv.rows == 0) return;
  const dim3 heads(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  mean_kernel<<<heads, threads, 0, stream_of(s)>>>(DeviceKv(kv), from, to, hashes);
  if (to > from)
    keys_kernel<<<grid_of((to - from + tile - 1) / tile, kv), threads, 0, stream_of(s)>>>(DeviceKv(kv), from, to,
                                                                                          hashes);
  check_launch("hash_keys");
}

void collision_weights_cuda(const PagedKv& kv, View<const float, 3> queries, const Collisions& rule,
                            const KeyHashes& hashes, Scores out, Workspace& w, Stream s) {
  if (kv.rows == 0) return;
  const int group = static_cast<int>(queries.extent[1]) / kv.kv_heads;
  const auto codes =
      take_scratch<std::int16_t>(w, "codes of queries", {kv.rows, queries.extent[1], hashes.code.extent[3]});
  const int tables = static_cast<int>(hashes.code.extent[3]), bits = static_cast<int>(hashes.planes.extent[2]);
  queries_kernel<<<grid_of((tables + 31) / 32, kv), 32 * bits, 0, stream_of(s)>>>(queries, group, hashes.planes, codes);
  // Some blocks a multiprocessor: each first fetches the codes of its queries.
  const std::int64_t most = (out.extent[2] + warps * warp_tokens - 1) / (warps * warp_tokens),
                     pairs = std::int64_t{kv.rows} * kv.kv_heads,
                     blocks =
                         std::clamp<std::int64_t>(32 * multiprocessors() / pairs, 1, std::max<std::int64_t>(most, 1));
  const bool whole = reinterpret_cast<std::uintptr_t>(hashes.code.data) % 16 == 0 && hashes.code.stride[0] % 8 == 0 &&
                     hashes.code.stride[1] % 8 == 0 && hashes.code.stride[2] % 8 == 0;
  const auto kernel = whole ? weights_kernel<true> : weights_kernel<false>;
  if (tables > 4096)
    throw Error(Errc::unsupported, "got " + std::to_string(tables) + " tables, wanted at most 4096",
                "op collision_weights (CUDA)");
  const std::size_t shared = members * static_cast<std::size_t>((tables + 7) / 8) * sizeof(uint4);
  kernel<<<grid_of(blocks, kv), threads, shared, stream_of(s)>>>(
      Weighing{DeviceKv(kv), queries, codes, hashes, rule, out});
  check_launch("collision_weights");
}

}  // namespace

KVLAB_ON_CUDA(hash_keys, hash_keys_cuda);
KVLAB_ON_CUDA(collision_weights, collision_weights_cuda);

}  // namespace kvlab::ops
