// Keys in 4 bits on a GPU. A warp multiplies tiles of 16 candidates. Codes become halves, which hold them exactly. A
// vector takes two columns of halves: its rounded value and the rest, times a power of two that makes them large.
#include "ops/score/key_codes.hpp"

#include <algorithm>
#include <bit>

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "base/ptx.cuh"
#include "ops/page/paged.cuh"
#include "ops/score/heads.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int warps = score_threads / 32, tile = 16, column_vectors = 4, pass_vectors = 32;

// A warp codes a key. A lane has eight of its elements.
__global__ void __launch_bounds__(score_threads)
    code_kernel(const __grid_constant__ DeviceKv kv, int newest, const __grid_constant__ KeyCodes c) {
  const int lane = static_cast<int>(threadIdx.x) % 32, head = static_cast<int>(blockIdx.y),
            row = static_cast<int>(blockIdx.z), slot = kv.kv.slots[row], of_block = static_cast<int>(blockDim.x) / 32;
  const int n = static_cast<int>(min(static_cast<std::int64_t>(kv.tokens(row, head)), c.code.extent[2]));
  for (int t = n - min(n, newest) + static_cast<int>(blockIdx.x) * of_block + static_cast<int>(threadIdx.x) / 32; t < n;
       t += static_cast<int>(gridDim.x) * of_block) {
    const auto token = kv.token(row, head, t);
    const bool has = 8 * lane < kv.head_dim;
    float x[8], least = INFINITY, greatest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = has ? token.key(8 * lane + i) : NAN;
      least = fminf(least, x[i]), greatest = fmaxf(greatest, x[i]);
    }
    least = least_of_lanes(least), greatest = most_of_lanes(greatest);
    const float scale = range_step(least, greatest, key_code_bits);
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= range_code(x[i], least, scale, key_code_bits) << 4 * i;
    if (has) reinterpret_cast<unsigned*>(&c.code(slot, head, t, 0))[lane] = word;
    if (lane == 0) {
      float* range = &c.range(slot, head, t, 0);
      range[0] = least <= greatest ? least : 0.f, range[1] = scale;
    }
  }
}

struct Dots {
  DeviceKv kv;
  View<const float, 3> vectors;
  IndexList list;
  KeyCodes codes;
  View<float, 3> out;
  int group, passes;  // vectors of a KV head, and parts of them
  int unit, shift;    // places of an entry; 2^shift is their number, -1 = none is

  __device__ int candidates(std::int64_t at, int head) const {
    return static_cast<int>(
        min(min(static_cast<std::int64_t>(list.count(at, head)), list.index.extent[2]) * unit, out.extent[2]));
  }
  __device__ int place(std::int64_t at, int head, int i) const {
    const int entry = shift >= 0 ? i >> shift : i / unit;
    return list.index(at, head, entry) * unit + (i - entry * unit);
  }
  __device__ int tokens(int row, int head) const {
    return static_cast<int>(min(static_cast<std::int64_t>(kv.tokens(row, head)), codes.code.extent[2]));
  }
};

__global__ void __launch_bounds__(score_threads) plain_dots_kernel(const __grid_constant__ Dots a) {
  const int q = static_cast<int>(blockIdx.y), head = q / a.group, row = static_cast<int>(blockIdx.z);
  const std::int64_t list = a.list.at(row), slot = a.kv.kv.slots[row];
  const int n = a.tokens(row, head), count = a.candidates(list, head);
  for (int i = static_cast<int>(blockIdx.x * score_threads + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x) * score_threads) {
    const int t = a.place(list, head, i);
    float sum = -INFINITY;
    if (t >= 0 && t < n) {
      const std::uint8_t* code = &a.codes.code(slot, head, t, 0);
      const float least = a.codes.range(slot, head, t, 0), scale = a.codes.range(slot, head, t, 1);
      sum = 0;
      for (int d = 0; d < a.kv.head_dim; ++d)
        sum += a.vectors(row, q, d) * (least + scale * static_cast<float>(code[d / 2] >> d % 2 * 4 & 15));
    }
    a.out(row, q, i) = sum;
  }
}

// What a lane holds of a tile: a quarter of candidate lane / 4, and of the eighth one after it.
template <int Words>
struct Candidates {
  unsigned x[2][Words];
  float2 range[2];
  bool there[2];

  __device__ __forceinline__ void load(const Dots& a, std::int64_t list, int slot, int head, int n, int count,
                                       int first, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = min(first + lane / 4 + 8 * half, count - 1), t = a.place(list, head, i);
      there[half] = static_cast<unsigned>(t) < static_cast<unsigned>(n);
      const int at = there[half] ? t : 0;
      const auto* from = reinterpret_cast<const unsigned*>(&a.codes.code(slot, head, at, 0)) + lane % 4 * Words;
      if constexpr (Words % 4 == 0) {
#pragma unroll
        for (int w = 0; w < Words; w += 4) {
          const uint4 v = load_once16(from + w);
          x[half][w] = v.x, x[half][w + 1] = v.y, x[half][w + 2] = v.z, x[half][w + 3] = v.w;
        }
      } else if constexpr (Words == 2) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
        x[half][0] = v.x, x[half][1] = v.y;
      } else {
#pragma unroll
        for (int w = 0; w < Words; ++w) x[half][w] = __ldg(from + w);
      }
      range[half] = __ldg(reinterpret_cast<const float2*>(&a.codes.range(slot, head, at, 0)));
    }
  }
};

// Codes i and i + 4 of a word as halves. 0x6400 is 1024, whose last bit counts 1.
__device__ __forceinline__ unsigned halves_of(unsigned word, int i) {
  return sub_halves(and_or(word >> 4 * i, 0x000f000fu, 0x64006400u), 0x64006400u);
}

struct Columns {
  uint4* fragments;  // [column tile, word, lane]
  float *sums, *back;
};

// Lays out `count` vectors from `first` on. sums: of a vector's elements. back: takes its power of two off again.
template <int Words>
__device__ __forceinline__ void lay_out(const Dots& a, int row, int first, int count, int columns, const Columns& c) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int v = warp; v < count; v += warps) {
    float sum = 0, most = 0;
    for (int d = lane; d < 32 * Words; d += 32) {
      const float x = a.vectors(row, first + v, d);
      sum += x, most = fmaxf(most, fabsf(x));
    }
    sum = sum_of_lanes(sum), most = most_of_lanes(most);
    if (lane == 0) c.sums[v] = sum, c.back[v] = most > 0 && most < INFINITY ? exp2f(floorf(log2f(most)) - 10.f) : 1.f;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < columns * Words * 32; i += score_threads) {
    const int of = i % 32, word = i / 32 % Words, vector = i / 32 / Words * column_vectors + of / 8;
    unsigned out[4] = {};
    if (vector < count) {
      const float* v = &a.vectors(row, first + vector, (of % 4 * Words + word) * 8);
      const float by = 1 / c.back[vector];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float low = v[k] * by, high = v[k + 4] * by;
        out[k] = Pair<__half>::pack(low, high);
        if (of / 4 % 2) {
          float x, y;
          Pair<__half>::unpack(out[k], x, y);
          out[k] = Pair<__half>::pack(low - x, high - y);
        }
      }
    }
    c.fragments[i] = make_uint4(out[0], out[1], out[2], out[3]);
  }
  __syncthreads();
}

// Four blocks of a multiprocessor hide each other's loads, where registers suffice.
template <int Words>
__global__ void __launch_bounds__(score_threads, Words > 4 ? 2 : 4) dots_kernel(const __grid_constant__ Dots a) {
  extern __shared__ uint4 fragments[];
  __shared__ float sums[pass_vectors], back[pass_vectors];
  const int head = static_cast<int>(blockIdx.y) / a.passes,
            offset = static_cast<int>(blockIdx.y) % a.passes * pass_vectors, row = static_cast<int>(blockIdx.z),
            slot = a.kv.kv.slots[row];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, quarter = lane % 4;
  const std::int64_t list = a.list.at(row);
  const int n = a.tokens(row, head), count = a.candidates(list, head),
            step = static_cast<int>(gridDim.x) * warps * tile;
  int first = (static_cast<int>(blockIdx.x) * warps + warp) * tile;
  Candidates<Words> next;
  if (first < count) next.load(a, list, slot, head, n, count, first, lane);

  const int first_vector = head * a.group + offset, vectors = min(pass_vectors, a.group - offset),
            columns = (vectors + column_vectors - 1) / column_vectors;
  lay_out<Words>(a, row, first_vector, vectors, columns, {fragments, sums, back});
  const unsigned fragment = shared_address(fragments + lane);
  for (; first < count; first += step) {
    const Candidates<Words> own = next;
    if (first + step < count) next.load(a, list, slot, head, n, count, first + step, lane);
    for (int column = 0; column < columns; ++column) {
      float sum[4] = {};
#pragma unroll
      for (int w = 0; w < Words; ++w) {
        const uint4 b = load_shared16(fragment + (column * Words + w) * 512);
        mma16816<__half>(sum, halves_of(own.x[0][w], 0), halves_of(own.x[1][w], 0), halves_of(own.x[0][w], 1),
                         halves_of(own.x[1][w], 1), b.x, b.y);
        mma16816<__half>(sum, halves_of(own.x[0][w], 2), halves_of(own.x[1][w], 2), halves_of(own.x[0][w], 3),
                         halves_of(own.x[1][w], 3), b.z, b.w);
      }
      const int vector = column * column_vectors + quarter;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = first + lane / 4 + 8 * half;
        if (vector >= vectors || i >= count) continue;
        const float dot = (sum[2 * half] + sum[2 * half + 1]) * back[vector];
        a.out(row, first_vector + vector, i) =
            own.there[half] ? own.range[half].x * sums[vector] + own.range[half].y * dot : -INFINITY;
      }
    }
  }
}

template <int Words>
void launch_dots(Dots& a, Stream s) {
  const PagedKv& kv = a.kv.kv;
  a.passes = (a.group + pass_vectors - 1) / pass_vectors;
  const int most = std::min(a.group, pass_vectors), columns = (most + column_vectors - 1) / column_vectors;
  // As many blocks as run at once: each lays out the vectors first.
  const std::int64_t pairs = std::int64_t{kv.kv_heads} * a.passes * kv.rows,
                     useful = (a.out.extent[2] + warps * tile - 1) / (warps * tile),
                     blocks = std::max<std::int64_t>(1, std::min(useful, (4 * multiprocessors() + pairs - 1) / pairs));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(kv.kv_heads * a.passes),
                  static_cast<unsigned>(kv.rows));
  const auto kernel = dots_kernel<Words>;
  kernel<<<grid, score_threads, columns * Words * 512, stream_of(s)>>>(a);
}

void code_keys_cuda(const PagedKv& kv, int newest, const KeyCodes& codes, Stream s) {
  if (kv.rows == 0 || newest == 0) return;
  const int threads = newest == 1 ? 32 : score_threads;
  const std::int64_t tokens = std::min<std::int64_t>(newest, codes.code.extent[2]);
  code_kernel<<<grid_of(kv.kv_heads, kv.rows, tokens, threads / 32), threads, 0, stream_of(s)>>>(DeviceKv(kv), newest,
                                                                                                 codes);
  check_launch("code_keys");
}

void coded_entry_dot_cuda(const PagedKv& kv, View<const float, 3> vectors, const IndexList& list, int unit,
                          const KeyCodes& codes, Scores out, Stream s) {
  if (kv.rows == 0) return;
  const auto places = static_cast<unsigned>(unit);
  Dots a{DeviceKv(kv),
         vectors,
         list,
         codes,
         out,
         static_cast<int>(vectors.extent[1]) / kv.kv_heads,
         1,
         unit,
         std::has_single_bit(places) ? std::countr_zero(places) : -1};
  const View<std::uint8_t, 4>& c = codes.code;
  const View<float, 4>& r = codes.range;
  const bool whole = reinterpret_cast<std::uintptr_t>(c.data) % 16 == 0 && c.stride[0] % 16 == 0 &&
                     c.stride[1] % 16 == 0 && c.stride[2] % 16 == 0 &&
                     reinterpret_cast<std::uintptr_t>(r.data) % 8 == 0 && r.stride[0] % 2 == 0 &&
                     r.stride[1] % 2 == 0 && r.stride[2] % 2 == 0;
  switch (whole ? kv.head_dim : 0) {
    case 64: launch_dots<2>(a, s); break;
    case 96: launch_dots<3>(a, s); break;
    case 128: launch_dots<4>(a, s); break;
    case 256: launch_dots<8>(a, s); break;
    default:
      plain_dots_kernel<<<grid_of(vectors.extent[1], kv.rows, out.extent[2]), score_threads, 0, stream_of(s)>>>(a);
  }
  check_launch("coded_row_dot");
}

}  // namespace

KVLAB_ON_CUDA(code_keys, code_keys_cuda);
KVLAB_ON_CUDA(coded_entry_dot, coded_entry_dot_cuda);

}  // namespace kvlab::ops
