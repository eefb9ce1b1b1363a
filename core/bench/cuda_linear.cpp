#include "bench/cuda_timing.hpp"
#include "model/random_weights.hpp"
#include "ops/linear/linear.hpp"

namespace kvlab::bench {

GemmRate cuda_gemm_rate() {
  constexpr std::int64_t n = 8192;
  const CudaTimer timer;
  const DeviceBuffer w(n * n * 2), x(n * n * 2), y(n * n * 4);
  random_weights(w.as<void>(), DType::bf16, 0, n * n, 1, 0.01f, timer.stream());
  random_weights(x.as<void>(), DType::bf16, 0, n * n, 2, 1, timer.stream());
  ops::LinearArgs a;
  a.weight = w.as<void>(), a.n = a.k = a.m = n;
  a.x = x.as<void>(), a.x_dtype = DType::bf16, a.x_stride = n;
  a.y = y.as<float>(), a.y_stride = n;
  const Times t = timer.time([&] { ops::linear_blas(a, timer.stream()); }, 10);
  return {2. * n * n * n / t.best, "cublaslt"};
}

}  // namespace kvlab::bench
