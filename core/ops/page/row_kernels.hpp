// Inner loops over stored rows of head_dim elements, whatever their storage: shared by attention, votes, norms and page
// scores. Raw pointers only: the same source is compiled once per instruction set, and nothing of it may be merged by
// the linker. Every result is a fixed sequence of additions: it does not depend on threads or on other rows.
#pragma once
#include <cstdint>

namespace kvlab::ops {

inline constexpr int row_pad = 8;       // arrays indexed by token are readable and writable up to a multiple of this
inline constexpr int panel_width = 16;  // tokens of a packed panel

constexpr int padded(int tokens) { return (tokens + row_pad - 1) / row_pad * row_pad; }

enum class RowKind : std::uint8_t { f32, bf16, u8 };

// Stored rows at equal distances: one side of a page, page summaries, decoded rows.
struct RowRun {
  const void* data = nullptr;
  const void* meta = nullptr;  // u8 only: f16 {scale, zero} of every row
  std::int64_t stride = 0;     // bytes from row to row
  int count = 0;
  RowKind kind = RowKind::f32;
};

// Pages are scattered and the hardware does not see the next one coming: while run i is read, the lines of run
// i + run_ahead are asked for. Arrays of runs are that much longer than their length says; the rest may be empty.
inline constexpr int run_ahead = 4;

// Angles of keys that are rotated as they are read: row t of all runs by rank[t] places.
struct Turn {
  const std::int32_t* rank;
  const float *cosine, *sine;  // [rank, dim / 2]
};

// dim is a multiple of 8 up to 512 everywhere (a box of page summaries is two rows wide).
struct RowKernels {
  const char* name;

  // out[i, t] = factor * q[i] . row t, the rows of all runs one after the other; strides in floats.
  void (*dot)(const RowRun* runs, int run_count, int dim, const float* q, std::int64_t q_stride, int queries,
              float factor, float* out, std::int64_t out_stride);
  // The same with every row rotated first: pairs (i, i + dim / 2).
  void (*dot_turned)(const RowRun* runs, int run_count, int dim, const float* q, std::int64_t q_stride, int queries,
                     float factor, const Turn& turn, float* out, std::int64_t out_stride);
  // out[i] += sum_t p[i, t] row t
  void (*accumulate)(const RowRun* runs, int run_count, int dim, const float* p, std::int64_t p_stride, int queries,
                     float* out, std::int64_t out_stride);
  // out[t] = row t . row t
  void (*square_sum)(const RowRun& run, int dim, float* out);
  // out[t] = row t as f32.
  void (*decode)(const RowRun& run, int dim, float* out, std::int64_t out_stride);
  // x[t] rotated in place by cosine[t], sine[t] (dim / 2 each): pairs (i, i + dim / 2).
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
  void (*to_bf16)(const float* x, std::int64_t n, std::uint16_t* out);  // as kvlab::bf16 rounds
};

const RowKernels& row_kernels();  // the best that this CPU runs
const RowKernels& row_kernels_portable();
const RowKernels* row_kernels_avx2();  // null when not compiled for x86-64; the CPU must have AVX2 to call them

}  // namespace kvlab::ops
