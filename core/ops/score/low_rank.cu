// Rows of low rank on a GPU, in f64 as on the CPU. Eigenvectors are [vector][element]: their elements change
// independently, so threads take elements.
#include "ops/score/low_rank.hpp"

#include <algorithm>
#include <string>

#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "base/scratch.cuh"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int tile = 16, tile_threads = tile * tile, form_threads = 512, vector_threads = 32, threads = 256,
              warps = threads / 32, most_width = 4096;

// Grids end in the batch row. Matrices are [width, width] for each of them.
struct Call {
  DeviceKv kv;
  View<float, 4> rows;
  int width;
  RankSide side;
  double *gram, *vectors;     // gram keeps the reflections: that of column k is row k from k + 1 on
  double *diagonal, *beside;  // [row, width] of the tridiagonal form
  double *beta, *values;      // [row, width]
  double* energy;             // [row] the sum of squares
  std::int32_t* order;        // [row, width] the eigenvectors that the projection sums

  __device__ double* matrix(double* of, int row) const { return of + std::int64_t(row) * width * width; }
  template <class T>
  __device__ T* vector(T* of, int row) const {
    return of + std::int64_t(row) * width;
  }
  __device__ int tokens(int row) const {
    int most = 0;
    for (int h = 0; h < kv.kv_heads; ++h) most = max(most, entries_of(kv, row, h, 1, rows.extent[2]));
    return most;
  }
  // null: the head has no such token.
  __device__ float* at(int row, int t, int i) const {
    const int h = i / kv.head_dim;
    return t < kv.tokens(row, h) ? &rows(row, h, t, i % kv.head_dim) : nullptr;
  }
  __device__ double x(int row, int t, int i) const {
    const float* p = at(row, t, i);
    return p ? double(*p) : 0.;
  }
};

__global__ void __launch_bounds__(tile_threads) gram_kernel(const __grid_constant__ Call a) {
  __shared__ double left[tile][tile], right[tile][tile];
  const int row = blockIdx.z, y = threadIdx.x / tile, z = threadIdx.x % tile, n = a.tokens(row);
  const int i = blockIdx.x * tile, j = blockIdx.y * tile;
  double sum = 0;
  for (int first = 0; first < n; first += tile) {
    const bool token = first + y < n;
    left[y][z] = token && i + z < a.width ? a.x(row, first + y, i + z) : 0;
    right[y][z] = token && j + z < a.width ? a.x(row, first + y, j + z) : 0;
    __syncthreads();
    for (int t = 0; t < tile; ++t) sum += left[t][y] * right[t][z];
    __syncthreads();
  }
  if (i + y < a.width && j + z < a.width) a.matrix(a.gram, row)[std::int64_t(i + y) * a.width + j + z] = sum;
}

// The sum over the block. All threads get it.
__device__ double sum_of_block(double x, double* parts) {
  x = sum_of_lanes(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) sum += parts[w];
  return sum;
}

// A block takes a row of the batch: Householder's tridiagonal form. Dynamic shared memory: v and p, [width] each.
__global__ void __launch_bounds__(form_threads) form_kernel(const __grid_constant__ Call a) {
  extern __shared__ double of_form[];
  __shared__ double parts[form_threads / 32];
  const int row = blockIdx.x, n = a.width, me = threadIdx.x;
  double *g = a.matrix(a.gram, row), *v = of_form, *p = of_form + n;
  double energy = 0;
  for (int i = me; i < n; i += form_threads) energy += g[std::int64_t(i) * n + i];
  energy = sum_of_block(energy, parts);
  if (energy > 0 && energy < INFINITY)
    for (std::int64_t i = me; i < std::int64_t(n) * n; i += form_threads) g[i] /= energy;
  if (me == 0) a.energy[row] = energy;
  __syncthreads();
  if (!(energy > 0 && energy < INFINITY)) return;
  for (int k = 0; k < n; ++k) {
    double* column = g + std::int64_t(k) * n;
    double tail = 0;
    for (int j = k + 2 + me; j < n; j += form_threads) tail += column[j] * column[j];
    tail = sum_of_block(tail, parts);
    const Reflection r = k + 1 < n ? Reflection::of(column[k + 1], tail) : Reflection{0, 0, 0};
    __syncthreads();
    if (me == 0) {
      a.vector(a.diagonal, row)[k] = column[k];
      a.vector(a.beside, row)[k] = r.first;
      a.vector(a.beta, row)[k] = r.beta;
      if (r.beta != 0) column[k + 1] = r.v0;
    }
    __syncthreads();
    if (r.beta == 0) continue;
    for (int j = k + 1 + me; j < n; j += form_threads) v[j] = column[j];
    __syncthreads();
    double product = 0;
    for (int i = k + 1 + me; i < n; i += form_threads) {
      double sum = 0;
      for (int j = k + 1; j < n; ++j) sum += g[std::int64_t(j) * n + i] * v[j];
      p[i] = sum * r.beta;
      product += p[i] * v[i];
    }
    product = sum_of_block(product, parts);
    for (int i = k + 1 + me; i < n; i += form_threads) p[i] -= r.beta / 2 * product * v[i];
    __syncthreads();
    for (int i = k + 1 + me; i < n; i += form_threads)
      for (int j = k + 1; j < n; ++j) g[std::int64_t(j) * n + i] -= v[j] * p[i] + p[j] * v[i];
    __syncthreads();
  }
}

// A thread takes an element of all vectors. Each block computes the QL steps for itself, which needs no vectors.
// Dynamic shared memory: four vectors of [width].
__global__ void __launch_bounds__(vector_threads) vectors_kernel(const __grid_constant__ Call a) {
  extern __shared__ double of_steps[];
  __shared__ int first, last;  // of a step's rotations; last < 0: there is none
  const int row = blockIdx.y, n = a.width, me = threadIdx.x, i = blockIdx.x * vector_threads + me;
  const double energy = a.energy[row];
  if (!(energy > 0 && energy < INFINITY)) return;
  const double *g = a.matrix(a.gram, row), *beta = a.vector(a.beta, row);
  double* z = a.matrix(a.vectors, row) + i;
  if (i < n) {
    for (int k = 0; k < n; ++k) z[std::int64_t(k) * n] = k == i;
    for (int k = 0; k < n; ++k) {
      if (beta[k] == 0) continue;
      const double* v = g + std::int64_t(k) * n;
      double sum = 0;
      for (int j = k + 1; j < n; ++j) sum += v[j] * z[std::int64_t(j) * n];
      sum *= beta[k];
      for (int j = k + 1; j < n; ++j) z[std::int64_t(j) * n] -= v[j] * sum;
    }
  }
  double *diagonal = of_steps, *beside = of_steps + n;
  for (int k = me; k < n; k += vector_threads)
    diagonal[k] = a.vector(a.diagonal, row)[k], beside[k] = a.vector(a.beside, row)[k];
  double *cosine = beside + n, *sine = cosine + n;
  QlSteps steps{diagonal, beside, cosine, sine, n};
  while (true) {
    __syncthreads();
    if (me == 0) last = steps.next() ? steps.last : -1, first = steps.first;
    __syncthreads();
    if (last < 0) break;
    if (i >= n || last < first) continue;
    double y = z[std::int64_t(last + 1) * n];
    for (int k = last; k >= first; --k) {
      const double c = cosine[k], s = sine[k], x = z[std::int64_t(k) * n];
      z[std::int64_t(k + 1) * n] = s * x + c * y;
      y = c * x - s * y;
    }
    z[std::int64_t(first) * n] = y;
  }
  if (blockIdx.x == 0)
    for (int k = me; k < n; k += vector_threads) a.vector(a.values, row)[k] = diagonal[k];
}

// Which eigenvectors the projection sums.
__global__ void __launch_bounds__(threads) order_kernel(const __grid_constant__ Call a) {
  const int row = blockIdx.x;
  const double* value = a.vector(a.values, row);
  for (int i = threadIdx.x; i < a.width; i += threads) {
    int before = 0;
    for (int j = 0; j < a.width; ++j) before += is_greater(value[j], j, value[i], i);
    if (before >= a.side.first && before < a.side.first + a.side.count)
      a.vector(a.order, row)[before - a.side.first] = i;
  }
}

// Blocks stride over tokens. Dynamic shared memory: a row of X and its products with the vectors.
__global__ void __launch_bounds__(threads) project_kernel(const __grid_constant__ Call a) {
  extern __shared__ double of_token[];
  const int row = blockIdx.y, n = a.tokens(row), w = a.width, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const double energy = a.energy[row];
  if (energy == 0) return;
  const bool finite = energy > 0 && energy < INFINITY;
  double *x = of_token, *along = of_token + w;
  const double* z = a.matrix(a.vectors, row);
  const std::int32_t* order = a.vector(a.order, row);
  for (int t = blockIdx.x; t < n; t += gridDim.x) {
    for (int i = threadIdx.x; i < w; i += threads) x[i] = a.x(row, t, i);
    __syncthreads();
    for (int q = warp; finite && q < a.side.count; q += warps) {
      const double* v = z + std::int64_t(order[q]) * w;
      double sum = 0;
      for (int i = lane; i < w; i += 32) sum += x[i] * v[i];
      sum = sum_of_lanes(sum);
      if (lane == 0) along[q] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < w; i += threads) {
      double sum = finite ? 0 : NAN;
      for (int q = 0; finite && q < a.side.count; ++q) sum += along[q] * z[std::int64_t(order[q]) * w + i];
      if (float* to = a.at(row, t, i)) *to = static_cast<float>(a.side.takes_away ? x[i] - sum : sum);
    }
    __syncthreads();
  }
}

void low_rank_cuda(const PagedKv& kv, int rank, View<float, 4> rows, Stream s) {
  if (kv.rows == 0) return;
  const int width = kv.kv_heads * kv.head_dim;
  if (width > most_width)
    throw Error(Errc::unsupported,
                "got " + std::to_string(kv.kv_heads) + " KV heads of " + std::to_string(kv.head_dim) +
                    " elements, wanted at most " + std::to_string(most_width) + " elements in all",
                "op low_rank");
  const std::size_t vector = static_cast<std::size_t>(kv.rows) * static_cast<std::size_t>(width), one = sizeof(double);
  auto* memory = static_cast<double*>(
      fixed_scratch(s.handle(), "low rank", vector * (2 * static_cast<std::size_t>(width) + 6) * one));
  Call a;
  a.kv = DeviceKv(kv);
  a.rows = rows;
  a.width = width;
  a.side = RankSide::of(rank, width);
  a.gram = memory;
  a.vectors = a.gram + vector * static_cast<std::size_t>(width);
  a.diagonal = a.vectors + vector * static_cast<std::size_t>(width);
  a.beside = a.diagonal + vector;
  a.beta = a.beside + vector;
  a.values = a.beta + vector;
  a.energy = a.values + vector;
  a.order = reinterpret_cast<std::int32_t*>(a.energy + vector);
  const auto of_rows = static_cast<unsigned>(kv.rows);
  const auto blocks = [&](int of) { return static_cast<unsigned>((width + of - 1) / of); };
  const auto bytes = [&](int vectors) { return static_cast<int>(vectors * width * static_cast<int>(one)); };
  const auto allow = [&](auto kernel, int vectors) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes(vectors)), "low_rank");
  };
  allow(form_kernel, 2), allow(vectors_kernel, 4), allow(project_kernel, 2);
  gram_kernel<<<dim3(blocks(tile), blocks(tile), of_rows), tile_threads, 0, stream_of(s)>>>(a);
  check_launch("low_rank");
  form_kernel<<<of_rows, form_threads, static_cast<unsigned>(bytes(2)), stream_of(s)>>>(a);
  check_launch("low_rank");
  vectors_kernel<<<dim3(blocks(vector_threads), of_rows), vector_threads, static_cast<unsigned>(bytes(4)),
                   stream_of(s)>>>(a);
  check_launch("low_rank");
  order_kernel<<<of_rows, threads, 0, stream_of(s)>>>(a);
  check_launch("low_rank");
  project_kernel<<<dim3(static_cast<unsigned>(std::clamp<std::int64_t>(rows.extent[2], 1, 1024)), of_rows), threads,
                   static_cast<unsigned>(bytes(2)), stream_of(s)>>>(a);
  check_launch("low_rank");
}

}  // namespace

KVLAB_ON_CUDA(low_rank, low_rank_cuda);

}  // namespace kvlab::ops
