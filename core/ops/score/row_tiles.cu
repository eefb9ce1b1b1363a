// Products of cached rows with many vectors. A warp multiplies tiles of 16 tokens, so it reads a row once for all
// vectors of a pass. A vector takes two columns: its rounded value and the rest.
#include "ops/score/row_tiles.hpp"

#include <algorithm>

#include "base/cuda.cuh"
#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "base/ptx.cuh"
#include "ops/page/paged.cuh"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int warps = score_threads / 32, tile_tokens = 16, column_vectors = 4;

struct Tiles {
  DeviceKv kv;
  std::int64_t side;  // where the side's rows begin in a frame
  View<const float, 3> vectors;
  View<float, 3> out;
  int group, passes;  // vectors of a KV head, and parts of them
  PageList pages;     // of listed rows
  int bits;           // see ops::listed_row_dot
};

// A token's elements lie in four lanes. They become their codes, which bf16 holds exactly. An element is least + scale
// * code.
template <int Chunks>
__device__ __forceinline__ void to_codes(uint4 (&x)[Chunks], int bits, float& least, float& scale) {
  float greatest = -INFINITY;
  least = INFINITY;
  const auto each = [&](auto f) {
#pragma unroll
    for (int c = 0; c < Chunks; ++c)
#pragma unroll
      for (unsigned* pair : {&x[c].x, &x[c].y, &x[c].z, &x[c].w}) {
        float a, b;
        Pair<__nv_bfloat16>::unpack(*pair, a, b);
        f(*pair, a, b);
      }
  };
  each([&](unsigned, float a, float b) { least = fminf(least, fminf(a, b)), greatest = fmaxf(greatest, fmaxf(a, b)); });
  least = least_of_lanes<1, 2>(least), greatest = most_of_lanes<1, 2>(greatest);
  scale = range_step(least, greatest, bits);
  const auto code = [&](float a) { return a != a ? a : static_cast<float>(range_code(a, least, scale, bits)); };
  each([&](unsigned& pair, float a, float b) { pair = Pair<__nv_bfloat16>::pack(code(a), code(b)); });
}

// Vectors of a pass: their fragments take at most 32 KiB.
template <int Chunks>
constexpr int pass_vectors = Chunks > 4 ? 32 : 64;

// Lays out `count` vectors from `first` on as the columns of tensor core products, [column tile, chunk, lane].
template <int Chunks>
__device__ __forceinline__ void lay_out(const Tiles& a, int row, int first, int count, int columns, uint4* fragments) {
  for (int i = static_cast<int>(threadIdx.x); i < columns * Chunks * 32; i += score_threads) {
    const int of = i % 32, chunk = i / 32 % Chunks, vector = i / 32 / Chunks * column_vectors + of / 8;
    unsigned out[4] = {};
    if (vector < count) {
      const float* v = &a.vectors(row, first + vector, chunk * 32 + of % 4 * 8);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[k] = Pair<__nv_bfloat16>::pack(v[2 * k], v[2 * k + 1]);
        if (of / 4 % 2) {
          float x, y;
          Pair<__nv_bfloat16>::unpack(out[k], x, y);
          out[k] = Pair<__nv_bfloat16>::pack(v[2 * k] - x, v[2 * k + 1] - y);
        }
      }
    }
    fragments[i] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

template <int Chunks, bool Listed>
__global__ void __launch_bounds__(score_threads) row_tiles_kernel(const __grid_constant__ Tiles a) {
  extern __shared__ uint4 fragments[];
  __shared__ float sums[pass_vectors<Chunks>];  // of a vector's elements
  const int kv_head = static_cast<int>(blockIdx.y) / a.passes, pass = static_cast<int>(blockIdx.y) % a.passes,
            row = static_cast<int>(blockIdx.z);
  const int offset = pass * pass_vectors<Chunks>, first = kv_head * a.group + offset,
            count = min(pass_vectors<Chunks>, a.group - offset),
            columns = (count + column_vectors - 1) / column_vectors;
  lay_out<Chunks>(a, row, first, count, columns, fragments);
  if constexpr (Listed)
    for (int v = static_cast<int>(threadIdx.x); v < count; v += score_threads) {
      sums[v] = 0;
      for (int d = 0; d < Chunks * 32; ++d) sums[v] += a.vectors(row, first + v, d);
    }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, quarter = lane % 4;
  const int n = entries_of(a.kv, row, kv_head, 1, a.out.extent[2]);
  const unsigned fragment = shared_address(fragments + lane);
  const int page_tiles = a.kv.page_size / tile_tokens;
  const std::int64_t list = Listed ? a.pages.at(row) : 0;
  const int tiles =
      Listed ? static_cast<int>(min(static_cast<std::int64_t>(a.pages.count(list, kv_head)), a.pages.index.extent[2])) *
                   page_tiles
             : (n + tile_tokens - 1) / tile_tokens;
  for (int tile = static_cast<int>(blockIdx.x) * warps + warp; tile < tiles;
       tile += static_cast<int>(gridDim.x) * warps) {
    int t[2];
    uint4 x[2][Chunks];
    float least[2], scale[2];
    int begin = tile * tile_tokens;
    if constexpr (Listed)
      begin = a.pages.index(list, kv_head, tile / page_tiles) * a.kv.page_size + tile % page_tiles * tile_tokens;
    if (begin >= n) continue;  // the same for all lanes
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      t[half] = begin + lane / 4 + 8 * half;
      const auto token = a.kv.token(row, kv_head, min(t[half], n - 1));
      const auto* from = reinterpret_cast<const uint4*>(token.frame + a.side + token.offset * (Chunks * 64)) + quarter;
#pragma unroll
      for (int c = 0; c < Chunks; ++c) x[half][c] = __ldg(from + 4 * c);
      if constexpr (Listed)
        if (a.bits > 0) to_codes<Chunks>(x[half], a.bits, least[half], scale[half]);
    }
    for (int column = 0; column < columns; ++column) {
      float sum[4] = {};
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        const uint4 b = load_shared16(fragment + (column * Chunks + c) * 512);
        mma16816<__nv_bfloat16>(sum, x[0][c].x, x[1][c].x, x[0][c].y, x[1][c].y, b.x, b.y);
        mma16816<__nv_bfloat16>(sum, x[0][c].z, x[1][c].z, x[0][c].w, x[1][c].w, b.z, b.w);
      }
      const int vector = column * column_vectors + quarter;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (vector < count && t[half] < n) {
          float dot = sum[2 * half] + sum[2 * half + 1];
          if constexpr (Listed)
            if (a.bits > 0) dot = least[half] * sums[vector] + scale[half] * dot;
          a.out(row, first + vector, t[half]) = dot;
        }
    }
  }
}

// Entries of tokens that are not listed.
__global__ void __launch_bounds__(score_threads)
    fill_entries_kernel(const __grid_constant__ DeviceKv kv, int group, View<float, 3> out) {
  const int q = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z),
            n = entries_of(kv, row, q / group, 1, out.extent[2]);
  for (int t = static_cast<int>(blockIdx.x * score_threads + threadIdx.x); t < n;
       t += static_cast<int>(gridDim.x) * score_threads)
    out(row, q, t) = -INFINITY;
}

template <int Chunks, bool Listed>
void launch_tiles(Tiles& a, Stream s) {
  const PagedKv& kv = a.kv.kv;
  a.passes = (a.group + pass_vectors<Chunks> - 1) / pass_vectors<Chunks>;
  const int most = std::min(a.group, pass_vectors<Chunks>), columns = (most + column_vectors - 1) / column_vectors;
  const dim3 grid = grid_of(std::int64_t{kv.kv_heads} * a.passes, kv.rows, capacity(kv), warps * tile_tokens);
  const auto kernel = row_tiles_kernel<Chunks, Listed>;
  kernel<<<grid, score_threads, columns * Chunks * 512, stream_of(s)>>>(a);
  check_launch("row_dot");
}

template <bool Listed>
void launch_dim(Tiles& a, Stream s) {
  switch (a.kv.kv.head_dim) {
    case 64: return launch_tiles<2, Listed>(a, s);
    case 96: return launch_tiles<3, Listed>(a, s);
    case 128: return launch_tiles<4, Listed>(a, s);
    default: return launch_tiles<8, Listed>(a, s);
  }
}

}  // namespace

bool row_product_tiles(const KvRows& rows, View<const float, 3> vectors, const RowProduct& how, Scores out, Stream s) {
  const PagedKv& kv = *rows.kv;
  const PageLayout& layout = kv.layouts[0];
  const bool keys = rows.side == KvSide::key;
  const int dim = kv.head_dim;
  if (kv.lower_pages || (keys ? layout.codec.k : layout.codec.v).bits > 0 || layout.dtype != DType::bf16 ||
      (dim != 64 && dim != 96 && dim != 128 && dim != 256) || (keys && kv.rope == RopeRegime::cache_relative) ||
      how.cosine || (!how.pages && how.bits > 0) || (how.pages && kv.page_size % tile_tokens != 0))
    return false;
  Tiles a{DeviceKv(kv),
          keys ? layout.k : layout.v,
          vectors,
          out,
          static_cast<int>(vectors.extent[1]) / kv.kv_heads,
          1,
          how.pages ? *how.pages : PageList{},
          how.bits};
  if (!how.pages) {
    launch_dim<false>(a, s);
    return true;
  }
  fill_entries_kernel<<<grid_of(vectors.extent[1], kv.rows, capacity(kv)), score_threads, 0, stream_of(s)>>>(
      a.kv, a.group, out);
  check_launch("row_dot");
  launch_dim<true>(a, s);
  return true;
}

}  // namespace kvlab::ops
