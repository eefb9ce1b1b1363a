// Rows of low rank on a GPU, in f64 as on the CPU. Eigenvectors are [vector][element]: their elements change
// independently, so threads take elements.
#include "ops/score/low_rank.hpp"

#include <algorithm>
#include <string>

#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "base/scratch.cuh"
#include "ops/score/heads.cuh"
#include "ops/score/key_factors.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int tile = 64, each = 4, tokens_at_once = 16, tile_threads = (tile / each) * (tile / each);
constexpr int form_threads = 1024, vector_threads = 32, threads = 256, warps = threads / 32, most_width = 4096;
constexpr int together = 8;  // tokens that a block projects, and loads that a thread has under way

// Grids end in the batch row, or in the layer. Matrices are [width, width] for each of them: those of batch row r lie
// at `first` + r.
struct Call {
  DeviceKv kv;
  View<float, 4> rows;
  int width, first;
  RankSide side;
  double *gram, *vectors;     // gram keeps the reflections: that of column k is row k from k + 1 on
  double *diagonal, *beside;  // [row, width] of the tridiagonal form
  double *beta, *values;      // [row, width]
  double* energy;             // [row] the sum of squares
  std::int32_t* order;        // [row, width] the eigenvectors by falling eigenvalue

  __device__ double* matrix(double* of, int row) const { return of + std::int64_t(first + row) * width * width; }
  template <class T>
  __device__ T* vector(T* of, int row) const {
    return of + std::int64_t(first + row) * width;
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

// A block makes 64 x 64 elements of X^T X and their mirror image. A thread has 4 x 4 of them.
__global__ void __launch_bounds__(tile_threads) gram_kernel(const __grid_constant__ Call a) {
  __shared__ double left[tokens_at_once][tile], right[tokens_at_once][tile];
  if (blockIdx.y > blockIdx.x) return;
  const int row = blockIdx.z, y = threadIdx.x / (tile / each), z = threadIdx.x % (tile / each), n = a.tokens(row);
  const int i = blockIdx.x * tile, j = blockIdx.y * tile;
  double sum[each][each] = {};
  for (int from = 0; from < n; from += tokens_at_once) {
    __syncthreads();
    for (int e = threadIdx.x; e < tokens_at_once * tile; e += tile_threads) {
      const int t = e / tile, column = e % tile;
      left[t][column] = from + t < n && i + column < a.width ? a.x(row, from + t, i + column) : 0;
      right[t][column] = from + t < n && j + column < a.width ? a.x(row, from + t, j + column) : 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < tokens_at_once; ++t) {
      double x[each], w[each];
#pragma unroll
      for (int e = 0; e < each; ++e) x[e] = left[t][y + e * (tile / each)], w[e] = right[t][z + e * (tile / each)];
#pragma unroll
      for (int p = 0; p < each; ++p)
#pragma unroll
        for (int q = 0; q < each; ++q) sum[p][q] += x[p] * w[q];
    }
  }
  double* g = a.matrix(a.gram, row);
  for (int p = 0; p < each; ++p)
    for (int q = 0; q < each; ++q) {
      const int u = i + y + p * (tile / each), v = j + z + q * (tile / each);
      if (u >= a.width || v >= a.width) continue;
      g[std::int64_t(u) * a.width + v] = sum[p][q];
      if (i != j) g[std::int64_t(v) * a.width + u] = sum[p][q];
    }
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

// A block takes a matrix: Householder's tridiagonal form. Dynamic shared memory: v and p, [width] each.
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
  if (me == 0) a.energy[a.first + row] = energy;
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
#pragma unroll 8
      for (int j = k + 1; j < n; ++j) sum += g[std::int64_t(j) * n + i] * v[j];
      p[i] = sum * r.beta;
      product += p[i] * v[i];
    }
    product = sum_of_block(product, parts);
    for (int i = k + 1 + me; i < n; i += form_threads) p[i] -= r.beta / 2 * product * v[i];
    __syncthreads();
    for (int i = k + 1 + me; i < n; i += form_threads) {
      const double vi = v[i], pi = p[i];
      double* of = g + i;
      for (int j = k + 1; j < n; j += together) {
        double x[together];  // all loads first: none waits for another
#pragma unroll
        for (int e = 0; e < together; ++e) x[e] = j + e < n ? of[std::int64_t(j + e) * n] : 0;
#pragma unroll
        for (int e = 0; e < together; ++e)
          if (j + e < n) of[std::int64_t(j + e) * n] = x[e] - (v[j + e] * pi + p[j + e] * vi);
      }
    }
    __syncthreads();
  }
}

// A thread takes an element of all vectors. Each block computes the QL steps for itself, which needs no vectors.
// Dynamic shared memory: four vectors of [width].
__global__ void __launch_bounds__(vector_threads) vectors_kernel(const __grid_constant__ Call a) {
  extern __shared__ double of_steps[];
  __shared__ int first, last;  // of a step's rotations; last < 0: there is none
  const int row = blockIdx.y, n = a.width, me = threadIdx.x, i = blockIdx.x * vector_threads + me;
  const double energy = a.energy[a.first + row];
  if (!(energy > 0 && energy < INFINITY)) return;
  const double *g = a.matrix(a.gram, row), *beta = a.vector(a.beta, row);
  double* z = a.matrix(a.vectors, row) + i;
  if (i < n) {
    for (int k = 0; k < n; ++k) z[std::int64_t(k) * n] = k == i;
    for (int k = 0; k < n; ++k) {
      if (beta[k] == 0) continue;
      const double* v = g + std::int64_t(k) * n;
      double sum = 0;
#pragma unroll 8
      for (int j = k + 1; j < n; ++j) sum += v[j] * z[std::int64_t(j) * n];
      sum *= beta[k];
      for (int j = k + 1; j < n; j += together) {
        double x[together];
#pragma unroll
        for (int e = 0; e < together; ++e) x[e] = j + e < n ? z[std::int64_t(j + e) * n] : 0;
#pragma unroll
        for (int e = 0; e < together; ++e)
          if (j + e < n) z[std::int64_t(j + e) * n] = x[e] - v[j + e] * sum;
      }
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
    for (int k = last; k >= first; k -= together) {
      double x[together];
#pragma unroll
      for (int e = 0; e < together; ++e) x[e] = k - e >= first ? z[std::int64_t(k - e) * n] : 0;
#pragma unroll
      for (int e = 0; e < together; ++e) {
        if (k - e < first) break;
        const double c = cosine[k - e], s = sine[k - e];
        z[std::int64_t(k - e + 1) * n] = s * x[e] + c * y;
        y = c * x[e] - s * y;
      }
    }
    z[std::int64_t(first) * n] = y;
  }
  if (blockIdx.x == 0)
    for (int k = me; k < n; k += vector_threads) a.vector(a.values, row)[k] = diagonal[k];
}

// The eigenvectors by falling eigenvalue.
__global__ void __launch_bounds__(threads) order_kernel(const __grid_constant__ Call a) {
  const int row = blockIdx.x;
  const double* value = a.vector(a.values, row);
  for (int i = threadIdx.x; i < a.width; i += threads) {
    int before = 0;
    for (int j = 0; j < a.width; ++j) before += is_greater(value[j], j, value[i], i);
    a.vector(a.order, row)[before] = i;
  }
}

// Blocks stride over groups of tokens. Dynamic shared memory: their rows of X, and the products with the vectors.
__global__ void __launch_bounds__(threads) project_kernel(const __grid_constant__ Call a, int group) {
  extern __shared__ double of_tokens[];
  const int row = blockIdx.y, n = a.tokens(row), w = a.width, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            count = a.side.count;
  const double energy = a.energy[a.first + row];
  if (energy == 0) return;
  const bool finite = energy > 0 && energy < INFINITY;
  double *x = of_tokens, *along = of_tokens + group * w;  // [token, element], [token, vector]
  const double* z = a.matrix(a.vectors, row);
  const std::int32_t* order = a.vector(a.order, row) + a.side.first;
  for (int from = blockIdx.x * group; from < n; from += gridDim.x * group) {
    const int here = min(group, n - from);
    for (int i = threadIdx.x; i < group * w; i += threads) x[i] = i / w < here ? a.x(row, from + i / w, i % w) : 0;
    __syncthreads();
    for (int q = warp; finite && q < count; q += warps) {
      const double* v = z + std::int64_t(order[q]) * w;
      double sum[together] = {};
      for (int i = lane; i < w; i += 32) {
        const double of = v[i];
#pragma unroll
        for (int t = 0; t < together; ++t)
          if (t < group) sum[t] += x[t * w + i] * of;
      }
#pragma unroll
      for (int t = 0; t < together; ++t) {
        sum[t] = sum_of_lanes(sum[t]);
        if (lane == 0 && t < group) along[t * count + q] = sum[t];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < w; i += threads) {
      double sum[together] = {};
#pragma unroll 4
      for (int q = 0; q < (finite ? count : 0); ++q) {
        const double of = z[std::int64_t(order[q]) * w + i];
#pragma unroll
        for (int t = 0; t < together; ++t)
          if (t < group) sum[t] += along[t * count + q] * of;
      }
      for (int t = 0; t < here; ++t)
        if (float* to = a.at(row, from + t, i))
          *to = static_cast<float>(!finite ? NAN : a.side.takes_away ? x[t * w + i] - sum[t] : sum[t]);
    }
    __syncthreads();
  }
}

__device__ void put_factor(std::byte* row, DType dtype, std::int64_t i, double number) {
  const auto x = static_cast<float>(number);
  if (dtype == DType::f32)
    reinterpret_cast<float*>(row)[i] = x;
  else
    reinterpret_cast<unsigned short*>(row)[i] = nearest_bits(x, dtype == DType::f16);
}

// As project_kernel, of one row: what the factors hold. Dynamic shared memory: rows of X.
__global__ void __launch_bounds__(threads)
    factor_kernel(const __grid_constant__ Call a, const __grid_constant__ KeyFactors f, int group) {
  extern __shared__ double of_factors[];
  const int n = a.tokens(0), w = a.width, warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = a.kv.kv.slots[0];
  const double energy = a.energy[a.first];
  const bool some = energy > 0 && energy < INFINITY;
  double* x = of_factors;
  const double* z = a.matrix(a.vectors, 0);
  const std::int32_t* order = a.vector(a.order, 0);
  std::byte *basis = f.basis + slot * f.slot_bytes, *tokens = f.tokens + slot * f.slot_bytes;
  const std::int64_t row_bytes = f.row * (f.dtype == DType::f32 ? 4 : 2);
  if (blockIdx.x == 0 && threadIdx.x == 0) f.count_of(slot) = n;
  for (std::int64_t i = blockIdx.x * threads + threadIdx.x; i < std::int64_t(f.rank) * w;
       i += std::int64_t(gridDim.x) * threads)
    put_factor(basis, f.dtype, i, some ? z[std::int64_t(order[i / w]) * w + i % w] : 0);
  for (int from = blockIdx.x * group; from < n; from += gridDim.x * group) {
    const int here = min(group, n - from);
    for (int i = threadIdx.x; i < group * w; i += threads) x[i] = i / w < here ? a.x(0, from + i / w, i % w) : 0;
    __syncthreads();
    for (int q = warp; q < f.rank; q += warps) {
      const double* v = z + (some ? std::int64_t(order[q]) * w : 0);
      double sum[together] = {};
      for (int i = lane; some && i < w; i += 32) {
        const double of = v[i];
#pragma unroll
        for (int t = 0; t < together; ++t)
          if (t < group) sum[t] += x[t * w + i] * of;
      }
#pragma unroll
      for (int t = 0; t < together; ++t) {
        sum[t] = sum_of_lanes(sum[t]);
        if (lane == 0 && t < here)
          put_factor(tokens + (from + t) * row_bytes, f.dtype, q, some || energy == 0 ? sum[t] : NAN);
      }
    }
    __syncthreads();
  }
}

// A block takes a head.
__global__ void __launch_bounds__(threads)
    mark_kernel(const int* slots, int page_size, const __grid_constant__ TokenList exact,
                const __grid_constant__ KeyFactors f) {
  const int head = blockIdx.x,
            count = min(static_cast<std::int64_t>(exact.count(exact.at(0), head)), exact.index.extent[2]);
  std::uint8_t* whole = f.whole_of(slots[0], head);
  for (int page = threadIdx.x; page < f.pages; page += threads) whole[page] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += threads) {
    const int page = exact.index(exact.at(0), head, i) / page_size;
    if (page >= 0 && page < f.pages) whole[page] = 1;
  }
}

// A block has some places of a head at a time.
__global__ void __launch_bounds__(rebuild_threads)
    rebuild_kernel(const __grid_constant__ DeviceKv kv, const __grid_constant__ KeyFactors f, View<float, 4> rows) {
  __shared__ RebuildShared shared;
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row];
  const int n = min(f.count_of(slot), entries_of(kv, row, head, 1, rows.extent[2]));
  for (int first = blockIdx.x * rebuilt_at_once; first < n; first += gridDim.x * rebuilt_at_once)
    rebuild_keys(
        f, kv.kv.rope_table, slot, head, first, min(rebuilt_at_once, n - first), shared,
        [&](int t) { return kv.position(row, head, first + t); },
        [&](int t, int d, float x) { rows(row, head, first + t, d) = x; });
}

template <class Kernel>
int shared_vectors(Kernel kernel, int vectors, int width) {
  const int bytes = vectors * width * static_cast<int>(sizeof(double));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "low_rank");
  return bytes;
}

unsigned blocks_of(int n, int of) { return static_cast<unsigned>((n + of - 1) / of); }

Call call_of(const PagedKv& kv, const View<float, 4>& rows, const RankDirections& d, int first, int rank) {
  Call a;
  if (kv.layouts) a.kv = DeviceKv(kv);
  a.rows = rows;
  a.width = static_cast<int>(d.vectors.extent[2]);
  a.first = first;
  a.side = RankSide::of(rank, a.width);
  a.gram = d.products.data, a.vectors = d.vectors.data;
  const std::int64_t kind = d.numbers.stride[0];
  a.diagonal = d.numbers.data, a.beside = a.diagonal + kind, a.beta = a.beside + kind, a.values = a.beta + kind;
  a.energy = a.values + kind;
  a.order = reinterpret_cast<std::int32_t*>(a.energy + kind);
  return a;
}

void check_width(int kv_heads, int dim) {
  if (kv_heads * dim > most_width)
    throw Error(Errc::unsupported,
                "got " + std::to_string(kv_heads) + " KV heads of " + std::to_string(dim) +
                    " elements, wanted at most " + std::to_string(most_width) + " elements in all",
                "op low_rank");
}

void launch_products(const Call& a, Stream s) {
  const unsigned tiles = blocks_of(a.width, tile);
  gram_kernel<<<dim3(tiles, tiles, static_cast<unsigned>(a.kv.kv.rows)), tile_threads, 0, stream_of(s)>>>(a);
  check_launch("low_rank");
}

// Of so many matrices.
void launch_directions(const Call& a, int matrices, Stream s) {
  const auto of = static_cast<unsigned>(matrices);
  form_kernel<<<of, form_threads, static_cast<unsigned>(shared_vectors(form_kernel, 2, a.width)), stream_of(s)>>>(a);
  check_launch("low_rank");
  vectors_kernel<<<dim3(blocks_of(a.width, vector_threads), of), vector_threads,
                   static_cast<unsigned>(shared_vectors(vectors_kernel, 4, a.width)), stream_of(s)>>>(a);
  check_launch("low_rank");
  order_kernel<<<of, threads, 0, stream_of(s)>>>(a);
  check_launch("low_rank");
}

void launch_projection(const Call& a, Stream s) {
  const int vectors = static_cast<int>((shared_bytes() - 1024) / sizeof(double)) / a.width,
            group = std::clamp(vectors / 2, 1, together);  // a token has at most w / 2 products
  const auto tokens = static_cast<int>(a.rows.extent[2]);
  project_kernel<<<dim3(std::clamp(blocks_of(tokens, group), 1u, 1024u), static_cast<unsigned>(a.kv.kv.rows)), threads,
                   static_cast<unsigned>(shared_vectors(project_kernel, 2 * group, a.width)), stream_of(s)>>>(a, group);
  check_launch("low_rank");
}

void low_rank_cuda(const PagedKv& kv, int rank, View<float, 4> rows, Stream s) {
  if (kv.rows == 0) return;
  check_width(kv.kv_heads, kv.head_dim);
  const int width = kv.kv_heads * kv.head_dim;
  const auto d =
      RankDirections::in(fixed_scratch(s.handle(), "low rank", RankDirections::bytes(kv.rows, width)), kv.rows, width);
  const Call a = call_of(kv, rows, d, 0, rank);
  launch_products(a, s);
  launch_directions(a, kv.rows, s);
  launch_projection(a, s);
}

void row_products_cuda(const PagedKv& kv, View<const float, 4> rows, const RankDirections& d, int layer, Stream s) {
  check_width(kv.kv_heads, kv.head_dim);
  launch_products(call_of(kv, {const_cast<float*>(rows.data), rows.extent, rows.stride}, d, layer, 1), s);
}

void rank_directions_cuda(const RankDirections& d, Stream s) {
  check_width(1, static_cast<int>(d.vectors.extent[2]));
  launch_directions(call_of({}, {}, d, 0, 1), static_cast<int>(d.vectors.extent[0]), s);
}

void factor_rows_cuda(const PagedKv& kv, const RankDirections& d, int layer, View<const float, 4> rows,
                      const TokenList& exact, const KeyFactors& f, Stream s) {
  const Call a = call_of(kv, {const_cast<float*>(rows.data), rows.extent, rows.stride}, d, layer, 1);
  const int group = std::clamp(static_cast<int>((shared_bytes() - 1024) / sizeof(double)) / a.width, 1, together);
  factor_kernel<<<std::clamp(blocks_of(static_cast<int>(rows.extent[2]), group), 1u, 1024u), threads,
                  static_cast<unsigned>(shared_vectors(factor_kernel, group, a.width)), stream_of(s)>>>(a, f, group);
  check_launch("factor_rows");
  mark_kernel<<<static_cast<unsigned>(kv.kv_heads), threads, 0, stream_of(s)>>>(kv.slots, kv.page_size, exact, f);
  check_launch("factor_rows");
}

void rebuild_rows_cuda(const PagedKv& kv, const KeyFactors& f, View<float, 4> rows, Stream s) {
  if (kv.rows == 0) return;
  rebuild_kernel<<<grid_of(kv.kv_heads, kv.rows, rows.extent[2], rebuilt_at_once), rebuild_threads, 0, stream_of(s)>>>(
      DeviceKv(kv), f, rows);
  check_launch("rebuild_rows");
}

}  // namespace

KVLAB_ON_CUDA(low_rank, low_rank_cuda);
KVLAB_ON_CUDA(row_products, row_products_cuda);
KVLAB_ON_CUDA(rank_directions, rank_directions_cuda);
KVLAB_ON_CUDA(factor_rows, factor_rows_cuda);
KVLAB_ON_CUDA(rebuild_rows, rebuild_rows_cuda);

}  // namespace kvlab::ops
