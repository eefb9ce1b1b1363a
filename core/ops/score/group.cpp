#include "ops/score/group.hpp"

#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/row_kernels.hpp"

namespace kvlab::ops {

void reduce_group(const float* in, std::int64_t stride, int group, int n, GroupRule rule, float softmax_scale,
                  float* out) {
  const RowKernels& kernels = row_kernels();
  if (rule == GroupRule::softmax_mean) {
    thread_local std::vector<float> row;
    row.resize(n);
    std::fill_n(out, n, 0.f);
    for (int g = 0; g < group; ++g) {
      std::copy_n(in + g * stride, n, row.data());
      kernels.scale(row.data(), n, softmax_scale);
      const float maximum = kernels.max(row.data(), n);
      const float total = std::isfinite(maximum) ? kernels.exp_sum(row.data(), n, maximum) : 0.f;
      if (total > 0) kernels.add_scaled(row.data(), n, 1.f / (total * static_cast<float>(group)), out);
    }
    return;
  }
  std::copy_n(in, n, out);
  for (int g = 1; g < group; ++g) {
    const float* x = in + g * stride;
    if (rule == GroupRule::max)
      for (int i = 0; i < n; ++i) out[i] = std::max(out[i], x[i]);
    else
      kernels.add_scaled(x, n, 1.f, out);
  }
  if (rule == GroupRule::mean && group > 1) kernels.scale(out, n, 1.f / static_cast<float>(group));
}

void group_reduce(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s) {
  check_kv(kv, "group_reduce", s);
  check_scores(kv, in, "in", "group_reduce", s);
  check_kv_scores(kv, out, "out", "group_reduce", s);
  if (s.device() == Device::cuda) return on_cuda<group_reduce>(kv, in, rule, out, s);
  const int group = static_cast<int>(in.extent[1]) / kv.kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * in.extent[1] * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int tokens = kv.tokens(r, h);
      if (tokens > 0) reduce_group(&in(r, h * group, 0), in.stride[1], group, tokens, rule, 1.f, &out(r, h, 0));
    }
}

}  // namespace kvlab::ops
