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

void group_reduce(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s,
                  const Heads& which) {
  const char* op = "group_reduce";
  check_kv(kv, op, s);
  check_scores(kv, in, "in", op, s);
  check_scores(kv, out, "out", op, s);
  if (in.extent[1] % out.extent[1])
    fail(Errc::internal, op,
         "got " + std::to_string(in.extent[1]) + " heads for " + std::to_string(out.extent[1]) +
             " of the output, wanted a multiple of them");
  if (s.device() == Device::cuda) return on_cuda<group_reduce>(kv, in, rule, out, s, which);
  const int heads = static_cast<int>(out.extent[1]), group = static_cast<int>(in.extent[1]) / heads;
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(kv.rows * in.extent[1] * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const int kv_head = h / (heads / kv.kv_heads), tokens = kv.tokens(r, kv_head);
      if (tokens > 0 && which.on(kv.slots[r], kv_head))
        reduce_group(&in(r, h * group, 0), in.stride[1], group, tokens, rule, 1.f, &out(r, h, 0));
    }
}

}  // namespace kvlab::ops
