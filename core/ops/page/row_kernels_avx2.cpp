#define KVLAB_LANES 8
#define KVLAB_NAME "avx2"
#include "ops/page/row_kernels.inl"

namespace kvlab::ops {
const RowKernels* row_kernels_avx2() { return &table; }
}  // namespace kvlab::ops
