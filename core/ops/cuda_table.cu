// The ops that libkvlab_cuda.so offers.
#include "base/backend.hpp"
#include "ops/attend_cuda.hpp"
#include "ops/linear_cuda.hpp"
#include "ops/rope_append_cuda.hpp"

namespace kvlab {

void fill_cuda_ops(CudaOps& t);
void fill_cuda_ops(CudaOps& t) {
  t.attend = ops::attend_cuda;
  t.linear = ops::linear_cuda;
  t.linear_stream = ops::linear_stream_cuda;
  t.linear_blas = ops::linear_blas_cuda;
  t.rms_norm = ops::rms_norm_cuda;
  t.embed = ops::embed_cuda;
  t.argmax = ops::argmax_cuda;
  t.rope_append = ops::rope_append_cuda;
}

}  // namespace kvlab
