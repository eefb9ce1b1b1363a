// A step's attention leaves mass out, and a mean value takes its place (Edits::fill_left_out).
#pragma once
#include <kvlab/left_out.hpp>

namespace kvlab::ops {

// out = share * out + (1 - share) * mean. out: [row, query head, head_dim]; dense where there is `rounded`. rounded:
// CUDA only, out again in the cache's 16-bit dtype; or null. kv gives slots, heads and the dtype. Bytes: out, twice.
void blend_left_out(const PagedKv& kv, const LeftOut& what, View<float, 3> out, void* rounded, Stream s);

void add_mean_value_reference(const PagedKv& kv, int newest, View<float, 3> mean);
void listed_share_reference(const PagedKv& kv, View<const float, 3> scores, const TokenList& list,
                            View<float, 2> share);
void blend_left_out_reference(const PagedKv& kv, const LeftOut& what, View<float, 3> out);

}  // namespace kvlab::ops
