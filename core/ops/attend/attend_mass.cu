// The mass of attend's pipelined kernel, which writes scores times log2(e): their probabilities, or their sums in a
// column of token state.
#include <algorithm>
#include <limits>

#include "base/launch.cuh"
#include "ops/attend/attend.cuh"
#include "ops/attend/attend_unit.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops {
using namespace cuda;
namespace {

constexpr int threads = 256;

// The log of a softmax's sum, as exp2 takes it. -inf: nothing was attended.
__device__ __forceinline__ float shift_of(const View<const float, 2>& lse, int row, int head) {
  return lse(row, head) * log2e;
}
__device__ __forceinline__ float probability(float score, float shift) {
  return score == -INFINITY ? 0.f : exp2_fast(score - shift);
}

template <int Vector>
__device__ __forceinline__ void load(const float* from, float (&to)[Vector]) {
  if constexpr (Vector == 4) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (Vector == 2) {
    const float2 x = *reinterpret_cast<const float2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = *from;
  }
}

__global__ void __launch_bounds__(threads) fill_kernel(View<float, 3> out, float value) {
  for (std::int64_t t = blockIdx.x * threads + threadIdx.x; t < out.extent[2]; t += std::int64_t(gridDim.x) * threads)
    out(blockIdx.z, blockIdx.y, t) = value;
}

__global__ void __launch_bounds__(threads) mass_kernel(View<float, 3> scores, View<const float, 2> lse) {
  const float shift = shift_of(lse, blockIdx.z, blockIdx.y);
  for (std::int64_t t = blockIdx.x * threads + threadIdx.x; t < scores.extent[2];
       t += std::int64_t(gridDim.x) * threads) {
    float& x = scores(blockIdx.z, blockIdx.y, t);
    x = probability(x, shift);
  }
}

struct AddArgs {
  PagedKv kv;
  FrameColumn column;
  const float* scores;  // [row, kv_head, token place, query head of the group]
  std::int64_t row, head;
  View<const float, 2> lse;
  int group, room;
  GroupRule rule;
};

// A thread takes `each` tokens. Vector: scores of one load.
template <int Vector, int Page>
__global__ void __launch_bounds__(threads) add_kernel(const __grid_constant__ AddArgs a) {
  constexpr int each = 4;
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.y, row = blockIdx.z, slot = a.kv.slots[row], n = min(a.kv.length(slot, head), a.room);
  const HeadTokens<Page> tokens(a.kv, slot, head);
  const float* scores = a.scores + row * a.row + head * a.head;
  const float factor = a.rule == GroupRule::mean ? 1.f / static_cast<float>(a.group) : 1.f;
  for (int first = blockIdx.x * threads * each + threadIdx.x; first < n; first += gridDim.x * threads * each) {
    float* state[each];
    float sum[each], old[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int t = first + i * threads;
      state[i] = nullptr, sum[i] = old[i] = 0;
      if (t >= n) continue;
      const PageEntry e = tokens.entry(t);
      if (e.frame >= 0) state[i] = tokens.template number<float>(e, a.column, t);
    }
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (state[i]) old[i] = *state[i];
#pragma unroll 1
    for (int j = 0; j < a.group; j += Vector) {
      float x[each][Vector];
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int t = min(first + i * threads, n - 1);
        load<Vector>(scores + std::int64_t{t} * a.group + j, x[i]);
      }
#pragma unroll
      for (int k = 0; k < Vector; ++k) {
        const float shift = shift_of(a.lse, row, head * a.group + j + k);
#pragma unroll
        for (int i = 0; i < each; ++i) {
          const float p = probability(x[i][k], shift);
          sum[i] = j + k == 0 ? p : a.rule != GroupRule::max ? sum[i] + p : sum[i] < p ? p : sum[i];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (state[i]) *state[i] = old[i] + sum[i] * factor;
  }
}

dim3 grid_of(const View<float, 3>& mass, std::int64_t rows) {
  const auto blocks = std::clamp<std::int64_t>(mass.extent[2] / 1024, 1, 64);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(mass.extent[1]), static_cast<unsigned>(rows));
}

}  // namespace

void clear_scores(const AttendArgs& in, cudaStream_t stream) {
  View<float, 3> scores = in.mass;
  if (adds_scores(in)) scores.extent[2] = scores.stride[1];  // each KV head has whole tokens in the room of its heads
  fill_kernel<<<grid_of(scores, in.kv.rows), threads, 0, stream>>>(scores, -INFINITY);
  check_launch("attend mass");
}

void scores_to_mass(const View<float, 3>& mass, const View<float, 2>& lse, int rows, cudaStream_t stream) {
  mass_kernel<<<grid_of(mass, rows), threads, 0, stream>>>(mass, lse);
  check_launch("attend mass");
}

// A store of several needs 32 bits for a token's place times the group.
int scores_at_once(const AttendArgs& in) {
  const int group = static_cast<int>(in.mass.extent[1]) / in.kv.kv_heads;
  const auto fits = [&](int n) {
    return group % n == 0 && in.mass.stride[0] % n == 0 &&
           reinterpret_cast<std::uintptr_t>(in.mass.data) % (4 * n) == 0 &&
           in.mass.stride[1] * group < std::numeric_limits<std::int32_t>::max();
  };
  return fits(4) ? 4 : fits(2) ? 2 : 1;
}

int logits_at_once(const HeadLogits& logits) {
  const auto& out = logits.out;
  const auto even = [](std::int64_t x) { return x % 2 == 0; };
  return even(out.extent[3]) && even(out.stride[0]) && even(out.stride[1]) &&
                 reinterpret_cast<std::uintptr_t>(out.data) % 8 == 0 &&
                 out.extent[2] * out.extent[3] < std::numeric_limits<std::int32_t>::max()
             ? 2
             : 1;
}

void add_scores(const AttendArgs& in, const View<float, 2>& lse, cudaStream_t stream) {
  const PagedKv& kv = in.kv;
  const int group = static_cast<int>(in.mass.extent[1]) / kv.kv_heads;
  const AddArgs a{kv,
                  FrameColumn::state(kv, in.mass_into.column),
                  in.mass.data,
                  in.mass.stride[0],
                  in.mass.stride[1] * group,
                  lse,
                  group,
                  static_cast<int>(in.mass.extent[2]),
                  in.mass_into.rule};
  const std::int64_t of_block = std::int64_t{threads} * 4, blocks = (a.room + of_block - 1) / of_block,
                     most = 16384 / (std::int64_t{kv.kv_heads} * kv.rows) + 1;
  const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, most)), static_cast<unsigned>(kv.kv_heads),
                  static_cast<unsigned>(kv.rows));
  const int vector = scores_at_once(in);
  with_page_size(kv.page_size, [&](auto page) {
    constexpr int size = decltype(page)::value;
    const auto kernel = vector == 4 ? add_kernel<4, size> : vector == 2 ? add_kernel<2, size> : add_kernel<1, size>;
    cuda::launch("attend mass", kernel, grid, threads, 0, stream, true, a);
  });
}

}  // namespace kvlab::ops
