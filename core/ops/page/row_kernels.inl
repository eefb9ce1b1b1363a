// Body of row_kernels_portable.cpp, row_kernels_avx2.cpp and row_kernels_avx512.cpp: GCC/Clang vectors of KVLAB_LANES
// floats. The unnamed namespace keeps the linker from using code of a wider instruction set for a narrower one.
#include <kvlab/dtype.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops/page/row_kernels.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // every function with vector arguments is inlined

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
KVLAB_INLINE F splat(float x) { return x - F{}; }  // x + F{} would turn -0 into 0, so the compiler could not drop it
KVLAB_INLINE F bits_to_float(U u) {
  F v;
  std::memcpy(&v, &u, sizeof v);
  return v;
}
KVLAB_INLINE float sum(F v) {
  float s[lanes];
  std::memcpy(s, &v, sizeof v);
  if constexpr (lanes == 16)
    for (int i = 0; i < 8; ++i) s[i] += s[i + 8];
  if constexpr (lanes >= 8)
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  else
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// Widening loads; GCC 12 makes four instructions of the portable form where AVX2 has one.
#if KVLAB_LANES == 16  // the masks are full: without one, GCC 12 warns of its own headers
KVLAB_INLINE U widen(const std::uint16_t* p) {
  return (U)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
KVLAB_INLINE I widen(const std::uint8_t* p) {
  return (I)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The first half of the lanes holds the first four bytes at p, the other half the next four.
KVLAB_INLINE U two_words(const char* p) {
  const __m512i halves = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m128i words = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (U)_mm512_maskz_permutexvar_epi32(0xffff, halves, _mm512_castsi128_si512(words));
}
#elif KVLAB_LANES == 8
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

KVLAB_INLINE int least(int a, int b) { return a < b ? a : b; }
KVLAB_INLINE void prefetch(const void* p, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

// half() returns half v (0 or 1) of elements d .. d + 2 * lanes. One load holds 2 * lanes bf16; in its 32-bit words
// even elements are the low halves and odd ones the high halves. `paired` readers return even elements for v = 0 and
// odd ones for v = 1; queries and sums keep that order. tail() returns the last `lanes` elements of a row in order,
// where head_dim is no multiple of 2 * lanes.
struct ReadF32 {
  static constexpr bool paired = false, coded = false;
  KVLAB_INLINE static F half(const char* row, int d, int v) { return tail(row, d + v * lanes); }
  KVLAB_INLINE static F tail(const char* row, int d) { return load(reinterpret_cast<const float*>(row) + d); }
};
struct ReadBf16 {
  static constexpr bool paired = true, coded = false;
  KVLAB_INLINE static F half(const char* row, int d, int v) {
    U u;
    std::memcpy(&u, row + std::int64_t{2} * d, sizeof u);
    return bits_to_float(v ? u & 0xffff0000u : u << 16);
  }
  KVLAB_INLINE static F tail(const char* row, int d) {
    return bits_to_float(widen(reinterpret_cast<const std::uint16_t*>(row) + d) << 16);
  }
};
struct ReadU8 {  // returns codes; the sums apply scale and zero
  static constexpr bool paired = false, coded = true;
  KVLAB_INLINE static F half(const char* row, int d, int v) { return tail(row, d + v * lanes); }
  KVLAB_INLINE static F tail(const char* row, int d) {
    return __builtin_convertvector(widen(reinterpret_cast<const std::uint8_t*>(row) + d), F);
  }
};
#if KVLAB_LANES == 16
constexpr U counted = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
            counted_twice = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
#elif KVLAB_LANES == 8
constexpr U counted = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr U counted = {0, 1, 2, 3};
#endif
KVLAB_INLINE F to_float(U small) { return __builtin_convertvector((I)small, F); }
struct ReadU4 {  // two elements a byte, the even one in the low bits
  static constexpr bool paired = true, coded = true;
  KVLAB_INLINE static F half(const char* row, int d, int v) {
    const U u = (U)widen(reinterpret_cast<const std::uint8_t*>(row) + d / 2);
    return to_float(v ? u >> 4 : u & 15u);
  }
#if KVLAB_LANES == 16
  KVLAB_INLINE static F tail(const char* row, int d) {
    return to_float(two_words(row + d / 2) >> counted_twice * 4u & 15u);
  }
#else
  KVLAB_INLINE static F tail(const char* row, int d) {
    std::uint32_t word = 0;
    std::memcpy(&word, row + d / 2, lanes / 2);
    return to_float((word - U{}) >> counted * 4u & 15u);
  }
#endif
};
struct ReadU2 {  // four elements a byte
  static constexpr bool paired = true, coded = true;
#if KVLAB_LANES == 16
  KVLAB_INLINE static F half(const char* row, int d, int v) {
    return to_float(two_words(row + d / 4) >> (counted_twice * 4u + (v ? 2u : 0u)) & 3u);
  }
#else
  KVLAB_INLINE static F half(const char* row, int d, int v) {
    std::uint32_t word = 0;
    std::memcpy(&word, row + d / 4, lanes / 2);
    return to_float((word - U{}) >> (counted * 4u + (v ? 2u : 0u)) & 3u);
  }
#endif
  KVLAB_INLINE static F tail(const char* row, int d) {
    std::uint32_t word = 0;
    std::memcpy(&word, row + d / 4, lanes / 4);
    return to_float((word - U{}) >> counted * 2u & 3u);
  }
};
struct ReadE4m3 {
  static constexpr bool paired = false, coded = true;
#if KVLAB_LANES == 16
  KVLAB_INLINE static F half(const char* row, int d, int v) { return tail(row, d + v * lanes); }
  KVLAB_INLINE static F tail(const char* row, int d) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + d)));
    const __m256i x = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1), _mm256_set1_epi16(-0x4080)),
                  most = _mm256_set1_epi16(0x3f80), nan = _mm256_cmpeq_epi16(_mm256_and_si256(x, most), most);
    return (F)_mm512_maskz_cvtph_ps(0xffff, _mm256_or_si256(x, _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)))) * 0x1p8f;
  }
#elif KVLAB_LANES == 8
  // A code's sign, exponent and mantissa are also those of an f16 that is 2^8 times smaller.
  KVLAB_INLINE static F half(const char* row, int d, int v) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + d)));
    const __m256i x = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1), _mm256_set1_epi16(-0x4080)),
                  most = _mm256_set1_epi16(0x3f80), nan = _mm256_cmpeq_epi16(_mm256_and_si256(x, most), most),
                  y = _mm256_or_si256(x, _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)));
    return (F)_mm256_cvtph_ps(v ? _mm256_extracti128_si256(y, 1) : _mm256_castsi256_si128(y)) * 0x1p8f;
  }
  KVLAB_INLINE static F tail(const char* row, int d) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + d)));
    const __m128i x = _mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(wide, 8), 1), _mm_set1_epi16(-0x4080)),
                  most = _mm_set1_epi16(0x3f80), nan = _mm_cmpeq_epi16(_mm_and_si128(x, most), most);
    return (F)_mm256_cvtph_ps(_mm_or_si128(x, _mm_and_si128(nan, _mm_set1_epi16(0x7c00)))) * 0x1p8f;
  }
#else
  KVLAB_INLINE static F half(const char* row, int d, int v) { return tail(row, d + v * lanes); }
  KVLAB_INLINE static F tail(const char* row, int d) {
    const U u = (U)widen(reinterpret_cast<const std::uint8_t*>(row) + d), size = u & 0x7fu;
    U x;
    const F exact = bits_to_float(size << 20) * 0x1p120f;  // the product moves the exponent
    std::memcpy(&x, &exact, sizeof x);
    return bits_to_float(x | (u & 0x80u) << 24 | ((U)(size == 0x7fu) & 0x7fc00000u));
  }
#endif
};

template <class Call>
KVLAB_INLINE void with_reader(RowKind kind, const Call& call) {
  switch (kind) {
    case RowKind::f32: call.template operator()<ReadF32>(); break;
    case RowKind::bf16: call.template operator()<ReadBf16>(); break;
    case RowKind::u8: call.template operator()<ReadU8>(); break;
    case RowKind::u4: call.template operator()<ReadU4>(); break;
    case RowKind::u2: call.template operator()<ReadU2>(); break;
    case RowKind::e4m3: call.template operator()<ReadE4m3>(); break;
  }
}

constexpr int most_dim = 512, most_queries = 4;  // largest dim; queries of one pass

// Calls `call` with the number of queries as a template argument; the group's sums fit the registers.
template <class Call>
KVLAB_INLINE void with_group(int queries, const Call& call) {
  switch (queries) {
    case 1: call.template operator()<1>(); break;
    case 2: call.template operator()<2>(); break;
    case 3: call.template operator()<3>(); break;
    default: call.template operator()<4>(); break;
  }
}

// Writes x in paired order: of each 2 * lanes elements the even ones, then the odd ones. A tail of `lanes` keeps its
// order.
KVLAB_INLINE void pair_up(const float* x, int dim, float* out) {
  int d = 0;
  for (; d + 2 * lanes <= dim; d += 2 * lanes)
    for (int i = 0; i < lanes; ++i) {
      out[d + i] = x[d + 2 * i];
      out[d + lanes + i] = x[d + 2 * i + 1];
    }
  for (; d < dim; ++d) out[d] = x[d];
}
// Adds x, which is in paired order, to inout in the order of the row.
KVLAB_INLINE void add_unpaired(const float* x, int dim, float* inout) {
  int d = 0;
  for (; d + 2 * lanes <= dim; d += 2 * lanes)
    for (int i = 0; i < lanes; ++i) {
      inout[d + 2 * i] += x[d + i];
      inout[d + 2 * i + 1] += x[d + lanes + i];
    }
  for (; d < dim; ++d) inout[d] += x[d];
}

// f16 {scale, zero} of one row.
struct Meta {
  float scale, zero;
};
KVLAB_INLINE Meta meta_of(const RowRun& run, int t) {
  std::uint16_t m[2];
  std::memcpy(m, static_cast<const char*>(run.meta) + std::int64_t{t} * 4, 4);
#if defined(__F16C__)
  return {_cvtsh_ss(m[0]), _cvtsh_ss(m[1])};
#else
  float x[2];
  for (int i = 0; i < 2; ++i) {
    // The product moves the exponent. It is exact, also for subnormals.
    const std::uint32_t magnitude = std::uint32_t{m[i] & 0x7fffu} << 13;
    std::memcpy(&x[i], &magnitude, 4);
    x[i] *= m[i] & 0x8000u ? -0x1p112f : 0x1p112f;
  }
  return {x[0], x[1]};
#endif
}

// Sums of the elements of v[0], v[1], v[2] and v[3].
using F4 = float __attribute__((vector_size(16)));
#if KVLAB_LANES >= 8
using F8 = float __attribute__((vector_size(32)));
#endif
KVLAB_INLINE F4 four_sums(const F* of) {
#if KVLAB_LANES >= 8
#if KVLAB_LANES == 16
  F8 v[4];
  for (int i = 0; i < 4; ++i)
    v[i] = __builtin_shufflevector(of[i], of[i], 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(of[i], of[i], 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const F* const v = of;
#endif
  F8 pair[2];
  for (int i = 0; i < 2; ++i)
    pair[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
              __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  const F8 s = __builtin_shufflevector(pair[0], pair[1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(pair[0], pair[1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(s, s, 0, 1, 2, 3) + __builtin_shufflevector(s, s, 4, 5, 6, 7);
#else
  F pair[2];
  for (int i = 0; i < 2; ++i)
    pair[i] = __builtin_shufflevector(of[2 * i], of[2 * i + 1], 0, 4, 1, 5) +
              __builtin_shufflevector(of[2 * i], of[2 * i + 1], 2, 6, 3, 7);
  return __builtin_shufflevector(pair[0], pair[1], 0, 1, 4, 5) + __builtin_shufflevector(pair[0], pair[1], 2, 3, 6, 7);
#endif
}

// Panels are transposed in blocks of so many rows and columns.
#if KVLAB_LANES >= 8
constexpr int block_width = 8;
using Block = F8;
KVLAB_INLINE void transpose(Block* x) {
  Block a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = __builtin_shufflevector(a[i + j], a[i + 2 + j], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = __builtin_shufflevector(a[i + j], a[i + 2 + j], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    x[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    x[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#else
constexpr int block_width = 4;
using Block = F;
KVLAB_INLINE void transpose(Block* x) {
  Block a[4];
  for (int i = 0; i < 4; i += 2) {
    a[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 4, 1, 5);
    a[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 2, 6, 3, 7);
  }
  for (int j = 0; j < 2; ++j) {
    x[2 * j] = __builtin_shufflevector(a[j], a[2 + j], 0, 1, 4, 5);
    x[2 * j + 1] = __builtin_shufflevector(a[j], a[2 + j], 2, 3, 6, 7);
  }
}
#endif

constexpr int dot_rows = 4;  // rows that four_sums adds up at once

// acc[g][first + j] = partial dot products of T rows with G queries, one per lane.
template <class R, int G, int T>
KVLAB_INLINE void dot_block(const char* const* row, int dim, const float* q, std::int64_t q_stride, F (*acc)[dot_rows],
                            int first) {
  F sums[G][T] = {};
  int d = 0;
  for (; d + 2 * lanes <= dim; d += 2 * lanes)
    for (int v = 0; v < 2; ++v) {
      F w[G];
      for (int g = 0; g < G; ++g) w[g] = load(q + g * q_stride + d + v * lanes);
      for (int j = 0; j < T; ++j) {
        const F x = R::half(row[j], d, v);
        for (int g = 0; g < G; ++g) sums[g][j] += w[g] * x;
      }
    }
  if (d < dim)
    for (int j = 0; j < T; ++j) {
      const F x = R::tail(row[j], d);
      for (int g = 0; g < G; ++g) sums[g][j] += load(q + g * q_stride + d) * x;
    }
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < T; ++j) acc[g][first + j] = sums[g][j];
}

template <class R, int G>
void dot_run(const RowRun& run, const RowRun& ahead, int dim, const float* q, std::int64_t q_stride,
             const float* q_sums, float* out, std::int64_t out_stride) {
  constexpr int rows_at_once = G == 4 && lanes < 16 ? 2 : dot_rows;  // sums, queries and a row fit 16 or 32 registers
  const char* data = static_cast<const char*>(run.data);
  const auto block = [&](int t, int count, F4* sums) {
    const char* row[dot_rows];
    for (int j = 0; j < dot_rows; ++j) row[j] = data + (t + (count == dot_rows ? j : least(j, count - 1))) * run.stride;
    F acc[G][dot_rows];
    for (int j = 0; j < dot_rows; j += rows_at_once) dot_block<R, G, rows_at_once>(row + j, dim, q, q_stride, acc, j);
    for (int g = 0; g < G; ++g) sums[g] = four_sums(acc[g]);
    if (!R::coded) return;
    F4 scale = {}, zero = {};
    for (int j = 0; j < dot_rows; ++j) {
      const Meta m = meta_of(run, t + least(j, count - 1));
      scale[j] = m.scale;
      zero[j] = m.zero;
    }
    for (int g = 0; g < G; ++g) sums[g] = sums[g] * scale + zero * q_sums[g];
  };
  int t = 0;
  F4 sums[G];
  for (; t + dot_rows <= run.count; t += dot_rows) {
    if (t < ahead.count)
      prefetch(static_cast<const char*>(ahead.data) + t * ahead.stride,
               least(dot_rows, ahead.count - t) * ahead.stride);
    block(t, dot_rows, sums);
    for (int g = 0; g < G; ++g) std::memcpy(out + g * out_stride + t, &sums[g], sizeof sums[g]);
  }
  if (t == run.count) return;
  block(t, run.count - t, sums);
  for (int g = 0; g < G; ++g)
    for (int j = 0; t + j < run.count; ++j) out[g * out_stride + t + j] = sums[g][j];
}

void dot(const RowRun* runs, int run_count, int dim, const float* q, std::int64_t q_stride, int queries, float factor,
         float* out, std::int64_t out_stride) {
  alignas(64) float plain[most_queries * most_dim], paired[most_queries * most_dim];
  for (int first = 0; first < queries; first += most_queries) {
    const int n = least(most_queries, queries - first);
    float sums[most_queries] = {};
    for (int g = 0; g < n; ++g) {
      const float* from = q + (first + g) * q_stride;
      F total = {};
      for (int d = 0; d < dim; d += lanes) {
        const F x = load(from + d) * factor;
        store(plain + g * dim + d, x);
        total += x;
      }
      sums[g] = sum(total);
      pair_up(plain + g * dim, dim, paired + g * dim);
    }
    with_group(n, [&]<int G>() {
      float* at = out + first * out_stride;
      for (int i = 0; i < run_count; ++i) {
        with_reader(runs[i].kind, [&]<class R>() {
          dot_run<R, G>(runs[i], runs[i + run_ahead], dim, R::paired ? paired : plain, dim, sums, at, out_stride);
        });
        at += runs[i].count;
      }
    });
  }
}

// Elements d .. d + lanes of row t as f32, in order.
template <class R>
KVLAB_INLINE F element(const RowRun& run, int t, int d, Meta m) {
  const F x = R::tail(static_cast<const char*>(run.data) + t * run.stride, d);
  return R::coded ? x * splat(m.scale) + splat(m.zero) : x;
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

// As dot_block, but every row is rotated first.
template <class R, int G, int T>
KVLAB_INLINE void turned_block(const RowRun& run, const int* row, int dim, const float* q, const std::int32_t* rank,
                               const Turn& turn, F (*acc)[dot_rows], int first) {
  const int half = dim / 2;
  F sums[G][T] = {};
  Meta m[T] = {};
  const float *cosine[T], *sine[T];
  for (int j = 0; j < T; ++j) {
    if (R::coded) m[j] = meta_of(run, row[j]);
    cosine[j] = turn.cosine + std::int64_t{rank[row[j]]} * half;
    sine[j] = turn.sine + std::int64_t{rank[row[j]]} * half;
  }
  for (int d = 0; d < half; d += lanes)
    for (int j = 0; j < T; ++j) {
      const F a = element<R>(run, row[j], d, m[j]), b = element<R>(run, row[j], half + d, m[j]);
      const F c = load(cosine[j] + d), s = load(sine[j] + d);
      const F x = a * c - b * s, y = b * c + a * s;
      for (int g = 0; g < G; ++g) sums[g][j] += load(q + g * dim + d) * x + load(q + g * dim + half + d) * y;
    }
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < T; ++j) acc[g][first + j] = sums[g][j];
}

// Takes rows whose halves are not whole vectors.
template <class R, int G>
void turned_row(const RowRun& run, int t, int dim, const float* q, const std::int32_t* rank, const Turn& turn,
                float* out, std::int64_t out_stride) {
  float row[most_dim];
  const Meta m = R::coded ? meta_of(run, t) : Meta{};
  for (int d = 0; d < dim; d += lanes) store(row + d, element<R>(run, t, d, m));
  const std::int64_t at = std::int64_t{rank[t]} * (dim / 2);
  rotate(row, turn.cosine + at, turn.sine + at, dim);
  for (int g = 0; g < G; ++g) {
    F total = {};
    for (int d = 0; d < dim; d += lanes) total += load(q + g * dim + d) * load(row + d);
    out[g * out_stride + t] = sum(total);
  }
}

template <class R, int G>
void turned_run(const RowRun& run, const RowRun& ahead, int dim, const float* q, const std::int32_t* rank,
                const Turn& turn, float* out, std::int64_t out_stride) {
  constexpr int at_once = G == 4 && lanes < 16 ? 1 : 2;
  for (int t = 0; t < run.count; t += dot_rows) {
    const int count = least(dot_rows, run.count - t);
    if (t < ahead.count)
      prefetch(static_cast<const char*>(ahead.data) + t * ahead.stride,
               least(dot_rows, ahead.count - t) * ahead.stride);
    if (dim % (2 * lanes)) {
      for (int j = 0; j < count; ++j) turned_row<R, G>(run, t + j, dim, q, rank, turn, out, out_stride);
      continue;
    }
    int row[dot_rows];
    for (int j = 0; j < dot_rows; ++j) row[j] = t + least(j, count - 1);
    F acc[G][dot_rows];
    for (int j = 0; j < dot_rows; j += at_once) turned_block<R, G, at_once>(run, row + j, dim, q, rank, turn, acc, j);
    for (int g = 0; g < G; ++g) {
      const F4 sums = four_sums(acc[g]);
      for (int j = 0; j < count; ++j) out[g * out_stride + t + j] = sums[j];
    }
  }
}

void dot_turned(const RowRun* runs, int run_count, int dim, const float* q, std::int64_t q_stride, int queries,
                float factor, const Turn& turn, float* out, std::int64_t out_stride) {
  alignas(64) float scaled[most_queries * most_dim];
  for (int first = 0; first < queries; first += most_queries) {
    const int n = least(most_queries, queries - first);
    for (int g = 0; g < n; ++g)
      for (int d = 0; d < dim; d += lanes) store(scaled + g * dim + d, load(q + (first + g) * q_stride + d) * factor);
    with_group(n, [&]<int G>() {
      for (int i = 0, at = 0; i < run_count; at += runs[i++].count)
        with_reader(runs[i].kind, [&]<class R>() {
          turned_run<R, G>(runs[i], runs[i + run_ahead], dim, scaled, turn.rank + at, turn,
                           out + first * out_stride + at, out_stride);
        });
    });
  }
}

// Adds V vectors of every row, from element d on, to G sums; p weights the rows.
template <class R, int G, int V>
KVLAB_INLINE void add_rows(const char* data, std::int64_t stride, int count, int d, const float* p,
                           std::int64_t p_stride, float* out, int dim, const char* ahead, std::int64_t ahead_stride) {
  F acc[G][V];
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) acc[g][v] = load(out + g * dim + d + v * lanes);
  for (int t = 0; t < count; ++t, data += stride) {
    if (V > 1) prefetch(ahead + t * ahead_stride, ahead_stride);
    F w[G];
    for (int g = 0; g < G; ++g) w[g] = splat(p[g * p_stride + t]);
    for (int v = 0; v < V; ++v) {
      const F x = V == 1 ? R::tail(data, d) : R::half(data, d + v / 2 * 2 * lanes, v % 2);
      for (int g = 0; g < G; ++g) acc[g][v] += w[g] * x;
    }
  }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) store(out + g * dim + d + v * lanes, acc[g][v]);
}

template <class R, int G>
void add_run(const RowRun& run, const RowRun& ahead, int dim, const float* p, std::int64_t p_stride, float* out,
             float* bias) {
  constexpr int piece = 16;             // rows at once
  constexpr int wide = G == 4 && lanes < 16 ? 2 : 4;  // vectors per pass: sums, weights and a row fit the registers
  float weights[most_queries * piece];
  for (int t = 0; t < run.count; t += piece) {
    const int count = least(piece, run.count - t);
    const char* data = static_cast<const char*>(run.data) + t * run.stride;
    const float* w = p + t;
    std::int64_t w_stride = p_stride;
    if (R::coded) {
      float scale[piece], zero[piece];
      for (int j = 0; j < count; ++j) {
        const Meta m = meta_of(run, t + j);
        scale[j] = m.scale;
        zero[j] = m.zero;
      }
      for (int g = 0; g < G; ++g)
        for (int j = 0; j < count; ++j) {
          weights[g * piece + j] = w[g * p_stride + j] * scale[j];
          bias[g] += w[g * p_stride + j] * zero[j];
        }
      w = weights;
      w_stride = piece;
    }
    // Each part of the rows prefetches its share of the next run's lines.
    const char* next = static_cast<const char*>(ahead.data) + t * ahead.stride;
    const std::int64_t share = t < ahead.count ? ahead.stride * wide * lanes / dim : 0;
    int d = 0;
    for (; d + wide * lanes <= dim; d += wide * lanes, next += count * share)
      add_rows<R, G, wide>(data, run.stride, count, d, w, w_stride, out, dim, next, share);
    if (wide > 2)
      for (; d + 2 * lanes <= dim; d += 2 * lanes)
        add_rows<R, G, 2>(data, run.stride, count, d, w, w_stride, out, dim, next, 0);
    if (d < dim) add_rows<R, G, 1>(data, run.stride, count, d, w, w_stride, out, dim, next, 0);
  }
}

void accumulate(const RowRun* runs, int run_count, int dim, const float* p, std::int64_t p_stride, int queries,
                float* out, std::int64_t out_stride) {
  alignas(64) float plain[most_queries * most_dim], paired[most_queries * most_dim];
  for (int first = 0; first < queries; first += most_queries) {
    const int n = least(most_queries, queries - first);
    float bias[most_queries] = {};
    std::memset(plain, 0, n * dim * sizeof(float));
    std::memset(paired, 0, n * dim * sizeof(float));
    with_group(n, [&]<int G>() {
      const float* at = p + first * p_stride;
      for (int i = 0; i < run_count; ++i) {
        with_reader(runs[i].kind, [&]<class R>() {
          add_run<R, G>(runs[i], runs[i + run_ahead], dim, at, p_stride, R::paired ? paired : plain, bias);
        });
        at += runs[i].count;
      }
    });
    for (int g = 0; g < n; ++g) {
      float* to = out + (first + g) * out_stride;
      add_unpaired(paired + g * dim, dim, to);
      for (int d = 0; d < dim; d += lanes) store(to + d, load(to + d) + load(plain + g * dim + d) + bias[g]);
    }
  }
}

void square_sum(const RowRun& run, int dim, float* out) {
  with_reader(run.kind, [&]<class R>() {
    for (int t = 0; t < run.count; ++t) {
      const Meta m = R::coded ? meta_of(run, t) : Meta{};
      F a = {};
      for (int d = 0; d < dim; d += lanes) {
        const F x = element<R>(run, t, d, m);
        a += x * x;
      }
      out[t] = sum(a);
    }
  });
}

void decode(const RowRun& run, int dim, float* out, std::int64_t out_stride) {
  with_reader(run.kind, [&]<class R>() {
    for (int t = 0; t < run.count; ++t) {
      const Meta m = R::coded ? meta_of(run, t) : Meta{};
      for (int d = 0; d < dim; d += lanes) store(out + t * out_stride + d, element<R>(run, t, d, m));
    }
  });
}

// Transposes blocks, so that it reads rows and writes columns a vector at a time.
void pack_panel(const float* rows, int count, int dim, float* panel) {
  for (int j = 0; j < panel_width; j += block_width)
    for (int d = 0; d < dim; d += block_width) {
      Block x[block_width] = {};
      for (int i = 0; i < block_width; ++i)
        if (j + i < count) std::memcpy(&x[i], rows + (j + i) * dim + d, sizeof x[i]);
      transpose(x);
      for (int i = 0; i < block_width; ++i) std::memcpy(panel + (d + i) * panel_width + j, &x[i], sizeof x[i]);
    }
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
  constexpr int block = lanes == 16 ? 12 : lanes == 8 ? 6 : 2;  // accumulators that fit the registers
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
  const F shifted = y * 1.44269504088896341f + magic;  // the low bits hold the integer part
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

// Loads n < lanes elements and fills the vector up with `fill`.
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

void to_bf16(const float* x, std::int64_t n, std::uint16_t* out) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    U u;
    std::memcpy(&u, x + i, sizeof u);
    const U nan = (U)((u & 0x7fffffffu) > 0x7f800000u);
    const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const U16 half = __builtin_convertvector((nan & ((u >> 16) | 0x40u)) | (~nan & rounded), U16);
    std::memcpy(out + i, &half, sizeof half);
  }
  for (; i < n; ++i) out[i] = bf16(x[i]).bits;
}

void ranges(const float* x, std::int64_t stride, int rows, int n, float* lo, float* hi) {
  int d = 0;
  for (; d + lanes <= n; d += lanes) {
    F least = splat(HUGE_VALF), most = splat(-HUGE_VALF);
    for (int t = 0; t < rows; ++t) {
      const F y = load(x + t * stride + d);
      least = y < least ? y : least;
      most = y > most ? y : most;
    }
    store(lo + d, least);
    store(hi + d, most);
  }
  for (; d < n; ++d) {
    lo[d] = HUGE_VALF, hi[d] = -HUGE_VALF;
    for (int t = 0; t < rows; ++t) {
      const float y = x[t * stride + d];
      lo[d] = y < lo[d] ? y : lo[d];
      hi[d] = y > hi[d] ? y : hi[d];
    }
  }
}

void range(const float* x, int n, float* lo, float* hi) {
  F least = splat(HUGE_VALF), most = splat(-HUGE_VALF);
  const auto take = [&](F y) {
    least = y < least ? y : least;
    most = y > most ? y : most;
  };
  int d = 0;
  for (; d + lanes <= n; d += lanes) take(load(x + d));
  if (d < n) take(load_tail(x + d, n - d, x[d]));
  float a[lanes], b[lanes];
  store(a, least);
  store(b, most);
  for (int width = lanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) {
      a[i] = a[i + width] < a[i] ? a[i + width] : a[i];
      b[i] = b[i + width] > b[i] ? b[i + width] : b[i];
    }
  *lo = a[0], *hi = b[0];
}

KVLAB_INLINE U float_bits(F x) {
  U u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

// As to_e4m3.
KVLAB_INLINE U e4m3_code(F y) {
  const U u = float_bits(y), sign = u >> 24 & 0x80u, size = u & 0x7fffffffu;
  const U within = size < 0x43e00000u ? size : 0x43e00000u - U{};
  const U rounded = ((within + 0x7ffffu + (within >> 20 & 1u)) >> 20) - (120u << 3);
  const U small = float_bits(bits_to_float(within) + 0x1p14f) & 0xfu;
  const U code = sign | (within < 0x3c800000u ? small : rounded);
  return size > 0x7f800000u ? 0x7fu - U{} : code;
}

// As nearest_code of integers up to `most`.
KVLAB_INLINE U integer_code(F y, F most) {
  const F above = y > F{} ? y : F{};
  return float_bits((above < most ? above : most) + 0x1.8p23f) & 0xffu;
}

KVLAB_INLINE void store_bytes(U codes, std::uint8_t* out) {
#if KVLAB_LANES == 16
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)codes));
#elif KVLAB_LANES == 8
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128((__m256i)codes), _mm256_extracti128_si256((__m256i)codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
#else
  const U8 bytes = __builtin_convertvector(codes, U8);
  std::memcpy(out, &bytes, sizeof bytes);
#endif
}

// Packs codes of 4 or 2 bits, one a byte, eight at a time. The first lies in the low bits.
template <int bits>
KVLAB_INLINE void squeeze(const std::uint8_t* codes, int n, std::uint8_t* out) {
  for (int d = 0; d < n; d += 8, out += bits) {
    std::uint64_t w;
    std::memcpy(&w, codes + d, 8);
    w = (w | w >> (8 - bits)) & (bits == 4 ? 0x00ff00ff00ff00ffu : 0x000f000f000f000fu);
    w = (w | w >> (16 - 2 * bits)) & (bits == 4 ? 0x0000ffff0000ffffu : 0x000000ff000000ffu);
    w = w | w >> (32 - 4 * bits);
    std::memcpy(out, &w, bits);
  }
}

template <bool e4m3>
KVLAB_INLINE void codes_of(const float* x, int n, float most, const float* scale, const float* zero, bool each,
                           std::uint8_t* out) {
  const F top = splat(most);
  const auto code = [&](F y, F s, F z) {
    // Where all numbers are one, the scale is 0. NaN stays NaN.
    y = s > F{} ? (y - z) / s : y == y ? F{} : y;
    return e4m3 ? e4m3_code(y) : integer_code(y, top);
  };
  int d = 0;
  for (; d + lanes <= n; d += lanes)
    store_bytes(code(load(x + d), each ? load(scale + d) : splat(*scale), each ? load(zero + d) : splat(*zero)),
                out + d);
  if (d == n) return;
  std::uint8_t last[lanes];
  store_bytes(code(load_tail(x + d, n - d, 0), each ? load_tail(scale + d, n - d, 0) : splat(*scale),
                   each ? load_tail(zero + d, n - d, 0) : splat(*zero)),
              last);
  for (int i = 0; d < n; ++i, ++d) out[d] = last[i];
}

void encode(const float* x, int n, RowKind kind, const float* scale, const float* zero, bool each,
            std::uint8_t* out) {
  constexpr int piece = 256;
  std::uint8_t codes[piece];
  switch (kind) {
    case RowKind::e4m3: return codes_of<true>(x, n, 0, scale, zero, each, out);
    case RowKind::u8: return codes_of<false>(x, n, 255, scale, zero, each, out);
    case RowKind::u4:
    case RowKind::u2: break;
    case RowKind::f32:
    case RowKind::bf16: return;
  }
  for (int d = 0; d < n; d += piece) {
    const int count = least(piece, n - d);
    codes_of<false>(x + d, count, kind == RowKind::u4 ? 15 : 3, each ? scale + d : scale, each ? zero + d : zero, each,
                    codes);
    if (kind == RowKind::u4)
      squeeze<4>(codes, count, out + d / 2);
    else
      squeeze<2>(codes, count, out + d / 4);
  }
}

using W = std::uint16_t __attribute__((vector_size(lanes * 4)));
using B = std::uint8_t __attribute__((vector_size(lanes * 2)));

// Two bytes of codes in each word become their lowered() ones in its low bits. A product and a shift divide: they are
// exact for all codes.
template <int bits, int fewer>
KVLAB_INLINE W lowered_words(W w) {
  if constexpr (bits == 8 && fewer == 4)
    return ((w & 0xff) + 8) * 241 >> 12 | ((w >> 8) + 8) * 241 >> 12 << 4;
  else if constexpr (bits == 8)
    return ((w & 0xff) + 42) * 193 >> 14 | ((w >> 8) + 42) * 193 >> 14 << 2;
  else
    return ((w & 15) + 2) * 13 >> 6 | ((w >> 4 & 15) + 2) * 13 >> 6 << 2 | ((w >> 8 & 15) + 2) * 13 >> 6 << 4 |
           ((w >> 12) + 2) * 13 >> 6 << 6;
}

// lanes * 4 bytes.
template <int bits, int fewer>
KVLAB_INLINE void lower_vector(const std::uint8_t* codes, std::uint8_t* out) {
  W w;
  std::memcpy(&w, codes, sizeof w);
  w = lowered_words<bits, fewer>(w);
  if constexpr (bits == 8 && fewer == 2) {  // half a byte in each word
    U u;
    std::memcpy(&u, &w, sizeof u);
    store_bytes((u | u >> 12) & 0xffu, out);
  } else {
    const B bytes = __builtin_convertvector(w, B);
    std::memcpy(out, &bytes, sizeof bytes);
  }
}

template <int bits, int fewer>
KVLAB_INLINE void lower_codes(const std::uint8_t* codes, int bytes, std::uint8_t* out) {
  constexpr int piece = lanes * 4;
  int at = 0;
  for (; at + piece <= bytes; at += piece) lower_vector<bits, fewer>(codes + at, out + at * fewer / bits);
  if (at == bytes) return;
  std::uint8_t rest[piece] = {}, low[piece];
  std::memcpy(rest, codes + at, static_cast<std::size_t>(bytes - at));
  lower_vector<bits, fewer>(rest, low);
  std::memcpy(out + at * fewer / bits, low, static_cast<std::size_t>((bytes - at) * fewer / bits));
}

void lower(const std::uint8_t* codes, int bytes, int bits, int fewer, std::uint8_t* out) {
  if (bits == 4)
    lower_codes<4, 2>(codes, bytes, out);
  else if (fewer == 4)
    lower_codes<8, 4>(codes, bytes, out);
  else
    lower_codes<8, 2>(codes, bytes, out);
}

#if KVLAB_LANES < 16
constexpr RowKernels table = {KVLAB_NAME, dot,     dot_turned, accumulate, square_sum, decode, rotate,
                              pack_panel, panel_dot, max,      scale,      exp_sum,    add_scaled, silu_mul,
                              rms_norm,   to_bf16, ranges,     range,      encode,     lower};
#endif

}  // namespace
}  // namespace kvlab::ops
