// This file uses intrinsics and plain pointers only. The linker could keep an inline function of a shared header,
// compiled here with AVX2, for all callers.
#include <immintrin.h>

#include "base/cpu.hpp"
#include "ops/linear/linear_kernels.hpp"

namespace kvlab::ops::gemm {
namespace {

struct Pair {
  __m256 lo, hi;  // columns 0..7, 8..15
};

inline Pair load(const std::uint16_t* p) {
  const __m256i w = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)),
          _mm256_and_ps(_mm256_castsi256_ps(w), _mm256_castsi256_ps(_mm256_set1_epi32(-65536)))};
}
inline Pair load(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }

inline __m256i tail_mask(std::int64_t columns) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(columns)), lane);
}

// Multiplies R rows by P panels of one depth block; `columns` counts from the first panel.
template <class W, int R, int P, bool Full>
inline void micro(const Tile& t, const W* panel, float* y, std::int64_t columns) {
  __m256 lo[P][R], hi[P][R];
  __m256i mask_lo[P], mask_hi[P];
  for (int p = 0; p < P; ++p) {
    if constexpr (!Full) {
      mask_lo[p] = tail_mask(columns - p * panel_width);
      mask_hi[p] = tail_mask(columns - p * panel_width - 8);
    }
    for (int r = 0; r < R; ++r) {
      const float* at = y + r * t.y_stride + p * panel_width;
      if (!t.accumulate) {
        lo[p][r] = hi[p][r] = _mm256_setzero_ps();
      } else if constexpr (Full) {
        lo[p][r] = _mm256_loadu_ps(at);
        hi[p][r] = _mm256_loadu_ps(at + 8);
      } else {
        lo[p][r] = _mm256_maskload_ps(at, mask_lo[p]);
        hi[p][r] = _mm256_maskload_ps(at + 8, mask_hi[p]);
      }
    }
  }
  constexpr std::int64_t ahead = 128 / P;  // rows of a panel to prefetch ahead: 4 KiB of bf16 over the P panels
  const float* a = t.a;
  const std::int64_t a_row = t.a_row, a_depth = t.a_depth, stride = t.panel_stride;
  for (std::int64_t i = 0; i < t.depth; ++i, a += a_depth, panel += panel_width) {
    // The hardware prefetcher stops at page ends and does not know the start of the next panels.
    const std::int64_t next = i + ahead < t.depth ? 0 : (P - 1) * stride;
    for (int p = 0; p < P; ++p)
      _mm_prefetch(reinterpret_cast<const char*>(panel + p * stride + ahead * panel_width + next), _MM_HINT_T0);
    Pair w[P];
    for (int p = 0; p < P; ++p) w[p] = load(panel + p * stride);
    for (int r = 0; r < R; ++r) {
      const __m256 x = _mm256_broadcast_ss(a + r * a_row);
      for (int p = 0; p < P; ++p) {
        lo[p][r] = _mm256_fmadd_ps(x, w[p].lo, lo[p][r]);
        hi[p][r] = _mm256_fmadd_ps(x, w[p].hi, hi[p][r]);
      }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) {
      float* at = y + r * t.y_stride + p * panel_width;
      if constexpr (Full) {
        _mm256_storeu_ps(at, lo[p][r]);
        _mm256_storeu_ps(at + 8, hi[p][r]);
      } else {
        _mm256_maskstore_ps(at, mask_lo[p], lo[p][r]);
        _mm256_maskstore_ps(at + 8, mask_hi[p], hi[p][r]);
      }
    }
}

// Takes panels in groups of 8 to 12 accumulators, which hide the latency of the FMA.
template <class W, int R>
void rows(const Tile& t) {
  constexpr int group = R == 1 ? 4 : R == 2 ? 2 : 1;  // panels at once: sums and weights fit the registers
  const W* panel = static_cast<const W*>(t.panels);
  std::int64_t c = 0;
  for (; c + group * panel_width <= t.columns; c += group * panel_width, panel += group * t.panel_stride)
    micro<W, R, group, true>(t, panel, t.y + c, 0);
  for (; c + panel_width <= t.columns; c += panel_width, panel += t.panel_stride)
    micro<W, R, 1, true>(t, panel, t.y + c, 0);
  if (c < t.columns) micro<W, R, 1, false>(t, panel, t.y + c, t.columns - c);
}

template <class W>
void tile(const Tile& t) {
  switch (t.rows) {
    case 1: return rows<W, 1>(t);
    case 2: return rows<W, 2>(t);
    case 3: return rows<W, 3>(t);
    case 4: return rows<W, 4>(t);
    case 5: return rows<W, 5>(t);
    case 6: return rows<W, 6>(t);
  }
}

}  // namespace

const Kernels* avx2_kernels() {
  static constexpr Kernels k{"avx2", tile<std::uint16_t>, tile<float>};
  return has_avx2() ? &k : nullptr;
}

}  // namespace kvlab::ops::gemm
