// A warp packs or unpacks one side of a page, in runs of 256 numbers: a lane has eight.
#include "ops/page/lossless.hpp"

#include <algorithm>

#include "base/copy_units.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 256, warps = threads / 32, exponents = 256;
constexpr int most_blocks = 64;  // as many as the store's copies in a step have: a link needs no more

struct Side {
  const std::byte* from;
  std::byte* to;
  std::int32_t* bytes;
};
__device__ Side side_of(const LosslessPages& a, int of) {
  const int page = of / 2;
  const std::int64_t at = of % 2 ? a.layout.v : a.layout.k;
  return {a.from + std::int64_t{a.from_frames[page]} * granule_bytes + at,
          a.to + std::int64_t{a.to_frames[page]} * granule_bytes + at, a.bytes + of};
}
__device__ void copy(const std::byte* from, std::byte* to, std::int64_t bytes, int lane) {
  copy_units([&](int i) { return reinterpret_cast<const uint4*>(from) + i; }, reinterpret_cast<uint4*>(to),
             static_cast<int>(bytes / 16), lane, 32);
}
// The warp of a page's values copies what lies behind them.
__device__ void copy_rest(const LosslessPages& a, const Side& side, int of, int n, int lane) {
  if (of % 2) copy(side.from + 2 * n, side.to + 2 * n, a.layout.bytes - a.layout.v - 2 * n, lane);
}

__device__ int exponent_of(unsigned x) { return static_cast<int>(x >> 7 & 0xffu); }
__device__ unsigned number_of(const uint4& eight, int i) {
  const unsigned words[] = {eight.x, eight.y, eight.z, eight.w};
  return words[i / 2] >> 16 * (i % 2) & 0xffffu;
}

// Sums `mine` over the lanes before this one; `all` gets the warp's sum.
__device__ int before(int mine, int lane, int& all) {
  int sum = mine;
  for (int d = 1; d < 32; d *= 2)
    if (const int below = __shfl_up_sync(~0u, sum, d); lane >= d) sum += below;
  all = __shfl_sync(~0u, sum, 31);
  return sum - mine;
}

// Returns {base, exceptions}. count: 256 words of the warp.
__device__ uint2 base_of(const uint4* from, int n, int* count, int lane) {
  for (int i = lane; i < exponents; i += 32) count[i] = 0;
  __syncwarp();
  for (int i = lane; i < n / 8; i += 32) {
    const uint4 eight = from[i];
#pragma unroll
    for (int j = 0; j < 8; ++j) atomicAdd(&count[exponent_of(number_of(eight, j))], 1);
  }
  __syncwarp();
  int most = -1, base = 0;
  for (int first = lane; first + lossless_exception <= exponents; first += 32) {
    int sum = 0;
    for (int i = 0; i < lossless_exception; ++i) sum += count[first + i];
    if (sum > most) most = sum, base = first;
  }
  for (int m = 16; m > 0; m /= 2) {
    const int other = __shfl_xor_sync(~0u, most, m), at = __shfl_xor_sync(~0u, base, m);
    if (other > most || (other == most && at < base)) most = other, base = at;
  }
  return make_uint2(static_cast<unsigned>(base), static_cast<unsigned>(n - most));
}

__global__ void __launch_bounds__(threads) pack_kernel(const __grid_constant__ LosslessPages a) {
  __shared__ int counts[warps][exponents];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            n = a.layout.page_size * a.layout.head_dim;
  for (int of = static_cast<int>(blockIdx.x) * warps + warp; of < 2 * a.pages;
       of += static_cast<int>(gridDim.x) * warps) {
    const Side side = side_of(a, of);
    const auto* from = reinterpret_cast<const uint4*>(side.from);
    const uint2 base = base_of(from, n, counts[warp], lane);
    const std::int32_t bytes = lossless_bytes(n, static_cast<int>(base.y));
    const bool packs = bytes < 2 * n;
    if (lane == 0) *side.bytes = packs ? bytes : 2 * n;
    copy_rest(a, side, of, n, lane);
    if (!packs) {
      copy(side.from, side.to, 2 * n, lane);
      continue;
    }
    if (lane == 0) *reinterpret_cast<uint4*>(side.to) = make_uint4(base.x, base.y, 0, 0);
    std::byte* rest = side.to + lossless_header;
    auto* low = reinterpret_cast<unsigned short*>(rest + n);
    auto* high = reinterpret_cast<unsigned char*>(rest + n + n / 4);
    unsigned char* exceptions = high + n / 8;
    for (int i = lane; i < n / 8; i += 32) {
      const uint4 eight = from[i];
      unsigned lows = 0, highs = 0, kept[2] = {};
      int outside = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned x = number_of(eight, j), distance = static_cast<unsigned>(exponent_of(x)) - base.x;
        const unsigned code = distance < lossless_exception ? distance : lossless_exception;
        kept[j / 4] |= ((x >> 8 & 0x80u) | (x & 0x7fu)) << 8 * (j % 4);
        lows |= (code & 3u) << 2 * j, highs |= code >> 2 << j;
        outside += code == lossless_exception;
      }
      reinterpret_cast<uint2*>(rest)[i] = make_uint2(kept[0], kept[1]);
      low[i] = static_cast<unsigned short>(lows), high[i] = static_cast<unsigned char>(highs);
      int all;
      unsigned char* to = exceptions + before(outside, lane, all);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned exponent = static_cast<unsigned>(exponent_of(number_of(eight, j)));
        if (exponent - base.x >= lossless_exception) *to++ = static_cast<unsigned char>(exponent);
      }
      exceptions += all;
    }
    __syncwarp();  // the next side counts in the same words
  }
}

// What a lane reads of a run.
struct Packed {
  uint2 rest;
  unsigned low, high;
};

__global__ void __launch_bounds__(threads) unpack_kernel(const __grid_constant__ LosslessPages a) {
  constexpr int batch = 4;  // runs whose loads do not wait for each other
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            n = a.layout.page_size * a.layout.head_dim, runs = n / lossless_run;
  for (int of = static_cast<int>(blockIdx.x) * warps + warp; of < 2 * a.pages;
       of += static_cast<int>(gridDim.x) * warps) {
    const Side side = side_of(a, of);
    copy_rest(a, side, of, n, lane);
    if (*side.bytes == 2 * n) {
      copy(side.from, side.to, 2 * n, lane);
      continue;
    }
    const unsigned base = static_cast<unsigned>(*reinterpret_cast<const int*>(side.from));
    const std::byte* rest = side.from + lossless_header;
    const auto* low = reinterpret_cast<const unsigned short*>(rest + n);
    const auto* high = reinterpret_cast<const unsigned char*>(rest + n + n / 4);
    const unsigned char* exceptions = high + n / 8;
    for (int first = 0; first < runs; first += batch) {
      Packed x[batch];
#pragma unroll
      for (int r = 0; r < batch; ++r)
        if (const int i = (first + r) * 32 + lane; first + r < runs)
          x[r] = {reinterpret_cast<const uint2*>(rest)[i], low[i], high[i]};
#pragma unroll
      for (int r = 0; r < batch; ++r) {
        if (first + r >= runs) break;
        unsigned code[8];
        int outside = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          code[j] = (x[r].low >> 2 * j & 3u) | (x[r].high >> j & 1u) << 2;
          outside += code[j] == lossless_exception;
        }
        int all;
        const unsigned char* own = exceptions + before(outside, lane, all);
        exceptions += all;
        unsigned words[4] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const unsigned kept = (j < 4 ? x[r].rest.x : x[r].rest.y) >> 8 * (j % 4);
          const unsigned exponent = code[j] == lossless_exception ? unsigned{*own++} : base + code[j];
          words[j / 2] |= ((kept & 0x80u) << 8 | exponent << 7 | (kept & 0x7fu)) << 16 * (j % 2);
        }
        reinterpret_cast<uint4*>(side.to)[(first + r) * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

int blocks_of(const LosslessPages& a) { return std::clamp((2 * a.pages + warps - 1) / warps, 1, most_blocks); }

}  // namespace

static void lossless_pack_cuda(const LosslessPages& a, Stream s) {
  pack_kernel<<<blocks_of(a), threads, 0, stream_of(s)>>>(a);
  check_launch("lossless_pack");
}
KVLAB_ON_CUDA(lossless_pack, lossless_pack_cuda);

static void lossless_unpack_cuda(const LosslessPages& a, Stream s) {
  unpack_kernel<<<blocks_of(a), threads, 0, stream_of(s)>>>(a);
  check_launch("lossless_unpack");
}
KVLAB_ON_CUDA(lossless_unpack, lossless_unpack_cuda);

}  // namespace kvlab::ops
