// The ops that libkvlab_cuda.so offers.
#include "base/backend.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cudnn_attention.hpp"
#include "ops/linear/linear_cuda.hpp"
#include "ops/page/policy_cuda.hpp"
#include "ops/page/rope_append.hpp"
#include "ops/page/rope_rank.hpp"
#include "ops/select/inject.hpp"

namespace kvlab {

void fill_cuda_ops(CudaOps& t);
void fill_cuda_ops(CudaOps& t) {
  t.attend = ops::attend_cuda;
  t.attend_prompt = ops::attend_prompt_cuda;
  t.cudnn_state = ops::cudnn_state;
  t.cudnn_chunks = ops::cudnn_chunks;
  t.linear = ops::linear_cuda;
  t.linear_stream = ops::linear_stream_cuda;
  t.linear_blas = ops::linear_blas_cuda;
  t.cublaslt_state = ops::cublaslt_state;
  t.rms_norm = ops::rms_norm_cuda;
  t.embed = ops::embed_cuda;
  t.argmax = ops::argmax_cuda;
  t.rope_append = ops::rope_append_cuda;
  t.rope_rank = ops::rope_rank_cuda;
  t.score_pages = ops::score_pages_cuda;
  t.row_norm = ops::row_norm_cuda;
  t.scale = ops::scale_cuda;
  t.recency = ops::recency_cuda;
  t.window_votes = ops::window_votes_cuda;
  t.pool = ops::pool_cuda;
  t.group_reduce = ops::group_reduce_cuda;
  t.add_mass = ops::add_mass_cuda;
  t.read_state = ops::read_state_cuda;
  t.allot_same = ops::allot_same_cuda;
  t.allot_by_score = ops::allot_by_score_cuda;
  t.round_allotment = ops::round_allotment_cuda;
  t.fill_heads = ops::fill_heads_cuda;
  t.find_nan = ops::find_nan_cuda;
  t.find_keep = ops::find_keep_cuda;
  t.lengths = ops::lengths_cuda;
  t.older_pages = ops::older_pages_cuda;
  t.place_pages = ops::place_pages_cuda;
  t.inject_pages = ops::inject_pages_cuda;
}

}  // namespace kvlab
