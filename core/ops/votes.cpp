#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/check.hpp"
#include "ops/paged.hpp"
#include "ops/token_rows.hpp"

namespace kvlab::ops {
namespace {

constexpr int block_tokens = 128;  // decoded and packed at once

struct Scratch {
  TokenRows rows;
  std::vector<float> panel, scores;  // [head_dim, panel_width], [window, tokens]
  std::vector<std::int32_t> position;
};

// scores[i, t] = q_i . k_t of one query head, all tokens.
void score_tokens(const PagedKv& kv, int row, int head, const View<const float, 2>& queries, const HeadRanks& ranks,
                  std::int64_t stride, Scratch& x) {
  const RowKernels& kernels = row_kernels();
  const int pages = kv.pages(row, head), window = static_cast<int>(queries.extent[0]);
  const int block = std::max(1, block_tokens / kv.page_size);
  x.panel.resize(std::size_t(kv.head_dim) * panel_width);
  int place = 0;
  for (int p = 0; p < pages; p += block) {
    x.rows.gather(kv, row, head, KvSide::key, nullptr, p, std::min(block, pages - p));
    const std::int32_t* rank = ranks.of(row, head);
    const float* keys = rank ? x.rows.rotate(kv, rank, *ranks.rope()) : x.rows.decode(kv.head_dim);
    for (int t = 0; t < x.rows.count(); ++t) x.position[place + t] = x.rows.position(t);
    for (int t = 0; t < x.rows.count(); t += panel_width) {
      const int count = std::min(panel_width, x.rows.count() - t);
      kernels.pack_panel(keys + std::int64_t{t} * kv.head_dim, count, kv.head_dim, x.panel.data());
      kernels.panel_dot(x.panel.data(), kv.head_dim, queries.data, queries.stride[0], window,
                        x.scores.data() + place + t, stride);
    }
    place += x.rows.count();
  }
}

void vote_head(const PagedKv& kv, int row, int head, const View<const float, 2>& queries, int last,
               const HeadRanks& ranks, float* votes) {
  thread_local Scratch x;
  const RowKernels& kernels = row_kernels();
  const int tokens = kv.tokens(row, head), window = static_cast<int>(queries.extent[0]);
  const std::int64_t stride = tokens + panel_width;  // the last panel may hang over
  x.scores.resize(stride * window);
  x.position.resize(tokens);
  score_tokens(kv, row, head, queries, ranks, stride, x);
  const float softmax_scale = 1.f / std::sqrt(static_cast<float>(kv.head_dim));
  std::fill_n(votes, tokens, 0.f);
  for (int i = 0; i < window; ++i) {
    float* s = x.scores.data() + i * stride;
    kernels.scale(s, tokens, softmax_scale);
    const int newest = last - (window - 1) + i;
    for (int t = 0; t < tokens; ++t)
      if (x.position[t] > newest) s[t] = -std::numeric_limits<float>::infinity();
    const float maximum = kernels.max(s, tokens);
    if (!std::isfinite(maximum)) continue;
    const float total = kernels.exp_sum(s, tokens, maximum);
    kernels.add_scaled(s, tokens, 1.f / total, votes);
  }
}

}  // namespace

void window_votes(const Tensor<4>& window_queries, const std::int32_t* seen, const PagedKv& kv, Scores votes,
                  Stream s) {
  const char* op = "window_votes";
  require_cpu(s, op);
  check_kv(kv, op);
  check_scores(kv, votes, "votes", op);
  if (window_queries.dtype != DType::f32)
    fail(Errc::unsupported, op, std::string("got queries of ") + name_of(window_queries.dtype) + ", wanted f32");
  const View<const float, 4> queries = window_queries.f32();
  if (queries.extent[0] < kv.rows || queries.extent[1] != votes.extent[1] || queries.extent[3] != kv.head_dim || !seen)
    fail(Errc::internal, op, "got window queries of another shape, wanted [row, query head, w, head_dim]");
  if (queries.stride[3] != 1) fail(Errc::unsupported, op, "got strided queries, wanted head_dim contiguous");
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) check_resident(kv, r, h, op);
  const int heads = static_cast<int>(queries.extent[1]), group = heads / kv.kv_heads;
  thread_local HeadRanks ranks_of_thread;
  HeadRanks& ranks = ranks_of_thread;
  ranks.fill(kv);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h)
      if (kv.tokens(r, h / group) > 0) vote_head(kv, r, h / group, queries[r][h], seen[r] - 1, ranks, &votes(r, h, 0));
}

}  // namespace kvlab::ops
