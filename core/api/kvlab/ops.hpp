// The ops a plugin calls. Each works on the whole batch: all rows and all KV heads of one layer, whatever page codec
// and RoPE regime; on CPU or GPU memory according to the stream. Outputs are scratch of the caller. "Bytes" = what must
// be moved. Ties go to the lower index everywhere; selection is exact and NaN ranks below every other score. A shape or
// dtype that is not supported is Errc::unsupported; a view that is too small, or a page that has to be read and is not
// on the device, is Errc::internal. Scores are contiguous along their last index; entries past a row's length are left
// alone. With a CUDA stream every array is device memory, pins, totals and text lengths too (LayerKv::upload); what a
// kernel finds wrong in them it cannot report: it writes no further than the arrays reach.
#pragma once
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

// column[token] += rule over the group of mass[row, query head, token]. Bytes: mass, and the column twice.
void add_mass(View<const float, 3> mass, GroupRule rule, const StateColumn& column, Stream s);

// out[row, kv_head, token] = the column.
void read_state(const StateColumn& column, Scores out, Stream s);

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
