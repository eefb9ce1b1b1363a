// The mass of attend's pipelined kernel. It writes scores times log2(e), which become probabilities, or shares, whose
// probabilities are summed up in a column of token state.
#include <algorithm>
#include <limits>

#include "base/launch.cuh"
#include "ops/attend/attend.cuh"
#include "ops/attend/attend_shares.cuh"
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
  MassShares shares;
  View<const float, 2> lse;
  int group, room;
  GroupRule rule;
};

// What clear_shares writes in place of `high`: no token of the span is seen, whatever its shares.
constexpr float unseen = INFINITY;
__device__ __forceinline__ float factor_of(float high, float lse) {
  return high == unseen ? -1.f : probability(high, lse * log2e);
}
__device__ __forceinline__ float product(float share, float factor) { return factor < 0 ? 0.f : share * factor; }

// A token's probability of the group, from those of its query heads, which come in order.
struct Sum {
  GroupRule rule;
  float value = 0;
  __device__ __forceinline__ void add(int head, float x) {
    value = head == 0 ? x : rule != GroupRule::max ? value + x : value < x ? x : value;
  }
};

// The numbers of 8 bytes that follow each other. Wide: they begin at a multiple of 16.
template <bool Wide, int Count>
__device__ __forceinline__ void load(const std::byte* from, uint2 (&to)[Count]) {
  if constexpr (Wide) {
    static_assert(Count % 2 == 0);
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      to[2 * i] = make_uint2(x.x, x.y), to[2 * i + 1] = make_uint2(x.z, x.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = reinterpret_cast<const uint2*>(from)[i];
  }
}

// A thread takes tokens t, t + 1, t + 8 and t + 9 of a record. Pairs: of query heads, 0 = any.
constexpr int each = 4, of_record = MassShares::tokens / each;
template <int Pairs>
__global__ void __launch_bounds__(threads) add_kernel(const __grid_constant__ AddArgs a) {
  let_successor_start();
  wait_for_predecessor();
  const int head = blockIdx.y, row = blockIdx.z, slot = a.kv.slots[row], n = min(a.kv.length(slot, head), a.room);
  const HeadTokens<0> tokens(a.kv, slot, head);
  const std::byte* from = a.shares.of(row, head);
  const float* lse = &a.lse(row, head * a.group);
  const float weight = a.rule == GroupRule::mean ? 1.f / static_cast<float>(a.group) : 1.f;
  for (int i = blockIdx.x * threads + threadIdx.x; i / of_record * MassShares::tokens < n; i += gridDim.x * threads) {
    const int t = i / of_record * MassShares::tokens + i % of_record * 2;
    if (t >= n) continue;
    const PageEntry e = tokens.entry(t);
    if (e.frame < 0) continue;
    float* const state = tokens.template number<float>(e, a.column, t);
    const std::byte* record = from + std::int64_t{i / of_record} * a.shares.record;
    const std::byte* shares = record + a.shares.behind_high;
    float2 old[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) old[k] = reinterpret_cast<const float2*>(state)[4 * k];
    Sum sum[2][2];  // [token / 8, token % 2]
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[k / 2][k % 2].rule = a.rule;
    const auto add_pair = [&](int pair, const float2& high, const uint2(&of)[2]) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 2 * pair + h;
        if (j >= a.group) break;
        const float factor = factor_of(h ? high.y : high.x, lse[j]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float x[2];
          Pair<__half>::unpack(k / 2 ? of[k % 2].y : of[k % 2].x, x[0], x[1]);
          sum[k / 2][k % 2].add(j, product(x[h], factor));
        }
      }
    };
    if constexpr (Pairs > 0) {
      uint2 high[Pairs], of[2 * Pairs];
      constexpr bool wide = Pairs % 2 == 0;  // a record of one pair has 72 bytes
      load<wide>(record, high);
      load<wide>(shares + t % 8 * (8 * Pairs), of);
#pragma unroll
      for (int p = 0; p < Pairs; ++p)
        add_pair(p, make_float2(__uint_as_float(high[p].x), __uint_as_float(high[p].y)), {of[p], of[Pairs + p]});
    } else if (a.group == 1) {
      const uint2 of = reinterpret_cast<const uint2*>(shares)[t % 8 / 2];
      const float factor = factor_of(*reinterpret_cast<const float*>(record), lse[0]);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float x[2];
        Pair<__half>::unpack(k ? of.y : of.x, x[0], x[1]);
        sum[0][k].add(0, product(x[0], factor)), sum[1][k].add(0, product(x[1], factor));
      }
    } else {
      const int pairs = (a.group + 1) / 2;
      for (int p = 0; p < pairs; ++p) {
        const uint2* of = reinterpret_cast<const uint2*>(shares) + t % 8 * pairs + p;
        add_pair(p, reinterpret_cast<const float2*>(record)[p], {of[0], of[pairs]});
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      old[k].x += sum[k][0].value * weight, old[k].y += sum[k][1].value * weight;
      if (t + 8 * k + 1 < n)
        reinterpret_cast<float2*>(state)[4 * k] = old[k];
      else if (t + 8 * k < n)
        state[8 * k] = old[k].x;
    }
  }
}

__global__ void __launch_bounds__(threads) clear_kernel(MassShares shares, int records) {
  std::byte* const head = shares.of(blockIdx.z, blockIdx.y);
  const int of_record = shares.behind_high / 4, count = records * of_record;
  for (int i = blockIdx.x * threads + threadIdx.x; i < count; i += gridDim.x * threads)
    reinterpret_cast<float*>(head + std::int64_t{i / of_record} * shares.record)[i % of_record] = unseen;
}

dim3 grid_of(const View<float, 3>& mass, std::int64_t rows) {
  const auto blocks = std::clamp<std::int64_t>(mass.extent[2] / 1024, 1, 64);
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(mass.extent[1]), static_cast<unsigned>(rows));
}

}  // namespace

void clear_scores(const AttendArgs& in, cudaStream_t stream) {
  fill_kernel<<<grid_of(in.mass, in.kv.rows), threads, 0, stream>>>(in.mass, -INFINITY);
  check_launch("attend mass");
}

void clear_shares(const AttendArgs& in, const MassShares& shares, cudaStream_t stream) {
  const dim3 grid(4, static_cast<unsigned>(in.kv.kv_heads), static_cast<unsigned>(in.kv.rows));
  const int records = static_cast<int>((in.mass.extent[2] + MassShares::tokens - 1) / MassShares::tokens);
  clear_kernel<<<grid, threads, 0, stream>>>(shares, records);
  check_launch("attend mass");
}

void scores_to_mass(const View<float, 3>& mass, const View<float, 2>& lse, int rows, cudaStream_t stream) {
  mass_kernel<<<grid_of(mass, rows), threads, 0, stream>>>(mass, lse);
  check_launch("attend mass");
}

// A store of several needs 32 bits for a token's place times the group.
int logits_at_once(const HeadLogits& logits) {
  const auto& out = logits.out;
  const auto even = [](std::int64_t x) { return x % 2 == 0; };
  return even(out.extent[3]) && even(out.stride[0]) && even(out.stride[1]) &&
                 reinterpret_cast<std::uintptr_t>(out.data) % 8 == 0 &&
                 out.extent[2] * out.extent[3] < std::numeric_limits<std::int32_t>::max()
             ? 2
             : 1;
}

void add_shares(const AttendArgs& in, const MassShares& shares, const View<float, 2>& lse, cudaStream_t stream) {
  const PagedKv& kv = in.kv;
  const int group = static_cast<int>(in.mass.extent[1]) / kv.kv_heads, room = static_cast<int>(in.mass.extent[2]);
  const AddArgs a{kv, FrameColumn::state(kv, in.mass_into.column), shares, lse, group, room, in.mass_into.rule};
  const std::int64_t of_block = std::int64_t{threads} * each, blocks = (room + of_block - 1) / of_block,
                     most = 16384 / (std::int64_t{kv.kv_heads} * kv.rows) + 1;
  const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, most)), static_cast<unsigned>(kv.kv_heads),
                  static_cast<unsigned>(kv.rows));
  const auto kernel = group == 1                 ? add_kernel<0>
                      : group == 2               ? add_kernel<1>
                      : group == 3 || group == 4 ? add_kernel<2>
                      : group == 7 || group == 8 ? add_kernel<4>
                                                 : add_kernel<0>;
  cuda::launch("attend mass", kernel, grid, threads, 0, stream, true, a);
}

}  // namespace kvlab::ops
