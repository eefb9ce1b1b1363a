// The small row operations of a decode step: norm and rounding, silu, bias, embedding, argmax. Each may start before
// the preceding kernel in the stream ends, and lets the next kernel start early too.
#include <algorithm>

#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "ops/linear/argmax.hpp"
#include "ops/linear/embed.hpp"
#include "ops/linear/linear.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

// Stores four neighbouring elements.
__device__ __forceinline__ void put4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
template <class T>
__device__ __forceinline__ void put4(T* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(Pair<T>::pack(v.x, v.y), Pair<T>::pack(v.z, v.w));
}

// Sum over a block, the same in every thread. `shared` has one float per warp.
__device__ float block_sum(float x, float* shared) {
  x = sum_of_lanes(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) x += shared[w];
  return x;
}

// A block takes every gridDim.x-th row. It loads the next row while it sums and writes one; weights stay in registers.
// The order of a row's additions depends on n alone.
// most: vectors of a row that a thread holds. rest: the row has more vectors, which the thread reads twice.
constexpr int norm_threads = 512;
// resident threads of a multiprocessor
constexpr int norm_resident(int most) { return (most <= 2 ? 3 : 2) * norm_threads; }

template <class T, int most, bool rest>
__global__ void __launch_bounds__(norm_threads, norm_resident(most) / norm_threads) norm_kernel(NormArgs a) {
  __shared__ float sums[2][norm_threads / 32];  // rows alternate, so that one barrier a row is enough
  const int count = static_cast<int>(a.n / 4), threads = blockDim.x, mine = threadIdx.x;
  const auto load = [&](const float* from, float4* to, bool there) {
#pragma unroll
    for (int j = 0; j < most; ++j)
      to[j] = there && mine + j * threads < count ? reinterpret_cast<const float4*>(from)[mine + j * threads]
                                                  : make_float4(0, 0, 0, 0);
  };
  float4 weight[most], row[most], next[most];
  load(a.weight, weight, true);
  let_successor_start();
  wait_for_predecessor();
  const float* x = a.x + blockIdx.x * a.x_stride;
  T* out = static_cast<T*>(a.out) + blockIdx.x * a.out_stride;
  int left = (static_cast<int>(a.rows) - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x);
  load(x, row, true);
  for (float* sum_of = sums[0];; --left) {
    const float* following = x + gridDim.x * a.x_stride;
    load(following, next, left > 0);
    float sum = 0;
    const auto add = [&](float4 v) { sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; };
#pragma unroll
    for (int j = 0; j < most; ++j) add(row[j]);
    if constexpr (rest)
      for (int v = mine + most * threads; v < count; v += threads) add(reinterpret_cast<const float4*>(x)[v]);
    const float factor = 1 / sqrtf(block_sum(sum, sum_of) / static_cast<float>(a.n) + a.eps);
    const auto put = [&](int v, float4 e, float4 w) {
      put4(out + 4 * v, make_float4(e.x * factor * w.x, e.y * factor * w.y, e.z * factor * w.z, e.w * factor * w.w));
    };
#pragma unroll
    for (int j = 0; j < most; ++j)
      if (const int v = mine + j * threads; v < count) put(v, row[j], weight[j]);
    if constexpr (rest)
      for (int v = mine + most * threads; v < count; v += threads)
        put(v, reinterpret_cast<const float4*>(x)[v], reinterpret_cast<const float4*>(a.weight)[v]);
    if (left == 0) return;
#pragma unroll
    for (int j = 0; j < most; ++j) row[j] = next[j];
    x = following;
    out += gridDim.x * a.out_stride;
    sum_of = sum_of == sums[0] ? sums[1] : sums[0];
  }
}

// A block rounds piece blockIdx.y of row blockIdx.x; each thread takes `each` vectors.
constexpr int round_threads = 128;

template <class T, int each>
__global__ void __launch_bounds__(round_threads) round_kernel(NormArgs a) {
  let_successor_start();
  wait_for_predecessor();
  const float* x = a.x + blockIdx.x * a.x_stride;
  T* out = static_cast<T*>(a.out) + blockIdx.x * a.out_stride;
  const int count = static_cast<int>(a.n / 4), threads = blockDim.x,
            first = static_cast<int>(blockIdx.y) * each * threads + threadIdx.x;
  float4 row[each];
#pragma unroll
  for (int j = 0; j < each; ++j)
    if (const int v = first + j * threads; v < count) row[j] = *reinterpret_cast<const float4*>(x + 4 * v);
#pragma unroll
  for (int j = 0; j < each; ++j)
    if (const int v = first + j * threads; v < count) put4(out + 4 * v, row[j]);
}

// Vector is unsigned or uint4, both of elements of T.
template <class T, class Vector>
__global__ void silu_mul_kernel(const T* x, std::int64_t x_stride, int n, T* gated, std::int64_t gated_stride) {
  let_successor_start();
  wait_for_predecessor();
  const T *gate = x + blockIdx.y * x_stride, *up = gate + n;
  T* out = gated + blockIdx.y * gated_stride;
  constexpr int words = sizeof(Vector) / 4, width = 2 * words;
  for (int i = width * (blockIdx.x * blockDim.x + threadIdx.x); i < n; i += width * gridDim.x * blockDim.x) {
    union Words {
      Vector all;
      unsigned each[words];
    } g, u;
    g.all = *reinterpret_cast<const Vector*>(gate + i);
    u.all = *reinterpret_cast<const Vector*>(up + i);
#pragma unroll
    for (int w = 0; w < words; ++w) {
      float g0, g1, u0, u1;
      Pair<T>::unpack(g.each[w], g0, g1);
      Pair<T>::unpack(u.each[w], u0, u1);
      g.each[w] = Pair<T>::pack(g0 / (1 + expf(-g0)) * u0, g1 / (1 + expf(-g1)) * u1);
    }
    *reinterpret_cast<Vector*>(out + i) = g.all;
  }
}

__global__ void add_bias_kernel(const float* bias, int n, float* y, std::int64_t y_stride) {
  let_successor_start();
  wait_for_predecessor();
  float* row = y + blockIdx.y * y_stride;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) row[i] += bias[i];
}

template <class T>
__global__ void embed_kernel(EmbedArgs a) {
  let_successor_start();
  wait_for_predecessor();
  const std::int64_t row = blockIdx.x, token = a.token[row];
  const bool known = token >= 0 && token < a.vocabulary;
  const T* from = static_cast<const T*>(a.table) + (known ? token : 0) * a.k;
  for (int i = 2 * threadIdx.x; i < a.k; i += 2 * blockDim.x) {
    float low, high;
    Pair<T>::unpack(*reinterpret_cast<const unsigned*>(from + i), low, high);
    *reinterpret_cast<float2*>(a.out + row * a.k + i) = known ? make_float2(low, high) : make_float2(NAN, NAN);
  }
}

struct Best {
  float value;
  int index;
  __device__ void take(float v, int i) {
    if (v > value || (v == value && i < index)) value = v, index = i;
  }
};

constexpr int argmax_threads = 256, argmax_parts = 32, argmax_rows = 1024;  // argmax_rows: of one launch

__global__ void __launch_bounds__(argmax_threads) argmax_kernel(ArgmaxArgs a, Best* partial, int* arrived) {
  __shared__ Best bests[argmax_threads / 32];
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, part = blockIdx.x, n = static_cast<int>(a.n), lane = threadIdx.x % 32;
  const float* x = a.x + row * a.x_stride;
  Best best = {-INFINITY, 0x7fffffff};
#pragma unroll 4
  for (int i = part * argmax_threads + threadIdx.x; i < n; i += argmax_parts * argmax_threads) {
    const bool finite = fabsf(x[i]) < INFINITY;
    best.take(finite ? x[i] : INFINITY, finite ? i : -1);  // a NaN or infinity beats every finite value
  }
  const auto over_warp = [&] {
    for (int d = 16; d; d /= 2) {
      const float v = __shfl_xor_sync(~0u, best.value, d);
      best.take(v, __shfl_xor_sync(~0u, best.index, d));
    }
  };
  over_warp();
  if (lane == 0) bests[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = lane < argmax_threads / 32 ? bests[lane] : Best{-INFINITY, 0x7fffffff};
  over_warp();
  int before = 0;
  if (lane == 0) {
    __stcg(&partial[row * argmax_parts + part].value, best.value);
    __stcg(&partial[row * argmax_parts + part].index, best.index);
    __threadfence();
    before = atomicAdd(arrived + row, 1);
  }
  if (__shfl_sync(~0u, before, 0) != argmax_parts - 1) return;
  __threadfence();
  static_assert(argmax_parts == 32);
  best.value = __ldcg(&partial[row * argmax_parts + lane].value);
  best.index = __ldcg(&partial[row * argmax_parts + lane].index);
  over_warp();
  if (lane == 0) {
    const bool marked = a.nonfinite && a.nonfinite[row];
    a.index[row] = marked ? -1 : best.index;
    if (marked) a.nonfinite[row] = 0;
    arrived[row] = 0;
  }
}

// Threads of a block that takes `vectors` of a row, `each` per thread.
int threads_for(std::int64_t vectors, int each, int most) {
  return static_cast<int>(std::min<std::int64_t>(most, ((vectors + each - 1) / each + 31) / 32 * 32));
}

template <class T, int most, bool rest>
void launch_norm(const NormArgs& a, void* stream) {
  const int threads = threads_for(a.n / 4, most, norm_threads);
  const std::int64_t blocks = std::int64_t{multiprocessors()} * std::min(32, norm_resident(most) / threads),
                     each = (a.rows + blocks - 1) / blocks;  // rows of a block, as equal as possible
  launch("rms_norm", norm_kernel<T, most, rest>, static_cast<unsigned>((a.rows + each - 1) / each), threads, 0,
         stream_of(stream), true, a);
}

template <class T, int each>
void launch_round(const NormArgs& a, void* stream) {
  const int threads = threads_for(a.n / 4, each, round_threads);
  const std::int64_t piece = 4 * each * threads;
  const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>((a.n + piece - 1) / piece));
  launch("round", round_kernel<T, each>, grid, threads, 0, stream_of(stream), true, a);
}

template <class T>
void norm_of(const NormArgs& a, void* stream) {
  constexpr std::int64_t many = 64;  // rows that fill the device at eight vectors a thread
  const std::int64_t vectors = a.n / 4;
  if (!a.weight)
    a.rows < many ? launch_round<T, 1>(a, stream) : launch_round<T, 8>(a, stream);
  else if (vectors <= 2 * norm_threads)
    launch_norm<T, 2, false>(a, stream);
  else
    vectors <= 4 * norm_threads ? launch_norm<T, 4, false>(a, stream) : launch_norm<T, 4, true>(a, stream);
}

int blocks_of(std::int64_t elements, int block, int most) {
  return static_cast<int>(std::clamp<std::int64_t>((elements + block - 1) / block, 1, most));
}

}  // namespace

void rms_norm_cuda(const NormArgs& a, Stream s) {
  const auto refuse = [](const std::string& message) { throw Error(Errc::unsupported, message, "op rms_norm (CUDA)"); };
  if (a.n < 8 || a.n % 8 || a.x_stride < a.n || a.x_stride % 4 || a.out_stride < a.n || a.out_stride % 8)
    refuse("got rows of " + std::to_string(a.n) + ", " + std::to_string(a.x_stride) + " and " +
           std::to_string(a.out_stride) + " apart, wanted multiples of 8, 4 and 8 and no row over another");
  const auto bits = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  if ((bits(a.x) | bits(a.weight) | bits(a.out)) % 16) refuse("got rows or weights off a multiple of 16 bytes");
  if (a.rows > 0 && a.out == a.x) refuse("got the rows as their own output, wanted memory beside them");
  if (a.rows == 0) return;
  a.dtype == DType::f32   ? norm_of<float>(a, s.handle())
  : a.dtype == DType::f16 ? norm_of<__half>(a, s.handle())
                          : norm_of<__nv_bfloat16>(a, s.handle());
}
KVLAB_ON_CUDA(rms_norm, rms_norm_cuda);

void silu_mul_cuda(const void* x, std::int64_t x_stride, DType dtype, std::int64_t rows, std::int64_t n, void* gated,
                   std::int64_t gated_stride, Stream s) {
  if (rows == 0) return;
  if (n % 2 || x_stride % 2 || gated_stride % 2)
    throw Error(Errc::unsupported, "got an odd gate of " + std::to_string(n) + ", wanted an even one",
                "op silu_mul (CUDA)");
  const auto bits = reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(gated);
  const bool wide = n % 8 == 0 && x_stride % 8 == 0 && gated_stride % 8 == 0 && bits % 16 == 0;
  const dim3 grid(blocks_of(n / (wide ? 8 : 2), 256, 64), static_cast<unsigned>(rows));
  const auto go = [&]<class T>(T*) {
    launch("silu_mul", wide ? silu_mul_kernel<T, uint4> : silu_mul_kernel<T, unsigned>, grid, 256, 0, stream_of(s),
           true, static_cast<const T*>(x), x_stride, static_cast<int>(n), static_cast<T*>(gated), gated_stride);
  };
  dtype == DType::f16 ? go(static_cast<__half*>(nullptr)) : go(static_cast<__nv_bfloat16*>(nullptr));
}

void add_bias_cuda(const float* bias, std::int64_t rows, std::int64_t n, float* y, std::int64_t y_stride, Stream s) {
  if (rows == 0) return;
  const dim3 grid(blocks_of(n, 256, 64), static_cast<unsigned>(rows));
  launch("add_bias", add_bias_kernel, grid, 256, 0, stream_of(s), true, bias, static_cast<int>(n), y, y_stride);
}

static void embed_cuda(const EmbedArgs& a, Stream s) {
  if ((a.dtype != DType::bf16 && a.dtype != DType::f16) || a.k % 2)
    throw Error(Errc::unsupported,
                std::string("got rows of ") + std::to_string(a.k) + " " + name_of(a.dtype) +
                    ", wanted an even number of bf16 or f16",
                "op embed (CUDA)");
  if (a.rows == 0) return;
  const auto kernel = a.dtype == DType::f16 ? embed_kernel<__half> : embed_kernel<__nv_bfloat16>;
  launch("embed", kernel, static_cast<unsigned>(a.rows), 256, 0, stream_of(s), true, a);
}
KVLAB_ON_CUDA(embed, embed_cuda);

static void argmax_cuda(const ArgmaxArgs& in, Stream s) {
  Best* partial = static_cast<Best*>(kept(s.handle(), "argmax partial", argmax_rows * argmax_parts * sizeof(Best)));
  int* arrived = static_cast<int*>(zeroed(s.handle(), "argmax arrived", argmax_rows * sizeof(int)));
  for (std::int64_t begin = 0; begin < in.rows; begin += argmax_rows) {
    ArgmaxArgs a = in;
    a.rows = std::min<std::int64_t>(argmax_rows, in.rows - begin);
    a.x += begin * in.x_stride;
    a.index += begin;
    if (a.nonfinite) a.nonfinite += begin;
    launch("argmax", argmax_kernel, dim3(argmax_parts, static_cast<unsigned>(a.rows)), argmax_threads, 0, stream_of(s),
           true, a, partial, arrived);
  }
}
KVLAB_ON_CUDA(argmax, argmax_cuda);

}  // namespace kvlab::ops
