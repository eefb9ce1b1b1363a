#include "ops/attend/attend_made_up.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/made_up.hpp"

namespace kvlab::ops {
namespace {

float scale_of(const AttendArgs& a) {
  return a.softmax_scale > 0 ? a.softmax_scale : 1.f / std::sqrt(static_cast<float>(a.kv.head_dim));
}

void join(const AttendArgs& a, const MadeUpTokens& tokens, int row, int query_head, float scale) {
  thread_local std::vector<float> logits;
  const int group = static_cast<int>(a.queries.extent[1]) / a.kv.kv_heads, head = query_head / group;
  const int slot = a.kv.slots[row], dim = a.kv.head_dim;
  const float* q = &a.queries(row, query_head, 0);
  float *out = &a.out(row, query_head, 0), &lse = a.lse(row, query_head), highest = lse;
  logits.clear();
  for (std::int64_t i = 0; i < tokens.weights.extent[2]; ++i) {
    const float weight = tokens.weights(slot, head, i), *key = &tokens.keys(slot, head, i, 0);
    float dot = -std::numeric_limits<float>::infinity();
    if (weight > 0) {
      dot = 0;
      for (int d = 0; d < dim; ++d) dot += q[d] * key[d];
      dot = dot * scale + std::log(weight);
    }
    logits.push_back(dot);
    highest = std::max(highest, dot);
  }
  if (highest == -std::numeric_limits<float>::infinity()) return;
  float total = std::exp(lse - highest);
  for (int d = 0; d < dim; ++d) out[d] *= total;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!(tokens.weights(slot, head, i) > 0)) continue;
    const float share = std::exp(logits[i] - highest), *value = &tokens.values(slot, head, i, 0);
    total += share;
    for (int d = 0; d < dim; ++d) out[d] += share * value[d];
  }
  for (int d = 0; d < dim; ++d) out[d] /= total;
  lse = highest + std::log(total);
}

}  // namespace

void attend_made_up(const AttendArgs& a, const MadeUpTokens& tokens, Stream s) {
  const char* op = "attend_made_up";
  check_kv(a.kv, op, s);
  check_made_up(a.kv, tokens, op, s);
  const std::int64_t heads = a.queries.extent[1];
  if (!a.lse || a.lse.extent[0] < a.kv.rows || a.lse.extent[1] < heads)
    fail(Errc::internal, op, "got no lse or too small a one, wanted [row, query head] of the attention");
  if (heads % a.kv.kv_heads || a.queries.stride[2] != 1 || a.out.stride[2] != 1)
    fail(Errc::internal, op, "got queries or an output of another shape, wanted those of the attention");
  if (s.device() == Device::cuda) return on_cuda<attend_made_up>(a, tokens, s);
  const float scale = scale_of(a);
#pragma omp parallel for collapse(2) if (worth_threads(a.kv.rows * heads * tokens.weights.extent[2] * a.kv.head_dim))
  for (int row = 0; row < a.kv.rows; ++row)
    for (std::int64_t head = 0; head < heads; ++head) join(a, tokens, row, static_cast<int>(head), scale);
}

}  // namespace kvlab::ops
