#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "base/joined_calls.hpp"
#include "ops/page/check.hpp"
#include "ops/page/row_kernels.hpp"
#include "ops/score/group.hpp"
#include "ops/score/logits.hpp"

namespace kvlab::ops {
namespace {

// Softmax of each query head's logits, pooled, and the group reduced.
void pool_head(const float* logits, int group, int n, const VotePooling& pooling, float* out) {
  thread_local std::vector<float> rows, padded;
  const RowKernels& kernels = row_kernels();
  const int half = pooling.kind == Pooling::none ? 0 : pooling.kernel / 2;
  const float edge = pooling.kind == Pooling::max ? -std::numeric_limits<float>::infinity() : 0.f;
  rows.resize(static_cast<std::size_t>(group) * static_cast<std::size_t>(n));
  padded.resize(static_cast<std::size_t>(n + 2 * half));
  for (int g = 0; g < group; ++g) {
    float* x = padded.data() + half;
    std::fill_n(padded.data(), half, edge), std::fill_n(x + n, half, edge);
    for (int t = 0; t < n; ++t) x[t] = logits[std::int64_t{t} * group + g] * std::numbers::ln2_v<float>;
    const float maximum = kernels.max(x, n);
    if (std::isfinite(maximum))
      kernels.scale(x, n, 1.f / kernels.exp_sum(x, n, maximum));
    else
      std::fill_n(x, n, 0.f);
    float* row = rows.data() + std::int64_t{g} * n;
    if (half == 0)
      std::copy_n(x, n, row);
    else
      pool_row(x, n, pooling.kind, pooling.kernel, row);
  }
  reduce_group(rows.data(), n, group, n, pooling.rule, 1.f, out);
}

}  // namespace

void PooledLogits::run(const std::vector<PooledLogits>& calls) {
  if (!cuda_reach_from_host()) return only_on_cuda<pooled_in_layers>(calls);
  for (const PooledLogits& c : calls) on_cuda<pooled_logits>(c.kv, c.logits, c.pooling, c.out, c.stream);
}

void check_logits(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, View<const float, 3> out,
                  const char* op, Stream s) {
  check_kv(kv, op, s);
  check_kv_scores(kv, out, "out", op, s);
  const int group = static_cast<int>(logits.out.extent[3]);
  if (!logits.index || logits.out.extent[0] < kv.rows || logits.out.stride[3] != 1 || logits.out.stride[2] != group)
    fail(Errc::internal, op, "got logits of another shape, wanted dense [row, i, token, query head of the group]");
  if (pooling.kernel < 1 || pooling.kernel % 2 == 0 || pooling.kernel > most_logit_kernel)
    fail(Errc::unsupported, op,
         "got a kernel of " + std::to_string(pooling.kernel) + ", wanted an odd one up to " +
             std::to_string(most_logit_kernel));
  if (pooling.rule == GroupRule::softmax_mean || group > most_logit_group)
    fail(Errc::unsupported, op,
         "got softmax_mean or " + std::to_string(group) + " query heads of a group, wanted another rule and at most " +
             std::to_string(most_logit_group));
}

void pooled_logits(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, Scores out, Stream s) {
  check_logits(kv, logits, pooling, out, "pooled_logits", s);
  const int group = static_cast<int>(logits.out.extent[3]);
  if (s.device() == Device::cuda) {
    if (!join_call(PooledLogits{kv, logits, pooling, out, s})) on_cuda<pooled_logits>(kv, logits, pooling, out, s);
    return;
  }
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(logits.out.extent[1] * kv.rows * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h);
      const float* of = logits.of(r, kv.slots[r], h, n);
      if (of && n > 0) pool_head(of, group, n, pooling, &out(r, h, 0));
    }
}

}  // namespace kvlab::ops
