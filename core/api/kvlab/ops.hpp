// The ops that a plugin calls. An op works on the whole batch: all rows and all KV heads of one layer, in any page
// codec and RoPE regime. The stream decides between CPU and GPU memory. Outputs are scratch of the caller. "Bytes" is
// the memory traffic that an op cannot avoid. Ties go to the lower index. Selection is exact; NaN ranks below all other
// scores. Scores are contiguous along their last index. Ops leave entries past a row's length alone unless they say so.
//
// Errc::unsupported: a shape or dtype that the op does not support. Errc::internal: a view that is too small, or, on
// the CPU, a page that the op must read and that is not on the device. A kernel notes such a page, and core throws
// Errc::plugin the next time that it waits for the device; the op's numbers are then wrong. With a CUDA stream every
// array is device memory, pins, totals and text lengths too (LayerKv::upload). A kernel cannot report
// wrong numbers in them, but writes only inside arrays.
#pragma once
#include <algorithm>
#include <vector>

#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/roles.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// out[row, kv_head, token] = ||x||_2 of every cached key or value. It reads no page of a head that `heads` leaves out.
// Bytes: that side of the layer's cache.
void row_norm(const KvRows& rows, Scores out, Stream s, const Heads& heads = {});

// out = factor * out for every entry, also those past a row's length.
void scale(Scores out, float factor, Stream s);
inline void negate(Scores out, Stream s) { scale(out, -1.f, s); }

// out = in, out += factor * in, out *= in, out /= in (x / 0 = 0) for every entry, also those past a row's length.
// The number of heads of `in` divides that of `out`. A head of `in` serves as many neighbours of `out`: a KV head its
// query heads, a single head all. `in` is as long as `out` or longer, else Errc::internal; it may be `out` itself.
// Bytes: in and out.
void copy(Scores out, View<const float, 3> in, Stream s);
void add(Scores out, View<const float, 3> in, float factor, Stream s);
void multiply(Scores out, View<const float, 3> in, Stream s);
void divide(Scores out, View<const float, 3> in, Stream s);

// x = 1 where it is above `threshold`, else 0, for every entry, also those past a row's length. NaN becomes 0. Bytes:
// x, twice.
void above(Scores x, float threshold, Stream s);

// x = ln(x + add) for every entry, also those past a row's length. The sum is rounded to f32. ln of 0 is -inf, and of
// a negative number NaN. Bytes: x, twice.
void logarithm(Scores x, float add, Stream s);

// out[row, head] = sum of in[row, head, token] over the head's tokens but those that `leave_out` names; query heads or
// KV heads. Added up in f64, in an order that is always the same. Pins are as in set_pinned. Bytes: in, and the
// positions if there are pins.
void head_sum(const PagedKv& kv, View<const float, 3> in, Pins leave_out, View<float, 2> out, Stream s);

// scores = exp(scores / temperature), divided by its sum over the head's tokens. Heads are query heads or KV heads.
// -inf becomes 0, also where a head has nothing else. temperature > 0. Bytes: scores, three times.
void softmax(const PagedKv& kv, Scores scores, float temperature, Stream s);

// out[row, kv_head, token, d] = the cached key or value, decoded to f32. Keys are as attention reads them:
// cache_relative turns them by their rank. Bytes: that side of the layer's cache, and out.
void read_rows(const KvRows& rows, View<float, 4> out, Stream s);

// row_dot: out[row, head, token] = vectors[row, head, :] . x for every cached key or value x, as in read_rows.
// row_cosine: the same, divided by the lengths of both vectors; 0 if one of them is 0. Heads are KV heads or query
// heads; a query head reads its group's KV head. Vectors are contiguous along head_dim. A GPU may take each element of
// a vector with an error of up to 2^-18 of it. Bytes: that side of the layer's cache, once.
void row_dot(const KvRows& rows, View<const float, 3> vectors, Scores out, Stream s);
void row_cosine(const KvRows& rows, View<const float, 3> vectors, Scores out, Stream s);

// row_dot for the tokens of the listed pages; -inf for the head's other tokens. `pages` is one list for each KV head.
// With `bits` from 1 to 8, x is what codes of so many bits give of it: the nearest min + scale * code, ties to even,
// with scale = (max - min) / (2^bits - 1) over the row's elements. 0 leaves x alone. It reads no other page; in the
// regime cache_relative it reads all positions. Bytes: that side of the listed pages, and out.
void listed_row_dot(const KvRows& rows, View<const float, 3> vectors, const PageList& pages, int bits, Scores out,
                    Stream s);

// out[row, head, token] = x . matrix[row, head] x, with heads and x as in row_dot. Bytes: that side of the layer's
// cache and the matrices; head_dim^2 multiplications per token and head.
void row_quadratic(const KvRows& rows, View<const float, 4> matrix, Scores out, Stream s);

// out[row, kv_head, d] = mean over the head's tokens of x / ||x||_2, x as in read_rows. An x of zeros counts as zeros,
// and a head without tokens gives zeros. Bytes: that side of the layer's cache.
void normalised_mean(const KvRows& rows, View<float, 3> out, Stream s);

// out[row, kv_head, token] = text position (newer = higher).
void recency(const PagedKv& kv, Scores out, Stream s);

// out[row, kv_head, token] = a number of [0, 1), a multiple of 2^-24, that only keys[row], the KV head and the token's
// text position decide. Number h of the SplitMix64 sequence (Steele, Lea and Flood 2014) that starts at the key starts
// the sequence of KV head h, and the top bits of its number p are the draw of text position p. Both count from 0. Draws
// of different keys, heads and positions are as good as independent. keys: [row] memory of the stream's device. Bytes:
// positions and out.
void random_scores(const PagedKv& kv, const std::uint64_t* keys, Scores out, Stream s);

// votes[row, query head, token] = sum over the w window queries of softmax_j(q . k_j / sqrt(D)), f32. SnapKV steps 2
// and 3. Votes of [row, kv_head, token] are sums over the w queries of the greatest share that a query head of the
// group gives. The softmax is over the cached tokens up to the query's own text position. seen: [row] text tokens seen
// so far (LayerKv::position, uploaded); the window's queries are those of the last w of them. null: all queries see all
// cached tokens. It reads no page of a KV head that `heads` leaves out; in the regime cache_relative it reads
// positions. Bytes: the layer's keys, once per query head, or once per KV head where w is 1. Votes of KV heads read
// them once more for each 128 queries of the group. newest > 0: a query votes for its newest text positions alone, so
// many with its own; its softmax stays over all that it sees. That needs `seen`.
void window_votes(const Tensor<4>& window_queries, const std::int32_t* seen, const PagedKv& kv, Scores votes, Stream s,
                  const Heads& heads = {}, int newest = 0);

// out[row, kv_head, token] = the number of the last `window` queries of the row's text that see the token: min(window,
// seen[row] - p) for text position p, at least 0. seen: [row], as for window_votes. Bytes: the positions, and out.
void query_counts(const PagedKv& kv, const std::int32_t* seen, int window, Scores out, Stream s);

// 1-D pooling in place with stride 1, for each head of `scores` (query heads or KV heads) over its tokens
// [0, tokens - excluded). kernel is odd. average counts its zero padding in the divisor; max pads with -inf. The
// excluded newest tokens stay as they are. The cache must be in text order, as at a prompt's end. SnapKV, PyramidKV.
void pool(const PagedKv& kv, Scores scores, Pooling kind, int kernel, int excluded, Workspace& w, Stream s,
          const Heads& heads = {});

// out[row, kv_head, token] from in[row, query head, token] over the group of G query heads. softmax_mean takes its
// softmax over all tokens of the row. `out` may have several heads for each KV head: then as many parts of its group,
// in order, become one each. Bytes: in and out.
void group_reduce(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s,
                  const Heads& heads = {});

// How pooled_votes makes one score of a group's attention. kernel is odd.
struct VotePooling {
  Pooling kind = Pooling::average;
  int kernel = 5;
  GroupRule rule = GroupRule::max;
};
// out[row, kv_head x i, token]: window_votes with w = 1 by queries of all cached tokens, then pool, then group_reduce.
// `out` may have several heads for each KV head, as in group_reduce. Scratch: [row, query head, token]. Bytes: the
// layer's keys, once, and the scratch twice.
void pooled_votes(const Tensor<4>& queries, const PagedKv& kv, const VotePooling& pooling, Scores out, Workspace& w,
                  Stream s, const Heads& heads = {});

// out[row, kv_head, token] = what pooled_votes finds by the queries whose logits attention left. The softmax is over
// the tokens of `kv`, which may be the first ones of those that attention read. softmax_mean is Errc::unsupported. It
// leaves heads without logits alone and reads no page. Bytes: the logits, twice, and out.
void pooled_logits(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, Scores out, Stream s);

// out[row, kv_head, token] from in[row, head, token] of all heads of the layer, query heads or KV heads: mean, max or
// sum over the heads that hold a token of the same text position. Heads that hold the same positions then have the same
// scores, whatever the places. softmax_mean is Errc::unsupported: use ops::softmax, then mean. Bytes: in and out, and
// the positions of every head.
void layer_reduce(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s);

// out[row, head, page] = sum of in[row, head, token] over the page's tokens; query heads or KV heads. Bytes: in and
// out.
void page_sum(const PagedKv& kv, View<const float, 3> in, Scores out, Stream s);

// scores[row, head, token] = value for the tokens that `pins` names by text position; query heads or KV heads.
// It ignores pins.newest_page. Bytes: the positions, and the entries written.
void set_pinned(const PagedKv& kv, Pins pins, float value, Scores scores, Stream s);

// scores[row, kv_head, place] = value for the places that the list names. Places past the scores are left alone. Bytes:
// the list, and the entries written.
void set_listed(const TokenList& list, float value, Scores scores, Stream s);

// out[row, head] = the number of the fewest tokens, best first, whose scores add up to `share` of the sum over the
// head's tokens; query heads or KV heads. Tokens that `leave_out` names count for neither, as in head_sum. NaN and what
// is below 0 count as 0. A sum of 0 gives 0, and an infinite one gives 1. Sums are in f64. 0 < share <= 1. Bytes: the
// scores, 33 times on a GPU, and the positions if there are pins.
void tokens_of_share(const PagedKv& kv, View<const float, 3> scores, float share, Pins leave_out, View<float, 2> out,
                     Stream s);

// list = for each KV head, as ascending places, the tokens that one of its heads of `weights` takes, and those that
// pins name. weights: [row, query head or KV head, token]. A head takes the fewest tokens, best first, whose weights
// add up to `p` of the sum over its tokens. NaN and what is below 0 count as 0, and weights of 0 are never taken. p = 1
// takes all others. Below 1, one infinite weight is enough. Sums are in f64. 0 < p <= 1. list has room for all tokens
// that it gets. Bytes: the weights, 33 times on a GPU, and the positions if there are pins.
void top_p_tokens(const PagedKv& kv, View<const float, 3> weights, float p, Pins pins, TokenList list, Stream s);

// The three ops of a column read and write no page of a head that `heads` leaves out.
// column[token] += mass[row, query head, token], reduced over the group by `rule`. Bytes: mass, and the column twice.
void add_mass(View<const float, 3> mass, GroupRule rule, const StateColumn& column, Stream s, const Heads& heads = {});

// out[row, kv_head, token] = the column.
void read_state(const StateColumn& column, Scores out, Stream s, const Heads& heads = {});

// column[token] = keep * column[token] + factor * in[row, kv_head, token]; an empty `in` counts as 1 everywhere. keep 0
// forgets any old number. So (0, {}, 0) clears, (0, x, 1) writes, (b, x, 1 - b) is a moving average, and (1, {}, 1)
// counts each token's calls. Bytes: in, and the column twice.
void blend_state(const StateColumn& column, float keep, View<const float, 3> in, float factor, Stream s,
                 const Heads& heads = {});

// Moments of many vectors, in state memory: [slot, query head, moment_floats(head_dim)] f32. Each head has the summed
// products of deviations from the mean [head_dim, head_dim], the mean [head_dim], the count, and 3 unused floats.
using Moments = View<float, 3>;
constexpr std::int64_t moment_floats(std::int64_t head_dim) { return head_dim * head_dim + head_dim + 4; }

// For attach: takes empty moments, one for each layer. Core saves, restores and clears them with the sequence.
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

// Adds queries to the moments of kv's rows, as they were before RoPE: it turns them back by their text positions and
// takes attention_scale off. queries: LayerKv::chunk_queries. seen: [row] as for window_votes; the newest query is that
// of the last of them. It leaves out queries at text positions below `first`. kv gives slots and RoPE. The f32 sums are
// of deviations, so a mean that is large beside the spread costs no accuracy. Bytes: queries, and the moments twice;
// head_dim^2 multiplications per query.
void add_moments(const Tensor<4>& queries, const std::int32_t* seen, const PagedKv& kv, int first, Moments moments,
                 Stream s);

// Mean and covariance of a query at an unknown one of the next `horizon` text positions (Devoto et al. 2025): R mean
// and R covariance R^T of the moments. R is the mean of RoPE's matrices at the positions seen .. seen + horizon - 1,
// attention_scale included. The covariance is divided by the count of vectors. Empty moments give zeros. mean: [row,
// query head, head_dim]; covariance: [row, query head, head_dim, head_dim]. Bytes: moments, mean and covariance.
void expected_query(const Moments& moments, const std::int32_t* seen, const PagedKv& kv, int horizon,
                    View<float, 3> mean, View<float, 4> covariance, Stream s);

// list = the tokens to keep, as ascending places in the cache: the keep(row, kv_head) best by score. The row's pins are
// always among them and use up keep first; all pins stay even if they exceed it. pins: [row], or null. The first and
// last tokens are those with the lowest and highest text positions in the cache. list has room for all kept tokens.
// keep >= length keeps everything. Bytes: the scores, and the positions if there are pins.
void top_tokens(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> keep, const Pins* pins,
                TokenList list, Stream s);
// The same with a TokenChoice. `list` may be a list that lasts.
void top_tokens(const PagedKv& kv, View<const float, 3> scores, const TokenChoice& choice, TokenList list, Stream s);

// The tokens that Edits::evict_surplus(surplus) would evict join made-up token i of their head. Its weight grows by
// their number. Its key and value become the means of all that ever joined, as the cache decodes them. Heads that lose
// no token are left alone. Errc::unsupported: a regime but RopeRegime::original, because the mean of keys at old ranks
// means nothing. Bytes: what finds the surplus, and keys and values of the tokens that join.
void fold_surplus(const PagedKv& kv, const Surplus& surplus, int i, const MadeUpTokens& to, Stream s);

// When ops::drifted_heads compares the median of the last `window` overlaps, at most 64, with the threshold: in steps
// where (steps + lead) % period == 0, by each sequence's own count.
struct DriftRule {
  float threshold = 0;
  int window = 1, period = 1, lead = 0;
  const std::int32_t* steps = nullptr;  // [slot] LayerKv::steps
};
// What drifted_heads keeps of each KV head from step to step. It starts as zeros.
struct DriftWatch {
  View<float, 3> missed;  // [slot, kv_head, i] of a list's tokens, those that were not among the best; i < window
  HeadFlags rests;        // [slot, kv_head] 1: the next step needs no scores of this head
};

// drifted[slot, kv_head] = 1 in a check that finds the median overlap of the head's leader below the threshold, else 0.
// The overlap of a step is the share of the leader's list that is among its best tokens by the step's scores, as many
// as the list holds. The median of an even number is the mean of the two middle ones. Overlaps count as 1 before
// forget_overlaps and after a check that found drift, since the list changes then. HeteroCache, equations 9 and 10.
// scores: [row, kv_head, token] of leaders that do not rest in this step. leaders: [kv_head], -1 = none, which gives 0
// as an empty list does. Where checks share no steps (window <= period), a leader rests in steps that no longer change
// the next median, unless it drifts: then it has scores in the step of the check. Bytes: the scores, four times, and
// the lists of the leaders.
void drifted_heads(const PagedKv& kv, View<const float, 3> scores, const TokenList& lists, const DriftRule& rule,
                   const std::int32_t* leaders, const DriftWatch& watch, HeadFlags drifted, Stream s);

// pooled_logits into `scores`, then drifted_heads by them. Bytes: the logits, twice, the scores four times, and the
// lists of the leaders.
void drifted_by_logits(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, Scores scores,
                       const TokenList& lists, const DriftRule& rule, const std::int32_t* leaders,
                       const DriftWatch& watch, HeadFlags drifted, Stream s);

// All overlaps so far count as 1, and no head rests: for new lists at a prompt's end.
void forget_overlaps(const PagedKv& kv, const DriftWatch& watch, Stream s);

// out[row, kv_head, page] = the page's score, reduced over the group. A box [lo, hi] gives sum_d max(q_d lo_d, q_d
// hi_d), the greatest product of its points with q. A mean gives q . mean. The box of min_max gives a bound of the
// page's keys. softmax_mean multiplies scores by `scale` before its softmax over pages. The other rules ignore `scale`,
// because ranks do not depend on it. Quest step 2. Bytes: the layer's summaries.
void page_score(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, GroupRule rule, float scale,
                Scores out, Stream s);

// out = the page_budgets(row, kv_head) best pages, or all if there are fewer. pins.newest_page gives one of these
// places to the last page. Pins of tokens are ignored: Edits::attend adds their pages. No page is read. Bytes: the
// scores.
void top_pages(const PagedKv& kv, View<const float, 3> page_scores, View<const std::int32_t, 2> page_budgets, Pins pins,
               PageList out, Stream s);

// page_score into `scores`, then top_pages of them: one launch on the GPU. Bytes: the layer's summaries.
void score_pages(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, GroupRule rule, float scale,
                 View<const std::int32_t, 2> page_budgets, Pins pins, Scores scores, PageList out, Stream s);

// Numbers of pages: `each` [row, kv_head] if it has any, else `same` for all.
struct PageCounts {
  int same = 1;
  View<const std::int32_t, 2> each;
};

// Turns budgets into whole pages, at least one: of(tokens) / page_size for a row that has so many tokens. It uploads
// the numbers if they differ from row to row; so a graph needs a budget in tokens.
template <class Of>
PageCounts budget_pages(const LayerKv& kv, Of of) {
  const auto pages = [&](int row) { return std::max(1, of(kv.budget_tokens(row)) / kv.pages.page_size); };
  PageCounts counts;
  if (kv.rows() > 0) counts.same = pages(0);
  bool same = true;
  for (int row = 1; row < kv.rows(); ++row) same = same && pages(row) == counts.same;
  if (same) return counts;
  std::vector<std::int32_t> all;
  for (int row = 0; row < kv.rows(); ++row) all.insert(all.end(), static_cast<std::size_t>(kv.kv_heads()), pages(row));
  counts.each = kv.upload_heads("page budgets", all.data());
  return counts;
}

// The same with a PageChoice. `out` may be a list that lasts. No scores are written for pages that are left out.
// Bytes: the summaries of the chosen heads.
void score_pages(const Tensor<3>& queries, const PagedKv& kv, const Summaries& summaries, const PageChoice& choice,
                 Scores scores, PageList out, Stream s);

// score_pages of a callback's layer for so many pages. Returns the scores, which are scratch.
inline Scores choose_pages(const LayerKv& kv, const Tensor<3>& queries, PageChoice choice, const PageCounts& counts,
                           PageList out, Stream s) {
  choice.budget = counts.same;
  choice.budgets = counts.each;
  const int pages = (kv.max_length + kv.pages.page_size - 1) / kv.pages.page_size;
  const auto scores = kv.scratch<float>("page score", {kv.rows(), kv.kv_heads(), pages});
  score_pages(queries, kv.pages, kv.summaries, choice, scores, out, s);
  return scores;
}

// The same for the row's budget less `paid` tokens, which are attended to in any case.
inline Scores choose_pages(const LayerKv& kv, const Tensor<3>& queries, const PageChoice& choice, int paid,
                           PageList out, Stream s) {
  return choose_pages(kv, queries, choice, budget_pages(kv, [&](int tokens) { return tokens - paid; }), out, s);
}

// turned[slot, kv_head] = 1 where the mean over the group of cos(query, last) is below `threshold`, else 0, for the
// slots of kv's rows. A cosine divides by the product of both norms plus 1e-12, so a `last` of zeros gives 0. Then
// last[slot, query head, :] = query. FreeKV, decode step 2. Bytes: queries, and last twice.
void turned_heads(const Tensor<3>& queries, const PagedKv& kv, View<float, 3> last, float threshold, HeadFlags turned,
                  Stream s);

// out[row, kv_head] = tokens in the cache.
void lengths(const PagedKv& kv, View<std::int32_t, 2> out, Stream s);

// out = all pages of tokens(row, kv_head) tokens but the `newest` newest. rows: [row] mask, null = every row; a row
// with 0 gets none.
void older_pages(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest, PageList out,
                 Stream s);

// out = the first full pages that are still in the first codec and hold none of the `residual` newest places; as many
// as the list has room for. tokens: [row, kv_head], empty = those of the cache. For Edits::encode, of caches of two
// codecs.
void aged_pages(const PagedKv& kv, View<const std::int32_t, 2> tokens, int residual, PageList out, Stream s);

// keep(row, head) = min(length, total(row)), at least the pinned tokens: the uniform split.
void allot_uniform(const Allotment& a, Stream s);

// keep(row, head) = min(length, tokens(row)) for per-layer totals that differ from Allotment::total.
void allot_tokens(const Allotment& a, const std::int32_t* tokens, Stream s);

// The split of AdaKV (Feng et al. 2024). A head's `count` is the number of its tokens among the layer's
// heads x (total - pinned) best unpinned scores. keep = pinned + round_half_even(count * (1 - floor) +
// trunc((total - pinned) * floor)). exact_total repairs the sum by largest remainder to heads x total, if every head is
// long enough. floor is a double because trunc sees it: 10 x 0.7f is 6.9999998. Bytes: the scores.
void allot_by_score(const Allotment& a, double floor, bool exact_total, Stream s);

// How ops::levels and ops::demote rate tokens. A token at text position p has a sum of scores. Its mean is the sum,
// divided by the number of queries that gave it: seen - max(p, first), at least 1. `seen` counts the text's tokens so
// far. `first` is the text position of the first query that counts. A token whose mean reaches high_from units is high:
// the first codec stores it. One that reaches low_from units is low: the second codec stores it. Any other is gone.
// All is computed in f32, the threshold as high_from / seen or high_from / (p + 1). NaN reaches nothing and ranks below
// -inf.
struct LevelRule {
  enum Unit : std::uint8_t { of_text, of_token };
  float high_from = 1, low_from = 0;  // low_from <= high_from
  Unit unit = of_text;                // of_text: 1 / seen. of_token: 1 / (p + 1), and of_text in demote
  int window = 1;                     // newest tokens of the text, at least 1, which are high in any case
  int queries = 0;                    // levels only: the sums are of so many of the last queries; 0 = of all
  // Each KV head of a row keeps the same number of high and of low tokens. It is the mean over the heads of what each
  // of them would keep by itself.
  bool same_numbers = false;
  bool leaving_decides = false;  // demote only
};

// Numbers that last beside the cache. `pending` counts low tokens that fill no page yet: the first codec stores them.
// The low tokens of a head are the first lower_pages * page_size + pending by place. LevelRule says what `first` is. An
// empty `first` is 0 everywhere and is not written.
struct LevelNumbers {
  HeadNumbers pending, first;
};

// out[row, kv_head, token] = 0 (high), 1 (low) or level_gone, for Edits::store_as at a prompt's end. sums: [row,
// kv_head, token]. seen: [row], as for window_votes. It writes pending = 0: low tokens that store_as leaves in the
// first codec count as high from then on. It writes first = seen - rule.queries, at least 0, or 0 where the sums are of
// all queries. same_numbers rounds to the nearest, halves up. Each head then gives its best tokens the higher level.
// Ties go to the lower index. Bytes: sums, positions and out.
void levels(const PagedKv& kv, View<const float, 3> sums, const std::int32_t* seen, const LevelRule& rule,
            View<std::uint8_t, 3> out, const LevelNumbers& numbers, Stream s);

// The lists of ops::demote. A policy hands them over in this order: Edits::move, evict, and encode with codec 1.
struct Demotion {
  TokenList pairs;  // none or one pair
  TokenList out;    // none or one token
  PageList full;    // none or one page
};

// At most one token of each head steps down, after a decode step. The step's token is the last of its head by place,
// and seen is its text position + 1. Tokens compete at text positions up to seen - window. h and l are the lowest means
// of the high and of the low tokens that compete, in units of 1 / seen. They are infinite where there is no such token.
// Of equal means that of the higher index is the lowest. The first line that holds says what happens.
//   h < low_from and h < l:       the high token is out.
//   h < high_from, l < low_from:  it takes the low token's place, and the low one is out.
//   h < high_from:                it becomes the last low token. Low tokens that then fill a page are `full`.
// With leaving_decides the token at text position seen - window counts, whose mean is m. A head without it stays.
//   m >= high_from:                it stays. The high token is out if h < low_from, or becomes low if h < high_from.
//   m >= low_from, l < low_from:   it takes the low token's place.
//   m >= low_from:                 it becomes low.
//   m < low_from:                  it is out.
// same_numbers takes the means of h, l and m over the row's heads: all heads do the same. The op updates `pending`.
// `sums` is the column of any view of the cache, also of Step::pages. A view that says there is one codec has no lower
// pages. Bytes: the column and the positions.
void demote(const StateColumn& sums, const LevelRule& rule, const LevelNumbers& numbers, const Demotion& to, Stream s);

}  // namespace kvlab::ops
