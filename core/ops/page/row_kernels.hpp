// Inner loops over stored rows of head_dim elements, for attention, votes, norms and page scores. The source is
// compiled once per instruction set. It takes raw pointers only, so that the linker merges none of its code across
// sets. Every result is a fixed sequence of additions: it does not depend on threads or on other rows.
#pragma once
#include <cstdint>

namespace kvlab::ops {

inline constexpr int row_pad = 8;       // kernels may read and write arrays of tokens up to a multiple of this
inline constexpr int panel_width = 16;  // tokens of a packed panel

constexpr int padded(int tokens) { return (tokens + row_pad - 1) / row_pad * row_pad; }

enum class RowKind : std::uint8_t { f32, bf16, u8, u4, u2, e4m3 };  // the last four are codes (CodecSide)

// Stored rows at equal distances: one side of a page, page summaries or decoded rows.
struct RowRun {
  const void* data = nullptr;
  const void* meta = nullptr;  // codes only: f16 {scale, zero} of every row
  std::int64_t stride = 0;     // bytes from row to row
  int count = 0;
  RowKind kind = RowKind::f32;
};

// Pages are scattered, so the hardware cannot prefetch the next one. While a kernel reads run i, it prefetches run i +
// run_ahead. Every array of runs has run_ahead more entries than run_count; these may be empty.
inline constexpr int run_ahead = 4;

// Angles of keys that a kernel rotates as it reads them: row t of all runs by rank[t] places.
struct Turn {
  const std::int32_t* rank;
  const float *cosine, *sine;  // [rank, dim / 2]
};

// dim is a multiple of 8 up to 512, because a box of page summaries is two rows wide.
struct RowKernels {
  const char* name;

  // out[i, t] = factor * q[i] . row t; t counts through all runs in order. Strides are in floats.
  void (*dot)(const RowRun* runs, int run_count, int dim, const float* q, std::int64_t q_stride, int queries,
              float factor, float* out, std::int64_t out_stride);
  // The same, but every row is rotated first: pairs (i, i + dim / 2).
  void (*dot_turned)(const RowRun* runs, int run_count, int dim, const float* q, std::int64_t q_stride, int queries,
                     float factor, const Turn& turn, float* out, std::int64_t out_stride);
  // out[i] += sum_t p[i, t] row t
  void (*accumulate)(const RowRun* runs, int run_count, int dim, const float* p, std::int64_t p_stride, int queries,
                     float* out, std::int64_t out_stride);
  // out[t] = row t . row t
  void (*square_sum)(const RowRun& run, int dim, float* out);
  // out[t] = row t as f32.
  void (*decode)(const RowRun& run, int dim, float* out, std::int64_t out_stride);
  // Rotates x [dim] in place by cosine and sine (dim / 2 each): pairs (i, i + dim / 2).
  void (*rotate)(float* x, const float* cosine, const float* sine, int dim);
  // panel[d, j] = rows[j, d] for `count` <= panel_width dense rows; columns past count are zero.
  void (*pack_panel)(const float* rows, int count, int dim, float* panel);
  // out[i, j] = q[i] . column j of the panel, panel_width columns.
  void (*panel_dot)(const float* panel, int dim, const float* q, std::int64_t q_stride, int queries, float* out,
                    std::int64_t out_stride);

  float (*max)(const float* x, int n);                                    // -inf if n is 0; NaN is ignored
  void (*scale)(float* x, int n, float factor);                           // x *= factor
  float (*exp_sum)(float* x, int n, float shift);                         // x = exp(x - shift), returns the sum of x
  void (*add_scaled)(const float* x, int n, float factor, float* inout);  // inout += factor * x
  void (*silu_mul)(const float* gate, const float* up, std::int64_t n, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t n, float* out);
  void (*to_bf16)(const float* x, std::int64_t n, std::uint16_t* out);  // rounds as kvlab::bf16 does

  // lo[d] and hi[d]: least and greatest x[t * stride + d] of `rows` rows, d < n. NaN is left out; lo > hi if all are.
  void (*ranges)(const float* x, std::int64_t stride, int rows, int n, float* lo, float* hi);
  // The same over the n numbers of one row: one lo, one hi.
  void (*range)(const float* x, int n, float* lo, float* hi);
  // Codes of x as code_of gives them, packed as a page stores them. n is a multiple of 8. kind: one of codes. scale and
  // zero: one of all numbers, or with `each` one for each.
  void (*encode)(const float* x, int n, RowKind kind, const float* scale, const float* zero, bool each,
                 std::uint8_t* out);
  // From codes of 8 bits to 4 or 2, or of 4 bits to 2: `bytes` bytes of packed codes become lowered() ones, packed.
  // bytes is a multiple of 4.
  void (*lower)(const std::uint8_t* codes, int bytes, int bits, int fewer, std::uint8_t* out);
};

const RowKernels& row_kernels();  // the fastest that this CPU runs, or those that KVLAB_ROWS names
const RowKernels& row_kernels_portable();
// Null when not compiled for x86-64; the CPU must have the instructions to call them (base/cpu.hpp).
const RowKernels* row_kernels_avx2();
const RowKernels* row_kernels_avx512();

}  // namespace kvlab::ops
