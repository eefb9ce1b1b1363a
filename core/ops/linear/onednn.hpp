// oneDNN's matrix products, in their own library (libkvlab_onednn.so beside libkvlab.so): oneDNN has 40 MB and kvlab
// runs without it. On CPUs with AVX-512 its kernels are wider than ours.
#pragma once
#include <kvlab/dtype.hpp>

#include <cstdint>
#include <memory>

namespace kvlab::ops::gemm {

class Weights;

struct OneDnn {
  // Where oneDNN can, bf16 weights are multiplied as bf16; activations are rounded too. Elsewhere the rounded weights
  // are held and multiplied as f32.
  std::unique_ptr<Weights> (*weights)(std::int64_t n, std::int64_t k, DType dtype) = nullptr;
  // C[m, n] = A[m, k] B[k, n], f32, dense
  void (*sgemm)(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c) = nullptr;
  bool bf16 = false;    // AVX-512 with bf16, or AMX
  bool avx512 = false;  // its f32 GEMM is twice as wide as our AVX2 kernels
};

const OneDnn* onednn();  // null without the library; the first call loads it

}  // namespace kvlab::ops::gemm
