#include "ops/score/votes.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/score/query_logits.hpp"

namespace kvlab::ops {
namespace {

constexpr int sees_all = std::numeric_limits<std::int32_t>::max();  // a position after all others

struct Scratch : QueryLogits {
  std::vector<float> greatest;  // [tokens], where a group gives one vote
};

// Turns the logits of a query into shares of the tokens up to `newest`. Returns the factor that is still missing; 0: it
// sees none of them.
float share(float* s, const std::int32_t* position, int tokens, int newest) {
  const RowKernels& kernels = row_kernels();
  for (int t = 0; t < tokens; ++t) s[t] = position[t] > newest ? -std::numeric_limits<float>::infinity() : s[t];
  const float maximum = kernels.max(s, tokens);
  return std::isfinite(maximum) ? 1.f / kernels.exp_sum(s, tokens, maximum) : 0.f;
}

// Computes the votes of one KV head's query heads, or of the group. last: text position of the newest query. near: as
// `newest` of window_votes.
void vote_head(const PagedKv& kv, int row, int head, const View<const float, 3>& queries, int last, int near,
               const HeadRanks& ranks, bool of_group, float* votes, std::int64_t votes_stride) {
  thread_local Scratch x;
  const RowKernels& kernels = row_kernels();
  const int tokens = kv.tokens(row, head), group = static_cast<int>(queries.extent[0]);
  const int window = static_cast<int>(queries.extent[1]);
  x.fill(kv, row, head, queries, ranks);
  const float softmax_scale = 1.f / std::sqrt(static_cast<float>(kv.head_dim));
  for (int g = 0; g < (of_group ? 1 : group); ++g) std::fill_n(votes + g * votes_stride, tokens, 0.f);
  for (int i = 0; i < window; ++i) {
    const int newest = last == sees_all ? last : last - (window - 1) + i;
    if (of_group) x.greatest.assign(static_cast<std::size_t>(tokens), 0.f);
    for (int g = 0; g < group; ++g) {
      float* s = x.of(g, i, window);
      kernels.scale(s, tokens, softmax_scale);
      const float factor = share(s, x.position.data(), tokens, newest);
      if (factor == 0) continue;
      for (int t = 0; near > 0 && t < tokens; ++t) s[t] = x.position[t] <= newest - near ? 0.f : s[t];
      if (!of_group)
        kernels.add_scaled(s, tokens, factor, votes + g * votes_stride);
      else
        for (int t = 0; t < tokens; ++t) x.greatest[t] = std::max(x.greatest[t], s[t] * factor);
    }
    if (of_group) kernels.add_scaled(x.greatest.data(), tokens, 1, votes);
  }
}

}  // namespace

void window_votes(const Tensor<4>& window_queries, const std::int32_t* seen, const PagedKv& kv, Scores votes, Stream s,
                  const Heads& which, int newest) {
  const char* op = "window_votes";
  check_kv(kv, op, s);
  check_scores(kv, votes, "votes", op, s);
  if (window_queries.dtype != DType::f32)
    fail(Errc::unsupported, op, std::string("got queries of ") + name_of(window_queries.dtype) + ", wanted f32");
  const View<const float, 4> queries = window_queries.f32();
  const bool of_group = queries.extent[1] > kv.kv_heads && votes.extent[1] == kv.kv_heads;
  if (queries.extent[0] < kv.rows || queries.extent[3] != kv.head_dim || queries.extent[1] % kv.kv_heads != 0 ||
      (!of_group && queries.extent[1] != votes.extent[1]))
    fail(Errc::internal, op, "got window queries of another shape, wanted [row, query head, w, head_dim]");
  if (queries.stride[3] != 1) fail(Errc::unsupported, op, "got strided queries, wanted head_dim contiguous");
  if (newest > 0 && !seen)
    fail(Errc::internal, op, "got votes for the newest tokens of each query, wanted the numbers of tokens seen");
  if (s.device() == Device::cuda) return on_cuda<window_votes>(window_queries, seen, kv, votes, s, which, newest);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      if (which.on(kv.slots[r], h)) check_resident(kv, r, h, op);
  const int heads = static_cast<int>(queries.extent[1]), group = heads / kv.kv_heads;
  thread_local HeadRanks ranks_of_thread;
  HeadRanks& ranks = ranks_of_thread;
  ranks.fill(kv, which);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (kv.tokens(r, h) == 0 || !which.on(kv.slots[r], h)) continue;
      View<const float, 3> of_head = queries[r];
      of_head.data += h * group * of_head.stride[0];
      of_head.extent[0] = group;
      vote_head(kv, r, h, of_head, seen ? seen[r] - 1 : sees_all, newest, ranks, of_group,
                &votes(r, of_group ? h : h * group, 0), votes.stride[1]);
    }
}

bool pooled_votes_at_once(const Tensor<4>& queries, const PagedKv& kv, const VotePooling& pooling, Scores rows,
                          Scores out, Stream s, const Heads& heads) {
  return s.device() == Device::cuda && on_cuda<pooled_votes_at_once>(queries, kv, pooling, rows, out, s, heads);
}

void pooled_votes(const Tensor<4>& queries, const PagedKv& kv, const VotePooling& pooling, Scores out, Workspace& w,
                  Stream s, const Heads& heads) {
  const char* op = "pooled_votes";
  check_kv(kv, op, s);
  check_scores(kv, out, "out", op, s);
  const std::int64_t query_heads = queries.extent[1];
  if (queries.extent[2] != 1 || query_heads % out.extent[1])
    fail(Errc::internal, op, "got queries of another shape, wanted [row, query head, 1, head_dim]");
  const auto rows = take_scratch<float>(w, op, {kv.rows, query_heads, out.extent[2]});
  if (pooled_votes_at_once(queries, kv, pooling, rows, out, s, heads)) return;
  window_votes(queries, nullptr, kv, rows, s, heads);
  pool(kv, rows, pooling.kind, pooling.kernel, 0, w, s, heads);
  group_reduce(kv, rows, pooling.rule, out, s, heads);
}

}  // namespace kvlab::ops
