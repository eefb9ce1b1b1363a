#include <kvlab/ops.hpp>

#include "base/device_op.hpp"
#include "ops/score/heads.cuh"
#include "ops/score/moments.hpp"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int side = 128, tile_queries = 16, per_thread = side / 16;  // a block has `side` x `side` products
constexpr int most_parts = 8, part_queries = 512, most_dim = 256;

struct Args {
  DeviceKv kv;
  View<const float, 4> queries;
  const std::int32_t* seen;
  int first, parts;
  // [row, query head, part, dim * dim + dim]: products, then sums, of differences from the first query that counts.
  float* sums;
  View<float, 3> moments;

  __device__ int count() const { return static_cast<int>(queries.extent[2]); }
  __device__ int skipped(int row) const { return min(max(first - seen[row] + count(), 0), count()); }
  __device__ float* sums_of(int row, int head, int part) const {
    const std::int64_t dim = kv.head_dim, heads = queries.extent[1];
    return sums + ((row * heads + head) * parts + part) * (dim * dim + dim);
  }
  // Element d of a query before RoPE.
  __device__ float plain(int row, int head, int i, int d) const {
    const int half = kv.head_dim / 2, pair = d < half ? d : d - half;
    double sine, cosine;
    sincos(double(i - count() + seen[row]) * kv.kv.rope_table.inv_freq[pair], &sine, &cosine);
    const float scale = kv.kv.rope_table.attention_scale;
    const float c = static_cast<float>(cosine) / scale, s = static_cast<float>(sine) / scale;
    const float x = queries(row, head, i, pair), y = queries(row, head, i, pair + half);
    return d < half ? x * c + y * s : y * c - x * s;
  }
};

// Sums products of a part's differences. blockIdx.x numbers the part and the square of products.
__global__ void __launch_bounds__(256) sums_kernel(const __grid_constant__ Args a) {
  __shared__ float tile[tile_queries][most_dim], shift[most_dim];
  const int head = blockIdx.y, row = blockIdx.z, dim = a.kv.head_dim, squares = (dim + side - 1) / side;
  const int part = blockIdx.x / (squares * squares), square = blockIdx.x % (squares * squares);
  const int top = square / squares * side, left = square % squares * side;
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  const int skip = a.skipped(row), own = a.count() - skip, step = (own + a.parts - 1) / a.parts;
  const int begin = skip + part * step, end = min(begin + step, a.count());
  if (threadIdx.x < dim) shift[threadIdx.x] = own > 0 ? a.plain(row, head, skip, threadIdx.x) : 0.f;
  __syncthreads();
  float product[per_thread][per_thread] = {}, sum = 0;
  for (int base = begin; base < end; base += tile_queries) {
    for (int i = ty; i < tile_queries; i += 16)
      for (int d = tx; d < dim; d += 16) tile[i][d] = base + i < end ? a.plain(row, head, base + i, d) - shift[d] : 0.f;
    __syncthreads();
    if (threadIdx.x < dim)
      for (int i = 0; i < tile_queries; ++i) sum += tile[i][threadIdx.x];
    for (int i = 0; i < tile_queries; ++i) {
      float x[per_thread], y[per_thread];
#pragma unroll
      for (int k = 0; k < per_thread; ++k) {
        const int d = top + ty + 16 * k, e = left + tx + 16 * k;
        x[k] = d < dim ? tile[i][d] : 0.f, y[k] = e < dim ? tile[i][e] : 0.f;
      }
#pragma unroll
      for (int k = 0; k < per_thread; ++k)
#pragma unroll
        for (int l = 0; l < per_thread; ++l) product[k][l] += x[k] * y[l];
    }
    __syncthreads();
  }
  float* out = a.sums_of(row, head, part);
#pragma unroll
  for (int k = 0; k < per_thread; ++k)
#pragma unroll
    for (int l = 0; l < per_thread; ++l)
      if (const int d = top + ty + 16 * k, e = left + tx + 16 * l; d < dim && e < dim) out[d * dim + e] = product[k][l];
  if (square == 0 && threadIdx.x < dim) out[dim * dim + threadIdx.x] = sum;
}

// Adds the parts, then joins them with the moments as add_head in moments.cpp does.
__global__ void __launch_bounds__(256) join_kernel(const __grid_constant__ Args a) {
  __shared__ float sum[most_dim], off[most_dim];
  const int head = blockIdx.y, row = blockIdx.z, dim = a.kv.head_dim;
  float* to = &a.moments(a.kv.kv.slots[row], head, 0);
  const int skip = a.skipped(row);
  const float fresh = static_cast<float>(a.count() - skip), old = to[dim * dim + dim], both = old + fresh;
  if (fresh == 0) return;
  if (const int d = threadIdx.x; d < dim) {
    sum[d] = 0;
    for (int part = 0; part < a.parts; ++part) sum[d] += a.sums_of(row, head, part)[dim * dim + d];
    off[d] = a.plain(row, head, skip, d) + sum[d] / fresh - to[dim * dim + d];
  }
  __syncthreads();
  for (int i = blockIdx.x * 256 + threadIdx.x; i < dim * dim; i += gridDim.x * 256) {
    const int d = i / dim, e = i % dim;
    float product = 0;
    for (int part = 0; part < a.parts; ++part) product += a.sums_of(row, head, part)[i];
    to[i] += product - sum[d] * sum[e] / fresh + off[d] * off[e] * (old * fresh / both);
  }
}

// Runs after join_kernel, which reads the old mean and count.
__global__ void __launch_bounds__(256) mean_kernel(const __grid_constant__ Args a) {
  const int head = blockIdx.y, row = blockIdx.z, dim = a.kv.head_dim, d = threadIdx.x;
  float *to = &a.moments(a.kv.kv.slots[row], head, 0), *mean = to + dim * dim, *count = mean + dim;
  const int skip = a.skipped(row);
  const float fresh = static_cast<float>(a.count() - skip), both = *count + fresh;
  if (fresh == 0) return;
  if (d < dim) {
    float sum = 0;
    for (int part = 0; part < a.parts; ++part) sum += a.sums_of(row, head, part)[dim * dim + d];
    mean[d] += (a.plain(row, head, skip, d) + sum / fresh - mean[d]) * (fresh / both);
  }
  __syncthreads();
  if (d == 0) *count = both;
}

struct Expected {
  DeviceKv kv;
  View<float, 3> moments;
  const std::int32_t* seen;
  int horizon;
  View<float, 3> mean;
  View<float, 4> covariance;
};

// A thread computes the four covariances of two pairs that RoPE turns.
__global__ void __launch_bounds__(256) expected_kernel(const __grid_constant__ Expected a) {
  __shared__ float cosine[most_dim / 2], sine[most_dim / 2];
  const int head = blockIdx.y, row = blockIdx.z, dim = a.kv.head_dim, half = dim / 2;
  const float *from = &a.moments(a.kv.kv.slots[row], head, 0), *mean = from + dim * dim;
  const float divisor = 1.f / fmaxf(1.f, mean[dim]);
  for (int i = threadIdx.x; i < half; i += 256) {
    const MeanTurn turn = mean_turn(a.kv.kv.rope_table.inv_freq[i], a.seen[row], a.horizon);
    cosine[i] = static_cast<float>(turn.cosine) * a.kv.kv.rope_table.attention_scale;
    sine[i] = static_cast<float>(turn.sine) * a.kv.kv.rope_table.attention_scale;
  }
  __syncthreads();
  for (int i = threadIdx.x; blockIdx.x == 0 && i < half; i += 256) {
    a.mean(row, head, i) = mean[i] * cosine[i] - mean[i + half] * sine[i];
    a.mean(row, head, i + half) = mean[i + half] * cosine[i] + mean[i] * sine[i];
  }
  for (int at = blockIdx.x * 256 + threadIdx.x; at < half * half; at += gridDim.x * 256) {
    const int i = at / half, j = at % half;
    const float c = cosine[i], s = sine[i], cj = cosine[j], sj = sine[j];
    const float *low = from + std::int64_t(i) * dim, *high = low + std::int64_t(half) * dim;
    const float a00 = low[j] * divisor, a01 = low[j + half] * divisor, a10 = high[j] * divisor,
                a11 = high[j + half] * divisor;
    const float b00 = a00 * cj - a01 * sj, b01 = a01 * cj + a00 * sj, b10 = a10 * cj - a11 * sj,
                b11 = a11 * cj + a10 * sj;
    a.covariance(row, head, i, j) = b00 * c - b10 * s;
    a.covariance(row, head, i, j + half) = b01 * c - b11 * s;
    a.covariance(row, head, i + half, j) = b10 * c + b00 * s;
    a.covariance(row, head, i + half, j + half) = b11 * c + b01 * s;
  }
}

void add_moments_cuda(const Tensor<4>& queries, const std::int32_t* seen, const PagedKv& kv, int first, Moments moments,
                      Stream s) {
  const View<const float, 4> q = queries.f32();
  if (kv.rows == 0 || q.extent[2] == 0) return;
  Args a{DeviceKv(kv), q, seen, first, 1, nullptr, moments};
  a.parts = static_cast<int>(std::clamp<std::int64_t>((q.extent[2] + part_queries - 1) / part_queries, 1, most_parts));
  const auto heads = static_cast<unsigned>(q.extent[1]), rows = static_cast<unsigned>(kv.rows);
  const std::size_t dim = static_cast<std::size_t>(kv.head_dim);
  a.sums = static_cast<float*>(
      fixed_scratch(s.handle(), "moments", std::size_t{rows} * heads * a.parts * (dim * dim + dim) * sizeof(float)));
  const unsigned squares = static_cast<unsigned>((dim + side - 1) / side);
  sums_kernel<<<dim3(a.parts * squares * squares, heads, rows), 256, 0, stream_of(s)>>>(a);
  check_launch("add_moments");
  join_kernel<<<dim3(static_cast<unsigned>((dim * dim + 2047) / 2048), heads, rows), 256, 0, stream_of(s)>>>(a);
  check_launch("add_moments");
  mean_kernel<<<dim3(1, heads, rows), 256, 0, stream_of(s)>>>(a);
  check_launch("add_moments");
}

void expected_query_cuda(const Moments& moments, const std::int32_t* seen, const PagedKv& kv, int horizon,
                         View<float, 3> mean, View<float, 4> covariance, Stream s) {
  if (kv.rows == 0) return;
  const Expected a{DeviceKv(kv), moments, seen, horizon, mean, covariance};
  const unsigned quarter = static_cast<unsigned>(kv.head_dim * kv.head_dim / 4);
  const dim3 grid((quarter + 1023) / 1024, static_cast<unsigned>(mean.extent[1]), static_cast<unsigned>(kv.rows));
  expected_kernel<<<grid, 256, 0, stream_of(s)>>>(a);
  check_launch("expected_query");
}

}  // namespace

KVLAB_ON_CUDA(add_moments, add_moments_cuda);
KVLAB_ON_CUDA(expected_query, expected_query_cuda);

}  // namespace kvlab::ops
