// What policies call (kvlab/ops.hpp) on CUDA. Every pointer inside a view is device memory, as are pins, totals and
// text lengths; shapes were checked by the caller, which knows them on the host. A list without room for its entries is
// cut off, since a kernel cannot throw.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/roles.hpp>

namespace kvlab::ops {

struct Finding;
struct PlacementArgs;

// out null: the scores alone.
void score_pages_cuda(const View<const float, 3>& queries, const PagedKv& kv, const Summaries& summaries,
                      GroupRule rule, float scale, const View<const std::int32_t, 2>& page_budgets, const Pins& pins,
                      const Scores& scores, const PageList* out, void* stream);

void row_norm_cuda(const KvRows& rows, const Scores& out, void* stream);
void scale_cuda(const Scores& out, float factor, void* stream);
void recency_cuda(const PagedKv& kv, const Scores& out, void* stream);
void window_votes_cuda(const View<const float, 4>& window_queries, const std::int32_t* seen, const PagedKv& kv,
                       const Scores& votes, void* stream);
void pool_cuda(const PagedKv& kv, const Scores& scores, Pooling kind, int kernel, int excluded, void* stream);
void group_reduce_cuda(const PagedKv& kv, const View<const float, 3>& in, GroupRule rule, const Scores& out,
                       void* stream);
void add_mass_cuda(const View<const float, 3>& mass, GroupRule rule, const StateColumn& column, void* stream);
void read_state_cuda(const StateColumn& column, const Scores& out, void* stream);

void allot_same_cuda(const Allotment& a, const std::int32_t* tokens, void* stream);
void allot_by_score_cuda(const Allotment& a, double floor, bool exact_total, void* stream);
void round_allotment_cuda(const View<const std::int32_t, 2>& length, const std::uint8_t* keep_all, int page_size,
                          const View<std::int32_t, 2>& keep, void* stream);
void fill_heads_cuda(const View<std::int32_t, 2>& out, std::int32_t value, void* stream);

// ops/score/verify.hpp
void find_nan_cuda(const PagedKv& kv, int layer, const Scores& scores, Finding* finding, void* stream);
void find_keep_cuda(const Allotment& a, std::int64_t* kept, Finding* finding, void* stream);

void lengths_cuda(const PagedKv& kv, const View<std::int32_t, 2>& out, void* stream);
void older_pages_cuda(const View<const std::int32_t, 2>& tokens, const std::uint8_t* rows, int page_size, int newest,
                      const PageList& out, void* stream);
// Attended pages that do not exist are passed over.
void place_pages_cuda(const PlacementArgs& a, void* stream);

// group_reduce over pages: page_size tokens are one entry; softmax_mean takes the softmax of scale * in.
void reduce_pages_cuda(const PagedKv& kv, const View<const float, 3>& in, GroupRule rule, float scale,
                       const Scores& out, void* stream);

}  // namespace kvlab::ops
