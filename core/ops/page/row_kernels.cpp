#include "ops/page/row_kernels.hpp"

#include "base/cpu.hpp"

namespace kvlab::ops {

const RowKernels& row_kernels() {
  static const RowKernels& best = has_avx2() && row_kernels_avx2() ? *row_kernels_avx2() : row_kernels_portable();
  return best;
}

}  // namespace kvlab::ops
