// Linear layers of decode steps: weights stream from memory once, whatever the number of rows.
//
// A work item is a tile of 64 rows of W, or an equal slice of k of one. The first items of a block are its own, later
// ones go to whichever block asks first, as multiprocessors do not get equal shares of the memory. A block has one
// producer, which keeps a ring of bulk copies (64 rows x 128 columns of W, with the same 128 columns of x) full, and
// four warps that multiply: tensor cores take 16 rows of W as A and the rows of x as columns of B. Which element of k
// is which column of a fragment is free as long as A and B agree, so both are 16-byte loads of rows; which row of W or
// x is which row or column of the product is free too, and chosen so that the two rows that a quarter of a warp reads
// lie in different halves of the swizzled 128 bytes. Sums of slices go to four more warps, which leave them in memory;
// the last one to bring a slice adds all of them in order, so that it does not matter who took which.
//
// The ring takes less than half of shared memory, so that the next kernel's first copies are under way when this one
// ends. The next kernel starts when the last items are handed out: earlier, its ring would be full too early and the
// memory idle between the two.
#include <algorithm>

#include "base/launch.cuh"
#include "base/tensor_map.hpp"
#include "ops/linear_cuda.hpp"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int tile_rows = 64, pieces = 2, chunk = 64 * pieces;  // of W: rows of a tile, columns of a stage
constexpr int piece_bytes = tile_rows * 128;
constexpr int consumers = 4;  // warps that multiply, and as many that add slices
constexpr int threads = (2 * consumers + 1) * 32;
constexpr int most_items_of_slices = 2048;
constexpr int most_slices = 16;
constexpr int chunks_of_slice = 512 / chunk;  // at least

struct Args {
  int m, n;  // n: outputs, half of W's rows when gated
  int chunks, slices, items;
  int fixed;  // items that are not handed out: block b's are b, b + blocks, ...
  bool add, constant_weights;
  const float* bias;
  float* y;
  void* gated;
  std::int64_t y_stride, gated_stride;
  float* partial;
  int* arrived;   // [tile, warp] slices there, zero between launches
  int* progress;  // items handed out, blocks that have ended; zero between launches
};

template <int Columns>
struct Stage {
  static constexpr int x_bytes = Columns * 8 * 128;  // 64 columns of x
  static constexpr int bytes = pieces * (piece_bytes + x_bytes);
  static constexpr int at_once = Columns > 2 ? 1 : pieces;  // pieces in registers
  static constexpr int sums = Columns * 4 * 32;             // of one warp
  static constexpr int handover = consumers * (sums * 4 + 16 + 4);
  static constexpr int count = (112 * 1024 - handover) / (bytes + 16 + 4);
  // The stages; two barriers a stage, two a pair of warps; the sums of a pair; items of stages and pairs.
  static constexpr int barriers = count * bytes, given = barriers + count * 16, sum_at = given + consumers * 16;
  static constexpr int items = sum_at + consumers * sums * 4, shared = items + (count + consumers) * 4;
};

// Row of a tile of eight that lane group g reads: rows 2i and 2i + 1 of the fragment are four rows apart.
__device__ __forceinline__ int row_of(int g) { return (g >> 1) | ((g & 1) << 2); }

// The chunks of an item in order.
struct Walk {
  int item, at, last;
  __device__ Walk(const Args& a, int of) : item(of) {
    const int slice = item % a.slices;
    at = a.chunks * slice / a.slices;
    last = a.chunks * (slice + 1) / a.slices;
  }
};

template <int Columns, bool Gated>
__device__ void produce(const Args& a, const CUtensorMap& weights, const CUtensorMap& input, unsigned stages,
                        volatile int* items) {
  using S = Stage<Columns>;
  const unsigned full = stages + S::barriers, empty = full + S::count * 8;
  const std::uint64_t policy = read_once_policy();
  const int blocks = static_cast<int>(gridDim.x);
  const auto copy_weights = [&](int stage, const Walk& w) {
    const unsigned to = stages + stage * S::bytes, barrier = full + 8 * stage;
    const int tile = w.item / a.slices;
    items[stage] = w.item;
    barrier_expect(barrier, S::bytes);
    for (int p = 0; p < pieces; ++p)
      if constexpr (Gated) {
        bulk_copy_2d(to + p * piece_bytes, &weights, w.at * chunk + p * 64, tile * 32, barrier, policy);
        bulk_copy_2d(to + p * piece_bytes + piece_bytes / 2, &weights, w.at * chunk + p * 64, a.n + tile * 32, barrier,
                     policy);
      } else {
        bulk_copy_2d(to + p * piece_bytes, &weights, w.at * chunk + p * 64, tile * tile_rows, barrier, policy);
      }
  };
  const auto copy_input = [&](int stage, const Walk& w) {
    const unsigned to = stages + stage * S::bytes + pieces * piece_bytes, barrier = full + 8 * stage;
    for (int p = 0; p < pieces; ++p) bulk_copy_2d(to + p * S::x_bytes, &input, w.at * chunk + p * 64, 0, barrier);
  };
  // To the next chunk of the block's own items; false after the last one.
  const auto next = [&](Walk& w) {
    if (++w.at < w.last) return true;
    if (w.item + blocks >= a.fixed) return false;
    w = Walk(a, w.item + blocks);
    return true;
  };
  if (!a.constant_weights) wait_for_predecessor();
  Walk w(a, static_cast<int>(blockIdx.x)), x = w;
  int i = 0;
  bool more = true;
  for (; i < S::count && more; ++i, more = next(w)) copy_weights(i, w);
  wait_for_predecessor();
  const bool shared = a.fixed < a.items;
  int ahead = shared ? atomicAdd(a.progress, 1) : 0;  // asked for an item early
  for (int j = 0; j < i; ++j, next(x)) copy_input(j, x);
  const auto wait = [&] {
    const int stage = i % S::count;
    if (i >= S::count) barrier_wait(empty + 8 * stage, (i / S::count - 1) & 1);
    return stage;
  };
  const auto copy = [&] {
    const int stage = wait();
    copy_weights(stage, w);
    copy_input(stage, w);
    ++i;
  };
  for (; more; more = next(w)) copy();
  if (shared) {
    for (;;) {
      const int item = a.fixed + ahead;
      if (item + blocks >= a.items) let_successor_start();
      if (item >= a.items) break;
      ahead = atomicAdd(a.progress, 1);
      for (w = Walk(a, item); w.at < w.last; ++w.at) copy();
    }
    if (atomicAdd(a.progress + 1, 1) == blocks - 1) a.progress[0] = a.progress[1] = 0;
  }
  const int stage = wait();
  items[stage] = -1;
  barrier_arrive(full + 8 * stage);
}

// sum[c][e]: row (e < 2 ? low : high) of W, row 8c + q + 4 (e % 2) of x.
template <class T, int Columns, bool Gated>
__device__ void finish(const Args& a, int low, int high, int q, const float (&sum)[Columns][4]) {
#pragma unroll
  for (int c = 0; c < Columns; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * c + q + 4 * e;
      if (row >= a.m) continue;
      if constexpr (Gated) {
        const float gate = sum[c][e], up = sum[c][2 + e];
        if (low < a.n)
          static_cast<T*>(a.gated)[row * a.gated_stride + low] = static_cast<T>(gate / (1.f + expf(-gate)) * up);
      } else {
        const auto put = [&](int output, float value) {
          if (output >= a.n) return;
          float* to = a.y + row * a.y_stride + output;
          if (a.bias) value += a.bias[output];
          if (a.add) value += *to;
          *to = value;
        };
        put(low, sum[c][e]);
        put(high, sum[c][2 + e]);
      }
    }
}

// What one of the adding warps does: sums of its pair's slices, the last of a tile to finish it.
template <class T, int Columns, bool Gated>
__device__ void add_slices(const Args& a, int warp, int lane, int low, int high, unsigned given, unsigned taken,
                           const float* sums, volatile const int* handed) {
  using S = Stage<Columns>;
  const auto used = [&](int v) { return 8 * (v / 4) + 4 * (v % 2) < a.m; };
  for (int h = 0;; ++h) {
    barrier_wait(given, h & 1);
    const int item = *handed;
    if (item < 0) return;
    const int tile = item / a.slices, slice = item % a.slices;
    float* partial = a.partial + (std::int64_t{tile} * a.slices * consumers + warp) * S::sums + lane;
    float* mine = partial + slice * consumers * S::sums;
#pragma unroll
    for (int v = 0; v < Columns * 4; ++v)
      if (used(v)) __stcg(mine + v * 32, sums[v * 32 + lane]);
    __syncwarp();
    if (lane == 0) barrier_arrive(taken);
    __threadfence();
    __syncwarp();
    int before = 0;
    if (lane == 0) before = atomicAdd(a.arrived + tile * consumers + warp, 1);
    if (__shfl_sync(~0u, before, 0) != a.slices - 1) continue;
    __threadfence();
    if (lane == 0) a.arrived[tile * consumers + warp] = 0;
    constexpr int at_once = Columns > 2 ? 1 : 16 / Columns;
    float sum[Columns][4] = {};
    for (int s = 0; s < a.slices; s += at_once) {
      float part[at_once][Columns * 4];
#pragma unroll
      for (int i = 0; i < at_once; ++i)
#pragma unroll
        for (int v = 0; v < Columns * 4; ++v)
          part[i][v] = used(v) && s + i < a.slices ? __ldcg(partial + (s + i) * consumers * S::sums + v * 32) : 0.f;
#pragma unroll
      for (int i = 0; i < at_once; ++i)
#pragma unroll
        for (int v = 0; v < Columns * 4; ++v) sum[v / 4][v % 4] += part[i][v];
    }
    const int first = tile * (Gated ? tile_rows / 2 : tile_rows);
    finish<T, Columns, Gated>(a, first + low, first + high, lane % 4, sum);
  }
}

template <class T, int Columns, bool Gated>
__global__ void __launch_bounds__(threads, Columns > 4 ? 1 : 2)
    linear_kernel(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap input) {
  using S = Stage<Columns>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, pair = threadIdx.x / 32 % consumers;
  const unsigned stages = shared_address(memory), full = stages + S::barriers, empty = full + S::count * 8;
  const unsigned given = stages + S::given + 16 * pair, taken = given + 8;
  int* items = reinterpret_cast<int*>(memory + S::items);
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::count; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, consumers);
    for (int p = 0; p < 2 * consumers; ++p) barrier_init(stages + S::given + 8 * p, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (a.fixed >= a.items) let_successor_start();
  if (threadIdx.x / 32 == 2 * consumers) {
    if (lane == 0) produce<Columns, Gated>(a, weights, input, stages, items);
    return;
  }
  wait_for_predecessor();

  // Row of the stage whose sums are the fragment's row g (low) and g + 8 (high).
  const int row = row_of(g), low = (Gated ? 8 : 16) * pair + row, high = Gated ? tile_rows / 2 + low : low + 8;
  float* handover = reinterpret_cast<float*>(memory + S::sum_at) + pair * S::sums;
  volatile int* handed = items + S::count + pair;
  if (threadIdx.x / 32 >= consumers) {
    if (a.slices > 1) add_slices<T, Columns, Gated>(a, pair, lane, low, high, given, taken, handover, handed);
    return;
  }
  const unsigned vector = (q ^ row) * 16;
  int i = 0;
  for (int h = 0;; ++h) {
    barrier_wait(full + 8 * (i % S::count), (i / S::count) & 1);
    const int item = static_cast<volatile int*>(items)[i % S::count];
    const auto hand_over = [&](auto&& write) {  // once the warp that adds has read what was there
      if (h > 0) barrier_wait(taken, (h - 1) & 1);
      write();
      if (lane == 0) *handed = item;
      __syncwarp();
      if (lane == 0) barrier_arrive(given);
    };
    if (item < 0) {
      if (a.slices > 1) hand_over([] {});
      return;
    }
    const int tile = item / a.slices, slice = item % a.slices;
    const int count = a.chunks * (slice + 1) / a.slices - a.chunks * slice / a.slices;
    float sum[Columns][4], other[Columns][4];
#pragma unroll
    for (int c = 0; c < Columns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[c][e] = other[c][e] = 0;
    for (int k = 0; k < count; ++k, ++i) {
      const int stage = i % S::count;
      const unsigned w = stages + stage * S::bytes + vector, x = w + pieces * piece_bytes + row * 128;
      barrier_wait(full + 8 * stage, (i / S::count) & 1);
#pragma unroll
      for (int p = 0; p < pieces; p += S::at_once) {
        constexpr int steps = 2 * S::at_once;  // of 32 columns
        uint4 w0[steps], w1[steps], b[steps][Columns];
#pragma unroll
        for (int s = 0; s < steps; ++s) {
          const unsigned at = p + s / 2, flip = s % 2 * 64;
          w0[s] = load_shared16((w + at * piece_bytes + low * 128) ^ flip);
          w1[s] = load_shared16((w + at * piece_bytes + high * 128) ^ flip);
#pragma unroll
          for (int c = 0; c < Columns; ++c) b[s][c] = load_shared16((x + at * S::x_bytes + c * 1024) ^ flip);
        }
#pragma unroll
        for (int s = 0; s < steps; ++s)
#pragma unroll
          for (int c = 0; c < Columns; ++c) {
            mma16816<T>(sum[c], w0[s].x, w1[s].x, w0[s].y, w1[s].y, b[s][c].x, b[s][c].y);
            mma16816<T>(other[c], w0[s].z, w1[s].z, w0[s].w, w1[s].w, b[s][c].z, b[s][c].w);
          }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * stage);
    }
#pragma unroll
    for (int c = 0; c < Columns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[c][e] += other[c][e];

    if (a.slices > 1) {
      hand_over([&] {
#pragma unroll
        for (int v = 0; v < Columns * 4; ++v) handover[v * 32 + lane] = sum[v / 4][v % 4];
      });
    } else {
      const int first = tile * (Gated ? tile_rows / 2 : tile_rows);
      finish<T, Columns, Gated>(a, first + low, first + high, q, sum);
    }
  }
}

// Tiles of 8 rows of x.
int column_tiles(std::int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : m <= 40 ? 5 : 8; }

template <class T, int Columns, bool Gated>
void launch_kernel(const Args& a, int blocks, const CUtensorMap& weights, const CUtensorMap& input,
                   cudaStream_t stream) {
  const auto kernel = linear_kernel<T, Columns, Gated>;
  static const cudaError_t once =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Stage<Columns>::shared);
  check(once, "linear");
  launch("linear", kernel, blocks, threads, Stage<Columns>::shared, stream, true, a, weights, input);
}

template <class T, bool Gated>
void launch_columns(const Args& a, int blocks, const CUtensorMap& weights, const CUtensorMap& input,
                    cudaStream_t stream) {
  switch (column_tiles(a.m)) {
    case 1: return launch_kernel<T, 1, Gated>(a, blocks, weights, input, stream);
    case 2: return launch_kernel<T, 2, Gated>(a, blocks, weights, input, stream);
    case 4: return launch_kernel<T, 4, Gated>(a, blocks, weights, input, stream);
    case 5: return launch_kernel<T, 5, Gated>(a, blocks, weights, input, stream);
    default: return launch_kernel<T, 8, Gated>(a, blocks, weights, input, stream);
  }
}

template <class T>
void launch_type(const Args& a, int blocks, const CUtensorMap& weights, const CUtensorMap& input, cudaStream_t stream) {
  a.gated ? launch_columns<T, true>(a, blocks, weights, input, stream)
          : launch_columns<T, false>(a, blocks, weights, input, stream);
}

}  // namespace

void linear_stream_cuda(const LinearArgs& in, void* handle) {
  if (in.m < 1) return;
  if (in.m > linear_stream_most)
    throw Error(Errc::internal,
                "got " + std::to_string(in.m) + " rows, wanted at most " + std::to_string(linear_stream_most),
                "op linear (CUDA)");
  const bool half = in.dtype == DType::f16, gated = in.gated != nullptr;
  Args a = {};
  a.m = static_cast<int>(in.m);
  a.n = static_cast<int>(gated ? in.n / 2 : in.n);
  a.chunks = static_cast<int>((in.k + chunk - 1) / chunk);
  a.add = in.add, a.constant_weights = in.constant_weights;
  a.bias = in.bias;
  a.y = in.y, a.y_stride = in.y_stride;
  a.gated = in.gated, a.gated_stride = in.gated_stride;
  const int outputs = gated ? tile_rows / 2 : tile_rows, tiles = (a.n + outputs - 1) / outputs;
  a.slices = std::clamp(std::min(a.chunks / chunks_of_slice, most_items_of_slices / tiles), 1, most_slices);
  a.items = tiles * a.slices;
  const int grid = std::min(multiprocessors(), a.items);
  const int each = a.items / grid, at_first = 6 * a.slices / a.chunks + 1;  // items of a block, those of a full ring
  a.fixed = std::min(a.items, std::max(each / 2, at_first) * grid);
  if (a.slices > 1) {
    const bool few = in.m <= linear_stream_rows;
    const std::size_t columns = few ? linear_stream_rows : linear_stream_most;
    a.partial = static_cast<float*>(kept(handle, few ? "linear partial" : "linear partial, many rows",
                                         most_items_of_slices * tile_rows * columns * sizeof(float)));
    a.arrived = static_cast<int*>(zeroed(handle, "linear arrived", most_items_of_slices * consumers * sizeof(int)));
  }
  a.progress = static_cast<int*>(zeroed(handle, "linear progress", 2 * sizeof(int)));
  const CUtensorMap weights = matrix_map(in.weight, half, in.n, in.k, in.k, outputs),
                    input = matrix_map(in.x, half, in.m, in.k, in.x_stride, 8 * column_tiles(in.m));
  half ? launch_type<__half>(a, grid, weights, input, stream_of(handle))
       : launch_type<__nv_bfloat16>(a, grid, weights, input, stream_of(handle));
}

}  // namespace kvlab::ops
