// Body of row_kernels_portable.cpp and row_kernels_avx2.cpp: GCC/Clang vectors of KVLAB_LANES floats. Everything is in
// an unnamed namespace so that code for a wider instruction set is never picked for a narrower one.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops/row_kernels.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a function that is not inlined

namespace kvlab::ops {
namespace {

constexpr int lanes = KVLAB_LANES;
#define KVLAB_INLINE [[gnu::always_inline]] inline

using F = float __attribute__((vector_size(lanes * 4)));
using I = std::int32_t __attribute__((vector_size(lanes * 4)));
using U = std::uint32_t __attribute__((vector_size(lanes * 4)));
using U16 = std::uint16_t __attribute__((vector_size(lanes * 2)));
using U8 = std::uint8_t __attribute__((vector_size(lanes)));

KVLAB_INLINE F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
KVLAB_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
KVLAB_INLINE F splat(float x) { return F{} + x; }
KVLAB_INLINE F bits_to_float(U u) {
  F v;
  std::memcpy(&v, &u, sizeof v);
  return v;
}
KVLAB_INLINE float sum(F v) {
  float s[lanes];
  std::memcpy(s, &v, sizeof v);
  if constexpr (lanes == 8)
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  else
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// Widening loads; GCC 12 makes four instructions of the portable form where AVX2 has one.
#if defined(__AVX2__)
KVLAB_INLINE U widen(const std::uint16_t* p) {
  return (U)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KVLAB_INLINE I widen(const std::uint8_t* p) {
  return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
#else
KVLAB_INLINE U widen(const std::uint16_t* p) {
  U16 h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, U);
}
KVLAB_INLINE I widen(const std::uint8_t* p) {
  U8 c;
  std::memcpy(&c, p, sizeof c);
  return __builtin_convertvector(c, I);
}
#endif

// Frames are scattered, so the hardware does not see the next page coming: ask for rows this many tokens ahead.
constexpr int ahead = 16;
KVLAB_INLINE void prefetch(const RowSet& rows, int t, int begin, int bytes) {
  if (t >= rows.count) return;
  const auto* p = static_cast<const char*>(rows.row[t]) + begin;
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// How one row is read: `at(d)` gives elements d .. d + lanes.
struct ReadF32 {
  static constexpr int element = 4;  // bytes
  const float* p;
  KVLAB_INLINE ReadF32(const RowSet& r, int t) : p(static_cast<const float*>(r.row[t])) {}
  KVLAB_INLINE F at(int d) const { return load(p + d); }
};
struct ReadBf16 {
  static constexpr int element = 2;  // bytes
  const std::uint16_t* p;
  KVLAB_INLINE ReadBf16(const RowSet& r, int t) : p(static_cast<const std::uint16_t*>(r.row[t])) {}
  KVLAB_INLINE F at(int d) const { return bits_to_float(widen(p + d) << 16); }
};
struct ReadU8 {
  static constexpr int element = 1;  // bytes
  const std::uint8_t* p;
  F scale, zero;
  KVLAB_INLINE ReadU8(const RowSet& r, int t)
      : p(static_cast<const std::uint8_t*>(r.row[t])), scale(splat(r.scale[t])), zero(splat(r.zero[t])) {}
  KVLAB_INLINE F at(int d) const { return __builtin_convertvector(widen(p + d), F) * scale + zero; }
};

template <class Call>
KVLAB_INLINE void with_reader(RowKind kind, const Call& call) {
  switch (kind) {
    case RowKind::f32: call.template operator()<ReadF32>(); break;
    case RowKind::bf16: call.template operator()<ReadBf16>(); break;
    case RowKind::u8: call.template operator()<ReadU8>(); break;
  }
}

// One vector whose lane t is the sum over the lanes of v[t].
#if KVLAB_LANES == 8
KVLAB_INLINE F transpose_sum(const F* v) {
  F pair[4], quad[2];
  for (int i = 0; i < 4; ++i)
    pair[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
              __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  for (int i = 0; i < 2; ++i)
    quad[i] = __builtin_shufflevector(pair[2 * i], pair[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
              __builtin_shufflevector(pair[2 * i], pair[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(quad[0], quad[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(quad[0], quad[1], 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
KVLAB_INLINE F transpose_sum(const F* v) {
  F pair[2];
  for (int i = 0; i < 2; ++i)
    pair[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 4, 1, 5) +
              __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 6, 3, 7);
  return __builtin_shufflevector(pair[0], pair[1], 0, 1, 4, 5) + __builtin_shufflevector(pair[0], pair[1], 2, 3, 6, 7);
}
#endif

template <class Reader, int G>
void dot_group(const RowSet& rows, int dim, const float* q, std::int64_t q_stride, float* out,
               std::int64_t out_stride) {
  for (int t = 0; t < rows.count; t += lanes) {
    F acc[G][lanes];
    for (int j = 0; j < lanes; j += 2) {  // two rows share each load of a query
      const Reader first(rows, t + j), second(rows, t + j + 1);
      prefetch(rows, t + j + ahead, 0, dim * Reader::element);
      prefetch(rows, t + j + 1 + ahead, 0, dim * Reader::element);
      F a[G] = {}, b[G] = {};
      for (int d = 0; d < dim; d += lanes) {
        const F x = first.at(d), y = second.at(d);
        for (int g = 0; g < G; ++g) {
          const F w = load(q + g * q_stride + d);
          a[g] += w * x;
          b[g] += w * y;
        }
      }
      for (int g = 0; g < G; ++g) {
        acc[g][j] = a[g];
        acc[g][j + 1] = b[g];
      }
    }
    for (int g = 0; g < G; ++g) store(out + g * out_stride + t, transpose_sum(acc[g]));
  }
}

void dot(const RowSet& rows, int dim, const float* q, std::int64_t q_stride, int queries, float* out,
         std::int64_t out_stride) {
  with_reader(rows.kind, [&]<class R>() {
    int i = 0;
    for (; queries - i >= 4; i += 4)
      dot_group<R, 4>(rows, dim, q + i * q_stride, q_stride, out + i * out_stride, out_stride);
    q += i * q_stride;
    out += i * out_stride;
    switch (queries - i) {
      case 3: dot_group<R, 3>(rows, dim, q, q_stride, out, out_stride); break;
      case 2: dot_group<R, 2>(rows, dim, q, q_stride, out, out_stride); break;
      case 1: dot_group<R, 1>(rows, dim, q, q_stride, out, out_stride); break;
      default: break;
    }
  });
}

template <class Reader, int G, int V>
KVLAB_INLINE void accumulate_block(const RowSet& rows, int d, const float* p, std::int64_t p_stride, float* out,
                                   std::int64_t out_stride) {
  F acc[G][V];
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) acc[g][v] = load(out + g * out_stride + d + v * lanes);
  for (int t = 0; t < rows.count; ++t) {
    const Reader row(rows, t);
    if (V > 1) prefetch(rows, t + ahead, d * Reader::element, V * lanes * Reader::element);
    F x[V];
    for (int v = 0; v < V; ++v) x[v] = row.at(d + v * lanes);
    for (int g = 0; g < G; ++g) {
      const F w = splat(p[g * p_stride + t]);
      for (int v = 0; v < V; ++v) acc[g][v] += w * x[v];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) store(out + g * out_stride + d + v * lanes, acc[g][v]);
}

template <class Reader, int G>
void accumulate_group(const RowSet& rows, int dim, const float* p, std::int64_t p_stride, float* out,
                      std::int64_t out_stride) {
  constexpr int wide = G == 4 ? 2 : 4;  // accumulators and one row fit 16 registers
  int d = 0;
  for (; d + wide * lanes <= dim; d += wide * lanes)
    accumulate_block<Reader, G, wide>(rows, d, p, p_stride, out, out_stride);
  for (; d < dim; d += lanes) accumulate_block<Reader, G, 1>(rows, d, p, p_stride, out, out_stride);
}

void accumulate(const RowSet& rows, int dim, const float* p, std::int64_t p_stride, int queries, float* out,
                std::int64_t out_stride) {
  with_reader(rows.kind, [&]<class R>() {
    int i = 0;
    for (; queries - i >= 4; i += 4)
      accumulate_group<R, 4>(rows, dim, p + i * p_stride, p_stride, out + i * out_stride, out_stride);
    p += i * p_stride;
    out += i * out_stride;
    switch (queries - i) {
      case 3: accumulate_group<R, 3>(rows, dim, p, p_stride, out, out_stride); break;
      case 2: accumulate_group<R, 2>(rows, dim, p, p_stride, out, out_stride); break;
      case 1: accumulate_group<R, 1>(rows, dim, p, p_stride, out, out_stride); break;
      default: break;
    }
  });
}

void square_sum(const RowSet& rows, int dim, float* out) {
  with_reader(rows.kind, [&]<class R>() {
    for (int t = 0; t < rows.count; ++t) {
      const R row(rows, t);
      F a = {};
      for (int d = 0; d < dim; d += lanes) {
        const F x = row.at(d);
        a += x * x;
      }
      out[t] = sum(a);
    }
  });
}

void decode(const RowSet& rows, int dim, float* out, std::int64_t out_stride) {
  with_reader(rows.kind, [&]<class R>() {
    for (int t = 0; t < rows.count; ++t) {
      const R row(rows, t);
      for (int d = 0; d < dim; d += lanes) store(out + t * out_stride + d, row.at(d));
    }
  });
}

void rotate(float* x, const float* cosine, const float* sine, int dim) {
  const int half = dim / 2;
  int i = 0;
  for (; i + lanes <= half; i += lanes) {
    const F a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

void pack_panel(const float* const* rows, int count, int dim, float* panel) {
  for (int d = 0; d < dim; ++d)
    for (int j = 0; j < panel_width; ++j) panel[d * panel_width + j] = j < count ? rows[j][d] : 0.f;
}

template <int Q>
void panel_block(const float* panel, int dim, const float* q, std::int64_t q_stride, float* out,
                 std::int64_t out_stride) {
  constexpr int vectors = panel_width / lanes;
  F acc[Q][vectors] = {};
  for (int d = 0; d < dim; ++d) {
    F k[vectors];
    for (int v = 0; v < vectors; ++v) k[v] = load(panel + d * panel_width + v * lanes);
    for (int i = 0; i < Q; ++i) {
      const F x = splat(q[i * q_stride + d]);
      for (int v = 0; v < vectors; ++v) acc[i][v] += x * k[v];
    }
  }
  for (int i = 0; i < Q; ++i)
    for (int v = 0; v < vectors; ++v) store(out + i * out_stride + v * lanes, acc[i][v]);
}

void panel_dot(const float* panel, int dim, const float* q, std::int64_t q_stride, int queries, float* out,
               std::int64_t out_stride) {
  constexpr int block = lanes == 8 ? 6 : 2;  // accumulators that fit 16 registers
  int i = 0;
  for (; i + block <= queries; i += block)
    panel_block<block>(panel, dim, q + i * q_stride, q_stride, out + i * out_stride, out_stride);
  for (; i < queries; ++i) panel_block<1>(panel, dim, q + i * q_stride, q_stride, out + i * out_stride, out_stride);
}

// exp to about 1e-7 relative (Cephes' polynomial): below -87.33 it is 0, above 88.37 it saturates, NaN stays NaN.
KVLAB_INLINE F exp_of(F x) {
  const F low = splat(-87.33f), high = splat(88.37f), magic = splat(12582912.f);
  F y = x > low ? x : low;
  y = y < high ? y : high;
  const F shifted = y * 1.44269504088896341f + magic;  // the integer part sits in the low bits
  const F n = shifted - magic;
  const F r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  U exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  const F result = p * bits_to_float((exponent << 23) + 0x3f800000u);
  const F cut = x < low ? F{} : result;
  return x == x ? cut : x;
}

float max(const float* x, int n) {
  float m = -HUGE_VALF;
  int i = 0;
  if (n >= lanes) {
    F v = splat(m);
    for (; i + lanes <= n; i += lanes) {
      const F y = load(x + i);
      v = y > v ? y : v;
    }
    for (int j = 0; j < lanes; ++j) m = v[j] > m ? v[j] : m;
  }
  for (; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

void scale(float* x, int n, float factor) {
  int i = 0;
  for (; i + lanes <= n; i += lanes) store(x + i, load(x + i) * factor);
  for (; i < n; ++i) x[i] *= factor;
}

// The tail of an array as a full vector, filled up with `fill`.
KVLAB_INLINE F load_tail(const float* x, int n, float fill) {
  float t[lanes];
  for (int j = 0; j < lanes; ++j) t[j] = j < n ? x[j] : fill;
  return load(t);
}
KVLAB_INLINE void store_tail(float* x, int n, F v) {
  float t[lanes];
  store(t, v);
  for (int j = 0; j < n; ++j) x[j] = t[j];
}

float exp_sum(float* x, int n, float shift) {
  F total = {};
  int i = 0;
  for (; i + lanes <= n; i += lanes) {
    const F e = exp_of(load(x + i) - shift);
    store(x + i, e);
    total += e;
  }
  if (i < n) {
    const F e = exp_of(load_tail(x + i, n - i, -HUGE_VALF) - shift);
    store_tail(x + i, n - i, e);
    total += e;
  }
  return sum(total);
}

void add_scaled(const float* x, int n, float factor, float* inout) {
  int i = 0;
  for (; i + lanes <= n; i += lanes) store(inout + i, load(inout + i) + load(x + i) * factor);
  for (; i < n; ++i) inout[i] += x[i] * factor;
}

void silu_mul(const float* gate, const float* up, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const F g = load(gate + i);
    store(out + i, g / (exp_of(-g) + 1.f) * load(up + i));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const F g = load_tail(gate + i, rest, 0.f);
    store_tail(out + i, rest, g / (exp_of(-g) + 1.f) * load_tail(up + i, rest, 0.f));
  }
}

void rms_norm(const float* x, const float* weight, float eps, std::int64_t n, float* out) {
  F squares = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const F v = load(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  const float factor = 1.f / std::sqrt(total / static_cast<float>(n) + eps);
  for (i = 0; i + lanes <= n; i += lanes) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

constexpr RowKernels table = {KVLAB_NAME, dot, accumulate, square_sum, decode,     rotate,   pack_panel,
                              panel_dot,  max, scale,      exp_sum,    add_scaled, silu_mul, rms_norm};

}  // namespace
}  // namespace kvlab::ops
