// The references of this folder (see ops/page/reference.hpp).
#pragma once
#include <kvlab/codebooks.hpp>
#include <kvlab/kv.hpp>
#include <kvlab/ops.hpp>
#include <kvlab/rewrite.hpp>
#include <kvlab/roles.hpp>

#include <cstdint>
#include <vector>

#include "ops/score/combine.hpp"

namespace kvlab::ops {

void row_norm_reference(const KvRows& rows, Scores out, const Heads& heads = {});
void scale_reference(Scores out, float factor);
void above_reference(Scores x, float threshold);
void logarithm_reference(Scores x, float add);
void combine_reference(Scores out, View<const float, 3> in, Combine rule, float factor);
void softmax_reference(const PagedKv& kv, Scores scores, float temperature);
void read_rows_reference(const KvRows& rows, View<float, 4> out);
void read_range_reference(const KvRows& rows, const TokenRange& range, View<float, 4> out);
void row_dot_reference(const KvRows& rows, View<const float, 3> vectors, bool cosine, Scores out);
void listed_row_dot_reference(const KvRows& rows, View<const float, 3> vectors, const PageList& pages, int bits,
                              Scores out);
void row_quadratic_reference(const KvRows& rows, View<const float, 4> matrix, Scores out);
void normalised_mean_reference(const KvRows& rows, View<float, 3> out);
void recency_reference(const PagedKv& kv, Scores out);
void query_counts_reference(const PagedKv& kv, const std::int32_t* seen, int window, Scores out);
void random_scores_reference(const PagedKv& kv, const std::uint64_t* keys, Scores out);
void window_votes_reference(const View<const float, 4>& window_queries, const std::int32_t* seen, const PagedKv& kv,
                            Scores votes, const Heads& heads = {}, int newest = 0);
// pooling.rule: mean, max or sum.
void pooled_logits_reference(const PagedKv& kv, const HeadLogits& logits, const VotePooling& pooling, Scores out);
void pool_reference(const PagedKv& kv, Scores scores, Pooling kind, int kernel, int excluded, const Heads& heads = {});
void group_reduce_reference(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out,
                            const Heads& heads = {});
void layer_reduce_reference(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out);
void page_sum_reference(const PagedKv& kv, View<const float, 3> in, Scores out);
// The mean cosines that turned_heads compares with its threshold: [row * kv_heads + kv_head].
std::vector<double> query_cosines_reference(const View<const float, 3>& queries, const PagedKv& kv,
                                            const View<const float, 3>& last);
void blend_state_reference(const StateColumn& column, float keep, View<const float, 3> in, float factor,
                           const Heads& heads = {});
void add_moments_reference(const View<const float, 4>& queries, const std::int32_t* seen, const PagedKv& kv, int first,
                           const View<float, 3>& moments);
void expected_query_reference(const View<float, 3>& moments, const std::int32_t* seen, const PagedKv& kv, int horizon,
                              View<float, 3> mean, View<float, 4> covariance);
void channel_energy_reference(const View<const float, 4>& queries, const PagedKv& kv, const View<const float, 4>& rows,
                              View<float, 3> out);
void zero_channels_reference(const PagedKv& kv, const View<const float, 3>& energy, int count, int newest,
                             View<float, 4> rows);
void turn_rows_reference(const PagedKv& kv, RopeTurn way, View<float, 4> rows, const RowRange& range = {});
void copy_rows_reference(const PagedKv& kv, const TokenList& tokens, View<const float, 4> from, View<float, 4> to);
void code_channels_reference(const PagedKv& kv, const View<const float, 2>& lower, const View<const float, 2>& upper,
                             const Coding& how, View<float, 4> rows);
void code_tokens_reference(const PagedKv& kv, double outliers, const Coding& how, View<float, 4> rows);
void row_distance_reference(const PagedKv& kv, const View<const float, 4>& a, const View<const float, 4>& b,
                            Scores out);
void merge_rows_reference(const PagedKv& kv, float t, const TokenList& exact, View<float, 4> a, View<float, 4> b);
void add_mass_reference(View<const float, 3> mass, GroupRule rule, const StateColumn& column, const Heads& heads = {});
void read_state_reference(const StateColumn& column, Scores out, const Heads& heads = {});
void page_score_reference(const View<const float, 3>& queries, const PagedKv& kv, const Summaries& summaries,
                          GroupRule rule, float scale, Scores out);

}  // namespace kvlab::ops
