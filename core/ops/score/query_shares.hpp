// What both devices and the reference of kvlab/query_shares.hpp share.
#pragma once
#include <kvlab/query_shares.hpp>

#include "ops/score/random_scores.hpp"

namespace kvlab::ops {

// It keeps a draw of 0, and the neighbour of 1, away from the ends of the noise's logarithms.
inline constexpr float least_draw = 0x1p-26f;

constexpr bool counts_below(ShareRule rule) { return rule == ShareRule::below_mean || rule == ShareRule::below_each; }

// Counts take shares below level / tokens.
void query_shares_reference(const View<const float, 4>& queries, const PagedKv& kv, const QueryShares& how,
                            double level, Scores out);

}  // namespace kvlab::ops
