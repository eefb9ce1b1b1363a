#include "base/lanes.cuh"
#include "ops/score/rows.hpp"

#include <kvlab/ops.hpp>
#include <kvlab/rewrite.hpp>

#include "base/device_op.hpp"
#include "ops/page/ranks.cuh"
#include "ops/score/heads.cuh"
#include "ops/score/row_tiles.hpp"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int warps = score_threads / 32, most_dim = 256, most_parts = most_dim / 32;
constexpr int part_tokens = 256;      // normalised_mean: tokens that one block sums
constexpr int quadratic_tokens = 32;  // row_quadratic: tokens of a tile, one lane each

// Cached rows of one side as attention reads them.
struct Rows {
  DeviceKv kv;
  bool keys;
  const std::int32_t* rank;  // [row, kv_head, room]; null = rows are read as stored
  std::int64_t room;

  __device__ float at(int row, int head, int t, int d) const {
    const auto token = kv.token(row, head, t);
    if (!rank) return token.element(keys, d);
    return kv.rotated_key(token, d, rank[(std::int64_t(row) * kv.kv_heads + head) * room + t]);
  }
};

Rows rows_of(const KvRows& from, Stream s) {
  Rows rows{DeviceKv(*from.kv), from.side == KvSide::key, nullptr, capacity(*from.kv)};
  if (rows.keys && from.kv->rope == RopeRegime::cache_relative) rows.rank = token_ranks(rows.kv, s.handle());
  return rows;
}

// One warp reads a token.
__global__ void __launch_bounds__(score_threads)
    read_rows_kernel(const __grid_constant__ Rows rows, const __grid_constant__ TokenRange range, View<float, 4> out) {
  const int head = blockIdx.y, row = blockIdx.z, all = rows.kv.tokens(row, head), begin = range.begin(row, head, all);
  const int n = static_cast<int>(min(static_cast<std::int64_t>(range.end(row, head, all) - begin), out.extent[2]));
  for (int t = blockIdx.x * warps + threadIdx.x / 32; t < n; t += gridDim.x * warps)
    for (int d = threadIdx.x % 32; d < rows.kv.head_dim; d += 32)
      out(row, head, t, d) = rows.at(row, head, begin + t, d);
}

// The pages whose rows count, and how their rows are rounded.
struct Listed {
  PageList list;
  bool all;
  int bits;

  __device__ bool has(int row, int head, int page) const {
    if (all) return true;
    const std::int64_t at = list.at(row);
    const int n = static_cast<int>(min(static_cast<std::int64_t>(list.count(at, head)), list.index.extent[2]));
    int low = 0;
    for (int high = n; low < high;) {
      const int middle = (low + high) / 2;
      if (list.index(at, head, middle) < page)
        low = middle + 1;
      else
        high = middle;
    }
    return low < n && list.index(at, head, low) == page;
  }
};

// One warp computes the products of a token with all vectors of its group.
__global__ void __launch_bounds__(score_threads)
    row_product_kernel(const __grid_constant__ Rows rows, View<const float, 3> vectors, int group, bool cosine,
                       const __grid_constant__ Listed listed, View<float, 3> out) {
  const int head = blockIdx.y, row = blockIdx.z, n = entries_of(rows.kv, row, head, 1, out.extent[2]);
  const int lane = threadIdx.x % 32, dim = rows.kv.head_dim;
  for (int t = blockIdx.x * warps + threadIdx.x / 32; t < n; t += gridDim.x * warps) {
    if (!listed.has(row, head, t / rows.kv.page_size)) {
      for (int q = head * group + lane; q < (head + 1) * group; q += 32) out(row, q, t) = -INFINITY;
      continue;
    }
    float x[most_parts], own = 0;
#pragma unroll
    for (int i = 0; i < most_parts; ++i) {
      const int d = lane + 32 * i;
      x[i] = d < dim ? rows.at(row, head, t, d) : 0.f;
      own += x[i] * x[i];
    }
    if (listed.bits > 0) {
      float least = INFINITY, greatest = -INFINITY;
#pragma unroll
      for (int i = 0; i < most_parts; ++i)
        if (lane + 32 * i < dim) least = fminf(least, x[i]), greatest = fmaxf(greatest, x[i]);
      least = least_of_lanes(least), greatest = most_of_lanes(greatest);
#pragma unroll
      for (int i = 0; i < most_parts; ++i) x[i] = rounded_to_code(x[i], least, greatest, listed.bits);
    }
    if (cosine) own = sum_of_lanes(own);
    for (int q = head * group; q < (head + 1) * group; ++q) {
      float dot = 0, other = 0;
#pragma unroll
      for (int i = 0; i < most_parts; ++i)
        if (const int d = lane + 32 * i; d < dim) {
          const float y = vectors(row, q, d);
          dot += x[i] * y;
          other += y * y;
        }
      dot = sum_of_lanes(dot);
      if (cosine) {
        const float by = sqrtf(own) * sqrtf(sum_of_lanes(other));
        dot = by > 0 ? dot / by : 0.f;
      }
      if (lane == 0) out(row, q, t) = dot;
    }
  }
}

struct Quadratic {
  Rows rows;
  View<const float, 4> matrix;
  View<float, 3> out;
  int group;
  bool aligned;  // four elements of the matrix can be one 16-byte load
};

__device__ __forceinline__ float4 load4(const float* from, bool aligned) {
  return aligned ? *reinterpret_cast<const float4*>(from) : make_float4(from[0], from[1], from[2], from[3]);
}

// Each lane has a token of the tile, and each warp takes four rows of the matrix at a time.
__global__ void __launch_bounds__(score_threads) row_quadratic_kernel(const __grid_constant__ Quadratic a) {
  __shared__ float tile[quadratic_tokens * (most_dim + 1)], parts[warps][quadratic_tokens];
  const int query_head = blockIdx.y, row = blockIdx.z, head = query_head / a.group;
  const int n = entries_of(a.rows.kv, row, head, 1, a.out.extent[2]), dim = a.rows.kv.head_dim;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int base = blockIdx.x * quadratic_tokens; base < n; base += gridDim.x * quadratic_tokens) {
    for (int t = warp; t < quadratic_tokens; t += warps)
      for (int d = lane; d < dim; d += 32)
        tile[t * (dim + 1) + d] = base + t < n ? a.rows.at(row, head, base + t, d) : 0.f;
    __syncthreads();
    const float* x = tile + lane * (dim + 1);
    float sum = 0;
    for (int i = 4 * warp; i < dim; i += 4 * warps) {
      const float* m = &a.matrix(row, query_head, i, 0);
      const std::int64_t step = a.matrix.stride[2];
      float y[4] = {};
      for (int d = 0; d < dim; d += 4)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float4 v = load4(m + k * step + d, a.aligned);
          y[k] += v.x * x[d] + v.y * x[d + 1] + v.z * x[d + 2] + v.w * x[d + 3];
        }
#pragma unroll
      for (int k = 0; k < 4; ++k) sum += y[k] * x[i + k];
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && base + lane < n) {
      for (int w = 1; w < warps; ++w) sum += parts[w][lane];
      a.out(row, query_head, base + lane) = sum;
    }
    __syncthreads();
  }
}

// parts[row, kv_head, part, d] = sum of the rows of part_tokens tokens, each scaled to length 1.
__global__ void __launch_bounds__(score_threads)
    normalised_parts_kernel(const __grid_constant__ Rows rows, float* parts, int most) {
  __shared__ float sums[warps][most_dim];
  const int head = blockIdx.y, row = blockIdx.z, n = rows.kv.tokens(row, head), dim = rows.kv.head_dim;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int part = blockIdx.x; part * part_tokens < n && part < most; part += gridDim.x) {
    float sum[most_parts] = {};
    for (int t = part * part_tokens + warp; t < min(n, (part + 1) * part_tokens); t += warps) {
      float x[most_parts], own = 0;
#pragma unroll
      for (int i = 0; i < most_parts; ++i) {
        const int d = lane + 32 * i;
        x[i] = d < dim ? rows.at(row, head, t, d) : 0.f;
        own += x[i] * x[i];
      }
      own = sqrtf(sum_of_lanes(own));
      if (own > 0)
#pragma unroll
        for (int i = 0; i < most_parts; ++i) sum[i] += x[i] / own;
    }
#pragma unroll
    for (int i = 0; i < most_parts; ++i) sums[warp][lane + 32 * i] = sum[i];
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += score_threads) {
      float all = 0;
      for (int w = 0; w < warps; ++w) all += sums[w][d];
      parts[((std::int64_t(row) * gridDim.y + head) * most + part) * dim + d] = all;
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(score_threads)
    normalised_mean_kernel(const __grid_constant__ DeviceKv kv, const float* parts, int most, View<float, 3> out) {
  const int head = blockIdx.x, row = blockIdx.y, n = kv.tokens(row, head), d = threadIdx.x;
  if (d >= kv.head_dim) return;
  const float* own = parts + (std::int64_t(row) * gridDim.x + head) * most * kv.head_dim + d;
  float sum = 0;
  for (int part = 0; part * part_tokens < n && part < most; ++part) sum += own[std::int64_t(part) * kv.head_dim];
  out(row, head, d) = sum / static_cast<float>(max(1, n));
}

void read_range_cuda(const KvRows& from, const TokenRange& range, View<float, 4> out, Stream s) {
  const PagedKv& kv = *from.kv;
  if (kv.rows == 0) return;
  const dim3 grid = grid_of(kv.kv_heads, kv.rows, std::min(capacity(kv), out.extent[2]), warps);
  read_rows_kernel<<<grid, score_threads, 0, stream_of(s)>>>(rows_of(from, s), range, out);
  check_launch("read_rows");
}

void read_rows_cuda(const KvRows& from, View<float, 4> out, Stream s) { read_range_cuda(from, {}, out, s); }

void row_product_cuda(const KvRows& from, View<const float, 3> vectors, const RowProduct& how, Scores out, Stream s) {
  const PagedKv& kv = *from.kv;
  if (kv.rows == 0 || row_product_tiles(from, vectors, how, out, s)) return;
  row_product_kernel<<<grid_of(kv.kv_heads, kv.rows, capacity(kv), warps), score_threads, 0, stream_of(s)>>>(
      rows_of(from, s), vectors, static_cast<int>(vectors.extent[1]) / kv.kv_heads, how.cosine,
      Listed{how.pages ? *how.pages : PageList{}, !how.pages, how.bits}, out);
  check_launch("row_dot");
}

void row_quadratic_cuda(const KvRows& from, View<const float, 4> matrix, Scores out, Stream s) {
  const PagedKv& kv = *from.kv;
  if (kv.rows == 0) return;
  const std::int64_t heads = matrix.extent[1];
  const bool aligned = reinterpret_cast<std::uintptr_t>(matrix.data) % 16 == 0 && matrix.stride[0] % 4 == 0 &&
                       matrix.stride[1] % 4 == 0 && matrix.stride[2] % 4 == 0;
  const Quadratic a{rows_of(from, s), matrix, out, static_cast<int>(heads) / kv.kv_heads, aligned};
  row_quadratic_kernel<<<grid_of(heads, kv.rows, capacity(kv), quadratic_tokens), score_threads, 0, stream_of(s)>>>(a);
  check_launch("row_quadratic");
}

void normalised_mean_cuda(const KvRows& from, View<float, 3> out, Stream s) {
  const PagedKv& kv = *from.kv;
  if (kv.rows == 0) return;
  const auto most = static_cast<int>((capacity(kv) + part_tokens - 1) / part_tokens);
  auto* parts = static_cast<float*>(fixed_scratch(
      s.handle(), "normalised mean", std::size_t(kv.rows) * kv.kv_heads * most * kv.head_dim * sizeof(float)));
  normalised_parts_kernel<<<grid_of(kv.kv_heads, kv.rows, most, 1), score_threads, 0, stream_of(s)>>>(rows_of(from, s),
                                                                                                      parts, most);
  check_launch("normalised_mean");
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  normalised_mean_kernel<<<grid, score_threads, 0, stream_of(s)>>>(DeviceKv(kv), parts, most, out);
  check_launch("normalised_mean");
}

}  // namespace

KVLAB_ON_CUDA(read_rows, read_rows_cuda);
KVLAB_ON_CUDA(read_range, read_range_cuda);
KVLAB_ON_CUDA(row_product, row_product_cuda);
KVLAB_ON_CUDA(row_quadratic, row_quadratic_cuda);
KVLAB_ON_CUDA(normalised_mean, normalised_mean_cuda);

}  // namespace kvlab::ops
