// Computes per-token scores from the cache, and reads and writes token state.
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/token_rows.hpp"
#include "ops/score/group.hpp"

namespace kvlab::ops {
namespace {

constexpr int pages_ahead = 12;  // prefetch distance: frames are scattered, and a pass reads little of each

float* state_of(const PagedKv& kv, const PageEntry& e, int column) {
  return reinterpret_cast<float*>(kv.frame(e) + kv.layout(e).state) + std::int64_t{column} * kv.page_size;
}

}  // namespace

void row_norm(const KvRows& rows, Scores out, Stream s, const Heads& heads) {
  const PagedKv& kv = resident_cache(rows.kv, "row_norm", s, heads);
  check_kv_scores(kv, out, "out", "row_norm", s);
  if (s.device() == Device::cuda) return on_cuda<row_norm>(rows, out, s, heads);
  constexpr int chunk = 32;  // pages
#pragma omp parallel for collapse(2) \
    schedule(dynamic) if (worth_threads(std::int64_t{longest(kv)} * kv.rows * kv.kv_heads))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      if (!heads.on(kv.slots[r], h)) continue;
      thread_local TokenRows tokens;
      thread_local std::vector<float> squares;
      for (int p = 0; p < kv.pages(r, h); p += chunk) {
        tokens.gather(kv, r, h, rows.side, nullptr, p, std::min(chunk, kv.pages(r, h) - p));
        squares.resize(tokens.count());
        float* to = squares.data();
        for (int i = 0; i < tokens.run_count(); to += tokens.runs()[i++].count)
          row_kernels().square_sum(tokens.runs()[i], kv.head_dim, to);
        for (int t = 0; t < tokens.count(); ++t) out(r, h, tokens.place(t)) = std::sqrt(squares[t]);
      }
    }
}

void scale(Scores out, float factor, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<scale>(out, factor, s);
  for (std::int64_t r = 0; r < out.extent[0]; ++r)
    for (std::int64_t h = 0; h < out.extent[1]; ++h)
      for (std::int64_t t = 0; t < out.extent[2]; ++t) out(r, h, t) *= factor;
}

// out[row, kv_head, token] = f(row, text position).
template <class F>
static void by_position(const PagedKv& kv, Scores out, F f) {
  thread_local std::vector<std::int32_t> position;
  position.resize(longest(kv));
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      token_positions(kv, r, h, kv.tokens(r, h), position.data());
      for (int t = 0; t < kv.tokens(r, h); ++t) out(r, h, t) = static_cast<float>(f(r, position[t]));
    }
}

void recency(const PagedKv& kv, Scores out, Stream s) {
  check_kv(kv, "recency", s);
  check_kv_scores(kv, out, "out", "recency", s);
  if (s.device() == Device::cuda) return on_cuda<recency>(kv, out, s);
  by_position(kv, out, [](int, std::int32_t p) { return p; });
}

void query_counts(const PagedKv& kv, const std::int32_t* seen, int window, Scores out, Stream s) {
  check_kv(kv, "query_counts", s);
  check_kv_scores(kv, out, "out", "query_counts", s);
  if (s.device() == Device::cuda) return on_cuda<query_counts>(kv, seen, window, out, s);
  by_position(kv, out, [&](int row, std::int32_t p) { return std::max(0, std::min(window, seen[row] - p)); });
}

void add_mass(View<const float, 3> mass, GroupRule rule, const StateColumn& column, Stream s, const Heads& heads) {
  const PagedKv& kv = checked_column(column, "add_mass", s, heads);
  check_scores(kv, mass, "mass", "add_mass", s);
  if (s.device() == Device::cuda) return on_cuda<add_mass>(mass, rule, column, s, heads);
  const int group = static_cast<int>(mass.extent[1]) / kv.kv_heads;
  thread_local std::vector<float> reduced;
  reduced.resize(longest(kv));
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      const int tokens = kv.tokens(r, h);
      if (tokens == 0 || !heads.on(kv.slots[r], h)) continue;
      reduce_group(&mass(r, h * group, 0), mass.stride[1], group, tokens, rule, 1.f, reduced.data());
      for (int p = 0; p < kv.pages(r, h); ++p) {
        if (p + pages_ahead < kv.pages(r, h))
          __builtin_prefetch(state_of(kv, kv.entry(r, h, p + pages_ahead), column.column), 1);
        float* state = state_of(kv, kv.entry(r, h, p), column.column);
        const int begin = p * kv.page_size, count = std::min(kv.page_size, tokens - begin);
        for (int t = 0; t < count; ++t) state[t] += reduced[begin + t];
      }
    }
}

void blend_state(const StateColumn& column, float keep, View<const float, 3> in, float factor, Stream s,
                 const Heads& heads) {
  const char* op = "blend_state";
  const PagedKv& kv = checked_column(column, op, s, heads);
  if (in) check_kv_scores(kv, in, "in", op, s);
  if (s.device() == Device::cuda) return on_cuda<blend_state>(column, keep, in, factor, s, heads);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int p = 0, begin = 0; heads.on(kv.slots[r], h) && p < kv.pages(r, h); ++p, begin += kv.page_size) {
        float* state = state_of(kv, kv.entry(r, h, p), column.column);
        for (int t = 0; t < std::min(kv.page_size, kv.tokens(r, h) - begin); ++t)
          state[t] = (keep != 0 ? keep * state[t] : 0) + factor * (in ? in(r, h, begin + t) : 1.f);
      }
}

void page_sum(const PagedKv& kv, View<const float, 3> in, Scores out, Stream s) {
  const char* op = "page_sum";
  check_kv(kv, op, s);
  check_scores(kv, in, "in", op, s);
  if (out.extent[0] < kv.rows || out.extent[1] != in.extent[1] ||
      (s.device() == Device::cpu && out.extent[2] < (longest(kv) + kv.page_size - 1) / kv.page_size))
    fail(Errc::internal, op, "got an output of another shape, wanted [row, head, page] with the heads of the input");
  if (s.device() == Device::cuda) return on_cuda<page_sum>(kv, in, out, s);
  const int heads = static_cast<int>(in.extent[1]), group = heads / kv.kv_heads;
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads; ++h)
      for (int p = 0, begin = 0; p < kv.pages(r, h / group); ++p, begin += kv.page_size) {
        const int end = std::min(begin + kv.page_size, kv.tokens(r, h / group));
        float sum = 0;
        for (int t = begin; t < end; ++t) sum += in(r, h, t);
        out(r, h, p) = sum;
      }
}

void read_state(const StateColumn& column, Scores out, Stream s, const Heads& heads) {
  const PagedKv& kv = checked_column(column, "read_state", s, heads);
  check_kv_scores(kv, out, "out", "read_state", s);
  if (s.device() == Device::cuda) return on_cuda<read_state>(column, out, s, heads);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h)
      for (int p = 0, begin = 0; heads.on(kv.slots[r], h) && p < kv.pages(r, h); ++p, begin += kv.page_size) {
        if (p + pages_ahead < kv.pages(r, h))
          __builtin_prefetch(state_of(kv, kv.entry(r, h, p + pages_ahead), column.column));
        std::copy_n(state_of(kv, kv.entry(r, h, p), column.column), std::min(kv.page_size, kv.tokens(r, h) - begin),
                    &out(r, h, begin));
      }
}

}  // namespace kvlab::ops
