#define KVLAB_LANES 4
#define KVLAB_NAME "portable"
#include "ops/page/row_kernels.inl"

namespace kvlab::ops {
const RowKernels& row_kernels_portable() { return table; }
}  // namespace kvlab::ops
