#include <kvlab/kinds.hpp>

#include "base/device_op.hpp"
#include "ops/page/paged.cuh"
#include "ops/select/select.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 512;

struct Args {
  DeviceKv kv;
  TextTokens text;
  View<const float, 3> scores;
  ClassNumbers classes;
  View<const KeepRule, 2> rules;
  View<float, 3> kept;
  View<std::int32_t, 2> counts;
};

// One block serves a head.
__global__ void __launch_bounds__(threads) keep_by_class_kernel(const __grid_constant__ Args a) {
  __shared__ SelectShared select;
  const int head = blockIdx.x, row = blockIdx.y, slot = a.kv.kv.slots[row];
  const auto room = min(a.scores.extent[2], a.kept.extent[2]);
  const int n = static_cast<int>(min(static_cast<std::int64_t>(a.kv.tokens(row, head)), room));
  const KeepRule rule = a.rules(row, a.classes.class_of(slot, head));
  const auto sure = [&](int position) {
    return position < rule.first || (rule.kinds & kind_bit(a.text.kind(slot, position)));
  };
  unsigned own = 0, others = 0;
  for (int t = threadIdx.x; t < n; t += threads) own += !sure(a.kv.position(row, head, t));
  block_scan(own, select.scan, others);
  // The least key among the best; 0: all others are.
  unsigned long long least = 0;
  const auto best = static_cast<unsigned>(max(rule.best, 0));
  if (best == 0) {
    least = ~0ull;
  } else if (best < others) {
    const int bounds[] = {0, n};
    const auto key = [&](int, int t, unsigned i, unsigned long long& k) {
      k = selection_key(a.scores(row, head, t), i);
      return !sure(a.kv.position(row, head, t));
    };
    least = radix_threshold(key, bounds, 1, best, 0, select);
  }
  unsigned stay = 0, count = 0;
  for (int t = threadIdx.x; t < n; t += threads) {
    const int position = a.kv.position(row, head, t);
    const bool keeps = sure(position) || position >= rule.from ||
                       selection_key(a.scores(row, head, t), static_cast<unsigned>(t)) >= least;
    a.kept(row, head, t) = keeps ? 1.f : 0.f;
    stay += keeps;
  }
  block_scan(stay, select.scan, count);
  if (threadIdx.x == 0) a.counts(row, head) = static_cast<std::int32_t>(count);
}

void keep_by_class_cuda(const PagedKv& kv, const TextTokens& text, View<const float, 3> scores,
                        const ClassNumbers& classes, View<const KeepRule, 2> rules, Scores kept,
                        View<std::int32_t, 2> counts, Stream s) {
  if (kv.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
  const Args a{DeviceKv(kv), text, scores, classes, rules, kept, counts};
  keep_by_class_kernel<<<grid, threads, 0, stream_of(s)>>>(a);
  check_launch("keep_by_class");
}

}  // namespace

KVLAB_ON_CUDA(keep_by_class, keep_by_class_cuda);

}  // namespace kvlab::ops
