// Budgets per head: one block per row takes the best tokens of all heads together and counts those of each head.
#include "base/lanes.cuh"
#include "ops/select/allot.hpp"

#include <kvlab/fill_heads.hpp>
#include <kvlab/ops.hpp>

#include <cmath>

#include "ops/select/pins.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 1024, most_heads = 256;

__device__ __forceinline__ int pinned_of(const Pins* pins, int row) {
  return pins ? max(pins[row].first, 0) + max(pins[row].last, 0) : 0;
}

__global__ void same_kernel(View<const std::int32_t, 2> length, const Pins* pins, const std::int32_t* tokens,
                            View<std::int32_t, 2> keep) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, heads = static_cast<int>(keep.extent[1]);
  if (i >= keep.extent[0] * heads) return;
  const int row = i / heads, head = i % heads;
  keep(row, head) = min(length(row, head), max(max(tokens[row], pinned_of(pins, row)), 0));
}

__global__ void round_kernel(View<const std::int32_t, 2> length, const std::uint8_t* keep_all, int page_size,
                             View<std::int32_t, 2> keep) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, heads = static_cast<int>(keep.extent[1]);
  if (i >= keep.extent[0] * heads) return;
  const int row = i / heads, head = i % heads, n = length(row, head), kept = keep(row, head);
  if (keep_all[row])
    keep(row, head) = n;
  else if (kept < n)
    keep(row, head) = kept - kept % page_size;
}

__global__ void fill_kernel(View<std::int32_t, 2> out, std::int32_t value) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, heads = static_cast<int>(out.extent[1]);
  if (i < out.extent[0] * heads) out(i / heads, i % heads) = value;
}

struct Args {
  DeviceKv kv;  // set only with pins
  View<const float, 3> scores;
  View<const std::int32_t, 2> length;
  const Pins* pins;
  const std::int32_t* total;
  View<std::int32_t, 2> keep;
  double floor;
  bool exact_total;
};

struct Shared {
  SelectShared select;
  int first[most_heads + 1], free[most_heads], count[most_heads], keep[most_heads];
  double share[most_heads];
  PinLimits limits[most_heads];
};

// Rounds share[h] to keep[h], as settle() in allot.cpp.
__device__ void settle(Shared& s, int heads, long long sum) {
  long long missing = sum;
  for (int h = 0; h < heads; ++h) {
    s.keep[h] = static_cast<int>(fmin(fmax(nearbyint(s.share[h]), 0.), static_cast<double>(s.free[h])));
    missing -= s.keep[h];
  }
  for (; missing != 0; missing += missing > 0 ? -1 : 1) {
    int best = -1;
    double remainder_of_best = 0;
    for (int h = 0; h < heads; ++h) {
      if (missing > 0 ? s.keep[h] >= s.free[h] : s.keep[h] <= 0) continue;
      const double remainder = s.share[h] - s.keep[h];
      if (best < 0 || (missing > 0 ? remainder > remainder_of_best : remainder < remainder_of_best))
        best = h, remainder_of_best = remainder;
    }
    if (best < 0) return;
    s.keep[best] += missing > 0 ? 1 : -1;
  }
}

__global__ void __launch_bounds__(threads, 1) by_score_kernel(const __grid_constant__ Args a) {
  __shared__ Shared s;
  const int row = blockIdx.x, heads = static_cast<int>(a.keep.extent[1]), lane = threadIdx.x % 32;
  const int pinned = pinned_of(a.pins, row), budget = max(a.total[row] - pinned, 0);
  const bool any_pinned = pinned > 0;
  if (threadIdx.x == 0) {
    s.first[0] = 0;
    for (int h = 0; h < heads; ++h)
      s.first[h + 1] = s.first[h] + min(a.length(row, h), static_cast<int>(a.scores.extent[2]));
  }
  for (int h = threadIdx.x; h < heads; h += threads) s.free[h] = s.count[h] = 0;
  __syncthreads();
  if (any_pinned)
    for (int h = 0; h < heads; ++h) {
      const PinLimits limits = pin_limits(a.kv, row, h, s.first[h + 1] - s.first[h], a.pins[row], s.select);
      if (threadIdx.x == 0) s.limits[h] = limits;
    }
  __syncthreads();
  const auto key = [&](int h, int t, unsigned i, unsigned long long& k) {
    if (any_pinned && s.limits[h].pinned(a.kv.position(row, h, t))) return false;
    k = selection_key(a.scores(row, h, t), i);
    return true;
  };
  // Counts the tokens of each head that are not pinned and have at least this key.
  const auto count = [&](unsigned long long least, int* of_head) {
    for (int h = 0; h < heads; ++h) {
      const int n = s.first[h + 1] - s.first[h];
      int own = 0;
      for (int t = threadIdx.x; t < n; t += threads) {
        unsigned long long k = 0;
        own += key(h, t, static_cast<unsigned>(s.first[h] + t), k) && k >= least;
      }
      own = sum_of_lanes(own);
      if (lane == 0 && own) atomicAdd(of_head + h, own);
    }
    __syncthreads();
  };
  count(0, s.free);
  long long candidates = 0;
  for (int h = 0; h < heads; ++h) candidates += s.free[h];
  const long long sum = min(static_cast<long long>(heads) * budget, candidates);
  if (sum > 0) {
    const unsigned long long threshold =
        sum < candidates ? radix_threshold(key, s.first, heads, static_cast<unsigned>(sum), 0, s.select) : 0;
    count(threshold, s.count);
  }
  if (threadIdx.x > 0) return;
  // Products and sums are rounded one by one, as on the CPU.
  const double fixed = trunc(__dmul_rn(static_cast<double>(budget), a.floor)), rest = __dsub_rn(1., a.floor);
  for (int h = 0; h < heads; ++h) s.share[h] = __dadd_rn(__dmul_rn(static_cast<double>(s.count[h]), rest), fixed);
  if (a.exact_total)
    settle(s, heads, sum);
  else
    for (int h = 0; h < heads; ++h)
      s.keep[h] = static_cast<int>(fmin(nearbyint(s.share[h]), static_cast<double>(s.free[h])));
  for (int h = 0; h < heads; ++h) a.keep(row, h) = a.length(row, h) - s.free[h] + s.keep[h];
}

}  // namespace

static void allot_tokens_cuda(const Allotment& a, const std::int32_t* tokens, Stream s) {
  const auto entries = a.keep.extent[0] * a.keep.extent[1];
  if (entries <= 0) return;
  same_kernel<<<static_cast<unsigned>((entries + 127) / 128), 128, 0, stream_of(s)>>>(a.length, a.pins, tokens, a.keep);
  check_launch("allot_tokens");
}
KVLAB_ON_CUDA(allot_tokens, allot_tokens_cuda);

static void round_allotment_cuda(View<const std::int32_t, 2> length, const std::uint8_t* keep_all, int page_size,
                                 View<std::int32_t, 2> keep, Stream s) {
  const auto entries = keep.extent[0] * keep.extent[1];
  if (entries <= 0) return;
  round_kernel<<<static_cast<unsigned>((entries + 127) / 128), 128, 0, stream_of(s)>>>(length, keep_all, page_size,
                                                                                       keep);
  check_launch("round_allotment");
}
KVLAB_ON_CUDA(round_allotment, round_allotment_cuda);

static __global__ void numbers_kernel(View<const std::int32_t, 2> of_slots, const std::int32_t* slots,
                                      View<std::int32_t, 2> out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = i / out.extent[1],
                     head = i % out.extent[1];
  if (row < out.extent[0]) out(row, head) = of_slots(slots[row], head);
}

static void numbers_of_rows_cuda(View<const std::int32_t, 2> of_slots, const std::int32_t* slots,
                                 View<std::int32_t, 2> out, Stream s) {
  const auto entries = out.extent[0] * out.extent[1];
  if (entries <= 0) return;
  numbers_kernel<<<static_cast<unsigned>((entries + 127) / 128), 128, 0, stream_of(s)>>>(of_slots, slots, out);
  check_launch("numbers_of_rows");
}
KVLAB_ON_CUDA(numbers_of_rows, numbers_of_rows_cuda);

static __global__ void share_kernel(View<const std::int32_t, 2> keep, int pinned, double share,
                                    View<std::int32_t, 2> out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = i / out.extent[1],
                     head = i % out.extent[1];
  if (row < out.extent[0])
    out(row, head) = static_cast<std::int32_t>(__dmul_rn(share, static_cast<double>(max(0, keep(row, head) - pinned))));
}

static void share_of_keep_cuda(View<const std::int32_t, 2> keep, int pinned, double share, View<std::int32_t, 2> out,
                               Stream s) {
  const auto entries = out.extent[0] * out.extent[1];
  if (entries <= 0) return;
  share_kernel<<<static_cast<unsigned>((entries + 127) / 128), 128, 0, stream_of(s)>>>(keep, pinned, share, out);
  check_launch("share_of_keep");
}
KVLAB_ON_CUDA(share_of_keep, share_of_keep_cuda);

static __global__ void lengths_kernel(View<const std::int32_t, 2> length, const std::int32_t* slots,
                                      const std::uint8_t* leave_out, int rows, int heads, View<std::int32_t, 2> out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / heads, head = i % heads;
  if (row < rows) out(slots[row], head) = leave_out[row] ? 0 : length(slots[row], head);
}

static void lengths_of_rows_cuda(const PagedKv& kv, const std::uint8_t* leave_out, View<std::int32_t, 2> out,
                                 Stream s) {
  const int entries = kv.rows * kv.kv_heads;
  if (entries <= 0) return;
  lengths_kernel<<<static_cast<unsigned>((entries + 127) / 128), 128, 0, stream_of(s)>>>(kv.length, kv.slots, leave_out,
                                                                                         kv.rows, kv.kv_heads, out);
  check_launch("lengths_of_rows");
}
KVLAB_ON_CUDA(lengths_of_rows, lengths_of_rows_cuda);

static void fill_heads_cuda(View<std::int32_t, 2> out, std::int32_t value, Stream s) {
  const auto entries = out.extent[0] * out.extent[1];
  if (entries <= 0) return;
  fill_kernel<<<static_cast<unsigned>((entries + 127) / 128), 128, 0, stream_of(s)>>>(out, value);
  check_launch("fill_heads");
}
KVLAB_ON_CUDA(fill_heads, fill_heads_cuda);

static void allot_by_score_cuda(const Allotment& in, double floor, bool exact_total, Stream s) {
  const auto rows = in.keep.extent[0], heads = in.keep.extent[1];
  if (rows <= 0 || heads <= 0) return;
  if (heads > most_heads)
    throw Error(Errc::unsupported,
                "got " + std::to_string(heads) + " KV heads, wanted at most " + std::to_string(most_heads),
                "op allot_by_score");
  Args a = {};
  if (in.kv) a.kv = DeviceKv(in.kv->pages);
  a.scores = in.scores, a.length = in.length, a.pins = in.pins, a.total = in.total, a.keep = in.keep;
  a.floor = floor, a.exact_total = exact_total;
  by_score_kernel<<<static_cast<unsigned>(rows), threads, 0, stream_of(s)>>>(a);
  check_launch("allot_by_score");
}
KVLAB_ON_CUDA(allot_by_score, allot_by_score_cuda);

}  // namespace kvlab::ops
