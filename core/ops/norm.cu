// The small row operations of a decode step: norm and rounding, silu, bias, embedding, argmax. All may start before
// what is in front of them in the stream has ended and let the next kernel do so.
#include <algorithm>

#include "base/launch.cuh"
#include "ops/linear_cuda.hpp"

namespace kvlab::ops {
using namespace cuda;
namespace {

// Four neighbouring elements.
__device__ __forceinline__ void put4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
template <class T>
__device__ __forceinline__ void put4(T* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(Pair<T>::pack(v.x, v.y), Pair<T>::pack(v.z, v.w));
}

// The sum over a block, the same in every thread; `shared` has room for one number a warp.
__device__ float block_sum(float x, float* shared) {
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) x += shared[w];
  return x;
}

// One block a row. The order of additions depends on n alone.
template <class T>
__global__ void __launch_bounds__(1024) norm_kernel(NormArgs a) {
  constexpr int most = 4;  // vectors a thread keeps between the passes
  __shared__ float sums[32];
  let_successor_start();
  wait_for_predecessor();
  const float* x = a.x + blockIdx.x * a.x_stride;
  T* out = static_cast<T*>(a.out) + blockIdx.x * a.out_stride;
  const int count = static_cast<int>(a.n / 4), threads = blockDim.x;
  const auto load = [&](int v) { return *reinterpret_cast<const float4*>(x + 4 * v); };
  float4 first[most];
#pragma unroll
  for (int j = 0; j < most; ++j) {
    const int v = threadIdx.x + j * threads;
    first[j] = v < count ? load(v) : make_float4(0, 0, 0, 0);
  }
  float factor = 1;
  if (a.weight) {
    float sum = 0;
    const auto add = [&](float4 v) { sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; };
#pragma unroll
    for (int j = 0; j < most; ++j) add(first[j]);
    for (int v = threadIdx.x + most * threads; v < count; v += threads) add(load(v));
    factor = 1 / sqrtf(block_sum(sum, sums) / static_cast<float>(a.n) + a.eps);
  }
  const auto put = [&](int v, float4 e) {
    if (a.weight) {
      const float4 w = *reinterpret_cast<const float4*>(a.weight + 4 * v);
      e = make_float4(e.x * factor * w.x, e.y * factor * w.y, e.z * factor * w.z, e.w * factor * w.w);
    }
    put4(out + 4 * v, e);
  };
#pragma unroll
  for (int j = 0; j < most; ++j)
    if (const int v = threadIdx.x + j * threads; v < count) put(v, first[j]);
  for (int v = threadIdx.x + most * threads; v < count; v += threads) put(v, load(v));
}

// Vector: unsigned or uint4, of elements.
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

constexpr int argmax_threads = 256, argmax_parts = 32, argmax_rows = 1024;  // rows of one launch

__global__ void __launch_bounds__(argmax_threads) argmax_kernel(ArgmaxArgs a, Best* partial, int* arrived) {
  __shared__ Best bests[argmax_threads / 32];
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, part = blockIdx.x, n = static_cast<int>(a.n), lane = threadIdx.x % 32;
  const float* x = a.x + row * a.x_stride;
  Best best = {-INFINITY, 0x7fffffff};
#pragma unroll 4
  for (int i = part * argmax_threads + threadIdx.x; i < n; i += argmax_parts * argmax_threads) best.take(x[i], i);
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
    a.index[row] = best.index < n ? best.index : 0;  // nothing but NaN
    arrived[row] = 0;
  }
}

int blocks_of(std::int64_t elements, int block, int most) {
  return static_cast<int>(std::clamp<std::int64_t>((elements + block - 1) / block, 1, most));
}

}  // namespace

void rms_norm_cuda(const NormArgs& a, void* stream) {
  if (a.n < 8 || a.n % 8 || a.x_stride % 4 || a.out_stride % 8)
    throw Error(Errc::unsupported,
                "got rows of " + std::to_string(a.n) + ", " + std::to_string(a.x_stride) + " and " +
                    std::to_string(a.out_stride) + " apart, wanted multiples of 8, 4 and 8",
                "op rms_norm (CUDA)");
  if (a.rows == 0) return;
  const int threads = std::min<int>(1024, static_cast<int>(a.n / 4 + 31) / 32 * 32);
  const auto kernel = a.dtype == DType::f32   ? norm_kernel<float>
                      : a.dtype == DType::f16 ? norm_kernel<__half>
                                              : norm_kernel<__nv_bfloat16>;
  launch("rms_norm", kernel, static_cast<unsigned>(a.rows), threads, 0, stream_of(stream), true, a);
}

void silu_mul_cuda(const void* x, std::int64_t x_stride, DType dtype, std::int64_t rows, std::int64_t n, void* gated,
                   std::int64_t gated_stride, void* stream) {
  if (rows == 0) return;
  if (n % 2 || x_stride % 2 || gated_stride % 2)
    throw Error(Errc::unsupported, "got an odd gate of " + std::to_string(n) + ", wanted an even one",
                "op silu_mul (CUDA)");
  const auto bits = reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(gated);
  const bool wide = n % 8 == 0 && x_stride % 8 == 0 && gated_stride % 8 == 0 && bits % 16 == 0;
  const dim3 grid(blocks_of(n / (wide ? 8 : 2), 256, 64), static_cast<unsigned>(rows));
  const auto go = [&]<class T>(T*) {
    launch("silu_mul", wide ? silu_mul_kernel<T, uint4> : silu_mul_kernel<T, unsigned>, grid, 256, 0, stream_of(stream),
           true, static_cast<const T*>(x), x_stride, static_cast<int>(n), static_cast<T*>(gated), gated_stride);
  };
  dtype == DType::f16 ? go(static_cast<__half*>(nullptr)) : go(static_cast<__nv_bfloat16*>(nullptr));
}

void add_bias_cuda(const float* bias, std::int64_t rows, std::int64_t n, float* y, std::int64_t y_stride,
                   void* stream) {
  if (rows == 0) return;
  const dim3 grid(blocks_of(n, 256, 64), static_cast<unsigned>(rows));
  launch("add_bias", add_bias_kernel, grid, 256, 0, stream_of(stream), true, bias, static_cast<int>(n), y, y_stride);
}

void embed_cuda(const EmbedArgs& a, void* stream) {
  if ((a.dtype != DType::bf16 && a.dtype != DType::f16) || a.k % 2)
    throw Error(Errc::unsupported,
                std::string("got rows of ") + std::to_string(a.k) + " " + name_of(a.dtype) +
                    ", wanted an even number of bf16 or f16",
                "op embed (CUDA)");
  if (a.rows == 0) return;
  const auto kernel = a.dtype == DType::f16 ? embed_kernel<__half> : embed_kernel<__nv_bfloat16>;
  launch("embed", kernel, static_cast<unsigned>(a.rows), 256, 0, stream_of(stream), true, a);
}

void argmax_cuda(const ArgmaxArgs& in, void* stream) {
  Best* partial = static_cast<Best*>(kept(stream, "argmax partial", argmax_rows * argmax_parts * sizeof(Best)));
  int* arrived = static_cast<int*>(zeroed(stream, "argmax arrived", argmax_rows * sizeof(int)));
  for (std::int64_t begin = 0; begin < in.rows; begin += argmax_rows) {
    ArgmaxArgs a = in;
    a.rows = std::min<std::int64_t>(argmax_rows, in.rows - begin);
    a.x += begin * in.x_stride;
    a.index += begin;
    launch("argmax", argmax_kernel, dim3(argmax_parts, static_cast<unsigned>(a.rows)), argmax_threads, 0,
           stream_of(stream), true, a, partial, arrived);
  }
}

}  // namespace kvlab::ops
