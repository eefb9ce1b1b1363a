// The work of ops::keep_page_scores.
#pragma once
#include <kvlab/page_order.hpp>

namespace kvlab::ops {

void keep_page_scores_reference(const PagedKv& kv, View<const float, 3> scores, const Pins& left_out,
                                const Heads& heads, View<float, 3> order);

}  // namespace kvlab::ops
