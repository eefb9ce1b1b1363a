#include "ops/linear/norm.hpp"

#include <kvlab/dtype.hpp>

#include "ops/page/check.hpp"
#include "ops/page/row_kernels.hpp"

namespace kvlab::ops {
namespace {

constexpr std::int64_t block = 8192;  // elements of one thread's piece

std::int64_t blocks(std::int64_t count) { return (count + block - 1) / block; }

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n, float* out) {
  const RowKernels& kernels = row_kernels();
#pragma omp parallel for if (worth_threads(rows * n))
  for (std::int64_t r = 0; r < rows; ++r) kernels.rms_norm(x + r * n, weight, eps, n, out + r * n);
}

void silu_mul(const float* gate, const float* up, std::int64_t count, float* out) {
  const RowKernels& kernels = row_kernels();
#pragma omp parallel for if (worth_threads(count))
  for (std::int64_t b = 0; b < blocks(count); ++b) {
    const std::int64_t at = b * block, n = count - at < block ? count - at : block;
    kernels.silu_mul(gate + at, up + at, n, out + at);
  }
}

void add(const float* x, std::int64_t count, float* inout) {
#pragma omp parallel for simd if (worth_threads(count))
  for (std::int64_t i = 0; i < count; ++i) inout[i] += x[i];
}

void round_to(float* x, std::int64_t count, int dtype_bytes) {
  if (dtype_bytes == 4) return;
  if (dtype_bytes != 2)
    fail(Errc::internal, "round_to", "got " + std::to_string(dtype_bytes) + " bytes, wanted 2 or 4");
#pragma omp parallel for simd if (worth_threads(count))
  for (std::int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(bf16(x[i]));
}

}  // namespace kvlab::ops
