// cuBLASLt is not emulated.
#include <string>

#include "ops/linear_cuda.hpp"

namespace kvlab::ops {

void linear_blas_cuda(const LinearArgs& a, void*) {
  throw Error(Errc::unsupported, "got " + std::to_string(a.m) + " rows for cuBLASLt, which is not emulated",
              "op linear (emulated CUDA)");
}

}  // namespace kvlab::ops
