// What both devices share of kvlab/partial_keys.hpp, and the references.
#pragma once
#include <kvlab/partial_keys.hpp>

#include "base/on_both.hpp"

namespace kvlab::ops {

// A number of a partial key before it becomes f16.
KVLAB_ON_BOTH inline float in_range_of_half(double x) {
  const float y = static_cast<float>(x);
  return y > 65504.f ? 65504.f : y < -65504.f ? -65504.f : y;
}

void add_channel_magnitudes_reference(const PagedKv& kv, View<const float, 4> queries, Directions directions,
                                      View<float, 3> sums);
void copy_partial_keys_reference(const PagedKv& kv, int newest, const PartialKeys& keys);
void partial_scores_reference(const PagedKv& kv, View<const float, 3> queries, const PartialKeys& keys, float factor,
                              int newest, Scores out);
void token_pages_reference(const PagedKv& kv, const TokenList& tokens, int newest, PageList out);

}  // namespace kvlab::ops
