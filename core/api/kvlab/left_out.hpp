// What Edits::fill_left_out takes: the share of a step's softmax that attention reads, by an estimate, and the mean of
// all values (SparQ, Ribar et al. 2024). ops.hpp says what holds for every op.
#pragma once
#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"

namespace kvlab::ops {

// mean[slot, kv_head, d] = the mean of the head's values, as the cache decodes them. On entry it is that of the tokens
// before the `newest` last places; where there are none, it may be anything. So it suits policies that evict nothing.
// mean: contiguous along head_dim, in state memory (KeptSeries of head_dim numbers). Sums are in f64. It reads no page
// of older tokens. Bytes: the newest values, and the mean twice.
void add_mean_value(const PagedKv& kv, int newest, View<float, 3> mean, Stream s);

// share[row, query head] = the sum of exp(score) over the listed tokens of its KV head, divided by that over all tokens
// of the head. NaN counts as -inf. Where no score is above -inf, it is 1. Scores are below +inf. The list names a token
// once. scores: [row, query head, token]. Sums are in f64. Bytes: the scores, twice.
void listed_share(const PagedKv& kv, View<const float, 3> scores, const TokenList& list, View<float, 2> share,
                  Stream s);

}  // namespace kvlab::ops
