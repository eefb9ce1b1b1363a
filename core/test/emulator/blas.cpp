// Plain loops compute the product in place of cuBLASLt (ops/linear/linear_blas.cu, which is not compiled). The kernels
// around it are the real ones.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <vector>

#include "base/scratch.cuh"
#include "ops/linear/linear.cuh"

namespace kvlab::ops {
namespace {

// Each sum is in the order of k. Rows of x go on together, which takes a fraction of the time.
template <class T, class Y>
void multiply(const LinearArgs& a, Y* y, std::int64_t y_stride) {
  constexpr std::int64_t together = 16;
  const T *weight = static_cast<const T*>(a.weight), *x = static_cast<const T*>(a.x);
  const std::int64_t weight_stride = a.weight_stride ? a.weight_stride : a.k;
  const std::int64_t groups = (a.m + together - 1) / together;
  std::vector<float> rows(static_cast<std::size_t>(groups * a.k * together));  // [group, k, row]
  for (std::int64_t row = 0; row < a.m; ++row)
    for (std::int64_t i = 0; i < a.k; ++i)
      rows[static_cast<std::size_t>((row / together * a.k + i) * together + row % together)] =
          static_cast<float>(x[row * a.x_stride + i]);
  std::vector<float> w(static_cast<std::size_t>(a.k));
  for (std::int64_t output = 0; output < a.n; ++output) {
    for (std::int64_t i = 0; i < a.k; ++i)
      w[static_cast<std::size_t>(i)] = static_cast<float>(weight[output * weight_stride + i]);
    const float* by = rows.data();
    for (std::int64_t first = 0; first < a.m; first += together) {
      float sums[together] = {};
      for (const float of : w) {
        for (std::int64_t r = 0; r < together; ++r) sums[r] += of * by[r];
        by += together;
      }
      for (std::int64_t r = 0; r < std::min(together, a.m - first); ++r) {
        Y& to = y[(first + r) * y_stride + output];
        to = a.add ? Y(static_cast<float>(to) + sums[r]) : Y(sums[r]);
      }
    }
  }
}

template <class T>
void product(const LinearArgs& a, Stream s) {
  const cudaStream_t stream = cuda::stream_of(s);
  if (!a.gated) {
    emulator::submit(stream, [a] { multiply<T>(a, a.y, a.y_stride); });
    if (a.bias) add_bias_cuda(a.bias, a.m, a.n, a.y, a.y_stride, s);
    return;
  }
  auto* both =
      static_cast<T*>(cuda::fixed_scratch(stream, "linear gate and up", static_cast<std::size_t>(a.m * a.n * 2)));
  emulator::submit(stream, [a, both] { multiply<T>(a, both, a.n); });
  silu_mul_cuda(both, a.n, a.dtype, a.m, a.n / 2, a.gated, a.gated_stride, s);
}

}  // namespace

static const LibraryState& cublaslt_state_cuda() {
  static const LibraryState state = emulator::stand_in("cuBLASLt", "KVLAB_CUBLASLT");
  return state;
}
KVLAB_ON_CUDA(cublaslt_state, cublaslt_state_cuda);

void linear_blas_cuda(const LinearArgs& a, Stream s) {
  a.dtype == DType::f16 ? product<__half>(a, s) : product<__nv_bfloat16>(a, s);
}
KVLAB_ON_CUDA(linear_blas, linear_blas_cuda);

}  // namespace kvlab::ops
