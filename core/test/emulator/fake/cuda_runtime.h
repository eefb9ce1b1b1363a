// Stands in for CUDA's header: the part of CUDA C++ that core's kernels use, on the emulator.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "runtime.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

inline const dim3 &threadIdx = emulator::now.thread, &blockIdx = emulator::now.block,
                  &blockDim = emulator::now.block_dim, &gridDim = emulator::now.grid_dim;

// ---- the host's side -----------------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
};
inline const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaSuccess             ? "cudaSuccess"
         : e == cudaErrorInvalidValue ? "cudaErrorInvalidValue"
                                      : "cudaErrorInvalidConfiguration";
}
inline const char* cudaGetErrorString(cudaError_t e) { return cudaGetErrorName(e); }
inline cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(emulator::last_error()); }

using cudaStream_t = emulator::Stream*;

#define CUDART_VERSION 13000
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderStream = 1 };
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
};
// Copies between emulated device and pinned memory alone.
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t pitch,
                                     std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (width > to_pitch || width > pitch) return cudaErrorInvalidValue;
  emulator::submit(stream, [=] {
    for (std::size_t i = 0; i < height; ++i)
      std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * pitch, width);
  });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                                        std::size_t count, cudaMemcpyAttributes*, std::size_t* attributes_from,
                                        std::size_t attributes, cudaStream_t stream) {
  if (count == 0 || attributes != 1 || *attributes_from != 0) return cudaErrorInvalidValue;
  for (std::size_t i = 0; i < count; ++i)
    emulator::submit(stream, [to = to[i], from = from[i], size = bytes[i]] { std::memcpy(to, from, size); });
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int bytes) {
  return emulator::allow_shared(reinterpret_cast<const void*>(kernel), bytes) ? cudaSuccess : cudaErrorInvalidValue;
}

namespace emulator {

// kernel<<<grid, block, shared, stream>>>(arguments) becomes start("kernel", kernel, grid, ...)(arguments).
template <class... P>
auto start(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared = 0,
           cudaStream_t stream = nullptr, bool early = false) {
  return [=](auto&&... arguments) {
    submit(stream, Launch{name, grid, block, shared, early}, reinterpret_cast<const void*>(kernel),
           [kernel, all = std::tuple<std::remove_cvref_t<P>...>(arguments...)] { std::apply(kernel, all); });
  };
}

}  // namespace emulator

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(P...), A&&... arguments) {
  emulator::start("a kernel", kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream,
                  c->numAttrs > 0)(arguments...);
  return cudaGetLastError();
}

// ---- vectors -------------------------------------------------------------------------------------------------------

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- arithmetic ----------------------------------------------------------------------------------------------------

using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return std::min(a, static_cast<unsigned>(b)); }
inline unsigned min(int a, unsigned b) { return std::min(static_cast<unsigned>(a), b); }
inline unsigned max(unsigned a, int b) { return std::max(a, static_cast<unsigned>(b)); }
inline unsigned max(int a, unsigned b) { return std::max(static_cast<unsigned>(a), b); }

inline unsigned __float_as_uint(float x) {
  unsigned u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) {
  return std::isnan(x) ? 0 : static_cast<int>(std::rint(std::clamp(x, -2147483648.f, 2147483520.f)));
}
inline float __uint_as_float(unsigned u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
// Byte i of the result is byte (selector nibble i) of b:a.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = std::uint64_t{b} << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}

// ---- memory --------------------------------------------------------------------------------------------------------

template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}
inline void __threadfence() { emulator::pause(); }
inline void __threadfence_block() { emulator::pause(); }

template <class T, class F>
T emulated_atomic(T* p, F f) {
  emulator::pause();
  const T old = *p;
  *p = static_cast<T>(f(old));
  emulator::pause();
  return old;
}
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> x) {
  return emulated_atomic(p, [x](T old) { return old + x; });
}
template <class T>
T atomicSub(T* p, std::type_identity_t<T> x) {
  return emulated_atomic(p, [x](T old) { return old - x; });
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> x) {
  return emulated_atomic(p, [x](T old) { return old | x; });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> x) {
  return emulated_atomic(p, [x](T old) { return std::max(old, x); });
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> wanted, std::type_identity_t<T> x) {
  return emulated_atomic(p, [wanted, x](T old) { return old == wanted ? x : old; });
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> x) {
  return emulated_atomic(p, [x](T) { return x; });
}

// ---- warps and blocks ----------------------------------------------------------------------------------------------

inline void __syncthreads() { emulator::meet_block(false); }
inline int __syncthreads_or(int x) { return emulator::meet_block(x != 0); }
inline void __syncwarp(unsigned mask = ~0u) {
  emulator::together<int>("__syncwarp", mask, 0, [](const int*, int*) {});
}

namespace emulator {
template <class T>
struct Shuffle {
  T value;
  int from;
};
template <class T>
T shuffle(const char* what, unsigned mask, T value, int from) {
  return together<T>(what, mask, Shuffle<T>{value, from}, [](const Shuffle<T>* in, T* out) {
    for (int i = 0; i < 32; ++i) out[i] = in[in[i].from].value;
  });
}
}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
  return emulator::shuffle("__shfl_sync", mask, x, from & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int m) {
  return emulator::shuffle("__shfl_xor_sync", mask, x, (emulator::lane() ^ m) & 31);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned d) {
  const int from = emulator::lane() - static_cast<int>(d);
  return emulator::shuffle("__shfl_up_sync", mask, x, from < 0 ? emulator::lane() : from);
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  return emulator::together<unsigned>("__ballot_sync", mask, x, [](const bool* in, unsigned* out) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(in[i]) << i;
    std::fill_n(out, 32, bits);
  });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned x) {
  return emulator::together<unsigned>("__reduce_add_sync", mask, x, [](const unsigned* in, unsigned* out) {
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) sum += in[i];
    std::fill_n(out, 32, sum);
  });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  return emulator::together<unsigned>("__reduce_max_sync", mask, x, [](const unsigned* in, unsigned* out) {
    std::fill_n(out, 32, *std::max_element(in, in + 32));
  });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x) {
  return emulator::together<unsigned>("__reduce_min_sync", mask, x, [](const unsigned* in, unsigned* out) {
    std::fill_n(out, 32, *std::min_element(in, in + 32));
  });
}
inline int __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T x) {
  return emulator::together<unsigned>("__match_any_sync", mask, x, [](const T* in, unsigned* out) {
    for (int i = 0; i < 32; ++i) {
      out[i] = 0;
      for (int j = 0; j < 32; ++j) out[i] |= static_cast<unsigned>(in[j] == in[i]) << j;
    }
  });
}
