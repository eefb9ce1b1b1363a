// The ops that libkvlab_cuda.so offers.
#include "base/backend.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/cudnn_attention.hpp"
#include "ops/linear/linear_cuda.hpp"
#include "ops/page/rope_append.hpp"
#include "ops/page/rope_rank.hpp"

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
}

}  // namespace kvlab
