// Scores of a layer that the layer before it guesses, from a few channels of queries and keys. ops.hpp says what holds
// for every op.
#pragma once
#include <limits>

#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"

namespace kvlab {

// How many tokens ops::near_greatest counts.
struct NearGreatest {
  float within = 4;                            // of the head's greatest score
  int most = std::numeric_limits<int>::max();  // the mean is at most so many,
  float most_share = 1;                        // and at most this share of the tokens that count, rounded down
  int newest = 0;                              // places that do not count: those of the newest tokens
};

namespace ops {

// sums(slot, kv_head, d) += the sum of |q_d| over the queries of the group, added up in f64. queries: [row, query head,
// i, head_dim], f32, contiguous along head_dim. sums: [slot, kv_head, head_dim], as KeptSeries gives them. It reads no
// page. Bytes: queries, and sums twice.
void add_magnitudes(const PagedKv& kv, const Tensor<4>& queries, View<float, 3> sums, Stream s);

// A token counts if its score is above the head's greatest less `within`. out(row, kv_head) = the same for all KV heads
// of a row: the mean of their numbers of such tokens, rounded down. `most` and `most_share` limit it. A row with tokens
// that count gets at least 1, and `newest` comes on top, as far as there are tokens. The difference is rounded to f32.
// NaN is neither the greatest nor above anything. scores: [row, kv_head, token]. InfiniGen, decode step 3. It reads no
// page. Bytes: the scores, twice.
void near_greatest(const PagedKv& kv, View<const float, 3> scores, const NearGreatest& rule, View<std::int32_t, 2> out,
                   Stream s);

}  // namespace ops
}  // namespace kvlab
