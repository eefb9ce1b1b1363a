// One row of activations times bf16 weights in oneDNN's layout of k pairs. A decode step streams each weight once;
// oneDNN's own kernels do that at less than half of the memory rate.
#include <immintrin.h>

#include "ops/linear/linear_kernels.hpp"

namespace kvlab::ops::gemm {
namespace {

// Sums `Vectors` vectors of eight columns each.
template <int Vectors>
void columns(const std::uint32_t* weights, const std::int64_t* pair, std::int64_t pairs, const float* x, float* y) {
  __m256 sum[Vectors];
  for (auto& s : sum) s = _mm256_setzero_ps();
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (std::int64_t p = 0; p < pairs; ++p) {
    const std::uint32_t* w = weights + pair[p];
    const __m256 even = _mm256_set1_ps(x[2 * p]), odd = _mm256_set1_ps(x[2 * p + 1]);
    _mm_prefetch(reinterpret_cast<const char*>(w + 16 * Vectors * 8), _MM_HINT_T0);
    for (int v = 0; v < Vectors; ++v) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 8 * v));
      sum[v] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), even, sum[v]);
      sum[v] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(both, upper)), odd, sum[v]);
    }
  }
  for (int v = 0; v < Vectors; ++v) _mm256_storeu_ps(y + 8 * v, sum[v]);
}

}  // namespace

void pair_columns(const std::uint32_t* weights, int width, const std::int64_t* pair, std::int64_t pairs, const float* x,
                  float* y) {
  while (width >= 64) {
    columns<8>(weights, pair, pairs, x, y);
    weights += 64, y += 64, width -= 64;
  }
  for (; width > 0; weights += 16, y += 16, width -= 16) columns<2>(weights, pair, pairs, x, y);
}

}  // namespace kvlab::ops::gemm
