#include "ops/score/abs_sums.hpp"

#include <algorithm>
#include <cmath>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {

void add_abs_sums(const PagedKv& kv, int kv_head, int first, View<const float, 2> rows, float factor, bool begins,
                  Scores scores, Stream s) {
  const char* op = "add_abs_sums";
  check_kv(kv, op, s);
  check_kv_scores(kv, scores, "scores", op, s);
  if (kv.rows != 1 || kv_head < 0 || kv_head >= kv.kv_heads || first < 0)
    fail(Errc::internal, op, "got several rows, or a head or token that is not there, wanted one row's");
  if (rows.stride[1] != 1 || first + rows.extent[0] > scores.extent[2])
    fail(Errc::internal, op, "got rows of another shape than the scores, wanted contiguous ones of their tokens");
  if (s.device() == Device::cuda) return on_cuda<add_abs_sums>(kv, kv_head, first, rows, factor, begins, scores, s);
  const std::int64_t tokens = std::min<std::int64_t>(rows.extent[0], kv.tokens(0, kv_head) - first);
#pragma omp parallel for if (worth_threads(tokens * rows.extent[1]))
  for (std::int64_t i = 0; i < tokens; ++i) {
    double sum = 0;
    for (std::int64_t d = 0; d < rows.extent[1]; ++d) sum += std::abs(double{rows(i, d)});
    float& to = scores(0, kv_head, first + i);
    to = (begins ? 0.f : to) + factor * static_cast<float>(sum);
  }
}

}  // namespace kvlab::ops
