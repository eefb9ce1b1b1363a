// Arithmetic on scores, entry by entry, and their softmax.
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/row_kernels.hpp"
#include "ops/score/combine.hpp"

namespace kvlab::ops {
namespace {

void combine_row(float* out, const float* in, std::int64_t n, Combine rule, float factor) {
  switch (rule) {
    case Combine::copy: std::copy_n(in, n, out); return;
    case Combine::add:
      for (std::int64_t i = 0; i < n; ++i) out[i] += factor * in[i];
      return;
    case Combine::multiply:
      for (std::int64_t i = 0; i < n; ++i) out[i] *= in[i];
      return;
    case Combine::divide:
      for (std::int64_t i = 0; i < n; ++i) out[i] = in[i] == 0 ? 0 : out[i] / in[i];
      return;
  }
}

const char* name_of(Combine rule) {
  constexpr const char* names[] = {"copy", "add", "multiply", "divide"};
  return names[static_cast<int>(rule)];
}

}  // namespace

void combine(Scores out, View<const float, 3> in, Combine rule, float factor, Stream s) {
  const char* op = name_of(rule);
  if (in.extent[0] < out.extent[0] || in.extent[1] < 1 || out.extent[1] % in.extent[1] || in.extent[2] < out.extent[2])
    fail(Errc::internal, op,
         "got an input that is smaller than the output, wanted its rows, entries and a divisor of "
         "its heads");
  if ((in.stride[2] != 1 || out.stride[2] != 1) && out.extent[2] > 1)
    fail(Errc::unsupported, op, "got entries with a stride between them, wanted them contiguous");
  if (s.device() == Device::cuda) return on_cuda<combine>(out, in, rule, factor, s);
  const std::int64_t group = out.extent[1] / in.extent[1], n = out.extent[2];
  if (n == 0) return;
#pragma omp parallel for collapse(2) if (worth_threads(out.extent[0] * out.extent[1] * n))
  for (std::int64_t r = 0; r < out.extent[0]; ++r)
    for (std::int64_t h = 0; h < out.extent[1]; ++h) combine_row(&out(r, h, 0), &in(r, h / group, 0), n, rule, factor);
}

void copy(Scores out, View<const float, 3> in, Stream s) { combine(out, in, Combine::copy, 1, s); }
void add(Scores out, View<const float, 3> in, float factor, Stream s) { combine(out, in, Combine::add, factor, s); }
void multiply(Scores out, View<const float, 3> in, Stream s) { combine(out, in, Combine::multiply, 1, s); }
void divide(Scores out, View<const float, 3> in, Stream s) { combine(out, in, Combine::divide, 1, s); }

void softmax(const PagedKv& kv, Scores scores, float temperature, Stream s) {
  const char* op = "softmax";
  check_kv(kv, op, s);
  check_scores(kv, scores, "scores", op, s);
  if (!(temperature > 0))
    fail(Errc::internal, op, "got temperature " + std::to_string(temperature) + ", wanted more than 0");
  if (s.device() == Device::cuda) return on_cuda<softmax>(kv, scores, temperature, s);
  const RowKernels& kernels = row_kernels();
  const int heads = static_cast<int>(scores.extent[1]), group = heads / kv.kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(std::int64_t{kv.rows} * heads * longest(kv)))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const int n = kv.tokens(r, h / group);
      if (n == 0) continue;
      float* x = &scores(r, h, 0);
      kernels.scale(x, n, 1.f / temperature);
      const float most = kernels.max(x, n);
      const float sum = std::isfinite(most) ? kernels.exp_sum(x, n, most) : 0.f;
      if (sum > 0)
        kernels.scale(x, n, 1.f / sum);
      else
        std::fill_n(x, n, 0.f);
    }
}

}  // namespace kvlab::ops
