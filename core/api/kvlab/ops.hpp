// The ops a plugin calls. Each works on the whole batch: all rows and all KV heads of one layer, whatever page codec
// and RoPE regime; on CPU or GPU memory according to the stream. Outputs are scratch of the caller. "Bytes" = what must
// be moved. Ties go to the lower index everywhere; selection is exact and NaN ranks below every other score. A shape or
// dtype that is not supported is Errc::unsupported; a view that is too small, or a page that has to be read and is not
// on the device, is Errc::internal. Scores are contiguous along their last index; entries past a row's length are left
// alone. With a CUDA stream every array is device memory, pins, totals and text lengths too (LayerKv::upload); what a
// kernel finds wrong in them it cannot report: it writes no further than the arrays reach.
#pragma once
#include <vector>

#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/roles.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// out[row, kv_head, token] = ||x||_2 of every cached key or value. Bytes: that side of the layer's cache.
void row_norm(const KvRows& rows, Scores out, Stream s);

// out = factor * out, every entry (those past a row's length mean nothing before and after).
void scale(Scores out, float factor, Stream s);
inline void negate(Scores out, Stream s) { scale(out, -1.f, s); }

// out = in, out += factor * in, out *= in and out /= in (x / 0 = 0), entry by entry, those past a row's length too.
// `in` has the heads of `out` or a divisor of their number. Each of its heads then stands for as many neighbours:
// scores of a KV head for its query heads, those of one head for all. `in` is as long as `out` or longer, else
// Errc::internal; it may be `out` itself. Bytes: in and out.
void copy(Scores out, View<const float, 3> in, Stream s);
void add(Scores out, View<const float, 3> in, float factor, Stream s);
void multiply(Scores out, View<const float, 3> in, Stream s);
void divide(Scores out, View<const float, 3> in, Stream s);

// scores = exp(scores / temperature), divided by its sum over the tokens of the row's head; of query heads or KV heads.
// -inf becomes 0. A head of nothing but -inf becomes 0 everywhere. temperature > 0. Bytes: scores, three times.
void softmax(const PagedKv& kv, Scores scores, float temperature, Stream s);

// out[row, kv_head, token, d] = the cached key or value as f32, decoded. Keys are as attention reads them: under
// cache_relative turned by their rank. Bytes: that side of the layer's cache, and out.
void read_rows(const KvRows& rows, View<float, 4> out, Stream s);

// out[row, head, token] = vectors[row, head, :] . x of every cached key or value x, and the same divided by the lengths
// of both (0 where one of them is 0). Heads are KV heads or query heads; a query head reads the rows of its group's KV
// head. Rows are those of read_rows; head_dim is contiguous. Bytes: that side of the layer's cache, once.
void row_dot(const KvRows& rows, View<const float, 3> vectors, Scores out, Stream s);
void row_cosine(const KvRows& rows, View<const float, 3> vectors, Scores out, Stream s);

// out[row, head, token] = x . matrix[row, head] x, for heads and rows x as row_dot. Bytes: that side of the layer's
// cache and the matrices; head_dim^2 multiplications a token and head.
void row_quadratic(const KvRows& rows, View<const float, 4> matrix, Scores out, Stream s);

// out[row, kv_head, d] = mean over the head's tokens of x / ||x||_2, x as read_rows; rows of zeros count as zeros, and
// a head without tokens gives zeros. Bytes: that side of the layer's cache.
void normalised_mean(const KvRows& rows, View<float, 3> out, Stream s);

// out[row, kv_head, token] = text position (newer = higher).
void recency(const PagedKv& kv, Scores out, Stream s);

// votes[row, query head, token] = sum over the w window queries of softmax_j(q . k_j / sqrt(D)), f32, over all cached
// tokens; query i of the window sees only tokens up to its own text position (the window is the last w tokens). SnapKV
// steps 2 and 3. seen: [row] text tokens seen so far (LayerKv::position, uploaded); the newest query is the last of
// them. Bytes: the layer's keys, once per query head.
void window_votes(const Tensor<4>& window_queries, const std::int32_t* seen, const PagedKv& kv, Scores votes, Stream s);

// 1-D pooling along text order of tokens [0, tokens - excluded), stride 1, in place per row of `scores` (query heads or
// KV heads); average counts the zero padding in its divisor, max pads with -inf; kernel is odd. The excluded newest
// tokens are left as they are. The cache must be in text order (it is at the end of a prompt). SnapKV, PyramidKV.
void pool(const PagedKv& kv, Scores scores, Pooling kind, int kernel, int excluded, Workspace& w, Stream s);

// out[row, kv_head, token] from in[row, query head, token] over the group of G query heads. softmax_mean takes its
// softmax over all tokens of the row. Bytes: in and out.
void group_reduce(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s);

// out[row, kv_head, token] from in[row, head, token] of all heads of the layer, query heads or KV heads: mean, max or
// sum over the heads that hold a token of the same text position. Heads that hold the same positions are thereby given
// the same scores, whatever the places. softmax_mean is Errc::unsupported (ops::softmax, then mean). Bytes: in and out,
// and the positions of every head.
void layer_reduce(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s);

// out[row, head, page] = sum of in[row, head, token] over the page's tokens; query heads or KV heads. Bytes: in and
// out.
void page_sum(const PagedKv& kv, View<const float, 3> in, Scores out, Stream s);

// scores[row, head, token] = value for the tokens that `pins` names by text position; query heads or KV heads.
// pins.newest_page is not looked at. Bytes: the positions, and what is written.
void set_pinned(const PagedKv& kv, Pins pins, float value, Scores scores, Stream s);

// column[token] += rule over the group of mass[row, query head, token]. Bytes: mass, and the column twice.
void add_mass(View<const float, 3> mass, GroupRule rule, const StateColumn& column, Stream s);

// out[row, kv_head, token] = the column.
void read_state(const StateColumn& column, Scores out, Stream s);

// column[token] = keep * column[token] + factor * in[row, kv_head, token]; without `in` its entries are 1. keep 0
// forgets whatever was there. So (0, {}, 0) clears, (0, x, 1) writes, (b, x, 1 - b) is a moving average, (1, {}, 1)
// counts the calls that each token has seen. Bytes: in, and the column twice.
void blend_state(const StateColumn& column, float keep, View<const float, 3> in, float factor, Stream s);

// Count, mean and summed products of deviations from the mean of many vectors, per slot and query head, in state
// memory: [slot, query head, moment_floats(head_dim)] f32, one head's being products [head_dim, head_dim], mean
// [head_dim], count, and 3 that are not used.
using Moments = View<float, 3>;
constexpr std::int64_t moment_floats(std::int64_t head_dim) { return head_dim * head_dim + head_dim + 4; }

// For attach: the moments of each layer, of nothing yet. They are saved, restored and cleared with the sequence.
inline std::vector<Moments> take_moments(const char* tag, const Shape& shape, Workspace& w) {
  const std::int64_t head = moment_floats(shape.head_dim), layer = head * shape.query_heads;
  auto* data = static_cast<float*>(
      w.state(tag, static_cast<std::size_t>(layer * shape.layers) * sizeof(float), shape.max_slots));
  std::vector<Moments> of_layers;
  for (int l = 0; l < shape.layers; ++l)
    of_layers.push_back(
        Moments{data + l * layer, {shape.max_slots, shape.query_heads, head}, {layer * shape.layers, head, 1}});
  return of_layers;
}

// Adds queries to the moments of kv's rows, as they were before RoPE: turned back by their text positions, without
// attention_scale. queries: LayerKv::chunk_queries; seen: [row] as for window_votes, the newest query being the last of
// them. Queries at text positions below `first` are left out. kv gives slots and RoPE. Sums are f32 of differences, so
// a mean that is large beside the spread costs no accuracy. Bytes: queries, and the moments twice; head_dim^2
// multiplications a query.
void add_moments(const Tensor<4>& queries, const std::int32_t* seen, const PagedKv& kv, int first, Moments moments,
                 Stream s);

// Mean and covariance (divided by the count of its vectors) of a query at an unknown one of the `horizon` text
// positions that follow seen[row], for vectors of these moments: R mean and R covariance R^T, where R is the mean of
// RoPE's matrices at the positions seen .. seen + horizon - 1, attention_scale included. Zeros where the moments are of
// nothing. mean: [row, query head, head_dim]; covariance: [row, query head, head_dim, head_dim]. Bytes: moments, mean
// and covariance.
void expected_query(const Moments& moments, const std::int32_t* seen, const PagedKv& kv, int horizon,
                    View<float, 3> mean, View<float, 4> covariance, Stream s);

// Tokens kept: the keep(row, kv_head) best by score, with the pins of the row always among them (they use up budget
// first; if the pins alone exceed keep, the pins stay). pins: one per row or null; the first and last tokens are those
// with the lowest and highest text positions in the cache. list: ascending places in the cache, with room for what is
// kept. keep >= length keeps everything. Bytes: the scores (and the positions where there are pins).
void top_tokens(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> keep, const Pins* pins,
                TokenList list, Stream s);

// Upper bounds (min_max: sum_d max(q_d lo_d, q_d hi_d)) or mean-key scores (q . mean) of every page, reduced over the
// group: out[row, kv_head, page]. scale multiplies the scores before the softmax over pages of softmax_mean; ranks
// under the other rules do not depend on it, and they leave it out. Quest step 2. Bytes: the layer's summaries.
void page_score(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, GroupRule rule, float scale,
                Scores out, Stream s);

// The page_budgets(row, kv_head) best pages; a pinned newest page (the last one) takes one of them. Fewer pages than
// budget = all pages. Pins by token are not looked at: Edits::attend adds their pages. No page is read. Bytes: the
// scores.
void top_pages(const PagedKv& kv, View<const float, 3> page_scores, View<const std::int32_t, 2> page_budgets, Pins pins,
               PageList out, Stream s);

// page_score into `scores`, then top_pages of them: one launch on the GPU. Bytes: the layer's summaries.
void score_pages(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, GroupRule rule, float scale,
                 View<const std::int32_t, 2> page_budgets, Pins pins, Scores scores, PageList out, Stream s);

// out[row, kv_head] = tokens in the cache.
void lengths(const PagedKv& kv, View<std::int32_t, 2> out, Stream s);

// Of `tokens` tokens per [row, kv_head] all pages but the `newest` newest; none of a row whose mask is 0 (rows null =
// every row).
void older_pages(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest, PageList out,
                 Stream s);

// keep(row, head) = min(length, total(row)), at least the pinned tokens: the uniform split.
void allot_uniform(const Allotment& a, Stream s);

// keep(row, head) = min(length, tokens(row)) for per-layer totals that differ from Allotment::total.
void allot_tokens(const Allotment& a, const std::int32_t* tokens, Stream s);

// AdaKV (Feng et al. 2024), step 2 and 3 of its card: within the layer, the heads x (total - pinned) best unpinned
// scores are counted per head; keep = pinned + round_half_even(count * (1 - floor) + trunc((total - pinned) * floor)),
// and with exact_total the sum is repaired by largest remainder to heads x total (when every head is long enough).
// floor is a double because trunc sees it: 10 x 0.7f is 6.9999998. Bytes: the scores.
void allot_by_score(const Allotment& a, double floor, bool exact_total, Stream s);

}  // namespace kvlab::ops
