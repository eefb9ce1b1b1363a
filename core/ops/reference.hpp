// Every op again, slow and obviously right: straight loops over the views, double accumulation, no threads, no scratch.
// They are the oracle of the fast CPU forms and of other backends. Arguments, results and errors of a view are those of
// the op of the same name (kvlab/ops.hpp, placement.hpp, allot.hpp, paged.hpp, norm.hpp, gemm.hpp); lengths are not
// checked again. attend_reference and prefill_attention_reference are declared with their ops (attend.hpp).
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/roles.hpp>

#include <cstdint>

#include "ops/placement.hpp"

namespace kvlab::ops {

// Pages. Encoding is specified to the bit (f32 arithmetic), so backends agree on stored bytes.
void write_token_reference(std::byte* frame, const PageLayout& l, int offset, const float* k, const float* v,
                           std::int32_t position);
void read_row_reference(const std::byte* frame, const PageLayout& l, KvSide side, int offset, float* out);
void copy_token_reference(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to,
                          const PageLayout& lt, int offset_to);
void summarize_page_reference(const std::byte* frame, const PageLayout& l, int tokens, Summary kind, DType dtype,
                              std::byte* out);
void gather_rows_reference(const PagedKv& kv, int row, int head, KvSide side, int tokens, float* out);
void token_ranks_reference(const PagedKv& kv, int row, int head, int tokens, std::int32_t* rank);
void token_positions_reference(const PagedKv& kv, int row, int head, int tokens, std::int32_t* positions);
void rotate_reference(float* x, const RopeTable& rope, double position);
void re_rotate_reference(const PagedKv& kv, int row, int head, int tokens, const std::int32_t* delta);

// Scores.
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

// Selection.
void top_tokens_reference(const PagedKv& kv, View<const float, 3> scores, View<const std::int32_t, 2> keep,
                          const Pins* pins, TokenList list);
void top_pages_reference(const PagedKv& kv, View<const float, 3> page_scores, View<const std::int32_t, 2> page_budgets,
                         Pins pins, PageList out);
void allot_uniform_reference(const Allotment& a);
void allot_tokens_reference(const Allotment& a, const std::int32_t* tokens);
void allot_by_score_reference(const Allotment& a, double floor, bool exact_total);
void round_allotment_reference(View<const std::int32_t, 2> length, const std::uint8_t* keep_all, int page_size,
                               View<std::int32_t, 2> keep);

// Placement.
void lengths_reference(const PagedKv& kv, View<std::int32_t, 2> out);
void older_pages_reference(View<const std::int32_t, 2> tokens, const std::uint8_t* rows, int page_size, int newest,
                           PageList out);
void place_pages_reference(const PlacementArgs& a);

// The executor's. w [n, k]: the weights as stored (Linear::row).
void linear_reference(const float* x, std::int64_t x_stride, const float* w, float* y, std::int64_t y_stride,
                      std::int64_t m, std::int64_t n, std::int64_t k);
void rms_norm_reference(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n, float* out);
void silu_mul_reference(const float* gate, const float* up, std::int64_t count, float* out);

}  // namespace kvlab::ops
