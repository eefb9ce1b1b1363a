// Keys by channel on a GPU. A warp multiplies a block of tokens: a lane has eight of them, so a load of the warp is a
// channel of the block.
#include "ops/score/key_channels.hpp"

#include <algorithm>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "base/ptx.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int block = static_cast<int>(KeyChannels::block), threads = 256, part = 64, most_dim = 256;
static_assert(block == 32 * 8);

template <class T>
__device__ __forceinline__ T of_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
}

__device__ __forceinline__ int tokens_of(const DeviceKv& kv, const KeyChannels& c, int row, int head) {
  return static_cast<int>(min(static_cast<std::int64_t>(kv.tokens(row, head)), c.blocks * block));
}

// A block turns up to `part` keys. Channels go through shared memory in turns, so that both sides are read in runs.
constexpr int turn = 32;
template <class T>
__global__ void __launch_bounds__(threads)
    copy_kernel(const __grid_constant__ DeviceKv kv, int newest, const __grid_constant__ KeyChannels c) {
  __shared__ T keys[turn][part + 2];
  const int head = blockIdx.y, row = blockIdx.z, slot = kv.kv.slots[row], n = tokens_of(kv, c, row, head),
            begin = n - min(n, newest), first = (begin / part + static_cast<int>(blockIdx.x)) * part;
  const int low = max(first, begin), count = min(first + part, n) - low;
  if (count <= 0) return;
  if (count == 1) {  // a decode step's
    const auto token = kv.token(row, head, low);
    for (int d = threadIdx.x; d < kv.head_dim; d += threads)
      reinterpret_cast<T*>(c.at(slot, head, low / block, d))[low % block] = of_float<T>(token.key(d));
    return;
  }
  for (int d = 0; d < kv.head_dim; d += turn) {
    const int width = min(turn, kv.head_dim - d);
    __syncthreads();
    for (int i = threadIdx.x; i < count * width; i += threads)
      keys[i % width][i / width] = of_float<T>(kv.token(row, head, low + i / width).key(d + i % width));
    __syncthreads();
    for (int i = threadIdx.x; i < count * width; i += threads)
      reinterpret_cast<T*>(c.at(slot, head, low / block, d + i / count))[low % block + i % count] =
          keys[i / count][i % count];
  }
}

// A thread has a channel.
__global__ void __launch_bounds__(most_dim) large_kernel(View<const float, 3> queries, int group, int dim, int rank,
                                                         bool norm_scale, IndexList channels, View<float, 3> vectors) {
  __shared__ double size[most_dim], parts[most_dim / 32][2];
  __shared__ unsigned chosen[most_dim / 32];
  const int head = blockIdx.x, row = blockIdx.y, d = threadIdx.x, lane = d % 32, warp = d / 32;
  const auto query = [&](int g) { return d < dim ? queries(row, head * group + g, d) : 0.f; };
  double own = 0;
  for (int g = 0; g < group; ++g) own += fabs(double(query(g)));
  if (own != own) own = INFINITY;  // it is large, so that there are `rank` of them in any case
  size[d] = own;
  __syncthreads();
  int larger = 0;
  for (int e = 0; e < dim; ++e) larger += size[e] > own || (size[e] == own && e < d);
  const bool large = d < dim && larger < rank;
  const unsigned bits = __ballot_sync(all_lanes, large);
  if (lane == 0) chosen[warp] = bits;
  double sum = 0;
  const bool each = vectors.extent[1] == queries.extent[1];
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int g = 0; g < group; ++g) {
    const double x = query(g);
    double by = 1;
    if (norm_scale) {
      const double all = sum_of_lanes(fabs(x)), of_large = sum_of_lanes(large ? fabs(x) : 0.);
      __syncthreads();
      if (lane == 0) parts[warp][0] = all, parts[warp][1] = of_large;
      __syncthreads();
      double total = 0, share = 0;
      for (int w = 0; w < warps; ++w) total += parts[w][0], share += parts[w][1];
      by = share > 0 ? 1 / sqrt(dim * share / total) : 0;
    }
    sum += by * x;
    if (each && d < dim) vectors(row, head * group + g, d) = large ? static_cast<float>(by * x) : 0.f;
  }
  __syncthreads();
  if (!each && d < dim) vectors(row, head, d) = large ? static_cast<float>(sum) : 0.f;
  const std::int64_t at = channels.at(row);
  if (large) {
    int before = __popc(bits & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) before += __popc(chosen[w]);
    channels.index(at, head, before) = d;
  }
  if (d == 0) channels.count(at, head) = rank;
}

struct Dots {
  DeviceKv kv;
  View<const float, 3> vectors;
  IndexList channels;
  KeyChannels copy;
  Scores out;
  int newest;
  bool whole;  // a lane's scores are two vectors of four
};

template <class T>
__device__ __forceinline__ void add_eight(const T* from, float factor, float (&sum)[8]) {
  if constexpr (sizeof(T) == 2) {
    const uint4 x = load_once16(from);
    const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a, b;
      Pair<T>::unpack(words[i], a, b);
      sum[2 * i] += factor * a, sum[2 * i + 1] += factor * b;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += factor * __ldg(from + i);
  }
}

constexpr int dot_threads = 128, dot_warps = dot_threads / 32;
template <class T>
__global__ void __launch_bounds__(dot_threads) dots_kernel(const __grid_constant__ Dots a) {
  __shared__ float factor[most_dim];
  __shared__ int channel[most_dim];
  const int head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, slot = a.kv.kv.slots[row];
  const std::int64_t list = a.channels.at(row);
  const int count = static_cast<int>(
      min(min(static_cast<std::int64_t>(a.channels.count(list, head)), a.channels.index.extent[2]), a.copy.head_dim));
  for (int i = threadIdx.x; i < count; i += dot_threads) {
    const int d = min(max(a.channels.index(list, head, i), 0), a.kv.head_dim - 1);
    channel[i] = d * block, factor[i] = a.vectors(row, head, d);
  }
  __syncthreads();
  const int tokens = a.kv.tokens(row, head),
            n = static_cast<int>(min(static_cast<std::int64_t>(tokens_of(a.kv, a.copy, row, head)), a.out.extent[2])),
            pinned = tokens - min(tokens, a.newest);
  for (int b = static_cast<int>(blockIdx.x) * dot_warps + static_cast<int>(threadIdx.x) / 32; b * block < n;
       b += static_cast<int>(gridDim.x) * dot_warps) {
    const T* from = reinterpret_cast<const T*>(a.copy.at(slot, head, b, 0)) + 8 * lane;
    const int t = b * block + 8 * lane;
    float sum[8] = {};
    if (t < n) {
#pragma unroll 8
      for (int i = 0; i < count; ++i) add_eight(from + channel[i], factor[i], sum);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (t + i >= pinned) sum[i] = INFINITY;
    if (t >= n) continue;
    float* to = &a.out(row, head, t);
    if (a.whole && t + 8 <= n) {
      reinterpret_cast<float4*>(to)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      reinterpret_cast<float4*>(to)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (t + i < n) to[i] = sum[i];
    }
  }
}

// The same for query heads: a load of a channel serves `together` of them, and a group of more takes several rounds.
constexpr int together = 4;
template <class T>
__global__ void __launch_bounds__(dot_threads)
    each_dots_kernel(const __grid_constant__ Dots a, const __grid_constant__ Scores each, int group) {
  __shared__ float factor[most_dim][together];
  __shared__ int channel[most_dim];
  const int head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, slot = a.kv.kv.slots[row];
  const std::int64_t list = a.channels.at(row);
  const int count = static_cast<int>(
      min(min(static_cast<std::int64_t>(a.channels.count(list, head)), a.channels.index.extent[2]), a.copy.head_dim));
  for (int i = threadIdx.x; i < count; i += dot_threads)
    channel[i] = min(max(a.channels.index(list, head, i), 0), a.kv.head_dim - 1);
  const std::int64_t room = min(a.out.extent[2], each.extent[2]);
  const int tokens = a.kv.tokens(row, head),
            n = static_cast<int>(min(static_cast<std::int64_t>(tokens_of(a.kv, a.copy, row, head)), room)),
            pinned = tokens - min(tokens, a.newest);
  for (int first = 0; first < group; first += together) {
    const int some = min(together, group - first);
    __syncthreads();
    for (int i = threadIdx.x; i < count * together; i += dot_threads) {
      const int g = i % together;
      factor[i / together][g] = g < some ? a.vectors(row, head * group + first + g, channel[i / together]) : 0.f;
    }
    __syncthreads();
    for (int b = static_cast<int>(blockIdx.x) * dot_warps + static_cast<int>(threadIdx.x) / 32; b * block < n;
         b += static_cast<int>(gridDim.x) * dot_warps) {
      const T* from = reinterpret_cast<const T*>(a.copy.at(slot, head, b, 0)) + 8 * lane;
      const int t = b * block + 8 * lane;
      if (t >= n) continue;
      float sum[together][8] = {}, total[8] = {};
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        float key[8] = {};
        add_eight(from + channel[i] * block, 1.f, key);
#pragma unroll
        for (int g = 0; g < together; ++g)
#pragma unroll
          for (int e = 0; e < 8; ++e) sum[g][e] += factor[i][g] * key[e];
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (t + e >= n) continue;
        if (first > 0) total[e] = a.out(row, head, t + e);
#pragma unroll
        for (int g = 0; g < together; ++g)
          if (g < some) each(row, head * group + first + g, t + e) = sum[g][e], total[e] += sum[g][e];
        a.out(row, head, t + e) = t + e >= pinned ? INFINITY : total[e];
      }
    }
  }
}

template <class F>
void with_type(DType dtype, const F& f) {
  if (dtype == DType::f32) return f(0.f);
  if (dtype == DType::f16) return f(__half{});
  f(__nv_bfloat16{});
}

void copy_channels_cuda(const PagedKv& kv, int newest, const KeyChannels& channels, Stream s) {
  if (kv.rows == 0 || newest == 0) return;
  const std::int64_t places = std::min<std::int64_t>(newest, channels.blocks * block);
  // The newest places may begin and end inside a part.
  const dim3 grid(static_cast<unsigned>(newest == 1 ? 1 : places / part + 2), static_cast<unsigned>(kv.kv_heads),
                  static_cast<unsigned>(kv.rows));
  with_type(channels.dtype, [&](auto type) {
    const auto kernel = copy_kernel<decltype(type)>;
    kernel<<<grid, threads, 0, stream_of(s)>>>(DeviceKv(kv), newest, channels);
  });
  check_launch("copy_channels");
}

void large_channels_cuda(const PagedKv& kv, View<const float, 3> queries, int rank, bool norm_scale,
                         const IndexList& channels, View<float, 3> vectors, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  large_kernel<<<grid, static_cast<unsigned>((kv.head_dim + 31) / 32 * 32), 0, stream_of(s)>>>(
      queries, static_cast<int>(queries.extent[1]) / kv.kv_heads, kv.head_dim, rank, norm_scale, channels, vectors);
  check_launch("large_channels");
}

void channel_dot_cuda(const PagedKv& kv, View<const float, 3> vectors, const IndexList& channels,
                      const KeyChannels& copy, int newest, Scores out, Stream s, Scores each) {
  if (kv.rows == 0) return;
  const bool whole =
      reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0 && out.stride[0] % 4 == 0 && out.stride[1] % 4 == 0;
  const std::int64_t blocks = std::min(copy.blocks, (out.extent[2] + block - 1) / block);
  const dim3 grid(static_cast<unsigned>((blocks + dot_warps - 1) / dot_warps), static_cast<unsigned>(kv.kv_heads),
                  static_cast<unsigned>(kv.rows));
  const Dots a{DeviceKv(kv), vectors, channels, copy, out, newest, whole};
  with_type(copy.dtype, [&](auto type) {
    const auto kernel = dots_kernel<decltype(type)>;
    const auto each_kernel = each_dots_kernel<decltype(type)>;
    if (each)
      each_kernel<<<grid, dot_threads, 0, stream_of(s)>>>(a, each, static_cast<int>(vectors.extent[1]) / kv.kv_heads);
    else
      kernel<<<grid, dot_threads, 0, stream_of(s)>>>(a);
  });
  check_launch("channel_dot");
}

}  // namespace

KVLAB_ON_CUDA(copy_channels, copy_channels_cuda);
KVLAB_ON_CUDA(large_channels, large_channels_cuda);
KVLAB_ON_CUDA(channel_dot, channel_dot_cuda);

}  // namespace kvlab::ops
