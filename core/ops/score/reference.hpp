// The references of this folder (see ops/page/reference.hpp).
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/roles.hpp>

#include <cstdint>

namespace kvlab::ops {

void row_norm_reference(const KvRows& rows, Scores out);
void scale_reference(Scores out, float factor);
void recency_reference(const PagedKv& kv, Scores out);
void window_votes_reference(const View<const float, 4>& window_queries, const std::int32_t* seen, const PagedKv& kv,
                            Scores votes);
void pool_reference(const PagedKv& kv, Scores scores, Pooling kind, int kernel, int excluded);
void group_reduce_reference(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out);
void add_mass_reference(View<const float, 3> mass, GroupRule rule, const StateColumn& column);
void read_state_reference(const StateColumn& column, Scores out);
void page_score_reference(const View<const float, 3>& queries, const PagedKv& kv, const Summaries& summaries,
                          GroupRule rule, float scale, Scores out);

}  // namespace kvlab::ops
