// The ops that libkvlab_cuda.so offers.
#include "base/backend.hpp"
#include "ops/attend_cuda.hpp"

namespace kvlab {

void fill_cuda_ops(CudaOps& t);
void fill_cuda_ops(CudaOps& t) { t.attend = ops::attend_cuda; }

}  // namespace kvlab
