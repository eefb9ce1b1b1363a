// Vectors of 16 floats. Rows that are no whole number of them go to the kernels of 8.
#define KVLAB_LANES 16
#define KVLAB_NAME "avx512"
#include "ops/page/row_kernels.inl"

namespace kvlab::ops {
namespace {

constexpr bool whole(int dim) { return dim % lanes == 0; }
const RowKernels& narrow() { return *row_kernels_avx2(); }

void any_dot(const RowRun* runs, int run_count, int dim, const float* q, std::int64_t q_stride, int queries,
             float factor, float* out, std::int64_t out_stride) {
  (whole(dim) ? dot : narrow().dot)(runs, run_count, dim, q, q_stride, queries, factor, out, out_stride);
}
void any_dot_turned(const RowRun* runs, int run_count, int dim, const float* q, std::int64_t q_stride, int queries,
                    float factor, const Turn& turn, float* out, std::int64_t out_stride) {
  (whole(dim) ? dot_turned : narrow().dot_turned)(runs, run_count, dim, q, q_stride, queries, factor, turn, out,
                                                  out_stride);
}
void any_accumulate(const RowRun* runs, int run_count, int dim, const float* p, std::int64_t p_stride, int queries,
                    float* out, std::int64_t out_stride) {
  (whole(dim) ? accumulate : narrow().accumulate)(runs, run_count, dim, p, p_stride, queries, out, out_stride);
}
void any_square_sum(const RowRun& run, int dim, float* out) {
  (whole(dim) ? square_sum : narrow().square_sum)(run, dim, out);
}
void any_decode(const RowRun& run, int dim, float* out, std::int64_t out_stride) {
  (whole(dim) ? decode : narrow().decode)(run, dim, out, out_stride);
}

constexpr RowKernels any_dim = {KVLAB_NAME, any_dot, any_dot_turned, any_accumulate, any_square_sum,
                                any_decode, rotate,  pack_panel,     panel_dot,      max,
                                scale,      exp_sum, add_scaled,     silu_mul,       rms_norm,
                                to_bf16,    ranges,  range,          encode,         lower};

}  // namespace

const RowKernels* row_kernels_avx512() { return &any_dim; }

}  // namespace kvlab::ops
