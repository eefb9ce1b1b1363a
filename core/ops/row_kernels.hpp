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

// `count` rows; the arrays hold padded(count) valid entries (the last one repeated). scale and zero only for u8.
struct RowSet {
  RowKind kind = RowKind::f32;
  int count = 0;
  const void* const* row = nullptr;
  const float* scale = nullptr;
  const float* zero = nullptr;
};

// dim is a multiple of 8 everywhere.
struct RowKernels {
  const char* name;

  // out[i, t] = q[i] . row[t]; strides in floats. Entries up to padded(count) are written.
  void (*dot)(const RowSet& rows, int dim, const float* q, std::int64_t q_stride, int queries, float* out,
              std::int64_t out_stride);
  // out[i] += sum_t p[i, t] row[t]
  void (*accumulate)(const RowSet& rows, int dim, const float* p, std::int64_t p_stride, int queries, float* out,
                     std::int64_t out_stride);
  // out[t] = row[t] . row[t]
  void (*square_sum)(const RowSet& rows, int dim, float* out);
  // out[t] = row[t] as f32, count rows.
  void (*decode)(const RowSet& rows, int dim, float* out, std::int64_t out_stride);
  // x[t] rotated in place by cosine[t], sine[t] (dim / 2 each): pairs (i, i + dim / 2).
  void (*rotate)(float* x, const float* cosine, const float* sine, int dim);
  // panel[d, j] = rows[j][d] for `count` <= panel_width f32 rows; columns past count are zero.
  void (*pack_panel)(const float* const* rows, int count, int dim, float* panel);
  // out[i, j] = q[i] . column j of the panel, panel_width columns.
  void (*panel_dot)(const float* panel, int dim, const float* q, std::int64_t q_stride, int queries, float* out,
                    std::int64_t out_stride);

  float (*max)(const float* x, int n);                                    // -inf if n is 0; NaN is ignored
  void (*scale)(float* x, int n, float factor);                           // x *= factor
  float (*exp_sum)(float* x, int n, float shift);                         // x = exp(x - shift), returns the sum of x
  void (*add_scaled)(const float* x, int n, float factor, float* inout);  // inout += factor * x
  void (*silu_mul)(const float* gate, const float* up, std::int64_t n, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t n, float* out);
};

const RowKernels& row_kernels();  // the best that this CPU runs
const RowKernels& row_kernels_portable();
const RowKernels* row_kernels_avx2();  // null when not compiled for x86-64; the CPU must have AVX2 to call them

}  // namespace kvlab::ops
