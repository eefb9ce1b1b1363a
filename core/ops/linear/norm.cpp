#include "ops/linear/norm.hpp"

#include <kvlab/dtype.hpp>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/row_kernels.hpp"

namespace kvlab::ops {
namespace {

constexpr std::int64_t block = 8192;  // elements of one thread's piece

std::int64_t blocks(std::int64_t count) { return (count + block - 1) / block; }

}  // namespace

void rms_norm(const NormArgs& a, Stream s) {
  if (s.device() == Device::cuda) return on_cuda<rms_norm>(a, s);
  if (a.dtype != DType::f32 || !a.weight)
    fail(Errc::unsupported, "rms_norm",
         std::string("got an output of ") + name_of(a.dtype) + (a.weight ? "" : " without a weight") +
             " on the CPU, wanted f32 and a weight");
  const RowKernels& kernels = row_kernels();
  auto* out = static_cast<float*>(a.out);
#pragma omp parallel for if (worth_threads(a.rows * a.n))
  for (std::int64_t r = 0; r < a.rows; ++r)
    kernels.rms_norm(a.x + r * a.x_stride, a.weight, a.eps, a.n, out + r * a.out_stride);
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
