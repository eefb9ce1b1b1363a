// Linear layers of decode steps: every weight streams from memory once, whatever the number of rows.
//
// A work item is a tile of 64 or 48 rows of W, whichever spreads better over the multiprocessors. Where there are too
// few tiles, an item is an equal slice of k of a tile. A block has one producer warp and one warp per 16 rows of the
// tile. The producer keeps a ring of bulk copies full: 128 columns of the tile's rows of W, and the same 128 columns of
// x. The other warps multiply on tensor cores, with 16 rows of W as A and the rows of x as columns of B.
//
// A and B may map elements of k to columns of a fragment in any way, if both use the same one. So both load 16 bytes of
// a row. Any map from rows of W or x to rows or columns of the product is right too. row_of is such that the two rows
// that a quarter of a warp reads lie in different halves of the swizzled 128 bytes. Each slice writes partial sums; the
// last slice to arrive adds them in order.
//
// The ring takes more than half of shared memory, so each multiprocessor has one block. Where two blocks fit, a
// launch's blocks gather on the half of the multiprocessors that is free first. Later kernels of the step stay as
// uneven (core/bench/RESULTS.md). With one, the next kernel's first copies start there as soon as this block ends.
#include <algorithm>

#include "base/lanes.cuh"
#include "base/launch.cuh"
#include "base/tensor_map.hpp"
#include "ops/linear/linear.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int most_rows = 64, warp_rows = 16;   // rows of W: of a tile, of a warp
constexpr int pieces = 2, chunk = 64 * pieces;  // a stage has 2 pieces of 64 columns
constexpr int most_threads = (most_rows / warp_rows + 2) * 32;
constexpr int ring_bytes = 184 * 1024;
constexpr int most_items_of_slices = 256;      // with slices a block has at most one item
constexpr int enough_tiles = 80;               // tiles that keep the memory busy without slices
constexpr int chunks_of_slice = 1024 / chunk;  // fewest chunks of a slice: it costs a round trip through memory

struct Args {
  int m, n;                          // n: outputs, half of W's rows when gated
  int tile_rows, consumers, stages;  // consumers: warps, one per 16 rows of a tile
  int chunks, slices, items;
  bool add, constant_weights;
  const float* bias;
  float* y;
  void* gated;
  std::int64_t y_stride, gated_stride;
  float* partial;
  int* arrived;
  NormLeft left;
  NormTaken taken;
  int k;  // elements of a row of x
};

template <int Columns>
struct Stage {
  static constexpr int x_bytes = Columns * 8 * 128;  // 64 columns of x
  static __host__ __device__ int bytes(int tile_rows) { return pieces * (tile_rows * 128 + x_bytes); }
};

// A place in the ring of stages. `odd` is the parity of the phase that its barrier is in.
struct Place {
  int stage = 0;
  unsigned odd = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, odd ^= 1;
  }
};

// Row of a tile of eight that lane group g reads: rows 2i and 2i + 1 of the fragment are four rows apart.
__device__ __forceinline__ int row_of(int g) { return (g >> 1) | ((g & 1) << 2); }

// Walks over the chunks of a block's items in order.
struct Walk {
  int chunks, slices, item, end, at, last;
  __device__ Walk(const Args& a, int begin, int stop)
      : chunks(a.chunks), slices(a.slices), item(begin), end(stop), at(0), last(0) {
    enter();
  }
  __device__ void enter() {
    const int slice = item % slices;
    at = chunks * slice / slices;
    last = chunks * (slice + 1) / slices;
  }
  __device__ bool valid() const { return item < end; }
  __device__ void next() {
    if (++at == last) {
      ++item;
      enter();
    }
  }
};

template <int Columns, bool Gated>
__device__ void produce(const Args& a, int begin, int end, const CUtensorMap& weights, const CUtensorMap& input,
                        unsigned stages, unsigned full, unsigned empty) {
  using S = Stage<Columns>;
  const int piece_bytes = a.tile_rows * 128, bytes = S::bytes(a.tile_rows);
  const std::uint64_t policy = read_once_policy();
  const auto copy_weights = [&](int stage, const Walk& w) {
    const unsigned to = stages + stage * bytes, barrier = full + 8 * stage;
    const int tile = w.item / w.slices;
    barrier_expect(barrier, static_cast<unsigned>(bytes));
    for (int p = 0; p < pieces; ++p)
      if constexpr (Gated) {
        const int half = a.tile_rows / 2;
        bulk_copy_2d(to + p * piece_bytes, &weights, w.at * chunk + p * 64, tile * half, barrier, policy);
        bulk_copy_2d(to + p * piece_bytes + piece_bytes / 2, &weights, w.at * chunk + p * 64, a.n + tile * half,
                     barrier, policy);
      } else {
        bulk_copy_2d(to + p * piece_bytes, &weights, w.at * chunk + p * 64, tile * a.tile_rows, barrier, policy);
      }
  };
  const auto copy_input = [&](int stage, const Walk& w) {
    const unsigned to = stages + stage * bytes + pieces * piece_bytes, barrier = full + 8 * stage;
    for (int p = 0; p < pieces; ++p) bulk_copy_2d(to + p * S::x_bytes, &input, w.at * chunk + p * 64, 0, barrier);
  };
  if (!a.constant_weights) wait_for_predecessor();
  Walk w(a, begin, end), x = w;
  int i = 0;
  for (; i < a.stages && w.valid(); ++i, w.next()) copy_weights(i, w);
  wait_for_predecessor();
  for (int j = 0; j < i; ++j, x.next()) copy_input(j, x);
  for (Place at; w.valid(); at.next(a.stages), w.next()) {
    barrier_wait(empty + 8 * at.stage, at.odd);
    copy_weights(at.stage, w);
    copy_input(at.stage, w);
  }
}

// scales[row] = 1 / sqrt(mean(x^2) + eps) of row `row` of x. One warp computes it while the others multiply; eight
// lanes share a row.
template <int Columns>
__device__ __forceinline__ void take_norm(const Args& a, int g, int q, float* scales) {
  const int count = a.k / (4 * static_cast<int>(norm_piece));
  float sum[2 * Columns];
#pragma unroll
  for (int i = 0; i < 2 * Columns; ++i) {
    const int row = 4 * i + q;
    const float4* from = reinterpret_cast<const float4*>(a.taken.squares) + std::int64_t{row} * count;
    sum[i] = 0;
#pragma unroll 8
    for (int j = g; j < count; j += 8) {
      const float4 v = row < a.m ? __ldcg(from + j) : make_float4(0, 0, 0, 0);
      sum[i] += (v.x + v.y) + (v.z + v.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * Columns; ++i) {
    sum[i] = sum_of_lanes<4, 16>(sum[i]);
    if (g == 0) scales[4 * i + q] = 1 / sqrtf(sum[i] / static_cast<float>(a.k) + a.taken.eps);
  }
}

// Bias and old y of a lane's outputs, and the next norm's weights for them. Lanes load them before the products.
template <int Columns>
struct Before {
  float old[Columns][4], weight[2];

  // old has the order of the sums.
  template <bool Gated>
  __device__ __forceinline__ void load_old(const Args& a, int low, int high, int q) {
#pragma unroll
    for (int c = 0; c < Columns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        old[c][e] = 0;
        if constexpr (Gated) continue;
        const int row = 8 * c + q + 4 * (e % 2), output = e < 2 ? low : high;
        if (row >= a.m || output >= a.n) continue;
        if (a.bias) old[c][e] = a.bias[output];
        if (a.add) old[c][e] += __ldcg(a.y + row * a.y_stride + output);
      }
    const bool norm = !Gated && a.left.weight;
    weight[0] = norm && low < a.n ? a.left.weight[low] : 0, weight[1] = norm && high < a.n ? a.left.weight[high] : 0;
  }
};

// sum[c][e] belongs to row (e < 2 ? low : high) of W and row 8c + q + 4 (e % 2) of x. `first` is the warp's lowest
// output. All lanes of the warp must call it.
template <class T, int Columns, bool Gated>
__device__ void finish(const Args& a, int first, int low, int high, int g, int q, const float (&sum)[Columns][4],
                       const Before<Columns>& before, const float* scales) {
#pragma unroll
  for (int c = 0; c < Columns; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * c + q + 4 * e;
      const float scale = a.taken.squares ? scales[row] : 1.f;
      const bool put_low = row < a.m && low < a.n, put_high = row < a.m && high < a.n;
      if constexpr (Gated) {
        const float gate = sum[c][e] * scale, up = sum[c][2 + e] * scale;
        if (put_low)
          static_cast<T*>(a.gated)[row * a.gated_stride + low] = static_cast<T>(gate / (1.f + expf(-gate)) * up);
      } else {
        const float x = sum[c][e] * scale + before.old[c][e], y = sum[c][2 + e] * scale + before.old[c][2 + e];
        float* to = a.y + row * a.y_stride;
        if (put_low) to[low] = x;
        if (put_high) to[high] = y;
        if (!a.left.weight) continue;
        T* out = static_cast<T*>(a.left.out) + row * a.left.out_stride;
        if (put_low) out[low] = static_cast<T>(x * before.weight[0]);
        if (put_high) out[high] = static_cast<T>(y * before.weight[1]);
        float squares = x * x + y * y;
        squares = sum_of_lanes<4, 16>(squares);
        if (g == 0 && put_low) a.left.squares[(row * std::int64_t{a.n} + first) / norm_piece] = squares;
      }
    }
}

template <class T, int Columns, bool Gated>
__global__ void __launch_bounds__(most_threads, 1)
    linear_kernel(const __grid_constant__ Args a, const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap input) {
  using S = Stage<Columns>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int piece_bytes = a.tile_rows * 128, bytes = S::bytes(a.tile_rows), consumers = a.consumers;
  const unsigned stages = shared_address(memory), full = stages + a.stages * bytes, empty = full + a.stages * 8,
                 scaled = empty + a.stages * 8;
  float* scales = reinterpret_cast<float*>(memory + a.stages * (bytes + 16) + 8);  // [8 Columns]
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.stages; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, consumers);
    barrier_init(scaled, 32);
    barrier_init_fence();
  }
  __syncthreads();
  let_successor_start();
  const int begin = static_cast<int>(std::int64_t{a.items} * blockIdx.x / gridDim.x),
            end = static_cast<int>(std::int64_t{a.items} * (blockIdx.x + 1) / gridDim.x);
  if (warp == consumers) {
    if (elect_lane()) produce<Columns, Gated>(a, begin, end, weights, input, stages, full, empty);
    return;
  }
  wait_for_predecessor();
  if (warp > consumers) {
    take_norm<Columns>(a, g, q, scales);
    barrier_arrive(scaled);
    return;
  }

  // low and high: rows of the stage whose sums are the fragment's rows g and g + 8.
  const int row = row_of(g), low = (Gated ? 8 : 16) * warp + row, high = Gated ? a.tile_rows / 2 + low : low + 8;
  const unsigned vector = (q ^ row) * 16;
  constexpr int at_once = Columns > 2 ? 1 : pieces;  // pieces that registers hold
  Place place;
  Before<Columns> before;
  for (int item = begin; item < end; ++item) {
    const int tile = item / a.slices, slice = item % a.slices;
    const int count = a.chunks * (slice + 1) / a.slices - a.chunks * slice / a.slices;
    const int first = tile * (Gated ? a.tile_rows / 2 : a.tile_rows);
    float sum[Columns][4], other[Columns][4];
    before.template load_old<Gated>(a, first + low, first + high, q);
#pragma unroll
    for (int c = 0; c < Columns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[c][e] = other[c][e] = 0;
    for (int k = 0; k < count; ++k, place.next(a.stages)) {
      const unsigned w = stages + place.stage * bytes + vector, x = w + pieces * piece_bytes + row * 128;
      barrier_wait(full + 8 * place.stage, place.odd);
#pragma unroll
      for (int p = 0; p < pieces; p += at_once) {
        constexpr int steps = 2 * at_once;  // steps of 32 columns
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
      if (lane == 0) barrier_arrive(empty + 8 * place.stage);
    }
#pragma unroll
    for (int c = 0; c < Columns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[c][e] += other[c][e];

    if (a.slices > 1) {
      constexpr int values = Columns * 4 * 32;  // floats of one warp
      float* partial = a.partial + (std::int64_t{tile} * a.slices * consumers + warp) * values + lane;
      float* mine = partial + slice * consumers * values;
#pragma unroll
      for (int c = 0; c < Columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) __stcg(mine + (c * 4 + e) * 32, sum[c][e]);
      __threadfence();
      __syncwarp();
      int earlier = 0;
      if (lane == 0) earlier = atomicAdd(a.arrived + tile * consumers + warp, 1);
      if (__shfl_sync(~0u, earlier, 0) != a.slices - 1) continue;
      __threadfence();
      if (lane == 0) a.arrived[tile * consumers + warp] = 0;
#pragma unroll
      for (int c = 0; c < Columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[c][e] = 0;
      for (int s = 0; s < a.slices; ++s)
#pragma unroll
        for (int c = 0; c < Columns; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[c][e] += __ldcg(partial + s * consumers * values + (c * 4 + e) * 32);
    }
    if (a.taken.squares) barrier_wait(scaled, 0);
    finish<T, Columns, Gated>(a, first + warp_rows * warp, first + low, first + high, g, q, sum, before, scales);
  }
}

// Tiles of 8 rows of x; the kernel is compiled for these numbers.
int column_tiles(std::int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : m <= 40 ? 5 : 8; }

template <class T, int Columns, bool Gated>
void launch_kernel(Args a, int blocks, const CUtensorMap& weights, const CUtensorMap& input, cudaStream_t stream) {
  const auto kernel = linear_kernel<T, Columns, Gated>;
  constexpr int barriers = 2048;  // bytes, more than barriers and scales take
  static const cudaError_t once =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ring_bytes + barriers);
  check(once, "linear");
  const int bytes = Stage<Columns>::bytes(a.tile_rows), warps = a.consumers + (a.taken.squares ? 2 : 1);
  a.stages = ring_bytes / bytes;
  launch("linear", kernel, blocks, warps * 32, a.stages * (bytes + 16) + 8 + 32 * Columns, stream, true, a, weights,
         input);
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

struct Tiles {
  int rows, count, each;  // each: most tiles of a block
};

// Cost of a block: the rows of W that it reads, and for each tile the rows of x. A row of x costs less, because it
// comes from the L2 cache. The number of rows of a tile changes no bit of the result.
Tiles tiles_of(int n, bool gated, int rows, int blocks) {
  const int outputs = gated ? rows / 2 : rows, count = (n + outputs - 1) / outputs;
  return {rows, count, (count + blocks - 1) / blocks};
}
Tiles best_tiles(int n, bool gated, int columns, int blocks) {
  const Tiles most = tiles_of(n, gated, most_rows, blocks);
  const auto cost = [&](const Tiles& t) { return t.each * (t.rows + 0.7 * 8 * columns); };
  const Tiles fewer = tiles_of(n, gated, most_rows - warp_rows, blocks);
  return cost(fewer) < cost(most) ? fewer : most;
}

}  // namespace

void linear_stream_cuda(const LinearArgs& in, Stream s) {
  if (in.m < 1) return;
  if (in.m > linear_stream_most)
    throw Error(Errc::internal,
                "got " + std::to_string(in.m) + " rows, wanted at most " + std::to_string(linear_stream_most),
                "op linear (CUDA)");
  if (in.weight_stride)
    throw Error(Errc::unsupported, "got rows of weights with gaps, wanted none", "op linear (CUDA)");
  const bool half = in.dtype == DType::f16, gated = in.gated != nullptr;
  Args a = {};
  a.m = static_cast<int>(in.m);
  a.n = static_cast<int>(gated ? in.n / 2 : in.n);
  a.chunks = static_cast<int>((in.k + chunk - 1) / chunk);
  a.add = in.add, a.constant_weights = in.constant_weights;
  a.bias = in.bias;
  a.y = in.y, a.y_stride = in.y_stride;
  a.gated = in.gated, a.gated_stride = in.gated_stride;
  a.left = in.left, a.taken = in.taken, a.k = static_cast<int>(in.k);
  const int blocks = std::min(step_multiprocessors(), most_items_of_slices);
  Tiles tiles = tiles_of(a.n, gated, most_rows, blocks);
  a.slices = 1;  // slices must not depend on m: they set the order of additions
  if (tiles.count < enough_tiles)
    a.slices = std::max(1, std::min(blocks / tiles.count, a.chunks / chunks_of_slice));
  else
    tiles = best_tiles(a.n, gated, column_tiles(in.m), blocks);
  a.tile_rows = tiles.rows, a.consumers = tiles.rows / warp_rows;
  a.items = tiles.count * a.slices;
  if (a.slices > 1) {
    constexpr std::size_t columns = linear_stream_most;
    a.partial = static_cast<float*>(
        kept(s.handle(), "linear partial", most_items_of_slices * most_rows * columns * sizeof(float)));
    a.arrived = static_cast<int*>(
        zeroed(s.handle(), "linear arrived", most_items_of_slices * (most_rows / warp_rows) * sizeof(int)));
  }
  const int each = (a.items + blocks - 1) / blocks;  // items of a block; equal shares may leave multiprocessors free
  const int grid = (a.items + each - 1) / each;
  const CUtensorMap weights = matrix_map(in.weight, half, in.n, in.k, in.k, gated ? a.tile_rows / 2 : a.tile_rows),
                    input = matrix_map(in.x, half, in.m, in.k, in.x_stride, 8 * column_tiles(in.m));
  half ? launch_type<__half>(a, grid, weights, input, stream_of(s))
       : launch_type<__nv_bfloat16>(a, grid, weights, input, stream_of(s));
}
KVLAB_ON_CUDA(linear_stream, linear_stream_cuda);

}  // namespace kvlab::ops
