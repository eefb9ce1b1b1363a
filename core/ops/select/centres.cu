// Tokens beyond a threshold, and k-center. A block serves a KV head of a row.
#include "ops/select/centres.hpp"

#include "base/cuda.cuh"
#include "base/device_op.hpp"
#include "base/lanes.cuh"
#include "ops/score/heads.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;

constexpr int threads = 512, warps = threads / 32, most_dim = 256;

__global__ void __launch_bounds__(threads)
    beyond_kernel(const __grid_constant__ DeviceKv kv, View<const float, 3> scores, double share,
                  const __grid_constant__ TokenList list) {
  __shared__ float lows[warps], highs[warps];
  __shared__ unsigned scan[32];
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32,
            n = entries_of(kv, row, head, 1, min(scores.extent[2], list.index.extent[2]));
  float least = INFINITY, greatest = -INFINITY;
  for (int t = threadIdx.x; t < n; t += threads) {
    const float x = scores(row, head, t);
    least = x < least ? x : least, greatest = x > greatest ? x : greatest;
  }
  least = least_of_lanes(least), greatest = most_of_lanes(greatest);
  if (threadIdx.x % 32 == 0) lows[warp] = least, highs[warp] = greatest;
  __syncthreads();
  for (int w = 0; w < warps; ++w) least = fminf(least, lows[w]), greatest = fmaxf(greatest, highs[w]);
  const double threshold = __dadd_rn(double(least), __dmul_rn(double(greatest) - double(least), 1 - share));
  const std::int64_t at = list.at(row);
  unsigned count = 0;
  for (int begin = 0; begin < n; begin += threads) {
    const int t = begin + static_cast<int>(threadIdx.x);
    const bool beyond = t<n&& double(scores(row, head, t))> threshold;
    unsigned total = 0;
    const unsigned before = device::block_scan(beyond, scan, total);
    if (beyond) list.index(at, head, count + before) = t;
    count += total;
  }
  if (threadIdx.x == 0) list.count(at, head) = static_cast<std::int32_t>(count);
}

// A candidate for the next centre: the farther one, of equal ones the first.
struct Far {
  float distance;
  int token;
};
struct Farther {
  __device__ Far operator()(Far a, Far b) const {
    return a.distance > b.distance || (a.distance == b.distance && a.token < b.token) ? a : b;
  }
};

__global__ void __launch_bounds__(threads)
    farthest_kernel(const __grid_constant__ DeviceKv kv, bool key, int count, Scores nearest, Scores out) {
  __shared__ Far fars[warps];
  __shared__ float found[most_dim];  // the newest centre
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32,
            n = entries_of(kv, row, head, 1, min(nearest.extent[2], out.extent[2]));
  float *near = &nearest(row, head, 0), *to = &out(row, head, 0);
  for (int t = threadIdx.x; t < n; t += threads) to[t] = 0;
  int centre = -1;
  for (int i = 0; i <= count; ++i) {
    // A thread keeps to its own tokens, so it alone reads and writes their distances.
    if (centre >= 0) {
      const auto token = kv.token(row, head, centre);
      for (int d = threadIdx.x; d < kv.head_dim; d += threads) found[d] = token.element(key, d);
    }
    __syncthreads();
    Far best{-INFINITY, n};
    for (int t = threadIdx.x; t < n; t += threads) {
      if (near[t] == -INFINITY) continue;
      if (centre >= 0) {
        const auto token = kv.token(row, head, t);
        double sum = 0;
        for (int d = 0; d < kv.head_dim; ++d) {
          const double apart = double(token.element(key, d)) - double(found[d]);
          sum = __dadd_rn(sum, __dmul_rn(apart, apart));
        }
        near[t] = i == 1 ? static_cast<float>(sum) : fminf(near[t], static_cast<float>(sum));
      }
      best = Farther{}(best, Far{near[t], t});
    }
    if (i == count) return;  // the last round is for distances alone
    best = join_lanes(best, Farther{});
    __syncthreads();
    if (threadIdx.x % 32 == 0) fars[warp] = best;
    __syncthreads();
    for (int w = 0; w < warps; ++w) best = Farther{}(best, fars[w]);
    centre = best.token;
    if (best.distance == -INFINITY) return;
    if (centre % threads == static_cast<int>(threadIdx.x))
      to[centre] = static_cast<float>(count - i), near[centre] = -INFINITY;
  }
}

dim3 heads_of(const PagedKv& kv) { return {static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows)}; }

void tokens_beyond_cuda(const PagedKv& kv, View<const float, 3> scores, double share, TokenList list, Stream s) {
  if (kv.rows == 0) return;
  beyond_kernel<<<heads_of(kv), threads, 0, stream_of(s)>>>(DeviceKv(kv), scores, share, list);
  check_launch("tokens_beyond");
}

void farthest_first_cuda(const KvRows& rows, int count, Scores nearest, Scores out, Stream s) {
  const PagedKv& kv = *rows.kv;
  if (kv.rows == 0) return;
  farthest_kernel<<<heads_of(kv), threads, 0, stream_of(s)>>>(DeviceKv(kv), rows.side == KvSide::key, count, nearest,
                                                              out);
  check_launch("farthest_first");
}

}  // namespace

KVLAB_ON_CUDA(tokens_beyond, tokens_beyond_cuda);
KVLAB_ON_CUDA(farthest_first, farthest_first_cuda);

}  // namespace kvlab::ops
