// oneDNN's matrix products, in a library of their own (libkvlab_onednn.so beside libkvlab.so): 40 MB that kvlab runs
// without. On CPUs with AVX-512 they are wider than our own kernels.
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>
#include <memory>

namespace kvlab::ops::gemm {

class Weights;

struct OneDnn {
  // bf16 is multiplied as bf16 where oneDNN can (activations are rounded too); elsewhere its rounded values are held
  // and multiplied as f32.
  std::unique_ptr<Weights> (*weights)(std::int64_t n, std::int64_t k, DType dtype) = nullptr;
  // C[m, n] = A[m, k] B[k, n], f32, dense
  void (*sgemm)(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c) = nullptr;
  bool bf16 = false;    // AVX-512 with bf16, or AMX
  bool avx512 = false;  // f32 GEMM twice as wide as our AVX2 kernels
};

const OneDnn* onednn();  // null where the library is not there; loaded at the first call

}  // namespace kvlab::ops::gemm
