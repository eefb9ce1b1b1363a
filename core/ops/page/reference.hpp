// Slow, plain versions of this folder's ops: loops over the views, double accumulation, no threads, no scratch. Tests
// compare the fast CPU forms and other backends with them. Arguments, results and errors equal those of the op of the
// same name; lengths are not checked again. Every folder of ops has such a header.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>

namespace kvlab::ops {

// Encoding and decoding are specified to the bit (f32 arithmetic), so backends agree on stored bytes.
void write_token_reference(std::byte* frame, const PageLayout& l, int offset, const float* k, const float* v,
                           std::int32_t position);
void read_row_reference(const std::byte* frame, const PageLayout& l, KvSide side, int offset, float* out);
void copy_token_reference(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to,
                          const PageLayout& lt, int offset_to);
void copy_page_reference(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt);
void summarize_page_reference(const std::byte* frame, const PageLayout& l, int tokens, Summary kind, DType dtype,
                              std::byte* out, int bits = 16);
void gather_rows_reference(const PagedKv& kv, int row, int head, KvSide side, int tokens, float* out);
void token_ranks_reference(const PagedKv& kv, int row, int head, int tokens, std::int32_t* rank);
void token_positions_reference(const PagedKv& kv, int row, int head, int tokens, std::int32_t* positions);
void rotate_reference(float* x, const RopeTable& rope, double position);
void re_rotate_reference(const PagedKv& kv, int row, int head, int tokens, const std::int32_t* delta);

}  // namespace kvlab::ops
