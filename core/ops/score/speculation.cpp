#include "ops/score/speculation.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/extents.hpp"

namespace kvlab::ops {

View<const float, 4> queries_and_sums(const PagedKv& kv, const Tensor<4>& of_queries, const View<float, 3>& sums,
                                      const char* op) {
  if (of_queries.dtype != DType::f32)
    fail(Errc::unsupported, op, std::string("got queries of ") + name_of(of_queries.dtype) + ", wanted f32");
  const View<const float, 4> queries = of_queries.f32();
  if (queries.extent[0] < kv.rows || queries.extent[1] % kv.kv_heads || queries.extent[3] != kv.head_dim ||
      queries.stride[3] != 1)
    fail(Errc::internal, op,
         "got queries " + extents(queries) + ", wanted [row, query head, i, " + std::to_string(kv.head_dim) +
             "], dense");
  if (sums.extent[1] != kv.kv_heads || sums.extent[2] != kv.head_dim)
    fail(Errc::internal, op,
         "got sums " + extents(sums) + ", wanted [slot, " + std::to_string(kv.kv_heads) + " KV heads, " +
             std::to_string(kv.head_dim) + "]");
  return queries;
}

void add_magnitudes(const PagedKv& kv, const Tensor<4>& of_queries, View<float, 3> sums, Stream s) {
  const char* op = "add_magnitudes";
  check_kv(kv, op, s);
  const View<const float, 4> queries = queries_and_sums(kv, of_queries, sums, op);
  if (s.device() == Device::cuda) return on_cuda<add_magnitudes>(kv, of_queries, sums, s);
  const std::int64_t group = queries.extent[1] / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (std::int64_t h = 0; h < kv.kv_heads; ++h)
      for (std::int64_t d = 0; d < kv.head_dim; ++d) {
        double sum = 0;
        for (std::int64_t i = 0; i < queries.extent[2]; ++i)
          for (std::int64_t g = h * group; g < (h + 1) * group; ++g) sum += std::abs(double{queries(r, g, i, d)});
        float& to = sums(kv.slots[r], h, d);
        to = static_cast<float>(double{to} + sum);
      }
}

void near_greatest(const PagedKv& kv, View<const float, 3> scores, const NearGreatest& rule, View<std::int32_t, 2> out,
                   Stream s) {
  const char* op = "near_greatest";
  check_kv(kv, op, s);
  check_kv_scores(kv, scores, "scores", op, s);
  if (out.extent[0] < kv.rows || out.extent[1] < kv.kv_heads)
    fail(Errc::internal, op, "got numbers " + extents(out) + ", wanted [row, kv_head]");
  if (rule.newest < 0 || rule.most < 1 || !(rule.most_share >= 0))
    fail(Errc::internal, op,
         "got " + std::to_string(rule.newest) + " newest tokens, at most " + std::to_string(rule.most) +
             " and a share of " + std::to_string(rule.most_share) + ", wanted at least 0, 1 and 0");
  if (s.device() == Device::cuda) return on_cuda<near_greatest>(kv, scores, rule, out, s);
  for (int r = 0; r < kv.rows; ++r) {
    long long total = 0;
    int tokens = kv.tokens(r, 0);
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int n = kv.tokens(r, h) - rule.newest;
      tokens = std::min(tokens, kv.tokens(r, h));
      float most = -INFINITY;
      for (int t = 0; t < n; ++t) most = std::fmax(most, scores(r, h, t));
      for (int t = 0; t < n; ++t) total += scores(r, h, t) > most - rule.within;
    }
    for (int h = 0; h < kv.kv_heads; ++h) out(r, h) = near_number(rule, total, kv.kv_heads, tokens);
  }
}

}  // namespace kvlab::ops
